import json

import pytest

from gapless.data.formats import ChatRow, PromptRow, RowReader, TextRow

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"name": "f", "parameters": {}}


def read(row, format="auto", **columns):
    return RowReader(format, columns).read(row)


def test_formats_by_their_columns():
    assert read({"text": "x", "id": 3}) == TextRow("x")
    assert read({"prompt": "x", "completion": "y"}) == PromptRow("x", "y")
    assert read({"messages": [USER, ASSISTANT]}) == ChatRow([USER, ASSISTANT], [False, True])
    assert read({"prompt": [USER], "completion": [ASSISTANT]}) == ChatRow([USER, ASSISTANT], [False, True])
    history = read({"prompt": [USER, ASSISTANT, USER], "completion": "a"})
    assert history == ChatRow([USER, ASSISTANT, USER, ASSISTANT], [False, False, False, True])


def test_own_column_names():
    assert read({"question": "x", "answer": "y"}, prompt="question", completion="answer") == PromptRow("x", "y")
    assert read({"text": "x", "messages": []}, format="text") == TextRow("x")
    row = {"messages": [USER], "tools": [TOOL]}
    assert read(row).tools == [TOOL]
    assert read(row, tools="").tools is None
    assert read({"messages": [USER], "functions": json.dumps([TOOL])}, tools="functions").tools == [TOOL]


def test_each_row_has_its_own_format():
    reader = RowReader("auto", {"prompt": "question"})
    chat = {"messages": [USER, ASSISTANT]}
    rows = [chat, {"instruction": "q", "output": "a"}, {"text": "x"}, {"question": "q", "completion": "a"}, chat]
    same = ChatRow([USER, ASSISTANT], [False, True])
    assert [reader.read(row) for row in rows] == [same, same, TextRow("x"), PromptRow("q", "a"), same]
    with pytest.raises(ValueError, match="the columns 'prompt', 'completion' are no known format"):
        reader.read({"prompt": "q", "completion": "a"})
    with pytest.raises(ValueError, match="fit the formats messages and text"):
        reader.read({**chat, "text": "x"})


def test_sharegpt():
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "s",
        "tools": json.dumps([TOOL]),
    }
    chat = read(row)
    assert isinstance(chat, ChatRow)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.learned == [False, False, True, False, True]
    assert chat.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert chat.tools == [{"type": "function", "function": TOOL}]
    for role in ("gpt", "chatgpt", "bing", "bard", "model", "assistant"):
        assert read({"conversations": [{"from": role, "value": "a"}]}) == ChatRow([ASSISTANT], [True])
    assert read({"conversations": [USER, ASSISTANT]}) == ChatRow([USER, ASSISTANT], [False, True])


def test_alpaca():
    row = {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["h", "g"]]}
    chat = read(row)
    assert isinstance(chat, ChatRow)
    assert [message["content"] for message in chat.messages] == ["s", "h", "g", "i\n\nx", "o"]
    assert chat.learned == [False, False, True, False, True]
    assert read({"instruction": "i", "input": "", "output": "o"}).messages[0]["content"] == "i"
    assert read({"instruction": "", "input": "x", "output": "o"}).messages[0]["content"] == "x"


def test_typed_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages == [{"role": "user", "content": "ab"}]
    call = {"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}
    answer = read(
        {"messages": [{"role": "assistant", "content": [{"type": "reasoning", "value": "r"}, call]}]}
    ).messages[0]
    assert (answer["reasoning_content"], answer["content"]) == ("r", "")
    assert answer["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_keys_of_a_message_are_kept_and_nulls_of_parquet_are_not():
    message = {"role": "assistant", "content": None, "tool_calls": [TOOL], "reasoning_content": "r", "name": None}
    want = {"role": "assistant", "content": None, "tool_calls": [TOOL], "reasoning_content": "r"}
    assert read({"messages": [message]}).messages == [want]


BAD = {
    "unknown columns": ({"foo": 1}, {}, "the columns 'foo' are no known format"),
    "two formats": ({"text": "x", "messages": []}, {}, "fit the formats messages and text; set data.format"),
    "missing": ({"prompt": "x"}, {"format": "prompt_completion"}, "no column 'completion' .*set data.format or"),
    "unknown canonical": ({"text": "x"}, {"question": "q"}, r"columns names \['question'\], which no format has"),
    "null text": ({"text": None}, {}, "text must be a string, not null"),
    "number": ({"prompt": "x", "completion": 3}, {}, "completion must be a list of messages, not int"),
    "messages": ({"messages": "hi"}, {}, "messages must be a list of messages, not str"),
    "message": ({"messages": ["hi"]}, {}, r"messages\[0\] must be an object"),
    "role": ({"messages": [{"from": "human", "value": "x"}]}, {}, r"messages\[0\] has no role; it looks like ShareGPT"),
    "content": ({"messages": [{"role": "user"}]}, {}, r"messages\[0\].content is missing"),
    "content type": ({"messages": [{"role": "user", "content": 3}]}, {}, "content must be a string or a list of parts"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "of type 'image'; only text"),
    "sharegpt role": ({"conversations": [{"from": "bot", "value": "x"}]}, {}, "unknown role 'bot'"),
    "sharegpt value": ({"conversations": [{"from": "gpt", "value": None}]}, {}, "must be a string, not null"),
    "function call": ({"conversations": [{"from": "function_call", "value": "{"}]}, {}, "is not valid JSON"),
    "call shape": ({"conversations": [{"from": "function_call", "value": "{}"}]}, {}, "with name and arguments"),
    "tools": ({"messages": [USER], "tools": "{"}, {}, "tools is not valid JSON"),
    "tools type": ({"messages": [USER], "tools": {"name": "f"}}, {}, "tools must be a list"),
    "history": ({"instruction": "i", "output": "o", "history": ["x"]}, {}, "history must be a list of"),
    "history of no list": ({"instruction": "i", "output": "o", "history": 5}, {}, "history must be a list of"),
    "input": ({"instruction": "", "input": 3, "output": "o"}, {}, "input must be a string, not int"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_rows_get_one_clear_line(case):
    row, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        read(row, **options)
