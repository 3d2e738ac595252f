"""What a row is: recognised by its columns and brought into one of three forms.

A row is plain text, a prompt and its completion (strings), or a conversation: messages of {role, content, ...} with the
tools offered. ShareGPT and Alpaca rows become conversations. Keys of a message that are not touched here (tool_calls,
reasoning_content, thinking, name, ...) reach the chat template as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["messages", "prompt_completion", "text", "sharegpt", "alpaca"]
Message = dict[str, Any]

REQUIRED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
"""The columns that make a format."""
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "prompt_completion": ("tools",),
    "text": (),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history", "tools"),
}
"""Columns of a format that are read if they are there."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


@dataclass(frozen=True)
class TextRow:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class PromptRow:
    """A prompt and its completion, both plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRow:
    """A conversation; `learned` says of each message whether it is an assistant's turn to train on."""

    messages: list[Message]
    learned: list[bool]
    tools: list[Any] | None = field(default=None)


class RowReader:
    """Turns rows into `TextRow`, `PromptRow` or `ChatRow`.

    Args:
        format: of all rows; auto recognises each by its columns.
        columns: {canonical name: name in the file}; an empty name leaves an optional column out.

    Raises:
        ValueError: `columns` has names that no format reads.
    """

    def __init__(self, format: Format | Literal["auto"], columns: Mapping[str, str]) -> None:
        known = sorted({name for group in (REQUIRED, OPTIONAL) for names in group.values() for name in names})
        if unknown := sorted(set(columns) - set(known)):
            raise ValueError(f"columns names {unknown}, which no format has; known are {known}")
        self._format: Format | None = None if format == "auto" else format
        self._recognised: dict[tuple[str, ...], Format] = {}
        self._columns = dict(columns)

    def read(self, row: Mapping[str, Any]) -> TextRow | PromptRow | ChatRow:
        """One row.

        Raises:
            ValueError: the format is not recognised, a column is missing or has the wrong type, a role is unknown. The
                message does not know the place of the row; the caller adds it.
        """
        format = self._format or self._recognise(row)
        names = {name: self._columns.get(name, name) for name in REQUIRED[format]}
        if missing := [column for column in names.values() if column not in row]:
            raise ValueError(
                f"no column {_quoted(missing)} for format {format} (the row has {_quoted(row)}); "
                "set data.format or data.columns"
            )
        values = {name: row[column] for name, column in names.items()}
        for name in OPTIONAL[format]:
            value = row.get(self._columns.get(name, name))
            if value is not None:
                values[name] = value
        return _READERS[format](values)

    def _recognise(self, row: Mapping[str, Any]) -> Format:
        columns = tuple(row)
        if columns not in self._recognised:
            self._recognised[columns] = self._fitting(columns)
        return self._recognised[columns]

    def _fitting(self, row: tuple[str, ...]) -> Format:
        found: list[Format] = [
            name
            for name, columns in REQUIRED.items()
            if all(self._columns.get(column, column) in row for column in columns)
        ]
        if not found:
            wanted = "; ".join(" + ".join(columns) for columns in REQUIRED.values())
            raise ValueError(
                f"the columns {_quoted(row)} are no known format ({wanted}); set data.format and data.columns"
            )
        if len(found) > 1:
            raise ValueError(f"the columns {_quoted(row)} fit the formats {' and '.join(found)}; set data.format")
        return found[0]


def _quoted(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names) or "no columns"


def _string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} must be a string, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


# ---- formats ----


def _read_text(values: Mapping[str, Any]) -> TextRow:
    return TextRow(_string(values["text"], "text"))


def _read_messages(values: Mapping[str, Any]) -> ChatRow:
    messages = _messages(values["messages"], "messages")
    return ChatRow(messages, [_learned(message) for message in messages], _tools(values.get("tools")))


def _read_prompt_completion(values: Mapping[str, Any]) -> PromptRow | ChatRow:
    prompt, completion, tools = values["prompt"], values["completion"], _tools(values.get("tools"))
    if isinstance(prompt, str) and isinstance(completion, str) and tools is None:
        return PromptRow(prompt, completion)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, "prompt")
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    after = _messages(completion, "completion")
    learned = [False] * len(before) + [_learned(message) for message in after]
    return ChatRow(before + after, learned, tools)


def _read_alpaca(values: Mapping[str, Any]) -> ChatRow:
    messages: list[Message] = []
    if values.get("system"):
        messages.append({"role": "system", "content": _string(values["system"], "system")})
    history = values.get("history") or []
    if not _is_list(history) or not all(_is_list(pair) and len(pair) == 2 for pair in history):
        raise ValueError("history must be a list of [instruction, answer] pairs")
    for question, answer in history:
        messages.append({"role": "user", "content": _string(question, "history")})
        messages.append({"role": "assistant", "content": _string(answer, "history")})
    question = _string(values["instruction"], "instruction")
    if values.get("input"):
        question = "\n\n".join(filter(None, [question, _string(values["input"], "input")]))
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _string(values["output"], "output")})
    return ChatRow(messages, [_learned(message) for message in messages], _tools(values.get("tools")))


def _read_sharegpt(values: Mapping[str, Any]) -> ChatRow:
    conversations = values["conversations"]
    if not _is_list(conversations):
        raise ValueError(f"conversations must be a list of turns, not {_kind(conversations)}")
    messages = [_sharegpt_message(turn, index) for index, turn in enumerate(conversations)]
    if values.get("system"):
        messages.insert(0, {"role": "system", "content": _string(values["system"], "system")})
    tools = _tools(values.get("tools"))
    if tools:
        # ShareGPT files list bare functions; templates expect what the chat APIs take.
        tools = [
            {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool
            for tool in tools
        ]
    return ChatRow(messages, [_learned(message) for message in messages], tools)


def _sharegpt_message(turn: Any, index: int) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"conversations[{index}] must be an object with from and value, not {_kind(turn)}")
    name, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"conversations[{index}]: unknown role {name!r}; known are {', '.join(_SHAREGPT_ROLES)}")
    kept = {key: value for key, value in turn.items() if key in ("weight", "loss_weight")}
    if role == "function_call":
        calls = _json(value, f"conversations[{index}]: the function call")
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(calls, index), **kept}
    return {"role": role, "content": _string(value, f"conversations[{index}].value"), **kept}


_READERS = {
    "messages": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
}


# ---- messages ----


def _messages(value: Any, column: str) -> list[Message]:
    if not _is_list(value):
        raise ValueError(f"{column} must be a list of messages, not {_kind(value)}")
    return [_message(entry, f"{column}[{index}]") for index, entry in enumerate(value)]


def _message(entry: Any, place: str) -> Message:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{place} must be an object with role and content, not {_kind(entry)}")
    if not isinstance(entry.get("role"), str):
        hint = '; it looks like ShareGPT: set data.format = "sharegpt"' if "from" in entry else ""
        raise ValueError(f"{place} has no role{hint}")
    # Parquet fills in null for keys that other messages have.
    message = {key: value for key, value in entry.items() if value is not None or key == "content"}
    content = message.get("content")
    if content is not None and _is_list(content):
        return _join_parts(message, content, place)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{place}.content must be a string or a list of parts, not {_kind(content)}")
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{place}.content is missing")
    return message


def _join_parts(message: Message, parts: Sequence[Any], place: str) -> Message:
    """Typed parts to plain content: text joined, reasoning and tool calls under the names that templates read."""
    texts, reasoning, calls = [], [], []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind not in ("text", "reasoning", "tool_call"):
            raise ValueError(f"{place}.content[{index}] is of type {kind!r}; only text can be trained on")
        value = part.get("text", part.get("value"))
        value = _string(value, f"{place}.content[{index}].text")
        if kind == "text":
            texts.append(value)
        elif kind == "reasoning":
            reasoning.append(value)
        else:
            calls.extend(_tool_calls(_json(value, f"{place}.content[{index}]"), index))
    message = {**message, "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [*message.get("tool_calls", []), *calls]
    return message


def _tool_calls(calls: Any, index: int) -> list[Message]:
    """{name, arguments}, one or a list of them, as the tool_calls of a message."""
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise ValueError(f"turn {index}: a function call must be an object with name and arguments, not {call!r}")
    return [{"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}} for call in calls]


def _learned(message: Message) -> bool:
    """Whether to train on a message: an assistant's, unless its weight (as in OpenAI's files) is 0."""
    weight = message.get("weight", message.get("loss_weight", 1))
    if weight not in (0, 1):
        raise ValueError(f"a message has weight {weight!r}; only 0 (not trained) and 1 are supported")
    return message["role"] == "assistant" and bool(weight)


def _tools(value: Any) -> list[Any] | None:
    value = _json(value, "tools") if isinstance(value, str) and value.strip() else value
    if not value:
        return None
    if not _is_list(value):
        raise ValueError(f"tools must be a list of JSON schemas, not {_kind(value)}")
    return list(value)


def _json(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON ({error}): {value[:60]!r}") from error
