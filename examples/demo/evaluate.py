"""What a person cares about: how many held-out notes come out right, and whether the difference is luck."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from task import KEYS

import gapless

MAX_NEW_TOKENS = 80
"""The longest right answer has 64."""


@dataclass(frozen=True)
class Score:
    """How a model did on rows, in their order."""

    answers: list[str]
    exact: list[bool]
    """The answer is JSON and equals the record."""
    valid: list[bool]
    """The answer is JSON."""
    fields: dict[str, float]
    """Share of rows whose answer has this field right."""


def measure(model_path: str, rows: Sequence[dict], dtype: str) -> Score:
    """Answer every row greedily and compare.

    Args:
        model_path: a model folder, or what `gapless.load_model` takes.
        rows: conversations of a system message, a note and the wanted JSON.
        dtype: bf16 or fp32.
    """
    model, tokenizer = gapless.load_model(model_path, dtype=dtype)
    prompts = [tokenizer.chat_ids(row["messages"][:-1]) for row in rows]
    completions = gapless.generate(model, tokenizer, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=len(rows))
    return score([completion.text for completion in completions], rows)


def score(answers: Sequence[str], rows: Sequence[dict]) -> Score:
    """Compare answers with the last message of each row."""
    got = [parse(answer) for answer in answers]
    wanted = [json.loads(row["messages"][-1]["content"]) for row in rows]
    pairs = list(zip(got, wanted, strict=True))
    return Score(
        answers=list(answers),
        exact=[record == want for record, want in pairs],
        valid=[record is not None for record in got],
        fields={key: sum(has(record, key, want[key]) for record, want in pairs) / len(rows) for key in KEYS},
    )


def parse(answer: str) -> dict | None:
    """The JSON object in an answer, whatever words or code fences stand around it; None if there is none."""
    try:
        return json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    except ValueError:
        return None


def has(record: dict | None, key: str, value: object) -> bool:
    """Whether a record has the field; one that lacks it does not have it as null."""
    return record is not None and key in record and record[key] == value


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Two-sided exact McNemar test: how likely is a change so lopsided if it were a coin's.

    Only rows that changed count; under the null hypothesis each changes either way with probability 1/2
    (McNemar, Psychometrika 12, 1947; exact binomial form).
    """
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    return min(1.0, 2 * tail)
