"""Rewrites the table of keys in docs/run-files.md from the dataclasses in gapless.config."""

import ast
import dataclasses
import inspect
import types
import typing
from pathlib import Path

from gapless.config_file import ALIASES, DEFAULTS, HINTS, RANGES, SECTIONS

PAGE = Path(__file__).with_name("run-files.md")
MARK = "<!-- The rest of this page is written by `make docs` from src/gapless/config.py. -->\n"


def field_docs(kind: type) -> dict[str, str]:
    """The docstring after each field of a dataclass."""
    body = ast.parse(inspect.getsource(kind)).body[0].body
    return {
        field.target.id: doc.value.value
        for field, doc in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def type_name(home: str) -> str:
    """What a value may be, in words."""
    hint = HINTS[home]
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        choices = typing.get_args(typing.get_args(hint)[0])
        return "list of " + (" and ".join(f"`{choice}`" for choice in choices) if choices else "strings")
    if typing.get_origin(hint) is dict:
        return "table"
    name = {str: "string", int: "integer", float: "number", bool: "true or false"}[hint]
    return f"{name}, {RANGES[home]}" if home in RANGES else name


def default(home: str) -> str:
    """The default as a run file would spell it."""
    value = DEFAULTS[home]
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{entry}"' for entry in value) + "]"
    return "" if value is None or value == {} else str(value)


def key_tables() -> str:
    """One table for each section."""
    lines = []
    for section, kind in SECTIONS.items():
        lines += [
            "",
            f"## [{section}]",
            "",
            inspect.getdoc(kind),
            "",
            "| key | value | default | |",
            "|---|---|---|---|",
        ]
        for name, doc in field_docs(kind).items():
            home = f"{section}.{name}"
            lines.append(f"| `{name}` | {type_name(home)} | {default(home)} | {doc} |")
    lines += ["", "## Names of other tools", "", "Accepted with a note, at the top level or in the key's section.", ""]
    for home in HINTS:
        names = [alias for alias, target in ALIASES.items() if target == home]
        if names:
            lines.append(f"- {', '.join(f'`{name}`' for name in names)}: `{home}`")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page with fresh tables."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + key_tables()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
