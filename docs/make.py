"""Rewrites what the pages repeat: the keys in run-files.md, the tree of files in README.md, all of benchmarks.md."""

import ast
import dataclasses
import inspect
import json
import types
import typing
from pathlib import Path

from gapless.config_file import ALIASES, DEFAULTS, HINTS, RANGES, SECTIONS, VALUES

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "gapless"
BENCHMARKS = DOCS.parent / "benchmarks"
KEYS = ("<!-- keys: written by `make docs` from src/gapless/config.py -->\n", "<!-- end of keys -->\n")
TREE = ("<!-- tree: written by `make docs` from the first lines of the files -->\n", "<!-- end of tree -->\n")


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
        return " or ".join(
            str(choice).lower() if isinstance(choice, bool) else f"`{choice}`" for choice in typing.get_args(hint)
        )
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
    for home, values in VALUES.items():
        pairs = [f"`{name}` for `{value}`" for name, value in values.items()]
        lines.append(f"- `{home}` takes {', '.join(pairs)}")
    return "\n".join(lines) + "\n"


def tree() -> str:
    """The package with the first line of each file's docstring."""
    lines = ["src/gapless/"]
    for path in sorted(SOURCE.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        name = path.relative_to(SOURCE)
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0].rstrip(".")
        if path.name == "__init__.py" and path.parent != SOURCE:
            lines.append(
                f"{'  ' * len(name.parts[:-1])}{f'{name.parent.name}/':<{26 - 2 * len(name.parts[:-1])}}{first}"
            )
        else:
            lines.append(f"{'  ' * len(name.parts)}{path.name:<{26 - 2 * len(name.parts)}}{first}")
    return "".join(f"    {line}\n" for line in lines)


def benchmarks() -> str:
    """What the scripts have measured, a table each."""
    parts = [
        "# Benchmarks",
        "",
        "Written by `make docs` from `benchmarks/results/`. Ours and its peers in one run on one machine, medians,",
        "through the public functions. The limit: what matmuls and bytes alone would give at the rates of that run.",
    ]
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        script = BENCHMARKS / f"{path.stem}.py"
        title, _, *about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))).split("\n\n")
        parts += ["", f"## {script.name}: {title.rstrip('.')}"]
        parts += [line for paragraph in about for line in ("", paragraph)]
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for run in dict.fromkeys(map(_run, rows)):
            parts += ["", run]
            measured = [row for row in rows if _run(row) == run]
            for unit in dict.fromkeys(row["unit"] for row in measured):
                parts += ["", *_table(unit, [row for row in measured if row["unit"] == unit])]
    return "\n".join(parts) + "\n"


def _run(row: dict) -> str:
    """Where and how a row was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return f"`{row['command']}`, commit {row['commit']}, {row['date']}, {row['device']}; {versions}."


def _table(unit: str, rows: list[dict]) -> list[str]:
    """Rows of one unit, a column for each peer that one of them has."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    heads = [unit, "gapless", *peers, "limit", ""]
    return [_line(heads), "|" + "---|" * len(heads), *(_line(_measured(row, peers)) for row in rows)]


def _measured(row: dict, peers: list[str]) -> list[str]:
    """The cells of a row."""
    notes = [*_values(row.get("beside", {})), *filter(None, [row.get("note")])]
    if row["peak_gib"]:
        notes.append(f"memory in GiB: {', '.join(_values(row['peak_gib']))}")
    others = [f"{row['peers'][peer]:g}" if peer in row["peers"] else "" for peer in peers]
    return [f"`{row['case']}`", f"{row['gapless']:g}", *others, f"{row['limit']:g}", "; ".join(notes)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _values(named: dict[str, float]) -> list[str]:
    return [f"{name} {value:g}" for name, value in named.items()]


def pages() -> dict[Path, str]:
    """Every page with fresh parts."""
    return {
        DOCS / "benchmarks.md": benchmarks(),
        DOCS / "run-files.md": _replaced(DOCS / "run-files.md", KEYS, key_tables()),
        DOCS.parent / "README.md": _replaced(DOCS.parent / "README.md", TREE, "\n" + tree() + "\n"),
    }


def _replaced(path: Path, marks: tuple[str, str], part: str) -> str:
    before, rest = path.read_text(encoding="utf-8").split(marks[0])
    return before + marks[0] + part + marks[1] + rest.split(marks[1])[1]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
