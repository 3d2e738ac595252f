"""samples.md: the same questions, answered by the model as it learns."""

from __future__ import annotations

from pathlib import Path

from gapless.config import LoggingConfig
from gapless.data.tokenizer import Tokenizer
from gapless.inference.generate import generate
from gapless.models.decoder import Decoder
from gapless.training import files


def write_samples(path: Path | None, model: Decoder, tokenizer: Tokenizer, config: LoggingConfig, step: int) -> None:
    """Append greedy answers to the sample prompts.

    Answers of this step and later ones, which a run that was killed has left, are replaced. Without a path the answers
    are only computed, for the ranks that hold the rest of the model.

    Raises:
        ValueError: the file cannot be written.
    """
    conversations = [[{"role": "user", "content": prompt}] for prompt in config.sample_prompts]
    prompts = [tokenizer.chat_ids(messages, add_generation_prompt=True) for messages in conversations]
    answers = generate(model, tokenizer, prompts, max_new_tokens=config.sample_tokens)
    if path is None:
        return
    section = [f"## Step {step}\n"]
    for prompt, answer in zip(config.sample_prompts, answers, strict=True):
        section.append(f"**{' '.join(prompt.split())}**\n\n{_quote(answer.text)}\n")
    with files.writing(path):
        files.write_text(path, "\n".join([*_earlier(path, step), *section]) + "\n")


def _earlier(path: Path, step: int) -> list[str]:
    """The file's lines before the section of `step` or a later one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for index, line in enumerate(lines):
        number = line.removeprefix("## Step ")
        if number != line and number.isdecimal() and int(number) >= step:
            return lines[:index]
    return lines


def _quote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])
