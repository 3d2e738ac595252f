"""Run files: strict TOML (YAML accepted) into the dataclasses of `gapless.config`, and back.

A file holds one table per section, or all keys at the top level: each key has one home, found by its name. All problems
of a file are collected and reported together, one line each. Names that other tools use are accepted with a note on
stderr. Paths in a file are relative to the file's folder; in the loaded configuration they are absolute.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gapless.arguments import parse_options
from gapless.config import RunConfig
from gapless.config_aliases import ALIAS_VALUES, ALIASES, TRUTH, VALUES

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)
HINTS: dict[str, Any] = {
    f"{section}.{name}": hint
    for section, kind in SECTIONS.items()
    for name, hint in typing.get_type_hints(kind).items()
}
"""Type of every key, by `section.key`."""
DEFAULTS: dict[str, Any] = {
    f"{section}.{entry.name}": entry.default
    if entry.default_factory is dataclasses.MISSING
    else entry.default_factory()
    for section, kind in SECTIONS.items()
    for entry in dataclasses.fields(kind)
}
"""Default of every key; `dataclasses.MISSING` where a value is required."""
HOMES: dict[str, str] = {home.partition(".")[2]: home for home in HINTS}
"""`section.key` by key: each key has one home."""
_EPOCHS = "training.num_train_epochs"
PATHS = ("model.path", "data.train", "data.eval", "data.chat_template", "data.cache_dir", "training.output_dir")

_SECTION_AS_KEY = {"model": "model.path", "data": "data.train", "adapter": "adapter.type", "optim": "optim.optim"}


@dataclass(frozen=True)
class Range:
    """The values a number may have."""

    low: float
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and abs(value) != float("inf")

    def __str__(self) -> str:
        low = f"greater than {self.low:.10g}" if self.open_low else f"at least {self.low:.10g}"
        if self.high == float("inf"):
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:.10g}"


_COUNT, _SHARE = Range(1), Range(0, 1)
RANGES: dict[str, Range] = {
    "data.max_length": Range(2),
    "data.packing_window": _COUNT,
    "data.max_documents": _COUNT,
    "adapter.r": _COUNT,
    "adapter.lora_alpha": Range(0, open_low=True),
    "adapter.lora_dropout": Range(0, 1, open_high=True),
    "optim.learning_rate": Range(0, open_low=True),
    "optim.warmup_steps": Range(0),
    "optim.warmup_ratio": _SHARE,
    "optim.min_lr_ratio": _SHARE,
    "optim.decay_ratio": _SHARE,
    "optim.weight_decay": Range(0),
    "optim.adam_beta1": Range(0, 1, open_high=True),
    "optim.adam_beta2": Range(0, 1, open_high=True),
    "optim.adam_epsilon": Range(0, open_low=True),
    "optim.max_grad_norm": Range(0),
    "training.num_train_epochs": Range(0, open_low=True),
    "training.max_steps": _COUNT,
    "training.per_device_train_batch_size": _COUNT,
    "training.gradient_accumulation_steps": _COUNT,
    "training.per_device_eval_batch_size": _COUNT,
    "training.eval_steps": _COUNT,
    "training.save_steps": _COUNT,
    "training.save_total_limit": _COUNT,
    "training.seed": Range(0, 2**31 - 1),
    "parallel.dp_replicate_size": _COUNT,
    "parallel.dp_shard_size": _COUNT,
    "parallel.tp_size": _COUNT,
    "parallel.pp_size": _COUNT,
    "parallel.zero_stage": Range(1, 3),
    "parallel.timeout": Range(0, open_low=True),
    "logging.logging_steps": _COUNT,
    "logging.sample_tokens": _COUNT,
}
"""What every numeric key may be."""


# ---- public ----


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a run file.

    Args:
        path: a .toml, .yaml or .yml file.
        overrides: command-line options that win over the file, `("--optim.learning_rate", "1e-4")`; paths in them are
            relative to the current folder.

    Raises:
        ValueError: the file, read with the overrides, has problems; one line for each of them.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    reading = _Reading(path)
    reading.table(_parse(path))
    config = _assemble(reading.values, folder=path.parent)
    given = set(reading.values)
    if overrides and not reading.problems:
        options = _spelled_as_options(overrides)
        config = _absolute(parse_options(RunConfig, options, prog="gapless train RUN.toml", default=config), Path())
        chosen = {_option_name(token) for token in options if token.startswith("--")}
        config, idle = _without_idle(config, chosen)
        given = (given | chosen) - idle
    # A list written as empty is that of a script's run, whose rows were in memory; a run from this file is refused.
    rows = reading.values.get("data.train") == ()
    found = _problems(config, given, train_rows=rows and not config.data.train)
    problems = [f"{path}: {home}: {text}" for home, text in found if home not in reading.failed]
    if reading.problems or problems:
        raise ValueError("\n".join(reading.problems + problems))
    if config.training.max_steps is not None and {"training.max_steps", _EPOCHS} <= given:
        print(
            f"note: {path}: training.max_steps = {config.training.max_steps} wins over "
            f"training.num_train_epochs = {config.training.num_train_epochs:g}",
            file=sys.stderr,
        )
    return config


_QUALIFIED = {
    "parallel.dp_shard_size": ("zero_stage", "shard_frozen"),
    "parallel.tp_size": ("sequence_parallel",),
    "parallel.pp_size": ("pp_schedule",),
}
"""Sizes, and the keys of the same section that say more about them."""


def _without_idle(config: RunConfig, chosen: set[str]) -> tuple[RunConfig, set[str]]:
    """A file's configuration where an option has set a size to 1: what the file says about the size goes with it.

    An option could not remove it. Returns the keys that went as well.
    """
    idle = {
        f"parallel.{name}"
        for size, names in _QUALIFIED.items()
        if size in chosen and getattr(config.parallel, size.partition(".")[2]) == 1
        for name in names
        if f"parallel.{name}" not in chosen
    }
    defaults = {home.partition(".")[2]: DEFAULTS[home] for home in idle}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **defaults)), idle


def check_config(config: RunConfig, *, train_rows: bool = False, eval_rows: bool = False) -> RunConfig:
    """The configuration with each value of its field's type; one written in Python may hold lists and pathlib paths.

    Args:
        config: the configuration.
        train_rows: whether a script brings rows in place of data.train, which is then empty.
        eval_rows: the same of data.eval.

    Raises:
        ValueError: values are of the wrong type, missing, out of range or contradict each other; one line for each.
    """
    config, problems = _typed(config)
    if not problems:
        found = _problems(config, set(), train_rows=train_rows, eval_rows=eval_rows)
        problems = [f"{home}: {text}" for home, text in found]
    if problems:
        raise ValueError("\n".join(problems))
    return config


def dump_config(config: RunConfig) -> str:
    """The configuration as TOML that loads back to the same one.

    Relative paths are written as absolute ones, so that the text means the same in any folder. Keys that the
    configuration does not use (those of the adapter in full fine-tuning, epochs beside max_steps) are left out.
    """
    unused = {key for key, _ in _unused(config)}
    if config.training.max_steps is not None:
        unused.add(_EPOCHS)
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for home, value in _items(_absolute(config, Path())):
            if (
                home.startswith(f"{section}.")
                and home not in unused
                and (value is not None or DEFAULTS[home] is not None)
            ):
                lines.append(f"{home.partition('.')[2]} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


# ---- reading ----


def _parse(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name the run file in it")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such run file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: is not TOML: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(path, text)
    raise ValueError(f"{path}: a run file ends in .toml, .yaml or .yml")


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    from gapless.yaml_file import parse_yaml

    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a run file is a table of keys, not {_name(values)}")
    return values


@dataclass
class _Reading:
    """Keys of one file as they find their homes, and the problems on the way."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    """Keys that a problem is about already: that they are missing is no news."""

    def table(self, raw: Mapping[Any, Any]) -> None:
        for name, value in raw.items():
            name = str(name)
            if name in SECTIONS and isinstance(value, dict):
                for key, inner in value.items():
                    self.key(name, str(key), inner)
            elif name in _SECTION_AS_KEY and isinstance(value, str | list):
                self.note(name, _SECTION_AS_KEY[name])
                self.value(name, _SECTION_AS_KEY[name], value)
            elif name in SECTIONS:
                self.problem(name, f"is a section, a table of keys, not {_name(value)}")
            elif isinstance(value, dict) and name not in HOMES:
                near = self.nearest(name, {section: section for section in SECTIONS})
                self.problem(name, f"unknown section{near}; there are {', '.join(SECTIONS)}")
            else:
                self.key(None, name, value)

    def key(self, section: str | None, key: str, value: Any) -> None:
        spelled = key if section is None else f"{section}.{key}"
        home = HOMES.get(key, ALIASES.get(key))
        if home is None:
            self.problem(spelled, f"unknown key{self.nearest(key, HOMES | ALIASES)}")
        elif section not in (None, home.partition(".")[0]):
            self.problem(spelled, f"unknown key; perhaps you meant {home}")
            self.failed.add(home)
        else:
            if key in ALIASES:
                self.note(spelled, home)
                value = ALIAS_VALUES.get(key, lambda same: same)(value)
            self.value(spelled, home, value)

    def value(self, spelled: str, home: str, value: Any) -> None:
        if home in self.spellings:
            self.problem(spelled, f"sets {home}, which {self.spellings[home]} has set already; keep one of them")
            return
        self.spellings[home] = spelled
        known = VALUES.get(home, {}).get(value) if isinstance(value, str) else None
        if known is not None:
            print(f'note: {self.path}: {spelled} = "{value}" is read as "{known}"', file=sys.stderr)
            value = known
        try:
            self.values[home] = _convert(value, HINTS[home], words=self.path.suffix != ".toml")
        except ValueError as error:
            self.problem(spelled, str(error))
            self.failed.add(home)

    def nearest(self, name: str, known: Mapping[str, str]) -> str:
        found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
        if not found:
            return ""
        self.failed.update(home for home in HINTS if home.startswith(known[found[0]]))
        return f"; perhaps you meant {known[found[0]]}"

    def note(self, spelled: str, home: str) -> None:
        print(f"note: {self.path}: {spelled} is read as {home}", file=sys.stderr)

    def problem(self, spelled: str, message: str) -> None:
        self.problems.append(f"{self.path}: {spelled}: {message}")


def _convert(value: Any, hint: Any, *, words: bool) -> Any:
    """`value` as the type of a field; `words`: yes, no, on and off are truth values, as in YAML."""
    arguments = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is types.UnionType:
        inner = next(argument for argument in arguments if argument is not type(None))
        if value is None or (value == "none" and inner is not str):
            return None
        return _convert(value, inner, words=words)
    if kind is tuple:
        return _convert_list(value, arguments[0], words=words)
    if kind is Literal and isinstance(value, str | bool) and value in arguments:
        return value
    if (kind is bool or True in arguments) and words and isinstance(value, str) and value.lower() in TRUTH:
        return TRUTH[value.lower()]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number and (isinstance(value, float) or abs(value) <= sys.float_info.max):
        return float(value)  # whether it is finite and in its range is checked with all others
    if kind is int and number and isinstance(value, int):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if (
        kind is dict
        and isinstance(value, dict)
        and all(isinstance(text, str) for pair in value.items() for text in pair)
    ):
        return value
    raise ValueError(f"must be {_expected(hint)}, not {_name(value)}")


def _convert_list(value: Any, item: Any, *, words: bool) -> tuple[Any, ...]:
    """A list, or one string in place of a list of one; for a list of choices "none" is the empty list."""
    if value == "none" and typing.get_origin(item) is Literal:
        return ()
    if not isinstance(value, str | list):
        raise ValueError(f"must be a list of strings, not {_name(value)}")
    return tuple(_convert(entry, item, words=words) for entry in ([value] if isinstance(value, str) else value))


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in typing.get_args(hint))
    names = {str: "a string", bool: "true or false", int: "an integer", float: "a finite number"}
    return names.get(hint, "a table of strings")


def _name(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "empty"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the string {text}" if isinstance(value, str) else text


# ---- checking ----


def _problems(
    config: RunConfig, given: set[str], *, train_rows: bool = False, eval_rows: bool = False
) -> Iterator[tuple[str, str]]:
    """Keys and what is wrong with their values.

    Args:
        config: the configuration.
        given: keys that were written down, even with their default.
        train_rows: whether a script brings the rows to train on.
        eval_rows: whether it brings those to evaluate on.
    """
    values = dict(_items(config))
    for home, rows in (("data.train", train_rows), ("data.eval", eval_rows)):
        if rows and values[home]:
            yield home, f"contradicts {home.partition('.')[2]}_rows; give one of them (in a script {home} = ())"
    for home, value in values.items():
        if DEFAULTS[home] is dataclasses.MISSING and not value and not (home == "data.train" and train_rows):
            yield home, f"is missing; {_REQUIRED[home]}"
        elif home in PATHS and value is not None and "" in ([value] if isinstance(value, str) else value):
            yield home, "is an empty path"
        if home in RANGES and value is not None and value not in RANGES[home]:
            yield home, f"must be {'' if math.isfinite(value) else 'a finite number '}{RANGES[home]}, not {value}"
    for home, reason in _unused(config, eval_rows=eval_rows):
        # That there is none of something needs no reason.
        if values[home] != DEFAULTS[home] or (home in given and values[home] is not None):
            yield home, f"has no effect because {reason}; remove it"
    if config.optim.warmup_steps > 0 and config.optim.warmup_ratio > 0:
        yield "optim.warmup_ratio", "contradicts optim.warmup_steps; remove one of them (or set it to 0)"
    folders = (config.model.path, config.training.output_dir)
    if all(folders) and os.path.realpath(folders[0]) == os.path.realpath(folders[1]):
        yield "training.output_dir", "is the model's folder (model.path), which stays as it is; name another one"
    if config.logging.sample_prompts and (config.parallel.tp_size > 1 or config.parallel.pp_size > 1):
        yield (
            "logging.sample_prompts",
            "cannot be answered while layers are cut by parallel.tp_size or parallel.pp_size; remove them and ask the "
            "result with `gapless generate`",
        )
    if config.optim.pure_bf16 and config.adapter.type == "lora":
        yield "optim.pure_bf16", 'needs full fine-tuning (adapter.type = "none"); adapters are trained in float32'
    if config.optim.pure_bf16 and config.model.dtype == "fp32":
        yield "optim.pure_bf16", 'contradicts model.dtype = "fp32"; remove one of them'


_REQUIRED = {
    "model.path": "name the folder of the model to start from",
    "data.train": "name at least one file of training rows",
    "training.output_dir": "name the run folder",
}


def _unused(config: RunConfig, *, eval_rows: bool = False) -> Iterator[tuple[str, str]]:
    """Keys that this configuration does not read, with the reason."""
    if config.adapter.type == "none":
        for home in HINTS:
            if home.startswith("adapter.") and home != "adapter.type":
                yield home, 'adapter.type = "none" trains all weights'
    if config.optim.lr_scheduler_type != "wsd":
        yield "optim.decay_ratio", f'optim.lr_scheduler_type is "{config.optim.lr_scheduler_type}", not "wsd"'
    if config.optim.lr_scheduler_type == "constant":
        yield "optim.min_lr_ratio", 'optim.lr_scheduler_type is "constant"'
    if not config.data.packing:
        yield "data.packing_window", "data.packing is false"
        yield "data.max_documents", "data.packing is false"
    evaluated = eval_rows or config.data.eval
    if not evaluated:
        yield "training.per_device_eval_batch_size", "data.eval names no files"
    if not evaluated and not config.logging.sample_prompts:
        yield "training.eval_steps", "there are neither data.eval nor logging.sample_prompts"
    if not config.logging.sample_prompts:
        yield "logging.sample_tokens", "there are no logging.sample_prompts"
    if config.parallel.dp_shard_size == 1:
        yield "parallel.zero_stage", "parallel.dp_shard_size is 1"
        yield "parallel.shard_frozen", "parallel.dp_shard_size is 1"
    elif config.adapter.type == "none":
        yield "parallel.shard_frozen", 'adapter.type = "none" leaves nothing frozen'
    if config.parallel.tp_size == 1:
        yield "parallel.sequence_parallel", "parallel.tp_size is 1"
    if config.parallel.pp_size == 1:
        yield "parallel.pp_schedule", "parallel.pp_size is 1"


def _typed(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A configuration written in Python with its values as a file gives them, and those that are of no use."""
    sections, problems = {}, []
    for section, kind in SECTIONS.items():
        table = getattr(config, section)
        if not isinstance(table, kind):
            problems.append(f"{section}: must be a {kind.__name__}, not {type(table).__name__}")
            continue
        values = {}
        for name, hint in typing.get_type_hints(kind).items():
            try:
                values[name] = _convert(_plain(getattr(table, name)), hint, words=False)
            except ValueError as error:
                problems.append(f"{section}.{name}: {error}")
        if values.keys() == {entry.name for entry in dataclasses.fields(kind)}:
            sections[section] = kind(**values)
    return (RunConfig(**sections), []) if not problems else (config, problems)


def _plain(value: Any) -> Any:
    """Lists for tuples and strings for paths, as a parsed file has them."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return os.fspath(value) if isinstance(value, Path) else value


# ---- pieces ----


def _items(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for home in HINTS:
        section, _, key = home.partition(".")
        yield home, getattr(getattr(config, section), key)


def _assemble(values: Mapping[str, Any], *, folder: Path) -> RunConfig:
    """A configuration from values by home; what is required and missing stays empty, which `_problems` reports."""
    filled = {home: () if home == "data.train" else "" for home in _REQUIRED} | dict(values)
    sections = {
        section: kind(**{home.partition(".")[2]: filled[home] for home in filled if home.startswith(f"{section}.")})
        for section, kind in SECTIONS.items()
    }
    return _absolute(RunConfig(**sections), folder)


def _absolute(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with paths that start at the root; an empty path stays empty, it is refused later."""

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(entry) for entry in value)
        return os.path.abspath(folder / os.path.expanduser(value)) if value else value

    for home in PATHS:
        section, _, key = home.partition(".")
        changed = dataclasses.replace(
            getattr(config, section), **{key: absolute(getattr(getattr(config, section), key))}
        )
        config = dataclasses.replace(config, **{section: changed})
    return config


def _spelled_as_options(tokens: Sequence[str]) -> list[str]:
    """Options as `parse_options` reads them, from those that spell a value as a run file does.

    `--data.packing false` is `--data.no_packing`; `none` is the empty value of a number and of a list of choices.

    Raises:
        ValueError: an option is a name that only other tools know.
    """
    spelled, rest = [], list(tokens)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        home = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and home in ALIASES:
            raise ValueError(f"there is no option {name}; perhaps you meant --{ALIASES[home]}")
        option = _option_of_value(home, value if equals else "".join(rest[:1])) if name.startswith("--") else None
        if option is not None and not equals:
            rest.pop(0)
        spelled += [token] if option is None else option
    return spelled


def _option_of_value(home: str, value: str) -> list[str] | None:
    """The option that gives a key a truth value, none or another tool's value; None for others, spelt alike."""
    hint = HINTS.get(home)
    arguments = typing.get_args(hint)
    section, _, key = home.partition(".")
    if hint is bool and value.lower() in TRUTH:
        return [f"--{section}.{'' if TRUTH[value.lower()] else 'no_'}{key}"]
    if True in arguments and value.lower() in TRUTH:  # a choice beside others
        return [f"--{home}", str(TRUTH[value.lower()])]
    if value in VALUES.get(home, {}):
        print(f'note: --{home} "{value}" is read as "{VALUES[home][value]}"', file=sys.stderr)
        return [f"--{home}", VALUES[home][value]]
    if value == "none" and type(None) in arguments and str not in arguments:
        return [f"--{home}", "None"]
    if value == "none" and typing.get_origin(hint) is tuple and typing.get_origin(arguments[0]) is Literal:
        return [f"--{home}"]
    return None


def _option_name(token: str) -> str:
    """`section.key` of an option as it is typed: --section.key, --section.no-key, --section.key=value."""
    section, _, key = token.removeprefix("--").partition("=")[0].replace("-", "_").partition(".")
    return f"{section}.{key if f'{section}.{key}' in HINTS else key.removeprefix('no_')}"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_string(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return repr(value)


def _toml_string(text: str) -> str:
    """A TOML basic string: JSON's escapes, and DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
