"""Rows of a file as prompts, read as training reads them, and the rows of their answers, written as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from gapless.data.formats import REQUIRED, Format, Message, PromptRow, RowReader, TextRow
from gapless.data.sources import open_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.data.chat import ChatSpans
    from gapless.inference.generate import Completion

_ANSWERS: dict[Format, str] = {"prompt_completion": "completion", "alpaca": "output"}
"""The column with the answer, which a prompt does without."""
_TERMINAL_SECONDS, _LOG_SECONDS = 0.5, 30.0
"""Between two lines of progress."""


@dataclass(frozen=True)
class Prompt:
    """What the model is asked."""

    content: str | list[Message]
    """A plain text, or a conversation without the answer to its last message."""
    tools: list[Any] | None = None
    where: str = "--prompt"
    """Its place, for messages."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row it was read from."""
    reference: Any = None
    """The row's own answer; None if it has none."""

    def ids(self, chat: ChatSpans, *, raw: bool) -> list[int]:
        """The prompt's tokens.

        Args:
            chat: of the tokenizer, which needs a chat template unless `raw`.
            raw: the text is to be continued; else it is what the user says.

        Raises:
            ValueError: nothing is left to answer, or the template refuses the conversation; names the place.
        """
        if raw:
            if not isinstance(self.content, str):
                raise ValueError(
                    f"{self.where}: the row has no `prompt` or `text` of plain text, which --raw continues"
                )
            ids = [*chat.tokenizer.prefix_ids, *chat.tokenizer.encode(self.content)]
            if not ids:
                raise ValueError(f"{self.where}: the text has no tokens")
            return ids
        messages: list[Message] = (
            self.content if isinstance(self.content, list) else [{"role": "user", "content": self.content}]
        )
        if not messages:
            raise ValueError(f"{self.where}: no message is left to answer")
        try:
            return chat.tokenizer.chat_ids(chat.checked(messages, self.tools), tools=self.tools)
        except ValueError as error:
            raise ValueError(f"{self.where}: {_for_options(error)}") from error

    def answered(self, completion: Completion) -> dict[str, Any]:
        """The row with its answer; a `completion` of its own, or the answer it was read with, is the `reference`."""
        kept = {"reference" if key == "completion" else key: value for key, value in self.row.items()}
        if self.reference is not None:
            kept.setdefault("reference", self.reference)
        return kept | {"completion": completion.text, "finish_reason": completion.finish_reason}


def read_prompts(file: str, *, format: Format | Literal["auto"], columns: Mapping[str, str]) -> list[Prompt]:
    """The prompts in a file of rows.

    Args:
        file: of any kind that training reads.
        format: of all rows; auto recognises each by its columns, of which that of the answer may be missing.
        columns: {canonical name: name in the file}.

    Raises:
        ValueError: a row is not of its format, by its place.
    """
    RowReader(format, columns)  # refuses unknown names of columns before any row is blamed
    rows, prompts = open_rows(file), []
    for index in range(len(rows)):
        row, where = dict(rows[index]), rows.where(index)
        try:
            prompts.append(_prompt(row, where, format, columns))
        except ValueError as error:
            raise ValueError(f"{where}: {_for_options(error)}") from error
    return prompts


def _for_options(error: ValueError) -> str:
    """The message of an error with the names of options in place of those of a run file."""
    return str(error).replace("data.format", "--format").replace("data.columns", "--columns")


def _prompt(row: dict[str, Any], where: str, format: Format | Literal["auto"], columns: Mapping[str, str]) -> Prompt:
    # Rows are recognised one by one: those with and without an answer may stand in one file.
    formats = _fitting(row, columns) if format == "auto" else [format]
    answers = [columns.get(_ANSWERS[name], _ANSWERS[name]) for name in formats if name in _ANSWERS]
    reader = RowReader(formats[0] if len(formats) == 1 else "auto", columns)
    content = reader.read({**row, **dict.fromkeys(answers, "")})
    reference = next((row[name] for name in answers if row.get(name) is not None), None)
    if isinstance(content, TextRow):
        return Prompt(content.text, None, where, row, reference)
    if isinstance(content, PromptRow):
        return Prompt(content.prompt, None, where, row, reference)
    messages, cut = list(content.messages), []
    while messages and messages[-1]["role"] == "assistant":
        cut.insert(0, messages.pop().get("content"))
    return Prompt(messages, content.tools, where, row, reference or "\n\n".join(filter(None, cut)) or None)


def _fitting(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[Format]:
    """The formats whose columns the row has; if there is none, those that only miss the answer."""

    def fits(name: Format, without: str | None = None) -> bool:
        return all(row.get(columns.get(column, column)) is not None for column in REQUIRED[name] if column != without)

    found = [name for name in REQUIRED if fits(name)] or [name for name in REQUIRED if fits(name, _ANSWERS.get(name))]
    if not found:
        raise ValueError(
            "the row has no `messages`, `conversations`, `prompt`, `instruction` or `text` (it has "
            f"{', '.join(map(repr, row)) or 'no columns'}); --columns gives them other names"
        )
    return found


class AnswerWriter:
    """Writes rows as JSON lines in the order of their prompts, each as soon as it and those before it are answered.

    Args:
        prompts: with the rows.
        stream: flushed after each line, so that a process that is killed leaves all of them.
        progress: where to say how many rows are answered; None for nowhere.
    """

    def __init__(self, prompts: Sequence[Prompt], stream: TextIO, progress: TextIO | None = None) -> None:
        self._prompts = prompts
        self._stream = stream
        self._progress = progress
        self._answered: dict[int, Completion] = {}
        self._written = 0
        self._shown = time.monotonic()

    def __call__(self, index: int, completion: Completion) -> None:
        """Takes the answer to a prompt."""
        self._answered[index] = completion
        while self._written in self._answered:
            row = self._prompts[self._written].answered(self._answered.pop(self._written))
            self._stream.write(_json_line(row, self._stream.encoding))
            self._stream.flush()
            self._written += 1
        if self._progress is not None:
            self._show(self._progress, self._written + len(self._answered))

    def _show(self, stream: TextIO, done: int) -> None:
        total, now, terminal = len(self._prompts), time.monotonic(), stream.isatty()
        if done < total and now - self._shown < (_TERMINAL_SECONDS if terminal else _LOG_SECONDS):
            return
        self._shown = now
        text = f"answered {done} of {total} rows"
        print(f"\r{text}" if terminal else text, end="" if terminal and done < total else "\n", file=stream, flush=True)


def _json_line(row: Mapping[str, Any], encoding: str) -> str:
    # Rows of other files than JSON may hold dates or bytes, which are written as text.
    line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
    try:
        line.encode(encoding)
    except UnicodeEncodeError:  # a terminal that is not UTF-8, or half of a surrogate pair
        line = json.dumps(row, default=str) + "\n"
    return line
