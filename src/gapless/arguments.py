"""Command-line options of a dataclass, by tyro: help from the fields' docstrings, nearest names, one-line errors."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import TypeVar

import tyro

T = TypeVar("T")


def parse_options(kind: type[T], args: Sequence[str], *, prog: str, default: T | None = None) -> T:
    """An instance of `kind` from command-line options.

    Args:
        kind: a dataclass; the fields of a nested one are options of the form `--section.key`.
        args: the command line after the verb. `-h` or `--help` prints the options and exits.
        prog: how the command is called, for the help text.
        default: values of the options that are not given; by default those of the dataclass.

    Raises:
        ValueError: an option is unknown, misses its value or has one of the wrong type; names the nearest options.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            start = tyro.MISSING_NONPROP if default is None else default
            return tyro.cli(kind, args=args, prog=prog, default=start, use_underscores=True)
    except SystemExit as request:
        if not request.code:
            raise
    raise ValueError(_one_line(errors.getvalue()))


def _one_line(box: str) -> str:
    """Tyro's boxed message without title and frame, and without the help texts of the options it names.

    The frame is drawn with spaces and hyphens where stdout is not UTF-8.
    """
    lines = [line.strip(" │") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("╭", "╰"))]
    paragraphs = [
        list(group) for rule, group in itertools.groupby(lines, lambda line: set(line) <= {"─", "-"}) if not rule
    ]
    if not box.startswith("╭"):
        paragraphs = paragraphs[1:]
    message = " ".join(paragraphs[0])
    for heading, *rest in paragraphs[1:]:
        options = [line for line in rest if line.startswith("--")]
        if options and heading != "Argument helptext:":
            message = f"{message.rstrip('.')}. {heading} {', '.join(options)}"
    return message
