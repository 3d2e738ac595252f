"""A problem of attention, and the implementations that solve it: ours, torch's two backends, FlashAttention 3 and 4."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from common import FAILURES, Work, one_line
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gapless
from gapless.batch import segments
from gapless.kernels.attention import attention_tiles, hopper

HIDDEN = 2048
PEERS = ("triton", "fa2", "cudnn", "fa3", "fa4")
"""The first: our own kernels for every GPU, where Hopper has others."""
_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Self-attention within documents, in bf16."""

    lengths: tuple[int, ...]
    """Tokens of the documents, one after the other."""
    head_dim: int
    v_head_dim: int
    causal: bool = True
    groups: int = 1
    """Query heads that share a key head."""
    hidden: int = HIDDEN
    """Features of the output, over all heads."""
    device: str = "cuda"

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.hidden // self.v_head_dim

    def flops(self, kind: str) -> float:
        """Of the matrix products over the documents' true lengths, half of that where causal.

        Two products of [S, S, D] in a forward ("fwd"); five in a backward ("bwd"), three of them with D of the keys.
        """
        features = self.head_dim + self.v_head_dim if kind == "fwd" else 3 * self.head_dim + 2 * self.v_head_dim
        pairs = sum(length**2 for length in self.lengths) * (0.5 if self.causal else 1)
        return 2 * self.heads * features * pairs

    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k, v and gradient of the output, each [T, heads, features]."""
        tokens, kv_heads = sum(self.lengths), self.heads // self.groups
        shapes = ((self.heads, self.head_dim), (kv_heads, self.head_dim), (kv_heads, self.v_head_dim))
        drawn = (torch.randn(tokens, *shape, device=self.device) for shape in (*shapes, (self.heads, self.v_head_dim)))
        q, k, v, grad = (x.bfloat16() for x in drawn)
        return q, k, v, grad


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Side:
    """One implementation, for one problem."""

    name: str
    attend: Attend
    lay: Callable[[torch.Tensor], torch.Tensor] = _same
    """[T, heads, features] in the implementation's own layout."""
    back: Callable[[torch.Tensor], torch.Tensor] = _same
    """And from there to [T, heads, features]."""
    has_backward: bool = True

    def work(self, kind: str, values: Sequence[torch.Tensor]) -> Work:
        """A call that can be repeated: the forward, or the backward alone on a graph that is kept."""
        *inputs, grad = (self.lay(x) for x in values)
        inputs = [x.detach().requires_grad_(self.has_backward) for x in inputs]
        if kind == "fwd":
            return lambda: (self.attend(*inputs),)
        out = self.attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def sides(problem: Problem, names: Sequence[str], *, deterministic: bool = False) -> list[Side]:
    """Ours, and the peers that take such a problem.

    Args:
        problem: to solve.
        names: of peers.
        deterministic: have FlashAttention 4 repeat its bits; the others go by torch's setting.
    """
    found = [_ours(problem)]
    dims, device = (problem.head_dim, problem.v_head_dim), torch.device(problem.device)
    if "triton" in names and hopper.applies(*dims, torch.bfloat16, device):
        found.append(_portable(problem))
    backends = [name for name in _BACKENDS if name in names and len(set(problem.lengths)) == 1]
    if problem.v_head_dim != problem.head_dim:
        backends = [name for name in backends if name != "fa2"]
    found += [_torch(problem, name) for name in backends]
    if "fa3" in names:
        found.append(_fa3(problem))
    if "fa4" in names:
        found.append(_fa4(problem, deterministic))
    return found


def installed(names: Sequence[str], fa3: Path | None) -> list[str]:
    """The peers that are there; a line for each that is not.

    Args:
        names: of peers.
        fa3: the library `_vllm_fa3_C.abi3.so` of a vLLM wheel.
    """
    found = []
    for name in names:
        try:
            if name == "fa3":
                torch.ops.load_library(fa3) if fa3 else _missing("--fa3 does not say where its library is")
            if name == "fa4":
                importlib.import_module("flash_attn.cute")
        except (*FAILURES, OSError) as error:
            print(f"{name} is left out: {one_line(error)}")
        else:
            found.append(name)
    return found


def _missing(why: str) -> None:
    raise ImportError(why)


def failures() -> tuple[type[Exception], ...]:
    """What a peer may end with while the others go on."""
    try:
        dsl = importlib.import_module("cutlass.base_dsl.common")
    except ImportError:
        return FAILURES
    return (*FAILURES, dsl.DSLBaseError)


def _ours(problem: Problem) -> Side:
    tiles = attention_tiles(
        problem.head_dim, problem.v_head_dim, [None], torch.bfloat16, problem.device, groups=problem.groups
    )
    stream = segments(problem.lengths, tokens=sum(problem.lengths), tiles=tiles, device=problem.device)
    return Side(name="gapless", attend=lambda q, k, v: gapless.attention(q, k, v, stream, causal=problem.causal))


def _portable(problem: Problem) -> Side:
    """Ours, as it runs where Gluon does not fit."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(hopper, "applies", return_value=False):
            return side.attend(q, k, v)

    with mock.patch.object(hopper, "applies", return_value=False):
        side = _ours(problem)
    return Side(name="triton", attend=attend)


def _torch(problem: Problem, name: str) -> Side:
    """A backend of torch, [documents, heads, S, features]."""
    options = {"is_causal": problem.causal, "enable_gqa": problem.groups > 1}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return Side(
        name=name,
        attend=attend,
        lay=lambda x: x.unflatten(0, (len(problem.lengths), -1)).transpose(1, 2).contiguous(),
        back=lambda x: x.transpose(1, 2).flatten(0, 1),
    )


def _bounds(problem: Problem) -> torch.Tensor:
    lengths = torch.tensor([0, *problem.lengths])
    return lengths.cumsum(0).to(problem.device, torch.int32)


def _fa4(problem: Problem, deterministic: bool) -> Side:
    """flash-attn-4: [documents, S, heads, features], or packed where documents differ."""
    cute = importlib.import_module("flash_attn.cute")
    options = {"causal": problem.causal, "deterministic": deterministic}
    packed = len(set(problem.lengths)) > 1
    function = partial(cute.flash_attn_func, **options)
    if packed:
        bounds, longest = _bounds(problem), max(problem.lengths)
        ends = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        function = partial(cute.flash_attn_varlen_func, **options, **ends)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    if packed:
        return Side(name="fa4", attend=attend)
    return Side(
        name="fa4",
        attend=attend,
        lay=lambda x: x.unflatten(0, (len(problem.lengths), -1)),
        back=lambda x: x.flatten(0, 1),
    )


def _fa3(problem: Problem) -> Side:
    """FlashAttention 3 as vLLM 0.24 builds it: packed, forward only."""
    function = torch.ops._vllm_fa3_C.fwd.default
    bounds, longest = _bounds(problem), max(problem.lengths)
    given = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    given |= {"softmax_scale": problem.head_dim**-0.5, "is_causal": problem.causal, "softcap": 0.0}
    given |= {"window_size_left": -1, "window_size_right": -1, "is_rotary_interleaved": True, "num_splits": 1}
    given |= {"sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
    options = [given.get(argument.name) for argument in function._schema.arguments[3:]]
    return Side(name="fa3", attend=lambda q, k, v: function(q, k, v, *options)[0], has_backward=False)
