"""A packed stream computes what its documents compute alone."""

import copy

import numpy as np
import pytest
import torch
from tests.tiny import tiny_model
from torch.nn import functional

from gapless.batch import IGNORE, Document, build_batch, segments
from gapless.kernels.runtime import forced

LENGTHS = (5, 1, 70, 7)
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


def documents(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(0, 256, n).astype(np.int32), rng.random(n) < 0.7) for n in lengths]


def batch_of(model, rows, row_tokens=90, **options):
    layout = model.batch_layout(rows=len(rows), row_tokens=row_tokens, row_documents=8)
    return build_batch(layout, rows, **options)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("qwen2", WINDOWED), ("qwen3", {})], ids=str)
def test_packed_equals_separate(family, overrides):
    """Per-token losses and the gradient of every weight."""
    model = tiny_model(family, **overrides)
    packed = batch_of(model, [documents()])
    separate = [batch_of(model, [[document]], row_tokens=80) for document in documents()]

    def token_losses(batch):
        logits = model.logits(model(batch.tokens, batch.segments))
        return functional.cross_entropy(logits, batch.labels.long(), ignore_index=IGNORE, reduction="none")

    with torch.no_grad():
        losses = token_losses(packed)
        for batch, start, length in zip(separate, packed.segments.starts, LENGTHS, strict=True):
            torch.testing.assert_close(losses[start : start + length], token_losses(batch)[:length], rtol=0, atol=1e-5)
        assert (losses[sum(LENGTHS) :] == 0).all()
        torch.testing.assert_close(model.loss(packed), losses.sum())
    together = gradients(model, model.loss(packed))
    alone = gradients(model, sum(model.loss(batch) for batch in separate))
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_changing_one_document_leaves_the_others_bits(dtype):
    model = tiny_model("qwen2", dtype=dtype, **WINDOWED)
    where = segments(LENGTHS, tokens=90)
    tokens = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    changed = tokens.clone()
    changed[6:76] = (changed[6:76] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens, where), model(changed, where)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[76:], after[76:])
    assert (before[6:76] != after[6:76]).any(dim=1).all()


def test_causal():
    """A token's output does not depend on later tokens, and does on every earlier one."""
    model = tiny_model()
    tokens = torch.arange(9, dtype=torch.int32)
    where = segments([9])
    with torch.no_grad():
        before = model(tokens, where)
        for position in range(9):
            changed = tokens.clone()
            changed[position] = 77
            differs = (model(changed, where) != before).any(dim=1)
            assert not differs[:position].any()
            assert differs[position:].all()


def test_scaled_loss_scales_gradients():
    model = tiny_model(tie_word_embeddings=True)
    batch = batch_of(model, [documents()])
    plain = gradients(model, model.loss(batch))
    doubled = gradients(model, model.loss(batch) * 2)
    loss = model.loss(batch)
    loss *= 3
    tripled = gradients(model, loss)
    for name, gradient in plain.items():
        assert torch.equal(gradient * 2, doubled[name])
        torch.testing.assert_close(gradient * 3, tripled[name], rtol=1e-5, atol=5e-6 * gradient.abs().max().item())


def test_empty_documents_and_empty_rows_change_nothing():
    model = tiny_model()
    docs = documents()
    empty = Document(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=bool))
    plain = batch_of(model, [docs])
    with_empty = batch_of(model, [[empty, *docs[:2], empty, empty, *docs[2:]]])
    assert torch.equal(model.loss(plain), model.loss(with_empty))
    nothing = batch_of(model, [[empty], []])
    loss = model.loss(nothing)
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients(model, loss).values())


def test_rows_in_any_micro_batches():
    """1 x 8, 2 x 4 and 8 x 1 rows: the same loss and gradients."""
    model = tiny_model("qwen3")
    rows = [documents((n, 3), seed=n) for n in (5, 3, 18, 1, 7, 2, 16, 4)]

    def accumulated(size):
        model.zero_grad()
        total = sum(model.loss(batch_of(model, rows[i : i + size], row_tokens=24)) for i in range(0, 8, size)) / 50
        return total, gradients(model, total)

    loss, expected = accumulated(8)
    for size in (4, 1):
        other, grads = accumulated(size)
        torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_trained_hidden_gathers_the_rows_with_labels():
    model = tiny_model()
    batch = batch_of(model, [documents()])
    hidden, labels = model.trained_hidden(batch)
    assert len(hidden) == len(labels) == len(batch.trained) > batch.num_trained
    assert (labels[batch.num_trained :] == IGNORE).all()
    rows = batch.labels != IGNORE
    assert torch.equal(labels[: batch.num_trained], batch.labels[rows])
    assert torch.equal(hidden[: batch.num_trained], model(batch.tokens, batch.segments)[rows])


def test_pipeline_stages_recombine():
    """A decoder without embedding, or without norm and head, is a stage; layers keep their keys."""
    whole, first, second = tiny_model(), tiny_model(), tiny_model()
    del first.layers["1"], first.layers["2"], second.layers["0"]
    first.norm = first.head = second.embed = None
    tokens, where = torch.arange(9, dtype=torch.int32), segments([4, 5])
    assert torch.equal(second(first(tokens, where), where), whole(tokens, where))


def test_a_decoder_that_is_cast_is_one_that_was_made_so():
    """But for weights; the rotary frequencies stay float32."""
    model = tiny_model("llama")
    frequencies = model.rotary_frequencies.clone()
    cast = copy.deepcopy(model).to(torch.bfloat16)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast.rotary_frequencies, frequencies)
    with forced("triton"):
        assert cast.attention_tiles() == tiny_model("llama", dtype="bf16").attention_tiles()
        assert cast.attention_tiles() != model.attention_tiles()
    tokens = torch.arange(9, dtype=torch.int32)
    assert cast(tokens, segments([9])).dtype == torch.bfloat16
    back = cast.to("meta").to_empty(device="cpu").float()
    assert back.dtype == torch.float32
    assert torch.equal(back.rotary_frequencies, frequencies)


def test_autocast_is_refused():
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="leave torch.autocast out"):
        model(torch.arange(9, dtype=torch.int32), segments([9]))
