"""Calls of the public functions, forward and backward, that launch every kernel with the tiles of real models.

Tensors are on the CPU and have few tokens: what is compiled depends on their other dimensions and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from gapless.batch import DropoutCounters, segments
from gapless.kernels import runtime
from gapless.kernels.activation import geglu, swiglu
from gapless.kernels.adamw import Entry, TensorList, prepare
from gapless.kernels.attention import attention, attention_tiles
from gapless.kernels.attention import hopper as own
from gapless.kernels.cross_entropy import VocabularyShard, linear_cross_entropy
from gapless.kernels.dropout import dropout
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.kernels.quantized_state import QuantizedMoment
from gapless.kernels.rms_norm import rms_norm
from gapless.kernels.rope import _Tiles, rotary_table, rotate_qkv
from gapless.kernels.runtime import empty_rows
from gapless.models.linear import Part

CASES: dict[str, Callable[[], None]] = {}
"""By name; the first part of a name, up to a dot, is the operation."""


def case(name: str):
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = function
        return function

    return add


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def backward(*outs: torch.Tensor) -> None:
    torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])


def rotate(shape: tuple[int, int, int], half: int, *, norm: str = "none", tokens: int = 2, **options) -> None:
    """norm: "none", "frozen" or "trained"."""
    rotary = rotary_table(torch.arange(tokens, dtype=torch.int32), torch.ones(half))
    weights = [] if norm == "none" else [tensor(shape[2], grad=norm == "trained") for _ in range(2)]
    backward(*rotate_qkv(tensor(tokens, *shape), rotary, *weights, **options))


@case("rope.llama")
def _() -> None:
    rotate((8, 6, 128), 64)


@case("rope.qwen3")
def _() -> None:
    rotate((8, 6, 128), 64, norm="frozen")


@case("rope.qwen3_trained")
def _() -> None:
    rotate((8, 6, 128), 64, norm="trained", tokens=64)  # enough for programs of many steps


@case("rope.padded")
def _() -> None:
    rotate((4, 3, 72), 36)


@case("rope.glm")
def _() -> None:
    rotate((2, 18, 128), 32, interleaved=True, norm="trained", tokens=96)


@case("rope.row")
def _() -> None:
    with mock.patch("gapless.kernels.rope._tiles", return_value=_Tiles(1, 1, 2)):
        rotate((1, 4, 256), 96, interleaved=True, norm="trained", tokens=31)  # of rows that take a whole program each


def head(size: int, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    hidden, weight = tensor(2, 16, dtype=dtype), tensor(size, 16, dtype=dtype)
    labels = torch.zeros(2, dtype=torch.int32)
    backward(linear_cross_entropy(hidden, weight, labels, **options))


@case("cross_entropy.llama")
def _() -> None:
    head(128256)


@case("cross_entropy.gemma2")
def _() -> None:
    head(256000, softcap=30.0, z_loss=1e-4)


@case("cross_entropy.odd_fp32")
def _() -> None:
    head(50257, torch.float32, logit_scale=0.0625)


@case("cross_entropy.cut")
def _() -> None:
    with mock.patch("torch.distributed.all_reduce"):
        head(64128, vocabulary=VocabularyShard(64128, None))


def norm(features: int, *, trained: bool, rows: int = 2, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    weight = tensor(features, dtype=options.pop("weight_dtype", dtype), grad=trained)
    backward(rms_norm(tensor(rows, features, dtype=dtype), weight, 1e-5, **options))


@case("rms_norm.smollm2")
def _() -> None:
    norm(576, trained=False)
    norm(576, trained=True, rows=96, weight_dtype=torch.float32)


@case("rms_norm.llama")
def _() -> None:
    norm(4096, trained=False, spare=16)
    norm(4096, trained=True, rows=96)  # enough for programs of many steps


@case("rms_norm.wide")
def _() -> None:
    norm(14336, trained=False)
    norm(14336, trained=True, rows=96)


@case("rms_norm.float32")
def _() -> None:
    norm(4096, trained=False, dtype=torch.float32)
    norm(4096, trained=True, rows=96, dtype=torch.float32)


@case("swiglu.smollm2")
def _() -> None:
    backward(swiglu(tensor(2, 2 * 1536)))


@case("swiglu.llama")
def _() -> None:
    backward(swiglu(tensor(2, 2 * 14336), spare=16))
    backward(swiglu(tensor(2, 2 * 14336, dtype=torch.float32)))


@case("geglu.gemma")
def _() -> None:
    backward(geglu(tensor(2, 2 * 9216), approximate="tanh"))
    backward(geglu(tensor(2, 2 * 9216), approximate="none"))


def _lora(channels: int, leading: tuple[int, ...], parts: tuple[Part, ...], *, p: float = 0.0, spare: bool = True):
    """A layer like Llama-3.1-8B's with adapters of rank 16; few tokens, so that sums are cut into pieces."""
    wide = WideWeight(tensor(*leading, channels, grad=False), 16 * len(parts), parts)
    x = empty_rows(tensor(20, channels), channels, wide.spare) if spare else tensor(20, channels)
    a = tensor(16 * len(parts), channels, dtype=torch.float32)
    b = [tensor(part.features(leading), 16, dtype=torch.float32) for part in parts]
    place = torch.zeros(20, dtype=torch.int32)
    drop = InputDropout(p, DropoutCounters(torch.zeros(2, dtype=torch.int32), place, place), 3, 2) if p else None
    residual = tensor(20, wide.out) if len(leading) == 1 else None
    room = wide.spare if spare else 0
    backward(lora_linear(x.detach().requires_grad_(), wide, a, b, 2.0, residual=residual, dropout=drop, spare=room))


@case("lora.qkv")
def _() -> None:
    _lora(4096, (2, 6, 128), (Part("q", 1, 0, 4), Part("k", 1, 4, 1), Part("v", 1, 5, 1)))


@case("lora.gate_up")
def _() -> None:
    _lora(4096, (2, 1024), (Part("gate", 0, 0, 1), Part("up", 0, 1, 1)), p=0.05)


@case("lora.down")
def _() -> None:
    _lora(14336, (512,), (Part("down", 0, 0, 512),), spare=False)


@case("dropout")
def _() -> None:
    place = torch.zeros(20, dtype=torch.int32)
    counters = DropoutCounters(torch.tensor([1, 2], dtype=torch.int32), place, place)
    backward(dropout(tensor(20, 4096), 0.1, counters, 3, 1))


def flash(
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 96,
    sinks: bool = False,
    **options,
) -> None:
    """With few tokens a query head is a program of its own in the gradient of keys."""
    window = options.get("window")
    tiles = attention_tiles(head_dim, v_head_dim, [window], dtype, "cpu")
    documents = segments([tokens - 32, 32], tiles=tiles)
    q, k = tensor(tokens, 4, head_dim, dtype=dtype), tensor(tokens, 2, head_dim, dtype=dtype)
    v = tensor(tokens, 2, v_head_dim, dtype=dtype)
    backward(attention(q, k, v, documents, sinks=tensor(4) if sinks else None, **options))


case("flash.128")(lambda: flash(128, 128))
case("flash.64")(lambda: flash(64, 64))
case("flash.grouped")(lambda: flash(128, 128, tokens=512))
case("flash.features")(lambda: flash(128, 128, window=4096, softcap=30.0, sinks=True))
case("flash.96")(lambda: flash(96, 96))
case("flash.192")(lambda: flash(192, 128, causal=False))
case("flash.256")(lambda: flash(256, 256))
case("flash.values")(lambda: flash(128, 256))
case("flash.float32")(lambda: flash(128, 128, torch.float32))


def hopper(
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 4,
    tokens: int = 400,
    *,
    groups: int = 1,
    ordered: bool = False,
    **options,
) -> None:
    """Hopper's own kernels alone; the cases above have them, too. Few tokens: gradients per query head, in float32.

    groups: query heads per key head that tables are declared for. Beyond 1 they share tiles in the forward, which then
        is all there is.
    """
    if runtime.architecture(torch.device("cpu")) != 90:
        return
    grad = groups == 1
    tiles = attention_tiles(head_dim, v_head_dim, [options.get("window")], dtype, "cpu", groups=groups)
    q = tensor(tokens, heads, head_dim, dtype=dtype, grad=grad)
    k, v = (tensor(tokens, 2, dim, dtype=dtype, grad=grad) for dim in (head_dim, v_head_dim))
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=ordered):
        out = attention(q, k, v, segments([tokens - 24, 24], tiles=tiles), **options)
        if grad:
            out.sum().backward()


@case("flash.fallback")
def _fallback() -> None:
    """What runs on Hopper where Gluon does not fit."""
    with mock.patch.object(own, "applies", return_value=False):
        flash(128, 128)
        flash(256, 256)


FEATURES = {"window": 100, "softcap": 30.0}
case("flash.hopper-features-64")(lambda: hopper(64, 64, sinks=torch.zeros(4), **FEATURES))
case("flash.hopper-features-96")(lambda: hopper(96, 96, sinks=torch.zeros(4), **FEATURES))
case("flash.hopper-features-256")(lambda: hopper(256, 256, sinks=torch.zeros(4), **FEATURES))
case("flash.hopper-packed")(lambda: hopper(128, 128, heads=8, groups=4))
case("flash.hopper-packed-96")(lambda: hopper(96, 96, heads=4, groups=2))
case("flash.hopper-packed-256")(lambda: hopper(256, 256, heads=32, groups=16, causal=False))
case("flash.hopper-packed-features-64")(lambda: hopper(64, 64, heads=16, groups=8, sinks=torch.zeros(16), **FEATURES))
case("flash.hopper-softcap")(lambda: hopper(128, 128, softcap=50.0))
case("flash.hopper-ordered")(lambda: hopper(128, 128, ordered=True))
case("flash.hopper-ordered-window")(lambda: hopper(64, 64, window=100, ordered=True))
case("flash.hopper-few-tokens")(lambda: hopper(128, 128, tokens=64))
case("flash.hopper-few-tokens-64")(lambda: hopper(64, 64, tokens=64, causal=False, ordered=True))
case("flash.hopper-64-128")(lambda: hopper(64, 128))
case("flash.hopper-sinks")(lambda: hopper(64, 64, sinks=torch.zeros(4), window=128))
case("flash.hopper-window")(lambda: hopper(128, 128, window=4096))
case("flash.hopper-full")(lambda: hopper(128, 128, causal=False))
case("flash.hopper-full-72")(lambda: hopper(72, 72, causal=False))
case("flash.hopper-fp16")(lambda: hopper(64, 64, torch.float16, heads=2))
case("flash.hopper-fp16-192")(lambda: hopper(192, 128, torch.float16))
case("flash.hopper-80")(lambda: hopper(80, 80))
case("flash.hopper-160")(lambda: hopper(160, 160))
case("flash.hopper-192")(lambda: hopper(192, 192))
# As many key heads as query heads: gradients in 16 bits, by TMA.
case("flash.hopper-192-128")(lambda: hopper(192, 128, heads=2))
case("flash.hopper-136-40")(lambda: hopper(136, 40, heads=2, window=100, softcap=30.0))
case("flash.hopper-256")(lambda: hopper(256, 256, heads=2))
# The most shared memory.
case("flash.hopper-256-192")(lambda: hopper(256, 192))
case("flash.hopper-192-256")(lambda: hopper(192, 256, window=100))
case("flash.hopper-8")(lambda: hopper(8, 8))


def optimizer_step(
    master: torch.dtype, copy: torch.dtype | None = None, *, eight: bool = False, start: int = 0, count: int = 8192
) -> None:
    """`start`: elements between an aligned address and the tensors."""

    def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(start + count, dtype=dtype)[start:]

    first, second = values(), values()
    moments = (QuantizedMoment.zeros(first, True), QuantizedMoment.zeros(first, False)) if eight else (first, second)
    entry = Entry(values(), values(master), None if copy is None else values(copy), *moments, True)
    tensors = TensorList([entry], torch.device("cpu"))
    norm, one = tensors.squares(torch.ones(1, dtype=torch.int32)), torch.ones(())
    control, _ = prepare(one, norm, one.clone(), torch.tensor(True), one.clone(), 1.0, (0.9, 0.999))
    tensors.update(control, 0.1, 1e-8, (0.9, 0.999))


case("adamw.bf16")(lambda: optimizer_step(torch.float32, torch.bfloat16))
case("adamw.8bit")(lambda: optimizer_step(torch.float32, torch.bfloat16, eight=True))
case("adamw.float32")(lambda: optimizer_step(torch.float32))
case("adamw.pure_bf16")(lambda: optimizer_step(torch.bfloat16))
case("adamw.unaligned")(lambda: optimizer_step(torch.float32, start=1))
