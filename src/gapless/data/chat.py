"""A row to token ids and the tokens to train on.

For a conversation the trained tokens follow from rendering prefixes. Turn i begins where the rendering of the messages
before it, generation prompt included, ends: what the model sees when it has to answer. It ends where the rendering up
to and including it ends, without white space that the template puts after the end token. What counts is what the whole
conversation renders: where a template shows earlier turns differently (Qwen3 leaves out the thinking of turns before
the last question, Mistral moves tools and system prompt to the last question), the prefix is not part of the whole, and
the turn is found by rendering the same conversations with a marker in the place of a message. A turn that neither way
settles is refused with its place; nothing is guessed.

The text is encoded once, as a whole. A token that holds the last characters of a header and the first of an answer is
trained.
"""

from __future__ import annotations

import bisect
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding

from gapless.batch import Document
from gapless.data.formats import ChatRow, Format, Message, PromptRow, RowReader, TextRow
from gapless.data.tokenizer import Tokenizer

Span = tuple[int, int]
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that any template may be given."""
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "thinking")
# Private-use characters: no template looks for them, and none trims them.
_MARK = "\ue000\ue001\ue002"


class RowEncoder:
    """Rows to documents.

    Args:
        tokenizer: with a chat template if rows are conversations.
        format: see `gapless.data.formats.RowReader`.
        columns: see `gapless.data.formats.RowReader`.
        train_on: completions: assistant turns, completions, all of a text; all: every token.

    Attributes:
        plain_prompts: rows of a prompt and a completion as plain texts, so far.
        empty_answers: trained turns and completions that say nothing at all, so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        format: Format | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        train_on: Literal["completions", "all"] = "completions",
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = RowReader(format, columns or {})
        self._chat = ChatSpans(tokenizer)
        self._train_on = train_on
        self.plain_prompts = self.empty_answers = 0

    @property
    def unended_turns(self) -> int:
        """Trained assistant turns that the template closes without an end token, so far."""
        return self._chat.unended

    @property
    def shortened_turns(self) -> int:
        """Trained assistant turns of which the template leaves out the beginning or the reasoning, so far."""
        return self._chat.shortened

    def prepare(self, row: Mapping[str, Any]) -> Prepared:
        """Everything but the encoding.

        Raises:
            ValueError: the row is not of its format, or the template refuses it; the caller adds the row's place.
        """
        prepared = self._prepare(self._reader.read(row))
        try:
            prepared.text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell it (\ud83d without its partner), as files that were cut in the wrong place do.
            raise ValueError(
                f"the text holds {error.object[error.start]!a}, half of a surrogate pair, which is no character; "
                "correct or remove the row"
            ) from error
        return prepared

    def _prepare(self, content: TextRow | PromptRow | ChatRow) -> Prepared:
        if isinstance(content, ChatRow):
            return self._prepare_chat(content)
        if self.tokenizer.eos_id is None:
            raise ValueError(
                f"{self.tokenizer.path} names no eos_token to end a text with; add it to tokenizer_config.json"
            )
        if isinstance(content, TextRow):
            return Prepared(content.text, None, ends=True, prompt=None)
        self.plain_prompts += 1
        self.empty_answers += not content.completion.strip()
        return Prepared(content.prompt + content.completion, None, ends=True, prompt=content.prompt)

    def _prepare_chat(self, row: ChatRow) -> Prepared:
        if not row.messages:
            return Prepared("", (), ends=False, prompt=None)
        text, spans = self._chat.spans(row)
        turns = zip(row.messages, row.learned, strict=True)
        self.empty_answers += sum(learned and _is_empty(message) for message, learned in turns)
        return Prepared(text, None if self._train_on == "all" else tuple(spans), ends=False, prompt=None)

    def finish(self, prepared: Prepared, encoding: Encoding) -> Document:
        """The document of a prepared row and the encoding (without special tokens) of its text."""
        if not prepared.ends:
            trained = np.full(len(encoding.ids), prepared.spans is None)
            for span in prepared.spans or ():
                trained[_token_range(encoding, span)] = True
            return Document(np.array(encoding.ids, dtype=np.int32), trained)
        untrained, ids, eos = 0, encoding.ids, self.tokenizer.eos_id
        if prepared.prompt is not None:
            untrained, ids = self._after_prompt(prepared.prompt, prepared.text, encoding)
        prefix = list(self.tokenizer.prefix_ids)
        # Texts that were rendered beforehand begin with their own.
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
            untrained += len(prefix) if prepared.prompt is not None else 0
        if prepared.text and ids[-1:] != [eos]:
            ids = [*ids, eos]
        trained = np.full(len(ids), bool(prepared.text))
        if self._train_on == "completions":
            trained[:untrained] = False
        return Document(np.array(ids, dtype=np.int32), trained)

    def _after_prompt(self, prompt: str, text: str, encoding: Encoding) -> tuple[int, list[int]]:
        """The prompt's tokens are those it has alone, as when the model is asked; then the completion's."""
        alone, whole = self.tokenizer.encode(prompt), encoding.ids
        if whole[: len(alone)] != alone:
            whole = alone + self.tokenizer.encode_continuation(text[len(prompt) :])
        return len(alone), whole


@dataclass(frozen=True)
class Prepared:
    """A row before its text is encoded."""

    text: str
    spans: tuple[Span, ...] | None
    """Characters to train on; None for all."""
    ends: bool
    """Plain text: begins and ends with the tokenizer's own tokens. A chat template writes them itself."""
    prompt: str | None
    """The beginning of `text` that is not trained."""


def _token_range(encoding: Encoding, span: Span) -> slice:
    """The tokens that hold a character of the span."""
    tokens = range(len(encoding.ids))
    first = bisect.bisect_right(tokens, span[0], key=lambda token: _characters(encoding, token)[1])
    end = bisect.bisect_left(tokens, span[1], lo=first, key=lambda token: _characters(encoding, token)[0])
    return slice(first, end)


def _characters(encoding: Encoding, token: int) -> Span:
    span = encoding.token_to_chars(token)
    assert span is not None, "only tokens added by a post-processor have no characters, and none were asked for"
    return span


class ChatSpans:
    """Finds the characters of trained turns in the rendering of a conversation.

    Attributes:
        tokenizer: whose chat template renders.
        unended: trained turns found without an end token.
        shortened: trained turns found without their beginning or reasoning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._traits: _Traits | None = None
        self._roles = set(USUAL_ROLES)
        self.unended = self.shortened = 0

    def spans(self, row: ChatRow) -> tuple[str, list[Span]]:
        """The text of a conversation and the characters of its trained turns, ascending.

        Raises:
            ValueError: a role is unknown, the template refuses the conversation, leaves out its tools or tool calls, or
                a turn cannot be told from the text around it.
        """
        messages = self.checked(row.messages, row.tools)
        assert self._traits is not None
        conversation = _Conversation(self.tokenizer, self._traits, messages, row.tools)
        spans = [conversation.turn(index) for index, learned in enumerate(row.learned) if learned]
        text = conversation.text
        for earlier, later in zip(spans, spans[1:], strict=False):
            if later[0] < earlier[1]:
                raise ValueError("the chat template mixes two assistant turns; the trained tokens cannot be told")
        self.unended += sum(not text[:end].endswith(self.tokenizer.end_tokens) for _, end in spans)
        learned = (message for message, learn in zip(messages, row.learned, strict=True) if learn)
        turns = zip(learned, spans, strict=True)
        self.shortened += sum(_is_shortened(message, text[start:end]) for message, (start, end) in turns)
        return text, spans

    def checked(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """The messages as the template takes them.

        Raises:
            ValueError: a role is unknown, or the template leaves out tools or tool calls.
        """
        for index, message in enumerate(messages):
            self._check_role(message["role"], index)
        # Probed once, when the first conversation comes: rows of plain text need no template.
        self._traits = self._traits or _probe(self.tokenizer)
        if tools and not self._traits.shows_tools:
            raise ValueError(
                "the row has tools, which the chat template leaves out; name another with data.chat_template, or leave "
                'them out with data.columns = {tools = ""}'
            )
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if not self._traits.shows_calls:
            raise ValueError(
                "the row has tool calls, which the chat template leaves out; name another with data.chat_template"
            )
        return [_parsed_calls(message) for message in messages] if self._traits.parses_arguments else messages

    def _check_role(self, role: str, index: int) -> None:
        """Most templates leave out a turn whose role they do not know, or print the name as it is."""
        if role in self._roles:
            return
        if not _names(self.tokenizer, role):
            known = ", ".join(USUAL_ROLES)
            near = difflib.get_close_matches(role.lower(), USUAL_ROLES, n=1)
            raise ValueError(
                f"message {index} has the role {role!r}, which is none of {known}, and which the chat template does "
                f"not name; {f'did you mean {near[0]!r}?' if near else 'correct it'}"
            )
        self._roles.add(role)


@dataclass(frozen=True)
class _Traits:
    """What a template does, found by rendering probes."""

    adds_prompt: bool
    """add_generation_prompt changes the rendering."""
    shows_tools: bool
    shows_calls: bool
    parses_arguments: bool
    """Arguments of a tool call must be objects: as a string they would be escaped a second time."""


def _probe(tokenizer: Tokenizer) -> _Traits:
    question: list[Message] = [{"role": "user", "content": "a"}]

    def call(arguments: Any) -> list[Message]:
        function = {"name": _MARK, "arguments": arguments}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        return [*question, {"role": "assistant", "content": "", "tool_calls": calls}]

    parameters = {"type": "object", "properties": {}, "required": []}
    tool = {"type": "function", "function": {"name": _MARK, "description": "a", "parameters": parameters}}
    as_object = _try_render(tokenizer, call({"k": 1})) or ""
    as_string = _try_render(tokenizer, call('{"k":  1}')) or ""
    plain = tokenizer.render(question)
    return _Traits(
        adds_prompt=_try_render(tokenizer, question, add_generation_prompt=True) != plain,
        shows_tools=_MARK in (_try_render(tokenizer, question, tools=[tool]) or ""),
        shows_calls=_MARK in as_object or _MARK in as_string,
        # Two blanks: a template that parses and prints again would leave one.
        parses_arguments='{"k":  1}' not in as_string,
    )


def _is_empty(message: Message) -> bool:
    """Whether a turn neither says, thinks nor calls anything."""
    texts = (message.get(name) for name in _TEXT_KEYS)
    return not message.get("tool_calls") and not any(isinstance(text, str) and text.strip() for text in texts)


def _names(tokenizer: Tokenizer, role: str) -> bool:
    """Whether a template of the tokenizer holds the role as a word ("use" is no word of "user")."""
    word = re.compile(rf"(?<!\w){re.escape(role)}(?!\w)")
    return bool(role) and any(word.search(source) for source in tokenizer.chat_templates.values())


def _is_shortened(message: Message, turn: str) -> bool:
    """Whether a turn lacks the first word of what the row says: some templates leave thinking out."""
    said = (message.get(name) for name in _TEXT_KEYS)
    return any(isinstance(text, str) and text.strip() and text.split()[0] not in turn for text in said)


def _try_render(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> str | None:
    try:
        return tokenizer.render(messages, **kwargs)
    except ValueError:
        return None


def _parsed_calls(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        raise ValueError(f"a tool call must be an object, not {call!r}")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _parsed_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "arguments": json.loads(arguments)}
    except ValueError as error:
        raise ValueError(f"the arguments of a tool call are not valid JSON ({error}): {arguments[:60]!r}") from error


class _Conversation:
    """One conversation, its text, and where its turns are."""

    def __init__(
        self, tokenizer: Tokenizer, traits: _Traits, messages: Sequence[Message], tools: list[Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        self._traits = traits
        self._messages = messages
        self._tools = tools
        self.text = tokenizer.render(messages, tools=tools)

    def turn(self, index: int) -> Span:
        """The characters of an assistant turn and its end token.

        Raises:
            ValueError: they cannot be told.
        """
        start = self._start(index)
        end = None if start is None else self._end(index, start)
        if start is None or end is None or end <= start:
            raise ValueError(
                f"message {index} cannot be found in what the chat template renders, so its tokens cannot be trained; "
                "name another template with data.chat_template"
            )
        content = self._messages[index].get("content")
        # Only its last word: thinking in front of it may be left out on purpose.
        words = content.split() if isinstance(content, str) else []
        if words and words[-1] in self.text and words[-1] not in self.text[start:end]:
            raise ValueError(f"the chat template renders message {index} away from its turn; it cannot be trained")
        return start, end

    def _start(self, index: int) -> int | None:
        prompt = self._render(index, add_generation_prompt=True)
        if prompt and self.text.startswith(prompt):
            if self._traits.adds_prompt:
                return len(prompt)
            # The template cannot open a turn: the header, if there is one, is seen with the turn itself only.
            before = self._around(index, len(self._messages))
            if before and self.text.startswith(before[0]) and before[0][len(prompt) :].strip():
                return len(before[0])
            return len(prompt)
        return self._start_by_mark(index)

    def _start_by_mark(self, index: int) -> int | None:
        """A marker in the message before shows where that one ends in the whole, and what opens the turn."""
        if index > 0:
            whole = self._around(index - 1, len(self._messages))
            prompt = self._around(index - 1, index, add_generation_prompt=True)
            if whole and prompt and self.text.endswith(whole[1]) and whole[1].startswith(prompt[1]):
                return len(self.text) - len(whole[1]) + len(prompt[1])
        own = self._around(index, len(self._messages))
        return len(own[0]) if own and self.text.startswith(own[0]) else None

    def _end(self, index: int, start: int) -> int | None:
        upto = self.text if index + 1 == len(self._messages) else self._render(index + 1)
        if upto and len(upto) > start and self.text.startswith(upto):
            return start + len(self._without_blanks(upto[start:]))
        whole = self._around(index, len(self._messages))
        if whole is None or not self.text.endswith(whole[1]):
            return None
        alone = self._around(index, index + 1)
        after = len(self.text) - len(whole[1])
        if alone and whole[1].startswith(alone[1]):
            return after + len(self._without_blanks(alone[1]))
        return next((after + len(end) for end in self._tokenizer.end_tokens if whole[1].startswith(end)), None)

    def _without_blanks(self, piece: str) -> str:
        stripped = piece.rstrip()
        return stripped if stripped.endswith(self._tokenizer.end_tokens) else piece

    def _render(self, count: int, **kwargs: Any) -> str | None:
        return _try_render(self._tokenizer, self._messages[:count], tools=self._tools, **kwargs)

    def _around(self, index: int, count: int, **kwargs: Any) -> tuple[str, str] | None:
        """The text before and after a marker that stands for message `index` of the first `count`."""
        message = self._messages[index]
        if message["role"] == "assistant":
            marked = {"role": "assistant", "content": _MARK}
        else:
            marked = {**message, "content": _MARK}
        messages = [*self._messages[:index], marked, *self._messages[index + 1 : count]]
        text = _try_render(self._tokenizer, messages, tools=self._tools, **kwargs)
        if text is None or text.count(_MARK) != 1:
            return None
        before, _, after = text.partition(_MARK)
        return before, after
