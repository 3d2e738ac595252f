"""Sums of what programs have added up: against float64."""

import pytest
import torch

from gapless.kernels.reduce import add_partials
from kernels.tools import DEVICE, guarded


@pytest.mark.parametrize("columns", [1, 256, 700])
@pytest.mark.parametrize("programs", [0, 3, 1100])
def test_agrees_with_float64(programs, columns):
    partial = torch.randn(programs, columns, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        with guarded():
            out = add_partials(partial, dtype)
        torch.testing.assert_close(out, partial.double().sum(0).to(dtype), rtol=8e-3, atol=1e-4)
