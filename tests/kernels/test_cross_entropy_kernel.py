"""The kernels of the fused head and cross-entropy, held to the rule of accuracy."""

from unittest import mock

import pytest
import torch
from torch.nn import functional

from gapless.kernels import cross_entropy
from gapless.kernels.cross_entropy import VocabularyShard, linear_cross_entropy
from gapless.kernels.runtime import triton
from kernels.tools import DEVICE, check, guarded, kernels, reference, run

pytestmark = pytest.mark.skipif(triton is None, reason="needs Triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = (
    {},
    {"softcap": 5.0},
    {"logit_scale": 0.3},
    {"z_loss": 0.02},
    {"softcap": 3.0, "logit_scale": 1.7, "z_loss": 0.1},
)


def plain(labels, *, softcap=None, logit_scale=1.0, z_loss=0.0):
    """The operation in torch's own, on float32 copies of logits in the dtype of the inputs."""

    def loss(hidden, weight):
        logits = hidden @ weight.t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        counts = labels != -100
        squares = logits[counts].logsumexp(1).square().sum()
        return functional.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="sum") + z_loss * squares

    return loss


def inputs(rows=7, hidden=24, vocabulary=37, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(rows * vocabulary)
    x = torch.randn(rows, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator) * size / hidden**0.5
    labels = torch.randint(0, vocabulary, (rows,), generator=generator, dtype=torch.int32)
    labels[1::4] = -100
    labels[-1] = vocabulary - 1
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def ones_like_loss():
    """The gradient that arrives from a loss of its own."""
    return [torch.ones((), device=DEVICE)]


def small_tiles(block=16, warps=1):
    """Many blocks a row, of which the last has a few columns."""
    return mock.patch.object(cross_entropy, "_tiles", return_value=(block, warps))


def accurate(shape=(7, 24, 37), dtype=torch.float32, upstream=1.0, chunk_tokens=None, size=1.0, eps=1e-6, **options):
    hidden, weight, labels = inputs(*shape, dtype, size)
    check(
        lambda x, w: linear_cross_entropy(x, w, labels, chunk_tokens=chunk_tokens, **options),
        plain(labels, **options),
        (hidden, weight),
        [torch.tensor(upstream, device=DEVICE)],
        eps=eps,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_accuracy(dtype, options):
    with small_tiles():
        for shape, chunk in (((7, 24, 37), None), ((9, 8, 48), 4), ((1, 16, 5), None)):
            accurate(shape, dtype, chunk_tokens=chunk, size=3.0, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upstream", [3.0, 0.0, 1 / 7])
def test_upstream_gradient(dtype, upstream):
    with small_tiles():
        accurate(dtype=dtype, upstream=upstream, chunk_tokens=2, softcap=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_tokens", [8, 3, 1])
def test_chunks(dtype, chunk_tokens):
    """Up to 4 summands of the weight's gradient in low precision, more in float32."""
    with small_tiles():
        accurate((11, 16, 40), dtype, upstream=0.3, chunk_tokens=chunk_tokens)


def test_many_chunks():
    """In low precision a sum of so many would have several times the error."""
    with small_tiles(32):
        accurate((80, 16, 20), torch.bfloat16, chunk_tokens=1)


def test_softcap_far_above_the_logits():
    with small_tiles():
        accurate(softcap=1000.0, eps=3e-7)


@pytest.mark.parametrize("vocabulary", [8192, 8209, 3 * 8192 - 1])
def test_own_tiles(vocabulary):
    accurate((3, 8, vocabulary), torch.bfloat16, size=4.0, softcap=9.0, z_loss=1e-3)


@pytest.mark.parametrize("size", [1e4, 2.5e5])
@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.25, "z_loss": 1e-6}], ids=str)
def test_extreme_logits(size, options):
    with small_tiles():
        accurate(size=size, **options)
    hidden, weight, labels = inputs()
    weight[:, :] = -size * (1 + torch.arange(len(weight), device=DEVICE)[:, None] / 100)
    hidden[:] = 1 / hidden.shape[1]
    with small_tiles(), kernels():
        (loss,), grads = run(
            lambda x, w: linear_cross_entropy(x, w, labels), (hidden, weight), [torch.ones((), device=DEVICE)]
        )
    exact = plain(labels)(hidden.double(), weight.double())
    # Sums in another order round otherwise: 1.1e-6 on a GPU.
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=0.0)
    assert all(grad.isfinite().all() for grad in grads)


def test_differences_of_large_logits_are_exact():
    logits = 2.5e5 - torch.arange(40, device=DEVICE).expand(2, 40) / 16
    exact = logits.double().requires_grad_()
    labels = torch.tensor([3, 39], dtype=torch.int32, device=DEVICE)
    expected = functional.cross_entropy(exact, labels.long(), reduction="none")
    (softmax,) = torch.autograd.grad(expected.sum(), exact)
    losses = torch.empty(2, device=DEVICE)
    logits = logits.contiguous()
    with small_tiles():
        cross_entropy._loss(logits, labels, losses, cross_entropy._Options(), grad=True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), softmax, rtol=1e-6, atol=1e-6)


def test_infinite_logits():
    """-inf is a probability of 0; a row with inf or NaN has no loss, as with torch's own."""
    logits = torch.randn(5, 40, device=DEVICE)
    logits[0, 3:30] = logits[1, 17] = -torch.inf
    logits[2, 5], logits[3, 39] = torch.inf, torch.nan
    logits[4] = -torch.inf
    labels = torch.tensor([0, 39, 7, 7, -100], dtype=torch.int32, device=DEVICE)
    expected = functional.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="none")
    softmax = logits.softmax(1) - functional.one_hot(labels.long().clamp(min=0), 40)
    losses = torch.empty(5, device=DEVICE)
    with small_tiles():
        cross_entropy._loss(logits, labels, losses, cross_entropy._Options(), grad=True)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    torch.testing.assert_close(logits[:4], softmax[:4], equal_nan=True)
    assert (logits[4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen(dtype, frozen):
    hidden, weight, labels = inputs(dtype=dtype)
    ones = [torch.ones((), device=DEVICE)]
    pair = [hidden, weight]

    def loss(trained):
        both = [x if place == frozen else trained for place, x in enumerate(pair)]
        return linear_cross_entropy(*both, labels)

    with kernels(), guarded(), small_tiles():
        (alone,), (grad,) = run(loss, (pair[1 - frozen],), ones)
        (together,), grads = run(lambda x, w: linear_cross_entropy(x, w, labels), pair, ones)
        with torch.no_grad():
            evaluated = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    assert not evaluated.requires_grad
    assert torch.equal(alone, together)
    assert torch.equal(evaluated, together)
    assert torch.equal(grad, grads[1 - frozen])


def test_no_row_counts():
    hidden, weight, labels = inputs()
    ones = [torch.ones((), device=DEVICE)]
    with kernels(), guarded():
        for rows in (0, 5):
            nothing = torch.full_like(labels[:rows], -100)
            (loss,), grads = run(
                lambda x, w, labels=nothing: linear_cross_entropy(x, w, labels), (hidden[:rows], weight), ones
            )
            assert loss.item() == 0
            assert loss.dtype == torch.float32
            assert [grad.shape for grad in grads] == [(rows, 24), weight.shape]
            assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
def test_rows_that_count_nothing_may_be_nan(options):
    hidden, weight, labels = inputs()
    ones = [torch.ones((), device=DEVICE)]
    kept = labels != -100
    with kernels(), guarded(), small_tiles():

        def loss(x, w):
            return linear_cross_entropy(x, w, labels, chunk_tokens=4, **options)

        (clean,), clean_grads = run(loss, (hidden, weight), ones)
        hidden[~kept] = torch.nan
        (dirty,), dirty_grads = run(loss, (hidden, weight), ones)
    assert torch.equal(clean, dirty)
    assert (dirty_grads[0][~kept] == 0).all()
    assert all(torch.equal(one, other) for one, other in zip(clean_grads, dirty_grads, strict=True))


def test_strided_inputs_and_a_second_backward():
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    wide = torch.cat([hidden, hidden], 1)[:, : hidden.shape[1]].requires_grad_()
    transposed = weight.t().contiguous().t().requires_grad_()
    with kernels(), small_tiles():
        loss = linear_cross_entropy(wide, transposed, labels)
        first = torch.autograd.grad(loss, (wide, transposed), retain_graph=True)
        second = torch.autograd.grad(loss * 2, (wide, transposed))
        again, grads = run(
            lambda x, w: linear_cross_entropy(x, w, labels), (hidden, weight), [torch.ones((), device=DEVICE)]
        )
    torch.testing.assert_close(loss, again[0], rtol=1e-3, atol=0.0)
    for one, two, other in zip(first, second, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
        assert torch.equal(2 * one, two)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_labels_that_are_not_dense(dtype):
    hidden, weight, labels = inputs()
    spaced = torch.stack([labels, labels.roll(1)], 1)[:, 0].to(dtype)
    found = []
    for given in (labels, spaced):
        with kernels(), small_tiles():
            found.append(
                run(lambda x, w, given=given: linear_cross_entropy(x, w, given), (hidden, weight), ones_like_loss())
            )
    (dense, dense_grads), (other, other_grads) = found
    assert torch.equal(dense[0], other[0])
    assert all(torch.equal(one, two) for one, two in zip(dense_grads, other_grads, strict=True))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("label", [-1, -(2**31), 37, 2**31 - 1])
def test_a_label_that_is_nowhere(label, options):
    """No finite loss: a trainer leaves such a step out. Nothing beside the logits is read."""
    hidden, weight, labels = inputs()
    labels[3] = label
    with kernels(), small_tiles(), guarded():
        (loss,), (grad, _) = run(
            lambda x, w: linear_cross_entropy(x, w, labels, **options), (hidden, weight), ones_like_loss()
        )
        assert linear_cross_entropy(hidden, weight, labels, **options).isnan()
    assert loss.isnan()
    assert grad[3].isnan().all()
    assert grad[:3].isfinite().all()
    if DEVICE == "cpu":
        with reference(), pytest.raises(ValueError, match=f"label {label} is not in the vocabulary of 37"):
            linear_cross_entropy(hidden, weight, labels, **options)
    for path in (kernels, reference):

        def rank(cut, path=path):
            def work():
                with path(), guarded(), small_tiles():
                    shard = VocabularyShard(cut.start, None)
                    return linear_cross_entropy(hidden, weight[cut], labels, vocabulary=shard, **options)

            return work

        first, second = in_turns([rank(slice(0, 21)), rank(slice(21, 37))])
        assert first.isnan()
        assert second.isnan()


class WaitingError(Exception):
    """A rank has come to a collective whose result is not known yet."""


def in_turns(works):
    """The results of ranks in one process: each runs again, up to the first collective that others have yet to join."""
    known = []
    while True:
        results, waiting = [], []
        for work in works:
            done = iter(list(known))

            def all_reduce(tensor, op=cross_entropy.distributed.ReduceOp.SUM, group=None, done=done, waiting=waiting):
                result = next(done, None)
                if result is None:
                    waiting.append((tensor.clone(), op))
                    raise WaitingError
                tensor.copy_(result)

            with mock.patch.object(cross_entropy.distributed, "all_reduce", all_reduce):
                try:
                    results.append(work())
                except WaitingError:
                    continue
        if not waiting:
            return results
        assert not results, "the ranks make different collectives"
        tensors = torch.stack([tensor for tensor, _ in waiting])
        largest = waiting[0][1] == cross_entropy.distributed.ReduceOp.MAX
        known.append(tensors.amax(0) if largest else tensors.sum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
def test_cut_vocabulary(dtype, options):
    hidden, weight, labels = inputs(dtype=dtype, size=3.0)
    cuts = (slice(0, 21), slice(21, 37))
    ones = [torch.ones((), device=DEVICE)]

    def rank(cut, path):
        shard = VocabularyShard(cut.start, None)

        def work():
            with path(), guarded(), small_tiles():
                return run(
                    lambda x, w: linear_cross_entropy(x, w, labels, chunk_tokens=4, vocabulary=shard, **options),
                    (hidden, weight[cut]),
                    ones,
                )

        return work

    with kernels(), small_tiles():
        whole, grads = run(lambda x, w: linear_cross_entropy(x, w, labels, **options), (hidden, weight), ones)
    ((first,), (grad_first, weight_first)), ((second,), (grad_second, weight_second)) = in_turns(
        [rank(cut, kernels) for cut in cuts]
    )
    assert torch.equal(first, second)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(first, whole[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(grad_first + grad_second, grads[0], **tolerance)
    torch.testing.assert_close(torch.cat([weight_first, weight_second]), grads[1], **tolerance)
    if DEVICE == "cpu":  # the reference leaves rows out there
        (plain_loss, _), _ = in_turns([rank(cut, reference) for cut in cuts])
        torch.testing.assert_close(first, plain_loss[0], rtol=1e-5, atol=0.0)
