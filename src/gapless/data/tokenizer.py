"""The tokenizer of a Hugging Face model folder and its chat template.

Reads `tokenizer.json` with the `tokenizers` library and the special tokens, end tokens and chat template from the files
beside it. Templates run in Jinja's immutable sandbox with the settings that Hugging Face documents for chat templates
(https://huggingface.co/docs/transformers/chat_templating_writing); nothing from the folder is executed.

Slow (SentencePiece or Python-only) tokenizers without a `tokenizer.json` are refused.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_GENERATION_CONFIG = "generation_config.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a template may raise for a conversation it was not written for, besides Jinja's own errors.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class Tokenizer:
    """Text and conversations to token ids and back.

    Attributes:
        path: the folder.
        eos_id: the token that ends a text, None if the folder names none.
        eos_ids: every token that ends an answer: of generation_config.json, tokenizer_config.json, and the one with
            which the chat template closes an assistant turn.
        bos_id: None if the folder names none.
        chat_templates: template sources by name; "default" is the usual one, "tool_use" is taken when there are tools.
    """

    def __init__(
        self,
        path: Path,
        fast: FastTokenizer,
        chat_templates: dict[str, str],
        override: Path | None,
        generation_config: Path,
    ) -> None:
        self.path = path
        self.generation_config = generation_config
        self.chat_templates = chat_templates
        self._fast = fast
        self._override = override
        self._special = _special_tokens(path)
        self._environment = _environment()
        # One clock for the whole run, so that a date in the template is the same in every rendering.
        now = datetime.datetime.now()
        self._globals = {"raise_exception": _raise_exception, "strftime_now": now.strftime}
        self._compiled = {name: self._compile(name, source) for name, source in chat_templates.items()}

    @classmethod
    def from_folder(
        cls, path: str | Path, chat_template: str | Path | None = None, *, base: str | Path | None = None
    ) -> Tokenizer:
        """Read a model folder.

        Args:
            path: folder with tokenizer.json.
            chat_template: file with a Jinja template to use instead of the folder's own.
            base: the model's folder, if `path` is that of an adapter: its generation_config.json counts where `path`
                has none.

        Raises:
            ValueError: tokenizer.json or the template is missing or cannot be read.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file} is missing; save a fast tokenizer there with transformers: "
                f'AutoTokenizer.from_pretrained(...).save_pretrained("{path}")'
            )
        try:
            fast = FastTokenizer.from_buffer(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error
        # Left in the file by whoever saved it; either would change what is trained.
        fast.no_truncation()
        fast.no_padding()
        generation_config = path / _GENERATION_CONFIG
        if base is not None and not generation_config.is_file():
            generation_config = Path(base) / _GENERATION_CONFIG
        if chat_template is None:
            return cls(path, fast, _folder_templates(path), None, generation_config)
        override = Path(chat_template)
        if not override.is_file():
            raise ValueError(f"chat_template {override} does not exist")
        return cls(path, fast, {"default": _read_text(override)}, override, generation_config)

    # ---- text ----

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; with `add_special_tokens` also what the tokenizer puts around plain text (often BOS)."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows another one.

        SentencePiece tokenizers put a space before the first word of what they encode; here it must not appear.
        """
        line_end = self.encode("\n")
        after_line = self.encode("\n" + text)
        # Where the line end becomes one token with the text's beginning, it cannot be taken off again.
        return after_line[len(line_end) :] if after_line[: len(line_end)] == line_end else self.encode(text)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Encoding]:
        """Encodings (ids and character offsets) of many texts, on all cores."""
        return self._fast.encode_batch(list(texts), add_special_tokens=add_special_tokens)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before plain text (often BOS)."""
        ids = self.encode("", add_special_tokens=True)
        return tuple(ids[:-1] if ids and ids[-1] == self.eos_id and self.eos_id != self.bos_id else ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id."""
        return self._fast.id_to_token(token_id)

    # ---- special tokens ----

    @cached_property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._special_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        """The token that ends a text."""
        named = self._special_id("eos_token")
        return named if named is not None else next(iter(_generation_eos(self.generation_config)), None)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, the one of `eos_id` first."""
        found = [self.eos_id, *_generation_eos(self.generation_config), self._turn_end]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    @property
    def unlisted_end(self) -> str | None:
        """The token that closes a turn of the chat template, if other tools will not stop there: no file lists it."""
        listed = _generation_eos(self.generation_config)
        return None if self._turn_end is None or self._turn_end in listed else self.token(self._turn_end)

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The texts of special tokens and of `eos_ids`, longest first: what may close a turn."""
        added = self._fast.get_added_tokens_decoder()
        ends = {token.content for index, token in added.items() if token.special or index in self.eos_ids}
        return tuple(sorted(ends, key=len, reverse=True))

    @cached_property
    def _turn_end(self) -> int | None:
        """The special token right after the content of an assistant turn; a base model may not list it as its end."""
        if "default" not in self._compiled:
            return None
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ue000"}]
        try:
            after = self.render(probe).partition("\ue000")[2]
        except ValueError:
            return None
        for index, token in self._fast.get_added_tokens_decoder().items():
            if token.special and after.lstrip().startswith(token.content):
                return index
        return None

    def _special_id(self, name: str) -> int | None:
        text = self._special.get(name)
        if text is None:
            return None
        index = self._fast.token_to_id(text)
        if index is None:
            raise ValueError(f"{self.path}: {name} is {text!r}, which tokenizer.json does not have")
        return index

    # ---- conversations ----

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: {role, content, ...} in the form the template expects.
            tools: JSON schemas of tools, as the template expects them.
            add_generation_prompt: end with the header of an assistant turn.
            **template_kwargs: further variables of the template (for instance enable_thinking).

        Raises:
            ValueError: the folder has no template, or the template refuses the conversation.
        """
        if not self._compiled:
            raise ValueError(
                f"{self.path} has no chat template; name a Jinja file with data.chat_template, or generate with --raw"
            )
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise ValueError(f"{self.path} has the chat templates {list(self._compiled)} but none named default")
        try:
            return self._compiled[name].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **template_kwargs},
            )
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template {self._place(name)} refuses the conversation: {error}") from error

    def chat_ids(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids that ask the model for an answer: `render` with the generation prompt, encoded."""
        prompt = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return self.encode(prompt)

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source, globals=dict(self._globals))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template {self._place(name)}, line {error.lineno}, is not Jinja: {error.message}"
            ) from error

    def _place(self, name: str) -> str:
        if self._override:
            return str(self._override)
        return f"{name!r} of {self.path}" if len(self.chat_templates) > 1 else f"of {self.path}"

    # ---- files ----

    @property
    def files(self) -> list[Path]:
        """The tokenizer's files and generation_config.json, to be copied byte for byte on export."""
        extra = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        named = [self.path / name for name in _TOKENIZER_FILES]
        return [path for path in (*named, self.generation_config) if path.is_file()] + extra

    def save(self, folder: str | Path) -> list[Path]:
        """Copy `files` into a folder; a chat template named by the user is written in place of the folder's own.

        Returns:
            The files written.
        """
        folder = Path(folder)
        written = []
        for source in self.files:
            own = source != self.generation_config  # that may be the base model's
            target = folder / (source.relative_to(self.path) if own else source.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (self._override and source.suffix == ".jinja"):
                shutil.copyfile(source, target)
                written.append(target)
        if self._override:
            target = folder / "chat_template.jinja"
            target.write_bytes(self.chat_templates["default"].encode())
            written.append(target)
        return written


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(path: Path) -> dict[str, str]:
    """Special tokens by name, those of tokenizer_config.json before those of special_tokens_map.json."""
    merged = _read_json(path / "special_tokens_map.json") | {
        name: token for name, token in _read_json(path / "tokenizer_config.json").items() if token is not None
    }
    found = {}
    for name in _SPECIAL_NAMES:
        token = merged.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _generation_eos(file: Path) -> list[int]:
    if not file.is_file():
        file = file.with_name("config.json")  # as transformers does
    value = _read_json(file).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
    return ids


def _folder_templates(path: Path) -> dict[str, str]:
    """Templates by name: chat_template.jinja and additional_chat_templates/, else those of tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        extra = {
            other.stem: _read_text(other) for other in sorted((path / "additional_chat_templates").glob("*.jinja"))
        }
        return {"default": _read_text(file), **extra}
    template = _read_json(path / "tokenizer_config.json").get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    entries = template if isinstance(template, list) else [template]
    if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in entries):
        raise ValueError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a template or a list of {{name, template}}; "
            "name a Jinja file with data.chat_template"
        )
    return {entry["name"]: entry["template"] for entry in entries}


# ---- the sandbox ----


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}, which some templates put around what the model says: only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment
