"""Rows of every format that training reads as prompts, and their answers as lines."""

import io
import json

import pytest

from gapless.inference.generate import Completion
from gapless.inference.rows import AnswerWriter, Prompt, read_prompts

USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "4"}


def said(text):
    return {"role": "assistant", "content": text}


# the row, what is asked, what it is to be compared with
ROWS = [
    ({"messages": [USER, said("a"), USER, said("b"), said("c")]}, [USER, said("a"), USER], "b\n\nc"),
    ({"messages": [USER], "prompt": "other"}, [USER], None),
    ({"messages": None, "prompt": "Hi"}, "Hi", None),
    ({"prompt": "Hi", "completion": "a"}, "Hi", "a"),
    ({"prompt": "Hi", "completion": None}, "Hi", None),
    ({"prompt": [USER], "completion": [said("a")]}, [USER], [said("a")]),
    ({"prompt": [USER], "completion": [CALL, RESULT, said("4")]}, [USER], [CALL, RESULT, said("4")]),
    ({"instruction": "Hi", "input": "there", "output": "a"}, [{"role": "user", "content": "Hi\n\nthere"}], "a"),
    ({"instruction": "Hi"}, [USER], None),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "a"}]}, [USER], "a"),
    ({"conversations": [{"from": "human", "value": "Hi"}]}, [USER], None),
    ({"text": "Hi"}, "Hi", None),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_all_formats(tmp_path):
    prompts = read_prompts(write(tmp_path / "rows.jsonl", [row for row, _, _ in ROWS]), format="auto", columns={})
    for prompt, (row, content, reference) in zip(prompts, ROWS, strict=True):
        assert (prompt.content, prompt.reference, prompt.row) == (content, reference, row)
    assert prompts[2].where == "rows.jsonl:3"


def test_own_columns_and_tools(tmp_path):
    columns = {"prompt": "q", "completion": "a"}
    rows = [{"q": "Hi", "a": "yes", "text": 3, "tools": json.dumps(TOOLS)}, {"q": "Hi", "tools": None}]
    first, second = read_prompts(write(tmp_path / "rows.jsonl", rows), format="prompt_completion", columns=columns)
    assert (first.content, first.tools, first.reference) == ([USER], TOOLS, "yes")
    assert (second.content, second.tools, second.reference) == ("Hi", None, None)


@pytest.mark.parametrize(
    ("row", "format", "columns", "message"),
    [
        (
            {"prompt": "a", "instruction": "b"},
            "auto",
            {},
            "rows.jsonl:1: the columns .* fit the formats .*; set --format",
        ),
        ({"q": "a"}, "auto", {}, "rows.jsonl:1: the row has no `messages`.*it has 'q'.*--columns"),
        ({"q": "a"}, "alpaca", {}, "rows.jsonl:1: no column 'instruction' .* set --format or --columns"),
        ({"q": "a"}, "auto", {"promt": "q"}, r"^columns names \['promt'\]"),
        ({"messages": [{"from": "human", "value": "a"}]}, "auto", {}, r"rows.jsonl:1: messages\[0\] has no role"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, format, columns, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path / "rows.jsonl", [row]), format=format, columns=columns)


def answer(text):
    return Completion([1], text, "stop")


def test_answers_wait_for_those_before_them():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    writer = AnswerWriter([Prompt("a", row={"id": index}) for index in range(3)], stream)
    for index, lines in ((1, 0), (0, 2), (2, 3)):
        writer(index, answer(f"é{index}"))
        assert stream.buffer.getvalue().decode().count("\n") == lines
    rows = [json.loads(line) for line in stream.buffer.getvalue().splitlines()]
    assert [(row["id"], row["completion"]) for row in rows] == [(0, "é0"), (1, "é1"), (2, "é2")]


def test_the_rows_own_answer_is_kept_as_reference():
    for row, reference, kept in (
        ({"output": "a"}, "a", {"output": "a", "reference": "a"}),
        ({"completion": "a"}, "a", {"reference": "a"}),
        ({"messages": [], "reference": "mine"}, "b", {"messages": [], "reference": "mine"}),
        ({"text": "t"}, None, {"text": "t"}),
    ):
        answered = Prompt("", row=row, reference=reference).answered(answer("new"))
        assert answered == {**kept, "completion": "new", "finish_reason": "stop"}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_text_is_written(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    row = {"half": "\ud83d", "whole": "😀"}
    AnswerWriter([Prompt("a", row=row)], stream)(0, answer("é"))
    assert json.loads(stream.buffer.getvalue()) == {**row, "completion": "é", "finish_reason": "stop"}
