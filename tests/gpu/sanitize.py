"""Runs every kernel once at small odd shapes, for NVIDIA's memory checker; a script.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src:tests
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py    # or racecheck, initcheck

Without torch's caching every tensor is an allocation of its own, so that what is written beside it is seen.
"""

from __future__ import annotations

import itertools
import time
from unittest import mock

import torch

import gapless
from gapless.adapters.lora import adapter_views
from gapless.batch import segments
from gapless.config import OptimConfig
from gapless.kernels.activation import geglu, swiglu
from gapless.kernels.attention import flash, hopper
from gapless.kernels.attention.flash import attention_tiles
from gapless.kernels.cross_entropy import linear_cross_entropy
from gapless.kernels.rms_norm import rms_norm
from gapless.models.views import hf_views
from gapless.training.optim import AdamW
from gapless.training.setup import determinism
from gpu.test_kernels import batch_of, decoder

DTYPES = (torch.bfloat16, torch.float32)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def backward(*outs: torch.Tensor) -> None:
    torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])


def steps() -> None:
    """A training step each of a model with adapters and dropout, and of one whose weights are all trained."""
    for kind in ("lora", "full"):
        model = decoder(kind, dropout=0.3 if kind == "lora" else 0.0)
        views = adapter_views(model) if kind == "lora" else hf_views(model)
        optimizer = AdamW(views, OptimConfig(), "cuda")
        loss = model.loss(batch_of(model))
        loss.backward()
        norm, finite = optimizer.step(loss.detach(), torch.full((), 1e-3, device="cuda"))
        assert finite, norm


def elementwise() -> None:
    for dtype, width in itertools.product(DTYPES, (72, 1)):
        x, weight = randn(7, width, dtype=dtype), randn(width, dtype=dtype)
        backward(rms_norm(x, weight, 1e-5))
        backward(swiglu(randn(7, 2 * width, dtype=dtype)))
        for approximate in ("none", "tanh"):
            backward(geglu(randn(7, 2 * width, dtype=dtype), approximate=approximate))


def loss() -> None:
    for dtype in DTYPES:
        labels = torch.randint(301, (37,), device="cuda", dtype=torch.int32)
        labels[::5] = -100
        hidden, weight = randn(37, 40, dtype=dtype), randn(301, 40, dtype=dtype)
        linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=16, softcap=20.0, z_loss=1e-3, logit_scale=0.7
        ).backward()


def attention() -> None:
    """Masks, grouped queries, head dimensions, empty documents, a tail of none, and programs with many tiles.

    Gradients of keys and values are added up in float32, or written by a program that goes through all query heads.
    """
    for head_dim, key_heads, options in (
        (64, 2, {}),
        (128, 2, {"causal": False}),
        (128, 4, {}),
        (72, 2, {"window": 9, "softcap": 15.0}),
        (32, 2, {"sinks": True}),
        (192, 4, {"window": 40}),
        (256, 2, {"return_lse": True}),
    ):
        options = dict(options)
        tiles = attention_tiles(
            head_dim, head_dim, [options.get("window")], torch.bfloat16, "cuda", groups=4 // key_heads
        )
        stream = segments((70, 0, 1, 50), tokens=131, tiles=tiles, device="cuda")
        q, k, v = randn(131, 4, head_dim), randn(131, key_heads, head_dim), randn(131, key_heads, head_dim)
        if "sinks" in options:
            options["sinks"] = randn(4, dtype=torch.float32)
        for ordered, chip in itertools.product((False, True), (1, 132)):
            with determinism(ordered), mock.patch.object(flash, "multiprocessors", return_value=chip):
                out = gapless.attention(q, k, v, stream, **options)
                backward(*((out,) if isinstance(out, torch.Tensor) else out))


def main() -> None:
    torch.manual_seed(0)
    for work in (steps, elementwise, loss, attention):
        start = time.perf_counter()
        with mock.patch.object(hopper, "multiprocessors", return_value=2):
            work()
        torch.cuda.synchronize()
        print(f"{work.__name__}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
