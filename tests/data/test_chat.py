import re

import numpy as np
import pytest
from conversations import ANSWER, ASK, ASK_AGAIN, CALL, CONVERSATIONS, REASONED, RESULT, SYSTEM, THOUGHT, TOOLS
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gapless.data.chat import RowEncoder
from gapless.data.tokenizer import Tokenizer
from tiny_tokenizer import write_tiny_tokenizer

TEMPLATES = ["chatml", "qwen25", "qwen3", "llama3", "mistral"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for template in TEMPLATES:
        write_tiny_tokenizer(root / template, template)
    return {template: Tokenizer.from_folder(root / template) for template in TEMPLATES}


def encode(tokenizer, row, **options):
    encoder = RowEncoder(tokenizer, **options)
    prepared = encoder.prepare(row)
    return encoder.finish(prepared, tokenizer.encode_batch([prepared.text])[0])


def trained_runs(tokenizer, document):
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], document.trained, [0]])))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(document.tokens[start:end], skip_special=False) for start, end in runs]


def with_template(tmp_path, source, base="chatml"):
    write_tiny_tokenizer(tmp_path, base)
    (tmp_path / "chat_template.jinja").write_text(source)
    return Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("asistant", "did you mean 'assistant'"),
        ("use", "did you mean 'user'"),
        ("Assistant", "did you mean 'assistant'"),
    ]
    + [("bot", "correct it"), ("", "correct it"), ("assistan", "did you mean 'assistant'")],
)
@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_a_mistyped_role_is_refused(tokenizers, template, role, hint):
    for row in (
        {"messages": [ASK, {**ANSWER, "role": role}]},
        {"prompt": [ASK], "completion": [{**ANSWER, "role": role}]},
    ):
        with pytest.raises(ValueError, match=f"message 1 has the role '{role}', .* does not name; {hint}"):
            encode(tokenizers[template], row)


def test_a_role_that_the_template_names_is_accepted(tmp_path):
    source = (
        "{% for m in messages %}{{ ('C: ' if m['role'] == 'critic' else m['role'] + ': ') + m['content'] }}"
        "<|im_end|>{% endfor %}"
    )
    tokenizer = with_template(tmp_path, source)
    critic = {"role": "critic", "content": "No."}
    document = encode(tokenizer, {"messages": [ASK, critic, ANSWER]})
    assert "C: No.<|im_end|>" in tokenizer.decode(document.tokens, skip_special=False)
    with pytest.raises(ValueError, match="'critics'"):
        encode(tokenizer, {"messages": [{**critic, "role": "critics"}, ANSWER]})
    for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython"):
        encode(tokenizer, {"messages": [{"role": role, "content": "x"}, ASK, ANSWER]})


# What a reader of the rendered text would mark by hand.
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø"}}\n</tool_call>'
EXPECTED = {
    ("chatml", "one turn"): ["Hello! <|im_end|>"],
    ("chatml", "two turns"): ["Hello! <|im_end|>", "<think>\nLet me see.\n</think>\n\nIt rains.<|im_end|>"],
    ("chatml", "answers in a row"): ["Hello! <|im_end|>", "Hello! <|im_end|>"],
    # A turn of calls only has no line end after its header, so the one of the generation prompt is no prefix of it.
    ("qwen25", "system"): ["Hello! <|im_end|>"],
    ("qwen25", "call"): [CALLED + "<|im_end|>", "Hello! <|im_end|>"],
    ("qwen3", "one turn"): ["<think>\n\n</think>\n\nHello! <|im_end|>"],
    ("qwen3", "two turns"): ["Hello! <|im_end|>", "<think>\nLet me see.\n</think>\n\nIt rains.<|im_end|>"],
    ("qwen3", "thinking earlier"): ["It rains.<|im_end|>", "<think>\n\n</think>\n\nHello! <|im_end|>"],
    ("qwen3", "reasoning"): ["It rains.<|im_end|>", "<think>\nLet me see.\n</think>\n\nIt rains.<|im_end|>"],
    ("qwen3", "call"): [CALLED + "<|im_end|>", "<think>\n\n</think>\n\nHello! <|im_end|>"],
    ("qwen3", "call earlier"): [
        CALLED + "<|im_end|>",
        "It rains.<|im_end|>",
        "<think>\n\n</think>\n\nHello! <|im_end|>",
    ],
    ("llama3", "system"): ["Hello!<|eot_id|>"],
    ("llama3", "answers in a row"): ["Hello!<|eot_id|>", "Hello!<|eot_id|>"],
    ("llama3", "call"): ['{"name": "get_weather", "parameters": {"city": "Tromsø"}}<|eot_id|>', "Hello!<|eot_id|>"],
    ("mistral", "system"): [" Hello!</s>"],
    ("mistral", "thinking earlier"): [" <think>\nLet me see.\n</think>\n\nIt rains.</s>", " Hello!</s>"],
    ("mistral", "call earlier"): [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Tromsø"}}]</s>',
        " <think>\nLet me see.\n</think>\n\nIt rains.</s>",
        " Hello!</s>",
    ],
}


@pytest.mark.parametrize(("template", "name"), list(EXPECTED))
def test_exactly_the_assistant_turns_are_trained(tokenizers, template, name):
    tokenizer, messages = tokenizers[template], CONVERSATIONS[name]
    tools = TOOLS if "call" in name else None
    document = encode(tokenizer, {"messages": messages, "tools": tools})
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tokenizer.path))
    assert document.tokens.tolist() == theirs.apply_chat_template(messages, tools=tools, return_dict=False)
    assert trained_runs(tokenizer, document) == EXPECTED[template, name]


PATTERNS = {
    "chatml": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    "qwen3": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    "llama3": r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    "mistral": r"\[/INST\](.*?</s>)",
}
texts = st.text(st.sampled_from("ab \n.<>{}é你😀"), min_size=1, max_size=12).filter(lambda text: text.strip())


@pytest.mark.parametrize("template", list(PATTERNS))
@given(
    pairs=st.lists(st.tuples(texts, st.sampled_from(["", "<think>\nq\n</think>\n\n"]), texts), min_size=1, max_size=4)
)
def test_masks_of_any_conversation(tokenizers, template, pairs):
    tokenizer = tokenizers[template]
    messages = [{"role": "system", "content": "b a"}]
    for question, thought, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": thought + answer}]
    document = encode(tokenizer, {"messages": messages})
    text = tokenizer.render(messages)
    assert tokenizer.decode(document.tokens, skip_special=False) == text
    wanted = re.findall(PATTERNS[template], text, re.DOTALL)
    assert len(wanted) == len(pairs)
    runs = trained_runs(tokenizer, document)
    # A token may hold the header's last line end and the first of the answer.
    assert [run.lstrip("\n") for run in runs] == [want.lstrip("\n") for want in wanted]
    assert all(len(run) - len(want) in (0, 1) for run, want in zip(runs, wanted, strict=True))


def test_characters_of_several_tokens_are_trained_whole(tokenizers):
    for template in TEMPLATES:
        row = {"messages": [{"role": "user", "content": "😀"}, {"role": "assistant", "content": "😀你"}]}
        document = encode(tokenizers[template], row)
        assert "😀你" in trained_runs(tokenizers[template], document)[0]


def test_tool_call_arguments_as_strings(tokenizers):
    call = CALL["tool_calls"][0]
    as_string = {**call, "function": {**call["function"], "arguments": '{"city":  "Tromsø"}'}}
    row = {"messages": [ASK, {**CALL, "tool_calls": [as_string]}, RESULT, ANSWER]}
    # Printed as JSON by this template: parsed first. Printed as it is by that one: left alone.
    assert CALLED in trained_runs(tokenizers["qwen25"], encode(tokenizers["qwen25"], row))[0]
    assert '{"city":  "Tromsø"}' in trained_runs(tokenizers["qwen3"], encode(tokenizers["qwen3"], row))[0]
    broken = {**call, "function": {**call["function"], "arguments": "{city"}}
    with pytest.raises(ValueError, match="arguments of a tool call are not valid JSON"):
        encode(tokenizers["qwen25"], {"messages": [ASK, {**CALL, "tool_calls": [broken]}]})


def test_what_a_template_leaves_out_is_refused(tokenizers):
    with pytest.raises(ValueError, match="has tools, which the chat template leaves out"):
        encode(tokenizers["chatml"], {"messages": [ASK, ANSWER], "tools": TOOLS})
    encode(tokenizers["chatml"], {"messages": [ASK, ANSWER], "tools": TOOLS}, columns={"tools": ""})
    with pytest.raises(ValueError, match="has tool calls, which the chat template leaves out"):
        encode(tokenizers["chatml"], {"messages": [ASK, CALL]})


def test_turns_without_training(tokenizers):
    quiet = {**ANSWER, "weight": 0}
    document = encode(tokenizers["qwen25"], {"messages": [ASK, quiet, ASK_AGAIN, ANSWER]})
    assert trained_runs(tokenizers["qwen25"], document) == ["Hello! <|im_end|>"]
    assert not encode(tokenizers["qwen25"], {"messages": [SYSTEM, ASK]}).trained.any()
    everything = encode(tokenizers["qwen25"], {"messages": [ASK, ANSWER]}, train_on="all")
    assert everything.trained.all()
    with pytest.raises(ValueError, match=r"weight 0\.5"):
        encode(tokenizers["qwen25"], {"messages": [ASK, {**ANSWER, "weight": 0.5}]})


def test_prompt_of_messages_is_not_trained(tokenizers):
    row = {"prompt": [ASK, ANSWER, ASK_AGAIN], "completion": [THOUGHT]}
    document = encode(tokenizers["qwen3"], row)
    assert trained_runs(tokenizers["qwen3"], document) == [EXPECTED["qwen3", "two turns"][1]]
    mixed = encode(tokenizers["qwen3"], {"prompt": [ASK, ANSWER, ASK_AGAIN], "completion": THOUGHT["content"]})
    assert mixed.tokens.tolist() == document.tokens.tolist()
    assert mixed.trained.tolist() == document.trained.tolist()


def test_text_rows(tokenizers):
    for template, bos in (("chatml", []), ("llama3", ["<|begin_of_text|>"])):
        tokenizer = tokenizers[template]
        document = encode(tokenizer, {"text": "The dog"})
        want = [*tokenizer.prefix_ids, *tokenizer.encode("The dog"), tokenizer.eos_id]
        assert document.tokens.tolist() == want
        assert len(tokenizer.prefix_ids) == len(bos)
        assert document.trained.all()
    # Rendered beforehand: neither begin nor end token twice.
    ready = "<|begin_of_text|>The dog<|eot_id|>"
    assert encode(tokenizers["llama3"], {"text": ready}).tokens.tolist() == tokenizers["llama3"].encode(ready)


words = st.lists(st.sampled_from(["the", " dog", "qu", "i", " ", "\n", "1", "é", "😀"]), max_size=6).map("".join)


@given(prompt=words, completion=words)
def test_prompt_tokens_are_the_same_as_alone(tokenizers, prompt, completion):
    assume(prompt or completion)
    for template in ("chatml", "llama3"):
        tokenizer = tokenizers[template]
        document = encode(tokenizer, {"prompt": prompt, "completion": completion})
        alone = tokenizer.encode(prompt, add_special_tokens=True)
        assert document.tokens[: len(alone)].tolist() == alone
        assert not document.trained[: len(alone)].any()
        assert document.trained[len(alone) :].all()
        assert document.tokens[-1] == tokenizer.eos_id
        assert tokenizer.decode(document.tokens) == prompt + completion


def sentencepiece(folder, *, as_normalizer):
    """A tokenizer that puts a space before the first word, as Llama 2's does, in its older and its newer spelling."""
    write_tiny_tokenizer(folder)
    words = ["▁", "a", "b", "c", "\n", "ab", "▁a", "▁b", "bc"]
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<|im_end|>", *words])}
    merges = [("a", "b"), ("▁", "a"), ("▁", "b"), ("b", "c")]
    tokenizer = HuggingFaceTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if as_normalizer:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace("▁")
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("as_normalizer", [True, False])
def test_no_space_slips_between_prompt_and_completion(tmp_path, as_normalizer):
    tokenizer = sentencepiece(tmp_path, as_normalizer=as_normalizer)
    # The whole is ▁c ab, which does not begin with the prompt's ▁c a.
    document = encode(tokenizer, {"prompt": "ca", "completion": "bc"})
    assert [tokenizer.token(token) for token in document.tokens] == ["▁", "c", "a", "bc", "<|im_end|>"]
    assert document.trained.tolist() == [False, False, False, True, True]
    document = encode(tokenizer, {"prompt": "c ", "completion": "a"})
    assert [tokenizer.token(token) for token in document.tokens] == ["▁", "c", "▁", "a", "<|im_end|>"]


@pytest.mark.parametrize("as_normalizer", [True, False])
def test_masks_of_a_sentencepiece_tokenizer(tmp_path, as_normalizer):
    """The space it puts in front shifts no characters."""
    sentencepiece(tmp_path, as_normalizer=as_normalizer)
    source = "{% for m in messages %}{{ m.content + ' c' }}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_folder(tmp_path)
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abca", strict=True)]
    document = encode(tokenizer, {"messages": messages})
    trained = [tokenizer.token(token) for token in document.tokens[document.trained]]
    assert trained == ["b", "▁", "c", "<|im_end|>", "a", "▁", "c", "<|im_end|>"]


# ---- templates of other people ----


def test_a_template_without_generation_prompt(tmp_path):
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    tokenizer = with_template(tmp_path, source)
    document = encode(tokenizer, {"messages": [ASK, ANSWER, ASK_AGAIN, ANSWER]})
    assert trained_runs(tokenizer, document) == ["Hello! <|im_end|>"] * 2


def test_a_generation_prompt_that_opens_the_thinking(tmp_path):
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = with_template(tmp_path, source)
    document = encode(tokenizer, {"messages": [ASK, THOUGHT, ASK_AGAIN, ANSWER]})
    assert [run.strip() for run in trained_runs(tokenizer, document)] == ["It rains.<|im_end|>", "Hello! <|im_end|>"]


def test_a_last_turn_with_another_end_token(tmp_path):
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = with_template(tmp_path, source)
    document = encode(tokenizer, {"messages": [ASK, ANSWER, ASK_AGAIN, ANSWER]})
    assert trained_runs(tokenizer, document) == ["Hello! <|im_end|>", "Hello! <|endoftext|>"]


def test_a_conversation_that_begins_with_an_answer(tokenizers):
    for template in ("chatml", "llama3", "qwen25"):
        document = encode(tokenizers[template], {"messages": [ANSWER, ASK, ANSWER]})
        runs = trained_runs(tokenizers[template], document)
        assert [run.replace(" ", "")[:6] for run in runs] == ["Hello!"] * 2


def test_turns_that_cannot_be_told_are_refused(tmp_path):
    # All that the assistant says is shown at the end, in one piece.
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ messages | tojson | upper }}"
    tokenizer = with_template(tmp_path, source)
    with pytest.raises(ValueError, match=r"message 1 cannot be found .* name another template"):
        encode(tokenizer, {"messages": [ASK, ANSWER, ASK_AGAIN, ANSWER]})


def test_answers_without_their_thinking_are_counted(tokenizers):
    for template, messages, count in (
        ("qwen3", [ASK, THOUGHT], 0),
        ("qwen3", [ASK, REASONED], 0),
        ("qwen3", [ASK, THOUGHT, ASK_AGAIN, REASONED], 1),
        ("qwen3", [ASK, {**ANSWER, "thinking": "Hm."}, ASK_AGAIN, {**THOUGHT, "weight": 0}], 1),
        ("chatml", [ASK, THOUGHT, ASK_AGAIN, ANSWER], 0),
        ("chatml", [ASK, REASONED], 1),
    ):
        encoder = RowEncoder(tokenizers[template])
        encoder.prepare({"messages": messages})
        assert encoder.shortened_turns == count


def test_answers_without_an_end_token_are_counted(tmp_path):
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer = with_template(tmp_path, source)
    encoder = RowEncoder(tokenizer)
    encoder.prepare({"messages": [ASK, ANSWER, ASK_AGAIN, REASONED]})
    assert encoder.unended_turns == 2
