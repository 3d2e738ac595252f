"""YAML 1.2's plain scalars on PyYAML's safe loader.

PyYAML follows YAML 1.1, where `1e-4` is a string, `no` is false, `010` is 8 and `1:30` is 90. Here numbers are what
they look like and yes, no, on and off stay words; the reader of a field decides what a word means. A key given twice is
an error instead of a silent choice of the last.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2 (section 10.3)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def parse_yaml(text: str) -> Any:
    """The one document in `text`.

    Raises:
        ValueError: it is not YAML, or a key is given twice; with the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"{error.problem}{f' (line {mark.line + 1})' if mark else ''}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
