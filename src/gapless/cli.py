"""The command line: `gapless train | generate | export`.

Parses, validates and prints help before torch is imported. What a user can put right is one line on stderr and exit
code 2; Ctrl-C exits with 130; anything else keeps its traceback.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gapless import __version__
from gapless.arguments import parse_options
from gapless.config import RunConfig
from gapless.config_file import load_config

if TYPE_CHECKING:
    from gapless.data.tokenizer import Tokenizer
    from gapless.inference.generate import Completion

HELP = """usage: gapless VERB ...

Fine-tune large language models and use the result.

  gapless train RUN.toml [--section.key value ...]   fine-tune as the run file says; the same command resumes
  gapless generate MODEL --prompt "..."              answer prompts with a model folder, an adapter or a run folder
  gapless export SOURCE --to merged --out FOLDER     write a merged model folder, or the adapter alone

  gapless VERB --help    the options of a verb; those of train are the keys of a run file
  gapless --version
"""
_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command line without the program's name; by default that of the process.

    Returns:
        The exit code.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as request:  # tyro has printed the help of a verb
        return int(request.code or 0)
    except BrokenPipeError:  # the reader of our output left; keep the interpreter from flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _FILE_ERRORS as error:
        return _user_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        if not _raised_here(error):
            raise
        return _user_error(str(error))


def _run(args: list[str]) -> int:
    verbs = {"train": _train, "generate": _generate, "export": _export}
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(f"gapless {__version__}")
        return 0
    if args[0] not in verbs:
        raise ValueError(f"there is no verb {args[0]!r}; the verbs are {', '.join(verbs)}")
    return verbs[args[0]](args[1:])


def _user_error(message: str) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


def _raised_here(error: BaseException) -> bool:
    """Whether our own code raised the error on purpose, rather than a library that our code called wrongly."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").split(".")[0] == "gapless"


# ---- train ----


def _train(args: list[str]) -> int:
    if "-h" in args or "--help" in args:
        parse_options(_train_options(), ["--help"], prog="gapless train")
    if not args or args[0].startswith("-"):
        raise ValueError("name the run file first: gapless train RUN.toml [--section.key value ...]")
    config = load_config(args[0], args[1:])
    for path in (config.model.path, *config.data.train, *config.data.eval):
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file or folder")

    from gapless.training.trainer import train

    result = train(config)
    return 130 if result.result_dir is None else 0  # None: a signal stopped it, what there was is saved


def _train_options() -> type:
    """RunConfig with the run file before it, for the help text."""
    run_file = Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml", help="The run file, TOML or YAML.")
    ]
    options = dataclasses.make_dataclass(
        "Train", [("run_file", run_file)], bases=(RunConfig,), frozen=True, kw_only=True
    )
    options.__doc__ = (
        "Fine-tunes as the run file says. Options win over the file; relative paths in the file start at its folder."
    )
    return options


# ---- generate ----


@dataclass(kw_only=True, frozen=True)
class GenerateOptions:
    """Answers prompts.

    Answers go to stdout; with --file they are JSON lines: the row with `completion` and `finish_reason` added.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face model folder, a PEFT adapter folder or a run folder."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What the user says."""
    system: str | None = None
    """The system message before each --prompt."""
    file: str | None = None
    """A file of rows (JSON lines, for instance) with `messages` or `prompt`. A last assistant message is left out."""
    output: str | None = None
    """Where the answers to --file go instead of stdout."""
    raw: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue the prompts as plain text, without the chat template."""
    adapter: str | None = None
    """A PEFT adapter folder to put on MODEL."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; higher is more random."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 for all."""
    seed: int = 0
    """Seed of the sampling."""
    batch_size: int = 32
    """Prompts answered at a time."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU if there is one."""


def _generate(args: list[str]) -> int:
    options = parse_options(GenerateOptions, args, prog="gapless generate")
    for folder in (options.model, options.adapter):
        if folder is not None and not Path(folder).exists():
            raise FileNotFoundError(f"{folder}: no such folder")
    rows = _prompt_rows(options)

    from gapless.inference.generate import generate
    from gapless.inference.load import load_model

    model, tokenizer = load_model(options.model, adapter=options.adapter, dtype=options.dtype, device=options.device)
    completions = generate(
        model,
        tokenizer,
        [_prompt_ids(tokenizer, row, raw=options.raw) for row in rows],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    _write_answers(options, rows, completions)
    return 0


def _prompt_rows(options: GenerateOptions) -> list[dict[str, Any]]:
    """The prompts as rows with `messages`, or with the `prompt` of a plain text."""
    if bool(options.prompt) == bool(options.file):
        raise ValueError("give either --prompt (any number of times) or --file")
    if options.output is not None and options.file is None:
        raise ValueError("--output is for the answers to --file")
    if options.output is not None and Path(options.output).exists():
        raise ValueError(f"{options.output}: exists already; remove it or choose another --output")
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise ValueError(f"{options.output}: its folder does not exist")
    if options.system is not None and (options.raw or options.file):
        raise ValueError("--system goes with --prompt in a chat; put it into the rows of --file or the text of --raw")
    if options.file is not None:
        return _read_rows(options.file, raw=options.raw)
    if options.raw:
        return [{"prompt": prompt} for prompt in options.prompt]
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [{"messages": [*system, {"role": "user", "content": prompt}]} for prompt in options.prompt]


def _read_rows(file: str, *, raw: bool) -> list[dict[str, Any]]:
    from gapless.data.sources import open_rows

    source = open_rows(file)
    rows = [dict(source[index]) for index in range(len(source))]
    for index, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) and (raw or not _is_chat(row.get("messages"))):
            need = "`prompt`, a text" if raw else "`messages`, a list of messages with a role, or `prompt`, a text"
            raise ValueError(f"{source.where(index)}: the row has no {need}")
        if not isinstance(row.get("tools"), list | None):
            raise ValueError(f"{source.where(index)}: `tools` must be a list of JSON schemas")
    return rows


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )


def _prompt_ids(tokenizer: Tokenizer, row: dict[str, Any], *, raw: bool) -> list[int]:
    if raw:
        return [*tokenizer.prefix_ids, *tokenizer.encode(row["prompt"])]
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return tokenizer.chat_ids(messages, tools=row.get("tools"))


def _write_answers(options: GenerateOptions, rows: list[dict[str, Any]], completions: Sequence[Completion]) -> None:
    if options.file is None:
        print("\n\n".join(completion.text for completion in completions))
        return
    lines = [
        json.dumps(row | {"completion": completion.text, "finish_reason": completion.finish_reason}, ensure_ascii=False)
        for row, completion in zip(rows, completions, strict=True)
    ]
    if options.output is None:
        print("\n".join(lines))
    else:
        Path(options.output).write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- export ----


@dataclass(kw_only=True, frozen=True)
class ExportOptions:
    """Writes a trained model in the form that other tools load, and reads it back before it says so."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A run folder, a PEFT adapter folder or a model folder."""
    to: Literal["merged", "adapter"]
    """merged: a Hugging Face model folder with the adapter in its weights; adapter: a PEFT adapter folder."""
    out: str
    """The folder to write; it must not exist or be empty."""


def _export(args: list[str]) -> int:
    options = parse_options(ExportOptions, args, prog="gapless export")
    if not Path(options.source).exists():
        raise FileNotFoundError(f"{options.source}: no such folder")

    from gapless.inference.export import export

    export(options.source, options.out, kind=options.to)
    return 0
