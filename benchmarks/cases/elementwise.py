"""Kernels that are limited by bytes: norms, rotation, activations, each forward and backward.

Peers are imported where they are called: they may not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from common import FAILURES, Row, assert_close, free_memory, gradient_work, graph_medians, randn
from torch.nn import functional

from cases import Case, Rates
from gapless.kernels.activation import geglu, swiglu
from gapless.kernels.rms_norm import rms_norm
from gapless.kernels.rope import RotaryTable, rotary_table, rotate_qkv

TOKENS, EPS, HEAD = 8192, 1e-5, 128
_SETS = 3
_NOTE = "times in CUDA graphs, ours and peers alike; inputs rotate"

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Candidate:
    """A way to compute an operation."""

    call: Callable[..., Tensors]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs
    """The operation's inputs -> what `call` takes; not timed."""
    canonical: Callable[..., Tensors] = lambda *outs: outs
    """What `call` returns -> the operation's outputs; not timed."""


@dataclass(frozen=True)
class Operation:
    """An operation at one size."""

    name: str
    inputs: Callable[[], Tensors]
    candidates: dict[str, Candidate]
    """By peer, with "gapless", and "eager": the operation in plain torch."""
    forward_bytes: int
    """Fewest that a forward moves: each input read once, each output written once."""
    backward_bytes: int


def rows(operation: Operation, rates: Rates) -> list[Row]:
    """A row of the forward and one of the backward."""
    compiled = torch.compile(operation.candidates["eager"].call, dynamic=False)
    candidates = {**operation.candidates, "compile": Candidate(compiled)}
    sets = [operation.inputs() for _ in range(_SETS)]
    kept: dict[str, tuple[list, list]] = {}
    for name, candidate in candidates.items():
        try:
            kept[name] = _works(operation, candidate, sets, check_gradients=name == "gapless")
        except FAILURES as error:
            if name == "gapless":
                raise
            print(f"{operation.name}: {name} is left out: {type(error).__name__}: {str(error)[:200]}")
    found = []
    for index, (kind, size) in enumerate((("fwd", operation.forward_bytes), ("bwd", operation.backward_bytes))):
        times = graph_medians({name: works[index] for name, works in kept.items()})
        shares = {name: size / rates.copy / time for name, time in times.items()}
        found.append(
            Row(
                case=f"{operation.name}-{kind}",
                unit="share of byte limit",
                gapless=shares.pop("gapless"),
                peers=shares,
                limit=1.0,
                beside={"us": times["gapless"] * 1e3},
                note=_NOTE,
                bar=0.8,
                must_beat=("liger", "compile"),
            )
        )
    torch._dynamo.reset()
    return found


def _works(operation: Operation, candidate: Candidate, sets: Sequence[Tensors], *, check_gradients: bool) -> tuple:
    """Calls of the forward and of the backward, one for each set of inputs, of a candidate that was found right."""
    _check(operation, candidate, sets[0], check_gradients)
    forward, backward = [], []
    for inputs in sets:
        # Leaves of its own: some peers write over their inputs, or over what they have saved.
        args = _leaves(candidate.prepare(*inputs))
        forward.append(partial(candidate.call, *args))
        trained = [arg for arg in args if arg.requires_grad]
        backward.append(gradient_work(candidate.call(*args), trained))
    return forward, backward


def _leaves(tensors: Tensors) -> Tensors:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors)


def _check(operation: Operation, candidate: Candidate, inputs: Tensors, check_gradients: bool) -> None:
    """Compare with the plain operation in float32."""
    exact_inputs = tuple(x.detach().float().requires_grad_(x.requires_grad) for x in inputs)
    exact = operation.candidates["eager"].call(*exact_inputs)
    args = _leaves(candidate.prepare(*inputs))
    outs = candidate.call(*args)
    for index, (out, expected) in enumerate(zip(candidate.canonical(*outs), exact, strict=True)):
        if out is not None:
            assert_close(f"{operation.name} out {index}", out, expected)
    if not check_gradients:
        return
    upstream = [torch.randn_like(out) for out in outs]
    trained, exact_trained = ([x for x in xs if x.requires_grad] for xs in (args, exact_inputs))
    found = torch.autograd.grad(outs, trained, upstream)
    wanted = torch.autograd.grad(exact, exact_trained, [grad.float() for grad in upstream])
    for index, (grad, expected) in enumerate(zip(found, wanted, strict=True)):
        assert_close(f"{operation.name} gradient {index}", grad, expected)


# ---- the operations ----


def _plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def _norm(width: int) -> Operation:
    def liger(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        from liger_kernel.transformers.functional import liger_rms_norm

        return (liger_rms_norm(x, weight, EPS, in_place=False),)

    size = TOKENS * width * 2
    return Operation(
        name=f"rms_norm-{TOKENS}x{width}",
        inputs=lambda: (randn(TOKENS, width), (1 + randn(width, scale=0.3).detach()).requires_grad_()),
        candidates={
            "gapless": Candidate(lambda x, weight: (rms_norm(x, weight, EPS),)),
            "liger": Candidate(liger),
            "eager": Candidate(lambda x, weight: (_plain_norm(x, weight),)),
        },
        forward_bytes=2 * size,
        backward_bytes=3 * size,
    )


def _rotary() -> RotaryTable:
    frequencies = 500000.0 ** (-torch.arange(HEAD // 2, device="cuda").float() / (HEAD // 2))
    return rotary_table(torch.arange(TOKENS, device="cuda", dtype=torch.int32), frequencies)


def _plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _rotation(width: int, *, qk_norm: bool) -> Operation:
    """Queries of `width` features, 8 key heads: q, k and v come fused, [T, 8, G + 2, D]."""
    heads, kv_heads = width // HEAD, 8
    groups = heads // kv_heads
    table = _rotary()
    cos, sin = table.cos, table.sin
    # As transformers passes them to Liger: [1, T, D], both halves.
    cos2, sin2 = (torch.cat([half, half], dim=-1)[None].to(torch.bfloat16) for half in (cos, sin))

    def ours(qkv: torch.Tensor, *weights: torch.Tensor) -> Tensors:
        return rotate_qkv(qkv, table, *weights, eps=EPS)

    def plain(qkv: torch.Tensor, *weights: torch.Tensor) -> Tensors:
        q, k, v = qkv[:, :, :groups].reshape(TOKENS, heads, HEAD), qkv[:, :, groups], qkv[:, :, groups + 1]
        if weights:
            q, k = _plain_norm(q, weights[0]), _plain_norm(k, weights[1])
        return _plain_rotation(q, cos, sin), _plain_rotation(k, cos, sin), v

    def liger(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> Tensors:
        from liger_kernel.transformers.functional import liger_rms_norm, liger_rope

        if weights:
            q = liger_rms_norm(q, weights[0], EPS, in_place=False)
            k = liger_rms_norm(k, weights[1], EPS, in_place=False)
        return liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos2, sin2)

    def separate(qkv: torch.Tensor, *weights: torch.Tensor) -> Tensors:
        q = qkv.detach()[:, :, :groups].reshape(1, TOKENS, heads, HEAD)
        k = qkv.detach()[None, :, :, groups].contiguous()
        return q.requires_grad_(), k.requires_grad_(), *weights

    def inputs() -> Tensors:
        weights = [(1 + randn(HEAD, scale=0.3).detach()).requires_grad_() for _ in range(2 if qk_norm else 0)]
        return randn(TOKENS, kv_heads, groups + 2, HEAD), *weights

    q, k, all_of = ((size * TOKENS * HEAD * 2) for size in (heads, kv_heads, heads + 2 * kv_heads))
    tables = 2 * TOKENS * HEAD // 2 * 4
    return Operation(
        name=f"{'qk_norm_rope' if qk_norm else 'rope'}-{TOKENS}x{width}",
        inputs=inputs,
        candidates={
            "gapless": Candidate(ours),
            # Values are no part of it there: nothing to check, nothing to move.
            "liger": Candidate(liger, separate, lambda q, k: (*(x[0].transpose(0, 1) for x in (q, k)), None)),
            "eager": Candidate(plain),
        },
        forward_bytes=2 * (q + k) + tables,
        # The gradient of the fused tensor is written whole; the norm's needs q and k again.
        backward_bytes=2 * all_of + (q + k if qk_norm else 0) + tables,
    )


def _gate(width: int, *, gelu: bool) -> Operation:
    def plain(gate_up: torch.Tensor) -> Tensors:
        gate, up = gate_up.float().chunk(2, dim=-1)
        activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return ((activated * up).to(gate_up.dtype),)

    def liger(gate: torch.Tensor, up: torch.Tensor) -> Tensors:
        from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

        return (liger_geglu(gate, up) if gelu else liger_swiglu(gate, up),)

    def separate(gate_up: torch.Tensor) -> Tensors:
        gate, up = gate_up.detach().chunk(2, dim=-1)
        return gate.contiguous().requires_grad_(), up.contiguous().requires_grad_()

    size = TOKENS * width * 2
    return Operation(
        name=f"{'geglu' if gelu else 'swiglu'}-{TOKENS}x{width}",
        inputs=lambda: (randn(TOKENS, 2 * width),),
        candidates={
            "gapless": Candidate(lambda x: (geglu(x, approximate="tanh") if gelu else swiglu(x),)),
            "liger": Candidate(liger, separate),
            "eager": Candidate(plain),
        },
        forward_bytes=3 * size,
        backward_bytes=5 * size,
    )


def _case(make: Callable[[], Operation]) -> Case:
    def case(rates: Rates) -> list[Row]:
        found = rows(make(), rates)
        free_memory()
        return found

    return case


CASES: dict[str, Case] = {
    "rms_norm-4096": _case(lambda: _norm(4096)),
    "rms_norm-14336": _case(lambda: _norm(14336)),
    "rope-4096": _case(lambda: _rotation(4096, qk_norm=False)),
    "rope-14336": _case(lambda: _rotation(14336, qk_norm=False)),
    "qk_norm_rope-4096": _case(lambda: _rotation(4096, qk_norm=True)),
    "qk_norm_rope-14336": _case(lambda: _rotation(14336, qk_norm=True)),
    "swiglu-4096": _case(lambda: _gate(4096, gelu=False)),
    "swiglu-14336": _case(lambda: _gate(14336, gelu=False)),
    "geglu-14336": _case(lambda: _gate(14336, gelu=True)),
}
