"""Gradient norm, clip and AdamW: whole optimizer steps as the trainer makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from common import Row, assert_close, free_memory, graph_medians, randn
from torch import nn

from cases import Case, Rates
from gapless.config import OptimConfig
from gapless.models.views import TensorView
from gapless.training.optim import AdamW

MATRICES = ((8192, 4096), (8192, 14336))
ADAPTERS = ((16, 4096),) * 500
RATE, DECAY, CLIP = 1e-3, 0.01, 1.0


class Torch:
    """The same step of torch: clip by the global norm, fused AdamW on float32 masters, copies and zeros in one go."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = [param.detach().clone() for param in params]
        self.masters = [nn.Parameter(param.float()) for param in self.params]
        self.wide = self.params[0].dtype == torch.float32
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=RATE, weight_decay=DECAY, fused=True, capturable=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        self.optimizer.step()
        if not self.wide:
            torch._foreach_copy_(self.params, self.masters)
        self.optimizer.zero_grad(set_to_none=False)


def step(rates: Rates, *, name: str, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Row]:
    """Parameters of one dtype; gradients, masters and moments are float32."""
    params = [nn.Parameter(randn(*shape, scale=0.02, dtype=dtype).detach()) for shape in shapes]
    views = [TensorView(f"{i}.weight", param, str(i), tuple(param.shape)) for i, param in enumerate(params)]
    config = OptimConfig(learning_rate=RATE, weight_decay=DECAY, max_grad_norm=CLIP)
    theirs = Torch(params)
    ours = AdamW(views, config, "cuda")
    loss, rate = torch.ones((), device="cuda"), torch.full((), RATE, device="cuda")
    before = [param.detach().float().clone() for param in params]
    for param, master in zip(params, theirs.masters, strict=True):
        grad = torch.randn_like(master).mul_(1e-3)
        ours.gradient(param).copy_(grad)
        master.grad.copy_(grad)
    ours.step(loss, rate)
    theirs.step()
    masters = {key: tensor for key, _, tensor in ours.tensors() if key.startswith(("master/", "weight/"))}
    for index, master in enumerate(theirs.masters):
        mine = masters.get(f"master/{index}.weight", masters[f"weight/{index}.weight"])
        assert_close(f"update {index}", mine - before[index], master - before[index], 1e-3)
    # In graphs: for many small tensors a step would measure the host.
    times = graph_medians({"gapless": [partial(ours.step, loss, rate)], "torch": [theirs.step]}, rep=100)
    count = sum(param.numel() for param in params)
    # The norm reads gradients; the update reads gradient, master and moments, writes the last three, a bf16 parameter,
    # and zeros.
    size = count * (4 + 16 + 12 + (0 if dtype == torch.float32 else 2) + 4)
    shares = {key: size / rates.copy / time for key, time in times.items()}
    row = Row(
        case=name,
        unit="share of byte limit",
        gapless=shares.pop("gapless"),
        peers=shares,
        limit=1.0,
        beside={"us": times["gapless"] * 1e3},
        note=f"{len(shapes)} tensors, {count / 1e6:.0f} M parameters in {dtype}; norm, clip, update, gradients cleared",
        bar=0.8,
        must_beat=("torch",),
    )
    ours.close()
    free_memory()
    return [row]


CASES: dict[str, Case] = {
    "adamw-bf16": partial(step, name="adamw-bf16", shapes=MATRICES, dtype=torch.bfloat16),
    "adamw-fp32": partial(step, name="adamw-fp32", shapes=MATRICES, dtype=torch.float32),
    "adamw-lora": partial(step, name="adamw-lora", shapes=ADAPTERS, dtype=torch.float32),
}
