from math import inf, nan

import pytest
import torch
from pool import run
from torch import distributed
from torch.nn import functional

from gapless.kernels.cross_entropy import VocabularyShard, _LinearCrossEntropy, _Options, linear_cross_entropy


def inputs(rows=13, hidden=8, vocab=29, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32)
    labels[::4] = -100
    return x, weight, labels


def oracle(x, weight, labels):
    return functional.cross_entropy((x @ weight.t()).double(), labels.long(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("upstream", [1.0, 0.37])
def test_equals_torch(chunk_tokens, upstream):
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens)
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    grads = torch.autograd.grad(loss * upstream, (x, weight))
    double_x, double_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = oracle(double_x, double_weight, labels)
    exact_grads = torch.autograd.grad(exact * upstream, (double_x, double_weight))
    torch.testing.assert_close(loss.double(), exact)
    for grad, expected in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)
    assert (grads[0][labels == -100] == 0).all()


@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"logit_scale": 0.3}, {"z_loss": 0.1}, {"softcap": 2.0, "logit_scale": 1.7, "z_loss": 0.02}],
    ids=str,
)
def test_softcap_scale_and_z_loss(options):
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels, chunk_tokens=5, **options)
    grads = torch.autograd.grad(loss, (x, weight))
    doubles = [t.detach().double().requires_grad_() for t in (x, weight)]
    logits = doubles[0] @ doubles[1].t() * options.get("logit_scale", 1.0)
    softcap = options.get("softcap")
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    exact = functional.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="sum")
    exact = exact + options.get("z_loss", 0.0) * logits.logsumexp(1)[labels != -100].square().sum()
    torch.testing.assert_close(loss.double(), exact)
    for grad, expected in zip(grads, torch.autograd.grad(exact, doubles), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, labels, **options), loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"softcap": value}, f"softcap must be finite and above 0, not {value}") for value in (0.0, inf, nan)),
        *(({"logit_scale": value}, f"logit_scale must be finite .* not {value}") for value in (-1.0, inf, nan)),
        *(({"z_loss": value}, f"z_loss must be finite and at least 0, not {value}") for value in (-0.1, inf, nan)),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
    ids=str,
)
def test_refused(options, message):
    x, weight, labels = inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, weight, labels, **options)
    with pytest.raises(ValueError, match="shapes"):
        linear_cross_entropy(x, weight, labels[1:])


def test_inputs_that_do_not_go_together():
    x, weight, labels = inputs()
    for args, message in (
        ((x, weight.bfloat16(), labels), "hidden has dtype torch.float32 and weight torch.bfloat16"),
        ((x.long(), weight.long(), labels), "not one of floating point"),
        ((x, weight, labels.float()), "labels have dtype torch.float32"),
        ((x, weight[:0], labels), "no vocabulary"),
        ((x, weight, labels.clamp(min=-1)), "label -1 is not in the vocabulary of 29; -100 is for"),
        ((x, weight, labels.clamp(max=99) + 29), "label -71 is not in"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*args)


def test_a_label_that_is_nowhere_where_it_is_not_refused():
    """As on a GPU, where that would have to wait."""
    x, weight, labels = inputs()
    for label in (-1, 29):
        labels[1] = label
        loss = _LinearCrossEntropy.apply(x, weight, labels, 5, _Options())
        assert loss.isnan()
        (grad,) = torch.autograd.grad(loss, x)
        assert grad[1].isnan().all()
        assert grad[2:].isfinite().all()


def test_scaled_loss_and_a_second_backward():
    """The gradient that arrives is honoured and nothing saved is written into."""
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels, chunk_tokens=5)
    plain = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    tripled = torch.autograd.grad(loss * 3, (x, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (x, weight))
    for one, three, other in zip(plain, tripled, again, strict=True):
        assert torch.equal(one * 3, three)
        assert torch.equal(one, other)


def test_bf16_within_twice_the_eager_error():
    x, weight, labels = inputs(rows=40, hidden=64, vocab=200, dtype=torch.bfloat16)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = torch.autograd.grad(oracle(*doubles, labels), doubles)
    ours = torch.autograd.grad(linear_cross_entropy(x, weight, labels, chunk_tokens=7), (x, weight))
    eager = torch.autograd.grad(oracle(x, weight, labels), (x, weight))
    for grad, other, exact in zip(ours, eager, truth, strict=True):
        error, budget = ((g.double() - exact).square().mean().sqrt() for g in (grad, other))
        assert error <= 2 * budget + 1e-4


def test_frozen_weight_gets_no_gradient_and_extremes_stay_finite():
    x, weight, labels = inputs()
    frozen = (weight.detach() * 1e4).contiguous()
    loss = linear_cross_entropy(x, frozen, labels)
    (grad,) = torch.autograd.grad(loss, (x,))
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_no_grad_and_nothing_to_train():
    x, weight, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels, chunk_tokens=3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), oracle(x, weight, labels))
    empty = linear_cross_entropy(x, weight, torch.full_like(labels, -100))
    assert empty.item() == 0
    grads = torch.autograd.grad(empty, (x, weight))
    assert all((grad == 0).all() for grad in grads)


def test_logits_of_all_tokens_are_never_held():
    """No tensor of rows x vocabulary is made or saved, only chunks of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t))
            return out

    x, weight, labels = inputs(rows=64, hidden=4, vocab=50)
    with Sizes():
        linear_cross_entropy(x, weight, labels, chunk_tokens=8).backward()
    assert max(sizes) == 8 * 50


def test_rows_that_count_nothing_may_stay_in():
    """On a GPU they are not left out first; loss and gradients are the same."""
    x, weight, labels = inputs()
    left_out = linear_cross_entropy(x, weight, labels)
    left_in = _LinearCrossEntropy.apply(x, weight, labels, 5, _Options())
    torch.testing.assert_close(left_in, left_out)
    for kept, dropped in zip(
        torch.autograd.grad(left_in, (x, weight)), torch.autograd.grad(left_out, (x, weight)), strict=True
    ):
        torch.testing.assert_close(kept, dropped)


def on_a_cut_vocabulary(rank, world):
    """Loss and gradients for 29 rows of 15 and 14 on two ranks, with and without the rows that count nothing."""
    x, weight, labels = inputs()
    start = rank * 15
    shard = VocabularyShard(start, distributed.group.WORLD)
    piece = weight[start : start + 15].detach().requires_grad_()
    with torch.no_grad():
        results = [linear_cross_entropy(x, piece, labels, chunk_tokens=5, vocabulary=shard)]
    for loss in (
        linear_cross_entropy(x, piece, labels, chunk_tokens=5, vocabulary=shard),
        _LinearCrossEntropy.apply(x, piece, labels, 4, _Options(vocabulary=shard)),
    ):
        results.append([loss.detach(), *torch.autograd.grad(loss, (x, piece))])
    extreme = linear_cross_entropy(x, piece.detach() * 1e4, labels, vocabulary=shard)
    nothing = linear_cross_entropy(x, piece, torch.full_like(labels, -100), vocabulary=shard)
    return [*results, extreme.detach(), nothing.detach()]


def test_a_cut_vocabulary_gives_the_same():
    x, weight, labels = inputs()
    loss = linear_cross_entropy(x, weight, labels)
    grad_x, grad_weight = torch.autograd.grad(loss, (x, weight))
    extreme = linear_cross_entropy(x, weight.detach() * 1e4, labels).detach()
    first, second = run(2, on_a_cut_vocabulary)
    for mine, other in zip(first, second, strict=True):
        if torch.is_tensor(mine):
            assert torch.equal(mine, other)
            continue
        torch.testing.assert_close(mine[0], loss.detach())
        assert torch.equal(mine[0], other[0])
        torch.testing.assert_close(mine[1] + other[1], grad_x)
        torch.testing.assert_close(torch.cat([mine[2], other[2]]), grad_weight)
    torch.testing.assert_close(first[0], loss.detach())
    torch.testing.assert_close(first[3], extreme)
    assert first[4] == 0
