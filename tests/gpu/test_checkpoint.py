"""Asynchronous saves from a GPU: a copy of the moment, taken without waiting for the disk."""

import pytest
import torch

from gapless.parallel.world import World
from gapless.training.checkpoint import CheckpointWriter, Piece, open_newest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


def test_an_asynchronous_save_is_of_the_moment_it_was_called(tmp_path):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(4096, 4096), (3, 5), (7,), (1, 1)]
    now = {
        f"weight/{n}": torch.randn(shape, device="cuda", generator=generator).to(dtype)
        for n, (shape, dtype) in enumerate(zip(shapes, [torch.float32, torch.bfloat16] * 2, strict=True))
    }
    expected = {name: tensor.cpu() for name, tensor in now.items()}
    # Read as the optimizer's state is, into temporaries that are gone when the copies arrive.
    pieces = (Piece.whole(name, tensor.T.contiguous().T.clone()) for name, tensor in now.items() if tensor.dim() == 2)
    with CheckpointWriter(tmp_path, World.single(), asynchronous=True) as writer:
        torch.cuda._sleep(50_000_000)  # the copies are behind a step that is still running
        writer.save(1, pieces, {})
        for tensor in now.values():
            tensor.zero_()
        scratch = [torch.full((4096, 4096), -1.0, device="cuda") for _ in range(4)]
    checkpoint = open_newest(tmp_path)
    assert len(scratch) == 4
    for name in checkpoint.shapes():
        assert torch.equal(checkpoint.read(name), expected[name])
    assert len(checkpoint.shapes()) == 3
