"""Adapted linear layers against their base matmul alone: Llama-3.1-8B's shapes, r 16, 8,192 tokens.

The layers are those of a real decoder layer, and get the very inputs that they get there: what stands before them
leaves room behind its rows for x A^T.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common import Row, assert_close, free_memory, gradient_work, medians
from torch.nn import functional

from cases import Case, Rates
from gapless.adapters.lora import LoraLinear, adapter_views, apply_lora
from gapless.batch import segments
from gapless.config import AdapterConfig
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config

TOKENS = 8192
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def adapted(path: str) -> tuple[LoraLinear, tuple[Any, ...], dict[str, Any]]:
    """A layer of a decoder, and the arguments that it gets in a forward, cut off from what made them."""
    model = Decoder(decoder_config(CONFIG, None), dtype=torch.bfloat16, device="cuda").train()
    apply_lora(model, AdapterConfig(r=16, lora_alpha=32.0), seed=0)
    for view in adapter_views(model):
        view.write(view.parameter, 0.02 * torch.randn(view.shape, device="cuda"))
    layer = model.layers["0"].get_submodule(path)
    assert isinstance(layer, LoraLinear)
    layer.trust()  # as in training
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    layout = model.batch_layout(rows=1, row_tokens=TOKENS, row_documents=4)
    stream = segments([TOKENS // 4] * 4, max_documents=layout.max_documents, tiles=layout.tiles, device="cuda")
    model(torch.randint(1024, (TOKENS,), device="cuda", dtype=torch.int32), stream)
    hook.remove()
    ((args, kwargs),) = seen
    return layer, tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value


def rows(rates: Rates, *, name: str, path: str) -> list[Row]:
    """The layer in a forward and, to inform, its backward."""
    layer, args, kwargs = adapted(path)
    x = args[0]
    residual = args[1] if len(args) > 1 else kwargs.get("residual")
    plain = x.detach().contiguous().requires_grad_()
    weight = layer.base_layer().dequantize().detach()
    pairs = _adapters(layer)

    def naive() -> list[torch.Tensor]:
        """As PEFT does: projection by projection."""
        outs = []
        for part, a, b in pairs:
            update = functional.linear(functional.linear(plain, a), b)
            outs.append(functional.linear(plain, part) + update * layer.scale)
        return outs if residual is None else [outs[0] + residual]

    def ours() -> torch.Tensor:
        return layer(*args, **kwargs)

    exact = plain.detach().float() @ layer.dequantize().detach().float().t()
    assert_close(name, ours(), exact if residual is None else exact + residual.detach().float(), 1e-2)
    del exact
    base = {"base": lambda: torch.mm(plain.detach(), weight.t())}
    times = medians({"gapless": ours, "peft": naive, **base}, rep=300)
    out, other = ours(), naive()
    grad = torch.randn(TOKENS, weight.shape[0], device="cuda", dtype=torch.bfloat16)
    back = {
        "gapless": gradient_work([out], [x, *(p for p in layer.parameters() if p.requires_grad)]),
        "peft": gradient_work(other, [plain, *(p for _, *ab in pairs for p in ab)]),
        "base": lambda: torch.mm(grad, weight),
    }
    back_times = medians(back, rep=200)
    found = []
    for kind, of, bar in (("fwd", times, 1.08), ("bwd", back_times, None)):
        ratio = {way: time / of["base"] for way, time in of.items()}
        found.append(
            Row(
                case=f"{name}-{kind}",
                unit="x of base matmul",
                gapless=ratio["gapless"],
                peers={"peft": ratio["peft"]},
                limit=1.0,
                beside={"us": of["gapless"] * 1e3, "base_us": of["base"] * 1e3},
                note="of the backward the base is the gradient of x alone" if kind == "bwd" else "",
                bar=bar,
                lower_is_better=True,
                must_beat=("peft",),
            )
        )
    del out, other, back
    free_memory()
    return found


def _adapters(layer: LoraLinear) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Weight, A and B of every projection, bf16 leaves."""
    stored = layer.base_layer()
    found = []
    for part in layer.adapted:
        weight = part.select(stored.weight.detach()).flatten(0, -2).contiguous()
        a, b = layer.a_part(part).select(layer.lora_a.detach()), layer.lora_b[part.name].detach()
        found.append((weight, *(x.to(weight.dtype).contiguous().requires_grad_() for x in (a, b))))
    return found


CASES: dict[str, Case] = {
    "lora_qkv": partial(rows, name="lora_qkv", path="attention.qkv"),
    "lora_gate_up": partial(rows, name="lora_gate_up", path="mlp.gate_up"),
    "lora_down": partial(rows, name="lora_down", path="mlp.down"),
}
