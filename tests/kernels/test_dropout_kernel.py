"""The dropout kernel: the reference's bits, whatever the layout."""

import pytest
import torch

from gapless.batch import DropoutCounters
from gapless.kernels.dropout import dropout
from kernels.tools import DEVICE, guarded, kernels, reference


def counters(tokens, seed=11, step=3):
    """Rows and columns with every bit of a word in use somewhere."""
    generator = torch.Generator().manual_seed(tokens)
    row, column = (torch.randint(-(2**31), 2**31, (tokens,), generator=generator).int() for _ in range(2))
    key = torch.tensor([seed, step], dtype=torch.int32)
    return DropoutCounters(key.to(DEVICE), row.to(DEVICE), column.to(DEVICE))


def both(x, p, *place):
    """Output and gradient on each path."""
    results = []
    for path in (kernels, reference):
        leaf = x.detach().clone().requires_grad_()
        with path(), guarded():
            out = dropout(leaf, p, *place)
            out.backward(torch.ones_like(out) * 1.5)
        results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize(
    ("tokens", "channels", "first", "layer", "site"),
    [
        (5, 8, 0, 0, 0),
        (1, 3, 0, 0, 1),  # place 1: Triton hands that number over as a constant
        (19, 257, 4, 7, 3),
        (17, 300, 5, 2**23 - 1, 255),
        (3, 1, 7, 31, 2),
        (16, 512, 14, 1, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_same_bits_as_the_reference(tokens, channels, first, layer, site, dtype):
    x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    ours, theirs = both(x, 0.37, counters(tokens), layer, site, first)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert ours[0].dtype == dtype


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.5, 0.999999, 1 - 1e-12])
def test_every_probability(p):
    ours, theirs = both(torch.ones(33, 130, device=DEVICE), p, counters(33, seed=-5, step=2**31 - 1), 3, 1, 2)
    assert torch.equal(ours[0], theirs[0])


def test_counters_that_are_not_dense():
    x, dense = torch.randn(7, 40, device=DEVICE), counters(7)
    fields = (dense.key, dense.row, dense.column)
    spaced = DropoutCounters(*(torch.stack([counter, counter + 1], 1)[:, 0] for counter in fields))
    ours, theirs = both(x, 0.5, spaced, 1, 2)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_strided_input_and_no_rows():
    x = torch.randn(7, 40, device=DEVICE)[:, 3:20]
    place = (counters(7), 0, 2)
    with kernels():
        ours, empty = dropout(x, 0.5, *place), dropout(x[:0], 0.5, counters(0), 0, 2)
    with reference():
        assert torch.equal(ours, dropout(x, 0.5, *place))
    assert empty.shape == (0, 17)
