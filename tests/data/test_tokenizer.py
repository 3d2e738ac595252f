import json

import pytest
from conversations import ASK, CALL, CONVERSATIONS, TOOLS
from transformers import PreTrainedTokenizerFast

from gapless.data.tokenizer import Tokenizer
from tiny_tokenizer import write_tiny_tokenizer

TEMPLATES = ["chatml", "qwen25", "qwen3", "llama3", "mistral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for template in TEMPLATES:
        assert write_tiny_tokenizer(root / template, template) == 384
    return root


def set_template(folder, source):
    (folder / "chat_template.jinja").write_text(source)


def oracle(folder):
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_and_encodes_as_transformers(folders, template):
    ours, theirs = Tokenizer.from_folder(folders / template), oracle(folders / template)
    assert ours.vocab_size == len(theirs) == 384
    for name, messages in CONVERSATIONS.items():
        if template == "chatml" and "call" in name:
            continue
        for tools in (None, TOOLS):
            for prompt in (False, True):
                want = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
                assert ours.render(messages, tools=tools, add_generation_prompt=prompt) == want, name
        want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.chat_ids(messages) == want
    for text in ("Hello  world\n\n", "", "naïve 你好 😀 <|im_end|>"):
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


def test_template_variables_reach_the_template(folders):
    ours, theirs = Tokenizer.from_folder(folders / "qwen3"), oracle(folders / "qwen3")
    want = theirs.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False, enable_thinking=False)
    assert ours.render([ASK], add_generation_prompt=True, enable_thinking=False) == want
    assert want.endswith("</think>\n\n")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
        "{{ {'a': '<&>', 'b': 'é'} | tojson }}|{{ [1, {'x': 2}] | tojson(indent=2) }}|{{ {'b': 1, 'a': 2} | tojson }}",
        "{% for i in [1, 2, 4, 5] %}{% if i == 2 %}{% continue %}"
        "{% elif i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{{ strftime_now('%Y-%m-%d') }}|{{ bos_token is defined }}|{{ eos_token }}|{{ pad_token }}",
        "   {%- set ns = namespace(a=1) %}\n  {% set ns.a = 3 %}\n{{ ns.a }}{{ tools is none }}{{ documents is none }}",
    ],
)
def test_jinja_settings_as_transformers(tmp_path, source):
    write_tiny_tokenizer(tmp_path)
    set_template(tmp_path, source)
    assert Tokenizer.from_folder(tmp_path).render([ASK]) == oracle(tmp_path).apply_chat_template([ASK], tokenize=False)


def test_templates_run_in_a_sandbox(tmp_path):
    write_tiny_tokenizer(tmp_path)
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        set_template(tmp_path, source)
        with pytest.raises(ValueError, match="refuses the conversation"):
            Tokenizer.from_folder(tmp_path).render([ASK])


def test_named_templates_of_an_older_folder(tmp_path):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    config["eos_token"] = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render([ASK]) == oracle(tmp_path).apply_chat_template([ASK], tokenize=False) == "plain"
    assert tokenizer.render([ASK], tools=TOOLS) == "tools 1"
    assert tokenizer.token(tokenizer.eos_id) == "<|im_end|>"
    config["chat_template"][1]["template"] = "{{ messages.nothing() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"the chat template 'tool_use' of {tmp_path} refuses"):
        Tokenizer.from_folder(tmp_path).render([ASK], tools=TOOLS)


def test_end_tokens(folders, tmp_path):
    llama = Tokenizer.from_folder(folders / "llama3")
    assert [llama.token(index) for index in llama.eos_ids] == ["<|eot_id|>", "<|end_of_text|>"]
    assert llama.token(llama.bos_id) == "<|begin_of_text|>"
    assert llama.prefix_ids == (llama.bos_id,)
    # A base model whose own end token is not the one its chat template closes a turn with.
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    base = Tokenizer.from_folder(tmp_path)
    assert [base.token(index) for index in base.eos_ids] == ["<|endoftext|>", "<|im_end|>"]


def test_end_tokens_of_the_base_model_hold_for_an_adapters_tokenizer(tmp_path):
    for name in ("base", "adapter"):
        write_tiny_tokenizer(tmp_path / name, "llama3")
    (tmp_path / "adapter" / "generation_config.json").unlink()
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [1, 4, 6]}')
    (tmp_path / "adapter" / "additional_chat_templates").mkdir()
    (tmp_path / "adapter" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    adapter = Tokenizer.from_folder(tmp_path / "adapter", base=tmp_path / "base")
    assert set(adapter.eos_ids) == {1, 4, 6}
    adapter.save(tmp_path / "out")
    tools = "additional_chat_templates/tool_use.jinja"
    for name, source in (("generation_config.json", "base"), ("tokenizer.json", "adapter"), (tools, "adapter")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / source / name).read_bytes()
    # Without a generation config anywhere transformers takes those of config.json.
    (tmp_path / "base" / "generation_config.json").unlink()
    (tmp_path / "base" / "config.json").write_text('{"eos_token_id": [1, 4, 7]}')
    assert set(Tokenizer.from_folder(tmp_path / "adapter", base=tmp_path / "base").eos_ids) == {1, 4, 7}


def test_special_tokens_as_objects(tmp_path):
    """The long spelling of older folders, in both files, and a list of end tokens or one."""
    write_tiny_tokenizer(tmp_path, "llama3")

    def added(content):
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        return {"__type": "AddedToken", "content": content, **flags}

    named = {"bos_token": added("<|begin_of_text|>"), "eos_token": added("<|eot_id|>")}
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    decoder = {"4": {**added("<|eot_id|>"), "special": True}}
    config = {"added_tokens_decoder": decoder, "chat_template": template, "pad_token": None, **named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mapped = {**named, "pad_token": added("<|pad|>"), "additional_special_tokens": ["<|eot_id|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    for stored, ends in (
        ([1, 4], ["<|eot_id|>", "<|end_of_text|>"]),
        (1, ["<|eot_id|>", "<|end_of_text|>"]),
        (4, ["<|eot_id|>"]),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert [tokenizer.token(index) for index in tokenizer.eos_ids] == ends
        names = [tokenizer.token(index) for index in (tokenizer.bos_id, tokenizer.eos_id)]
        assert names == ["<|begin_of_text|>", "<|eot_id|>"]
    assert tokenizer.render([ASK]) == oracle(tmp_path).apply_chat_template([ASK], tokenize=False)
    (tmp_path / "pad.jinja").write_text("{{ pad_token }}")
    assert Tokenizer.from_folder(tmp_path, tmp_path / "pad.jinja").render([ASK]) == "<|pad|>"


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default"}], ["x"]], ids=str)
def test_templates_of_another_form_are_refused(tmp_path, template):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(
        ValueError, match="chat_template must be a template or a list of {name, template}; name a Jinja"
    ):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("ids", ["2", ["2"], [2, None], 2.0], ids=str)
def test_end_tokens_that_no_token_would_equal_are_refused(tmp_path, ids):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        _ = Tokenizer.from_folder(tmp_path).eos_ids


def test_truncation_left_in_the_file_is_not_applied(tmp_path):
    write_tiny_tokenizer(tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert len(Tokenizer.from_folder(tmp_path).encode("one two three four five six")) > 3


def test_save_copies_bytes(folders, tmp_path):
    tokenizer = Tokenizer.from_folder(folders / "llama3")
    tokenizer.save(tmp_path)
    for file in tokenizer.files:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
        file.name for file in tokenizer.files
    }
    override = tmp_path / "mine.jinja"
    override.write_text("{{ messages[0].content }}")
    Tokenizer.from_folder(folders / "llama3", chat_template=override).save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).render([ASK]) == ASK["content"]


def test_errors_of_a_template_name_its_file(folders, tmp_path):
    mine = tmp_path / "mine.jinja"
    for source, fault in (
        ("{% if %}", ", line 1, is not Jinja"),
        ("{{ messages.nothing() }}", " refuses the conversat"),
    ):
        mine.write_text(source)
        with pytest.raises(ValueError, match=rf"^the chat template {mine}{fault}"):
            Tokenizer.from_folder(folders / "llama3", chat_template=mine).render([ASK])
    with pytest.raises(ValueError, match=rf"the chat template of {folders / 'mistral'} refuses"):
        Tokenizer.from_folder(folders / "mistral").render([{"role": "user"}])


def test_bad_folders(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing; save a fast tokenizer"):
        Tokenizer.from_folder(tmp_path)
    write_tiny_tokenizer(tmp_path)
    set_template(tmp_path, "{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ValueError, match="line 2, is not Jinja"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{# \xff #}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 .* at byte 3\); convert the file"):
        Tokenizer.from_folder(tmp_path)
    set_template(tmp_path, "{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match="refuses the conversation: only one turn"):
        Tokenizer.from_folder(tmp_path).render([ASK])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"no chat template; name a Jinja file with data\.chat_template"):
        Tokenizer.from_folder(tmp_path).render([CALL])
    with pytest.raises(ValueError, match=r"nowhere\.jinja does not exist"):
        Tokenizer.from_folder(tmp_path, chat_template=tmp_path / "nowhere.jinja")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
