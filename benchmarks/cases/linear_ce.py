"""The fused head and cross-entropy against its matmuls alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from common import FAILURES, Row, assert_close, free_memory, medians, peak_gib, randn

from cases import Case, Rates
from gapless.kernels.cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256


def head(rates: Rates, *, trained: bool) -> list[Row]:
    """Loss and gradients, of the hidden states and, if trained, of the head."""
    hidden, weight = randn(TOKENS, HIDDEN), randn(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5, grad=trained)
    labels = torch.randint(VOCABULARY, (TOKENS,), device="cuda", dtype=torch.int32)
    inputs = (hidden, weight) if trained else (hidden,)

    def step(loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        total = loss()
        return total, *torch.autograd.grad(total, inputs)

    ours = partial(step, lambda: linear_cross_entropy(hidden, weight, labels))
    _check(ours(), hidden, weight, labels)
    works = {"gapless": ours}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        targets = labels.long()
        peer = partial(step, lambda: liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="sum"))
        peer()
        works["liger"] = peer
    except FAILURES as error:
        print(f"liger is left out: {type(error).__name__}: {str(error)[:200]}")
    gradients = sum(x.numel() * 2 for x in inputs) / 2**30
    peaks = {name: peak_gib(work) - gradients for name, work in works.items()}
    logits = torch.mm(hidden.detach(), weight.detach().t())
    products = {
        "logits": lambda: torch.mm(hidden.detach(), weight.detach().t()),
        "grad_hidden": lambda: torch.mm(logits, weight.detach()),
    }
    if trained:
        products["grad_weight"] = lambda: torch.mm(logits.t(), hidden.detach())
    times = medians(works | products, rep=400)
    matmuls = sum(times[name] for name in products)
    row = Row(
        case=f"linear_ce-{'trained' if trained else 'frozen'}",
        unit="x of its matmuls",
        gapless=times["gapless"] / matmuls,
        peers={name: times[name] / matmuls for name in works if name != "gapless"},
        limit=1.0,
        peak_gib=peaks,
        beside={"ms": times["gapless"], "matmuls_ms": matmuls},
        note="memory above inputs and gradients",
        peak_bar=1.5,
        bar=1.2,
        lower_is_better=True,
    )
    free_memory()
    return [row]


def _check(found: tuple[torch.Tensor, ...], hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    """Compare with float32, where products of 512 rows are made at a time."""
    exact = torch.zeros(1, device="cuda")
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    wide = weight.detach().float()
    for start in range(0, TOKENS, 512):
        rows, targets = hidden.detach()[start : start + 512].float(), labels[start : start + 512].long()
        log_probabilities = torch.log_softmax(rows @ wide.t(), dim=-1)
        exact -= log_probabilities.gather(1, targets[:, None]).sum()
        grad = log_probabilities.exp_()
        grad.scatter_add_(1, targets[:, None], torch.full_like(targets[:, None], -1, dtype=torch.float32))
        grad_hidden[start : start + 512] = grad @ wide
        if len(found) == 3:
            grad_weight.addmm_(grad.t(), rows)
    assert_close("loss", found[0], exact[0], 1e-3)
    assert_close("gradient of hidden", found[1], grad_hidden, 1e-2)
    if len(found) == 3:
        assert_close("gradient of weight", found[2], grad_weight, 1e-2)


CASES: dict[str, Case] = {
    "linear_ce-frozen": partial(head, trained=False),
    "linear_ce-trained": partial(head, trained=True),
}
