import numpy as np
import pytest
import torch

from gapless.batch import BatchLayout, Document, DropoutCounters, build_batch
from gapless.kernels.dropout import dropout, keep_mask, philox

# Known answers published with the paper's library (Random123 1.x, kat_vectors: philox4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_vectors(counter, key, expected):
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(word.item() for word in words) == expected


def counters(tokens=6, seed=11, step=3):
    return DropoutCounters(
        torch.tensor([seed, step], dtype=torch.int32),
        torch.arange(tokens, dtype=torch.int32) % 3,
        torch.arange(tokens, dtype=torch.int32),
    )


def test_mask_is_the_word_of_the_documented_counter():
    mask = keep_mask(10, 0.4, counters(), layer=5, site=2)
    for token, channel in np.ndindex(6, 10):
        words = philox(
            tuple(torch.tensor(c) for c in (channel // 4, token, token % 3, 5 << 8 | 2)),
            (torch.tensor(11), torch.tensor(3)),
        )
        assert mask[token, channel].item() == (words[channel % 4].item() >= round(0.4 * 2**32))


def test_every_coordinate_matters():
    base = keep_mask(64, 0.5, counters(), layer=1, site=1)
    assert torch.equal(base, keep_mask(64, 0.5, counters(), layer=1, site=1))
    others = [
        keep_mask(64, 0.5, counters(), layer=2, site=1),
        keep_mask(64, 0.5, counters(), layer=1, site=2),
        keep_mask(64, 0.5, counters(seed=12), layer=1, site=1),
        keep_mask(64, 0.5, counters(step=4), layer=1, site=1),
        base.roll(1, 0),
        base.roll(1, 1),
    ]
    for other in others:
        assert 0.35 < (base ^ other).float().mean() < 0.65


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_share_and_scale(p):
    place = DropoutCounters(
        torch.tensor([1, 1], dtype=torch.int32), torch.zeros(400, dtype=torch.int32), torch.arange(400).int()
    )
    out = dropout(torch.ones(400, 101), p, place, 0, 0)
    kept = out != 0
    # 40,400 draws: five standard deviations.
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


def test_backward_uses_the_same_mask_and_saves_counters_only():
    x = torch.randn(6, 9, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = dropout(x, 0.3, counters(), 2, 1)
    assert all(t.dtype == torch.int32 for t in saved)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (out != 0).float() / 0.7)


def test_no_dropout_is_the_identity():
    x = torch.randn(6, 9)
    assert dropout(x, 0.0, counters(), 0, 0) is x


def test_same_mask_in_any_layout():
    """8 rows as 1 batch, 2 batches of 4 or 8 of 1 drop the same values of the same tokens."""
    documents = [Document(np.arange(n, dtype=np.int32), np.ones(n, dtype=bool)) for n in (5, 3, 8, 1, 7, 2, 6, 4)]

    def masks(rows):
        layout = BatchLayout(rows=rows, row_tokens=8, row_documents=2)
        out = []
        for first in range(0, 8, rows):
            ids = range(40 + first, 40 + first + rows)
            batch = build_batch(layout, [[documents[i - 40]] for i in ids], row_ids=ids, seed=5, step=2)
            mask = keep_mask(12, 0.5, batch.segments.dropout, layer=1, site=0)
            out += [
                mask[start : start + n] for start, n in zip(batch.segments.starts, batch.segments.lengths, strict=True)
            ]
        return torch.cat(out)

    assert torch.equal(masks(8), masks(4))
    assert torch.equal(masks(8), masks(1))


@pytest.mark.parametrize("cuts", [(4, 8), (5, 7), (1, 3, 2, 6), (11, 1)])
def test_a_range_of_the_channels_has_the_whole_ones_mask(cuts):
    """Whatever channel a piece of the input begins with: the bits do not depend on how the input is cut."""
    whole = keep_mask(12, 0.5, counters(), layer=1, site=2)
    x = torch.randn(6, 12)
    out, first = [], 0
    for channels in cuts:
        piece = x[:, first : first + channels].clone().requires_grad_()
        dropped = dropout(piece, 0.5, counters(), 1, 2, first)
        dropped.sum().backward()
        assert torch.equal(piece.grad != 0, whole[:, first : first + channels])
        out.append(dropped)
        first += channels
    assert torch.equal(torch.cat(out, dim=1), dropout(x, 0.5, counters(), 1, 2))


def test_refused():
    x, good = torch.ones(6, 9), counters()
    for args, message in (
        ((x, 1.0, good, 0, 0), "p is 1.0: a value"),
        ((x, -0.1, good, 0, 0), "p is -0.1"),
        ((x, float("nan"), good, 0, 0), "p is nan"),
        ((x, 0.5, good, -1, 0), "layer -1, site 0"),
        ((x, 0.5, good, 2**23, 0), "the layer below 2\\^23"),
        ((x, 0.5, good, 0, 256), "site 256 and first channel 0 must"),
        ((x, 0.5, good, 0, 0, -4), "first channel -4"),
        ((x[0], 0.5, good, 0, 0), r"x has shape \[9\]"),
        ((x.int(), 0.5, good, 0, 0), "dtype torch.int32"),
        ((x[:5], 0.5, good, 0, 0), r"shapes \[2\], \[6\], \[6\]: x has 5 tokens"),
        ((x, 0.5, DropoutCounters(good.key, good.row.long(), good.column), 0, 0), "torch.int32, torch.int64, torch.i"),
        ((x, 0.0, DropoutCounters(good.key[:1], good.row, good.column), 0, 0), r"shapes \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dropout(*args)
