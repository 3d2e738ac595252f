"""When kernels run, and for which chip."""

import pytest
import torch

from gapless.batch import DropoutCounters, segments
from gapless.kernels import runtime
from gapless.kernels.activation import swiglu
from gapless.kernels.attention import attention, attention_tiles
from gapless.kernels.cross_entropy import linear_cross_entropy
from gapless.kernels.dropout import dropout
from gapless.kernels.rms_norm import rms_norm
from gapless.kernels.rope import rotary_table, rotate_qkv
from gapless.kernels.runtime import empty_rows, forced, runs_kernels, spare_columns
from kernels.tools import DEVICE, kernels

GPU = torch.device("cuda")


def pretend(monkeypatch, capability, triton=True):
    monkeypatch.setattr(runtime, "_properties", lambda _: runtime.Chip(10 * capability[0] + capability[1], 100, 2**25))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(runtime, "_forced", runtime._Forced())
    monkeypatch.setattr(runtime, "triton", triton or None)


def test_kernels_run_where_they_can(monkeypatch):
    pretend(monkeypatch, (8, 0))
    assert runs_kernels(GPU)
    assert not runs_kernels(torch.device("cpu"))
    assert runtime.reference_note(GPU) is None
    assert runtime.reference_note(torch.device("cpu")) is None
    with forced("reference"):
        assert not runs_kernels(GPU)
        with forced("triton"):
            assert runs_kernels(torch.device("cpu"))
        assert not runs_kernels(GPU)


def test_the_reason_for_references_is_told(monkeypatch):
    pretend(monkeypatch, (7, 5))
    assert not runs_kernels(GPU)
    assert "compute capability 8.0; Tesla T4 has less" in runtime.reference_note(GPU)
    pretend(monkeypatch, (9, 0), triton=False)
    assert not runs_kernels(GPU)
    assert "pip install triton" in runtime.reference_note(GPU)


@pytest.mark.parametrize("path", ["trition", True, None])
def test_a_path_that_there_is_not(path):
    with pytest.raises(ValueError, match=f'path is {path!r}, not "triton" or "reference"'), forced(path):
        pass


def nothing():
    """A kernel's body."""


def test_kernels_that_cannot_run_here(monkeypatch):
    cpu = torch.device("cpu")
    if runtime.triton is not None:
        with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 in the environment before"):
            runtime.launch(runtime.triton.JITFunction(nothing), (1,), cpu)
    monkeypatch.setattr(runtime, "triton", None)
    with pytest.raises(ValueError, match="pip install triton"):
        runtime.launch(runtime.jit(nothing), (1,), cpu)


def test_tables_are_those_of_the_next_older_chip(monkeypatch):
    for capability, expected in [((8, 0), 80), ((8, 7), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)]:
        pretend(monkeypatch, capability)
        assert runtime.family(GPU) == expected


def test_spare_columns():
    x = empty_rows(torch.zeros(3, 1), 5, 64)
    assert x.shape == (3, 5)
    assert spare_columns(x) == 64
    assert spare_columns(x[:2]) == 64
    assert spare_columns(torch.zeros(3, 5)) == 0
    assert spare_columns(torch.zeros(3, 69)[:, 64:]) == 0
    assert spare_columns(empty_rows(torch.zeros(0, 1), 5, 64)) == 0


def test_gradients_of_gradients_are_refused():
    """They would lack what the kernels do not record."""
    x = torch.randn(4, 8, requires_grad=True)
    counters = DropoutCounters(torch.zeros(2, dtype=torch.int32), *[torch.arange(4, dtype=torch.int32)] * 2)
    for function in (
        swiglu,
        lambda x: rms_norm(x, torch.ones(8), 1e-6),
        lambda x: dropout(x, 0.5, counters, 0, 0),
        lambda x: rotate_qkv(x.unflatten(1, (1, 4, 2)), rotary_table(torch.arange(4), torch.ones(1)))[0],
        lambda x: linear_cross_entropy(x, torch.ones(5, 8), torch.arange(4, dtype=torch.int32)),
    ):
        (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
    with kernels():
        tiles = attention_tiles(16, 16, [None], torch.float32, "cpu")
    documents = segments([4], tiles=tiles, device=DEVICE)
    q = torch.randn(4, 1, 16, requires_grad=True, device=DEVICE)
    with kernels():
        (grad,) = torch.autograd.grad(attention(q, q, q, documents).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
