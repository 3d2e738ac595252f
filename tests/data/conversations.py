"""Conversations and tools that the tests of templates and masks share."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather in a city, in <°C> & "words"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Hi there, 你好 😀"}
ANSWER = {"role": "assistant", "content": "Hello! "}
ASK_AGAIN = {"role": "user", "content": "And the weather <in> Oslo?"}
THOUGHT = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nIt rains."}
REASONED = {"role": "assistant", "content": "It rains.", "reasoning_content": "Let me see."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Tromsø"}}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"rain": true}'}

CONVERSATIONS = {
    "one turn": [ASK, ANSWER],
    "system": [SYSTEM, ASK, ANSWER],
    "two turns": [ASK, ANSWER, ASK_AGAIN, THOUGHT],
    "thinking earlier": [SYSTEM, ASK, THOUGHT, ASK_AGAIN, ANSWER],
    "reasoning": [ASK, REASONED, ASK_AGAIN, REASONED],
    "answers in a row": [ASK, ANSWER, ANSWER],
    "call": [ASK_AGAIN, CALL, RESULT, ANSWER],
    "call earlier": [SYSTEM, ASK_AGAIN, CALL, RESULT, THOUGHT, ASK, ANSWER],
}
