"""Batched generation against one prompt at a time, and against transformers token by token."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from gapless.batch import segments
from gapless.data.tokenizer import Tokenizer
from gapless.inference.generate import generate
from gapless.models.weights import load_weights
from tiny import write_tiny_model
from tiny_tokenizer import write_tiny_tokenizer

VOCAB = 384
LENGTHS = (5, 1, 17, 9, 2, 30, 11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_weights(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def transformers_greedy(folder, prompt, count, stops=()):
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def tokens_of(completions):
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_greedy_equals_transformers(folder, model, tokenizer, prompts, batch_size):
    ours = generate(model, tokenizer, prompts, max_new_tokens=12, stop_ids=(), batch_size=batch_size)
    assert tokens_of(ours) == [transformers_greedy(folder, prompt, 12) for prompt in prompts]
    assert {completion.finish_reason for completion in ours} == {"length"}
    assert [completion.text for completion in ours] == [tokenizer.decode(completion.tokens) for completion in ours]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_equals_transformers_in_other_families_and_with_windows(tmp_path, prompts, family):
    extra = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} if family == "qwen2" else {}
    folder = write_tiny_model(tmp_path, family, vocab_size=VOCAB, **extra)
    write_tiny_tokenizer(folder)
    ours = generate(load_weights(folder), Tokenizer.from_folder(folder), prompts, max_new_tokens=8, stop_ids=())
    assert tokens_of(ours) == [transformers_greedy(folder, prompt, 8) for prompt in prompts]


def test_stop_tokens_end_an_answer_and_make_room(folder, model, tokenizer, prompts):
    free = tokens_of(generate(model, tokenizer, prompts, max_new_tokens=12, stop_ids=()))
    stops = {free[0][3], free[2][0], free[5][7]}
    ours = generate(model, tokenizer, prompts, max_new_tokens=12, stop_ids=stops, batch_size=3)
    assert {completion.finish_reason for completion in ours} == {"stop", "length"}
    for completion, tokens, prompt in zip(ours, free, prompts, strict=True):
        end = next((place for place, token in enumerate(tokens) if token in stops), None)
        assert completion.tokens == tokens[:end]
        assert completion.finish_reason == ("length" if end is None else "stop")
        theirs = transformers_greedy(folder, prompt, 12, stops)
        assert theirs == tokens[: None if end is None else end + 1]


def test_the_stop_tokens_are_the_tokenizers_by_default(folder, tokenizer, prompts):
    assert len(tokenizer.eos_ids) == 2
    for stop in tokenizer.eos_ids:
        rigged = load_weights(folder)
        with torch.no_grad():
            hidden = rigged(torch.tensor(prompts[0], dtype=torch.int32), segments([len(prompts[0])]))
            rigged.head.weight.zero_()
            rigged.head.weight[stop] = hidden[-1]
        [completion] = generate(rigged, tokenizer, prompts[:1], max_new_tokens=5)
        assert (completion.tokens, completion.finish_reason) == ([], "stop")


def test_sampling_does_not_depend_on_the_batch(model, tokenizer, prompts):
    settings = {"max_new_tokens": 10, "temperature": 1.2, "top_p": 0.9, "top_k": 50, "seed": 5}
    stops = list(range(0, VOCAB, 23))
    expected = generate(model, tokenizer, prompts, stop_ids=stops, batch_size=1, **settings)
    for batch_size in (2, 4, 7):
        assert generate(model, tokenizer, prompts, stop_ids=stops, batch_size=batch_size, **settings) == expected
    other = generate(model, tokenizer, prompts, stop_ids=stops, **{**settings, "seed": 6})
    assert other != expected
    assert len({len(completion.tokens) for completion in expected}) > 1


def test_tokens_are_streamed_in_order(model, tokenizer, prompts):
    streamed = {index: [] for index in range(len(prompts))}
    stop = generate(model, tokenizer, prompts[:1], max_new_tokens=4, stop_ids=())[0].tokens[3]
    completions = generate(
        model,
        tokenizer,
        prompts,
        max_new_tokens=6,
        stop_ids=[stop],
        batch_size=2,
        on_token=lambda index, token: streamed[index].append(token),
    )
    for index, completion in enumerate(completions):
        assert streamed[index] == completion.tokens + [stop] * (completion.finish_reason == "stop")


def test_generation_leaves_the_model_as_it_was(model, tokenizer, prompts):
    model.train()
    generate(model, tokenizer, prompts[:1], max_new_tokens=1)
    assert model.training
    assert generate(model, tokenizer, [], max_new_tokens=1) == []


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1, VOCAB]], {}, "token 384, the vocabulary ends at 383"),
        ([[1, -1]], {}, "token -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ([[1]], {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ([[1]], {"top_p": 2.0}, "top_p"),
    ],
)
def test_bad_input_is_refused(model, tokenizer, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model, tokenizer, prompts, **{"max_new_tokens": 1, **settings})


def test_texts_for_token_ids_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="prompt 1 is a text; prompts are token ids"):
        generate(model, tokenizer, [[1], "Hello"], max_new_tokens=1)


def test_answers_are_handed_out_as_they_are_finished(model, tokenizer, prompts):
    """Begun in order: with equal answers' lengths, a batch is finished before the next one is."""
    taken, begun = [], []
    completions = generate(
        model,
        tokenizer,
        prompts,
        max_new_tokens=3,
        stop_ids=(),
        batch_size=2,
        on_token=lambda index, token: begun.append((index, len(taken))),
        on_completion=lambda index, completion: taken.append((index, completion)),
    )
    assert sorted(index for index, _ in taken) == list(range(len(prompts)))
    assert all(completions[index] is completion for index, completion in taken)
    first = [next(done for at, done in begun if at == index) for index in range(len(prompts))]
    assert first == [0, 0, 2, 2, 4, 4, 6]
