"""The command line: `gapless train | profile | generate | export`.

Parses, validates and prints help before torch is imported. What a user can put right is one line on stderr and exit
code 2. A run that a signal stopped exits with 129 (closed terminal), 130 (Ctrl-C) or 143 (SIGTERM). Anything else keeps
its traceback. In a job of many processes the one that failed says why (see `gapless.parallel.watch`); the others exit
with its code where they found the same mistake, else with 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gapless import __version__
from gapless.arguments import parse_options
from gapless.config import RunConfig
from gapless.config_file import load_config
from gapless.errors import user_message

if TYPE_CHECKING:
    from gapless.data.tokenizer import Tokenizer
    from gapless.inference.rows import AnswerWriter, Prompt

HELP = """usage: gapless VERB ...

Fine-tune large language models and use the result.

  gapless train RUN.toml [--section.key value ...]   fine-tune as the run file says; the same command resumes
  gapless profile RUN.toml [--steps 3]               run a few steps: how busy the GPU is, and why it waits
  gapless generate MODEL --prompt "..."              answer prompts with a model folder, an adapter or a run
  gapless export SOURCE --to merged --out FOLDER     write a merged model folder, or the adapter alone

  gapless VERB --help    the options of a verb; those of train are the keys of a run file
  gapless --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command line without the program's name; by default that of the process.

    Returns:
        The exit code.
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as request:  # tyro has printed the help of a verb
        return int(request.code or 0)
    except BrokenPipeError:  # the reader of our output left; keep the interpreter from flushing into the closed pipe
        _drop_output()
        return 1
    except (OSError, ValueError) as error:
        message = user_message(error)
        if message is None:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_output()
        return _user_error(message)


def _run(args: list[str]) -> int:
    verbs = {"train": _train, "profile": _profile, "generate": _generate, "export": _export}
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] == "--version":
        print(f"gapless {__version__}")
        return 0
    if args[0] not in verbs:
        raise ValueError(f"there is no verb {args[0]!r}; the verbs are {', '.join(verbs)}")
    return verbs[args[0]](args[1:])


def _drop_output() -> None:
    """Sends what stdout still holds nowhere, so that the interpreter does not try it again when it ends."""
    with contextlib.suppress(OSError):  # stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _user_error(message: str) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


# ---- train ----


def _train(args: list[str]) -> int:
    if "-h" in args or "--help" in args:
        parse_options(_train_options(), ["--help"], prog="gapless train")
    if not args or args[0].startswith("-"):
        raise ValueError("name the run file first: gapless train RUN.toml [--section.key value ...]")
    config = _load_run(args[0], args[1:])

    from gapless.parallel.watch import CommandExit
    from gapless.training.trainer import train

    with CommandExit():
        return train(config).exit_code


def _load_run(path: str, overrides: Sequence[str]) -> RunConfig:
    """The run file's configuration, whose files are there."""
    config = load_config(path, overrides)
    _check_model(config.model.path)
    for name in (*config.data.train, *config.data.eval):
        if not Path(name).exists():
            raise FileNotFoundError(f"{name}: no such file or folder")
    return config


def _refuse_launcher(verb: str) -> None:
    from gapless.parallel.launch import refuse_others

    refuse_others(f"gapless {verb}", remedy="start it without torchrun")


def _check_model(folder: str) -> None:
    if not Path(folder).exists():
        raise FileNotFoundError(
            f"{folder}: no such folder; models are read from local folders, one of the Hugging Face hub comes with: "
            "hf download OWNER/NAME --local-dir FOLDER"
        )


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


# ---- profile ----


@dataclass(kw_only=True, frozen=True)
class ProfileOptions:
    """Runs some steps of a run and says how busy the GPU is, why it waits, and what each kernel takes.

    The run itself is left as it is: no checkpoint, no log. Keys of the run file may follow as for `gapless train`.
    """

    run_file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.toml")]
    """The run file, TOML or YAML."""
    steps: int = 3
    """Steps to record: as many are timed without the profiler, measured, and traced with their Python lines."""
    before: int = 5
    """Steps to warm up."""
    output: str | None = None
    """The folder for report and timeline; by default training.output_dir with "-profile" behind it."""


def _profile(args: list[str]) -> int:
    if args and args[0].startswith("-") and not {"-h", "--help"} & set(args):
        raise ValueError("name the run file first: gapless profile RUN.toml [--steps 3] [--section.key value ...]")
    own, overrides = _split(args, {"--steps", "--before", "--output"})
    options = parse_options(ProfileOptions, own, prog="gapless profile")
    config = _load_run(options.run_file, overrides)
    run = Path(config.training.output_dir)
    folder = Path(options.output or run.with_name(f"{run.name}-profile"))
    if folder.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{folder} is the run's own folder or in it; choose another --output")

    from gapless.parallel.watch import CommandExit
    from gapless.profiling.report import profile

    with CommandExit():
        profile(config, folder.absolute(), steps=options.steps, before=options.before)
    return 0


def _split(args: Sequence[str], names: set[str]) -> tuple[list[str], list[str]]:
    """The options of these names with their values, and the first of the others if it is no option; and the rest."""
    own, rest, waiting = [], [], iter(args)
    for place, arg in enumerate(waiting):
        name, has_value, _ = arg.partition("=")
        if name in names or arg in ("-h", "--help") or (place == 0 and not arg.startswith("-")):
            own.append(arg)
            if name in names and not has_value:
                own.extend(value for _, value in zip(range(1), waiting, strict=False))
        else:
            rest.append(arg)
    return own, rest


# ---- generate ----


@dataclass(kw_only=True, frozen=True)
class GenerateOptions:
    """Answers prompts.

    Answers go to stdout, a single one as it is written; with --file they are JSON lines: the row with `completion`
    and `finish_reason` added, in the file's order as they are finished (the row's own answer becomes `reference`).
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face model folder, a PEFT adapter folder, a run folder, or a checkpoint in one."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What the user says."""
    system: str | None = None
    """The system message before each --prompt."""
    file: str | None = None
    """A file of rows as for training; the answer may be missing, and a last assistant message is left out. A plain text
    (`prompt`, a line of a .txt) is what the user says."""
    format: Literal["auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca"] = "auto"
    """What a row of --file is; auto recognises it by its columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Own column names in --file, as pairs: --columns prompt question completion answer."""
    output: str | None = None
    """Where the answers to --file go instead of stdout, line by line as they are finished; a new file."""
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
    """Seed of the sampling. Another --batch_size may still give other answers: rounding differs, above all in bf16."""
    batch_size: int = 32
    """Prompts answered at a time."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU if there is one."""


def _generate(args: list[str]) -> int:
    options = parse_options(GenerateOptions, args, prog="gapless generate")
    _check_model(options.model)
    if options.adapter is not None and not Path(options.adapter).exists():
        raise FileNotFoundError(f"{options.adapter}: no such folder")
    prompts = _prompts(options)

    _refuse_launcher("generate")

    from gapless.data.chat import ChatSpans
    from gapless.inference.generate import generate
    from gapless.inference.load import DTYPES, find_model, load_source, pick_device

    source, device = find_model(options.model, options.adapter), pick_device(options.device)
    tokenizer = source.tokenizer()
    chat = ChatSpans(tokenizer)
    ids = [prompt.ids(chat, raw=options.raw) for prompt in prompts]
    longest = max(map(len, ids)) + options.max_new_tokens
    made_for = source.made_for()
    if made_for is not None and longest > made_for:
        print(
            f"note: prompt and answer may take {longest} tokens, more than the {made_for} the model is made for "
            "(max_position_embeddings); the answer may be poor",
            file=sys.stderr,
        )
    model = load_source(source, dtype=DTYPES[options.dtype], device=device, max_length=longest)
    streamed = _Streamed(tokenizer) if options.file is None and len(prompts) == 1 else None
    with _answers(options, prompts) as writer:
        completions = generate(
            model,
            tokenizer,
            ids,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            batch_size=options.batch_size,
            on_token=streamed,
            on_completion=writer,
        )
    if streamed is not None:
        streamed.finish(completions[0].text)
    elif writer is None:
        print("\n\n".join(completion.text for completion in completions))
    return 0


def _prompts(options: GenerateOptions) -> list[Prompt]:
    """The prompts, of the command line or of the file."""
    if bool(options.prompt) == bool(options.file):
        raise ValueError("give either --prompt (any number of times) or --file")
    if options.output is not None and options.file is None:
        raise ValueError("--output is for the answers to --file")
    if options.file is None and (options.columns or options.format != "auto"):
        raise ValueError("--format and --columns are for the rows of --file")
    if options.output is not None:
        _check_output(Path(options.output))
    if options.system is not None and (options.raw or options.file):
        raise ValueError("--system goes with --prompt in a chat; put it into the rows of --file or the text of --raw")

    from gapless.inference.rows import Prompt, read_prompts

    if options.file is not None:
        return read_prompts(options.file, format=options.format, columns=options.columns)
    if options.raw:
        return [Prompt(prompt) for prompt in options.prompt]
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [Prompt([*system, {"role": "user", "content": prompt}]) for prompt in options.prompt]


def _check_output(path: Path) -> None:
    """Refuses to overwrite answers; an empty file, a pipe or a device may be there."""
    if path.is_dir() or (path.is_file() and path.stat().st_size):
        raise ValueError(f"{path}: exists already; remove it or choose another --output")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: its folder does not exist")


@contextlib.contextmanager
def _answers(options: GenerateOptions, prompts: Sequence[Prompt]) -> Generator[AnswerWriter | None]:
    """What takes the answers to --file; None for those to --prompt."""
    from gapless.inference.rows import AnswerWriter

    if options.file is None:
        yield None
    elif options.output is None:
        yield AnswerWriter(prompts, sys.stdout, None if sys.stdout.isatty() else sys.stderr)
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            yield AnswerWriter(prompts, file, sys.stderr)


class _Streamed:
    """Prints one answer while it is written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = ""

    def __call__(self, index: int, token: int) -> None:
        """Takes the next token; see `generate`."""
        if token in self._tokenizer.eos_ids:
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith("\ufffd"):  # else perhaps the first bytes of a character
            self._print(text)

    def finish(self, text: str) -> None:
        """Prints what is left of the whole answer."""
        self._print(text)
        print()

    def _print(self, text: str) -> None:
        print(text[len(self._printed) :], end="", flush=True)
        self._printed = text


# ---- export ----


@dataclass(kw_only=True, frozen=True)
class ExportOptions:
    """Writes a trained model in the form that other tools load, and reads it back before it says so."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A run folder, a checkpoint in one, a PEFT adapter folder or a model folder."""
    to: Literal["merged", "adapter"]
    """merged: a Hugging Face model folder with the adapter in its weights; adapter: a PEFT adapter folder."""
    out: str
    """The folder to write; it must not exist or be empty."""


def _export(args: list[str]) -> int:
    options = parse_options(ExportOptions, args, prog="gapless export")
    if not Path(options.source).exists():
        raise FileNotFoundError(f"{options.source}: no such folder")
    _refuse_launcher("export")

    from gapless.inference.export import export

    export(options.source, options.out, kind=options.to)
    return 0
