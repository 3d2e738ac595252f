"""The cases of finetune_gpu.py: what is trained, beside whom, and what the card could do at most.

The limit, in tokens/s: linear layers take what a plain bf16 matmul of their shape takes, timed in the same run: in a
full fine-tuning a forward, a gradient of the input and one of the weight, with adapters the last of these for the
adapters alone, whose FLOPs count at the rate of the others. Attention has the FLOPs of the documents' true lengths,
causal, (1 + 2.5) x 2 n^2 x heads x head_dim, at 6/7 of the rate of these matmuls: what the best kernels reach of it on
this chip (600 of 700 TFLOP/s). Layers that are recomputed take their forward once more, but for their last product,
whose values nobody needs again. Norms, activations, the loss and the optimizer take nothing, and the padding of a row
is not paid for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Row, free_memory, medians, one_line

from cases import Rates
from cases.finetune_plan import LLAMA_1B, LLAMA_8B, QWEN3_06B, SMOLLM2_135M, Plan, R, knows, lengths, prepare
from cases.finetune_sides import Comparison, NotInstalled, Side, SideError, compare
from cases.finetune_worker import LEAD

PEERS = ("hf", "hf-liger", "unsloth")
RECOMPUTE, GRAPHS = "memory.checkpointing", "training.cuda_graphs"
"""Keys of run files that cases need; a case is skipped where there is none."""
ATTENTION_SHARE = 6 / 7
UNIT = "tokens/s"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison: the plan without its folder, and what is asked of it."""

    plan: Mapping[str, Any]
    factors: Mapping[str, float]
    """What we must reach over a peer's rate."""
    peers: Sequence[str]
    alone: Sequence[str] = ()
    """Peers that need the whole card."""
    peak_of: str | None = None
    """The peer whose memory ours must not exceed."""
    needs: str | None = None
    """A key of run files."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other settings of ours, measured besides; each with keys that this version knows."""
    profiled: bool = False
    """Say, too, how busy the GPU is by our own profiler."""
    note: str = ""


_8B = {"shape": LLAMA_8B, "rows": 2, "row_tokens": 4096, "learning_rate": 3e-4}
_1B = {"shape": LLAMA_1B, "rows": 2, "row_tokens": 4096, "learning_rate": 1e-4, "lora": False}
_AT_8B, _AT_1B = "Llama-3.1-8B shape, LoRA r=16 on all linear layers", "1B shape (16 layers, 2048, tied), all weights"
_ROWS = "2 documents of 3,840 to 4,096 tokens a step, peers padded to 4,096"
_PACKED = "packed rows of 4,096 tokens, LoRA r=16 on all linear layers; to peers a row is one document"


def _small(shape: dict[str, Any], name: str) -> Case:
    """A model that a GPU runs faster than the host launches it."""
    return Case(
        plan={"shape": shape, "rows": 1, "row_tokens": 4096, "packed": True, "learning_rate": 3e-4, "timed": 12},
        factors={"hf": 3.0, "unsloth": 1.5},
        peers=PEERS,
        needs=GRAPHS,
        settings={GRAPHS: True},
        variants={"eager": {GRAPHS: False}},
        profiled=True,
        note=f"{name} shape; {_PACKED}; ours as CUDA graphs",
    )


CASES: dict[str, Case] = {
    "lora-8b": Case(
        plan=_8B,
        factors={"unsloth": 1.10, "hf-liger": 1.6},
        peers=("unsloth", "hf-liger"),
        alone=("hf-liger", "hf"),
        peak_of="unsloth",
        variants={"not deterministic": {"training.deterministic": False}},
        note=f"{_AT_8B}; {_ROWS}; no layer recomputed",
    ),
    "lora-8b-recompute": Case(
        plan=_8B | {"recompute": True},
        factors={"unsloth": 1.10},
        peers=("unsloth", "hf-liger"),
        alone=("hf",),
        peak_of="unsloth",
        needs=RECOMPUTE,
        settings={RECOMPUTE: "full"},
        note=f"{_AT_8B}; {_ROWS}; every layer recomputed",
    ),
    "full-1b": Case(
        plan=_1B,
        factors={"hf-liger": 1.3},
        peers=("hf-liger",),
        settings={"optim.pure_bf16": True},
        note=f"{_AT_1B}; {_ROWS}; weights and moments in bf16",
    ),
    "full-1b-master": Case(
        plan=_1B | {"slack": 0.35},
        factors={},
        peers=("hf-liger",),
        note=f"{_AT_1B}; {_ROWS}; float32 masters and moments, peers all in bf16",
    ),
    "small-135m": _small(SMOLLM2_135M, "SmolLM2-135M"),
    "small-0.6b": _small(QWEN3_06B, "Qwen3-0.6B"),
}
BUSY = {"busy-lora-8b-eager": (False, 97.0), "busy-lora-8b": (True, 99.0)}
"""`lora-8b` by our own profiler: whether its steps are CUDA graphs, and the bar in %."""
NAMES = (*CASES, *BUSY)


def plan_of(name: str, case: Case, work: Path, pairs: int, **changed: Any) -> Plan:
    """The plan of a case, with rows enough for ours to take turns with so many others."""
    plan = Plan(name=name, work=str(work / name), settings=dict(case.settings), **(dict(case.plan) | changed))
    return replace(plan, steps=plan.checked + pairs * plan.turns * (LEAD + plan.timed) + 8)


def rows(
    rates: Rates, *, name: str, case: Case, work: Path, peers: Sequence[str] | None = None, **changed: Any
) -> list[Row]:
    """Measure a case; none where this version cannot do it.

    Args:
        rates: of the machine.
        name: of the case.
        case: what it is.
        work: folder for models and data; models that are there are used.
        peers: in place of the case's own.
        changed: fields of the plan.
    """
    if case.needs is not None and not knows(case.needs):
        print(f"{name} is skipped: run files have no {case.needs}", flush=True)
        return []
    peers = case.peers if peers is None else peers
    plan = plan_of(name, case, work, len(peers) + len(case.variants), **changed)
    prepare(plan)
    variants = {
        label: replace(plan, work=f"{plan.work}-{label.replace(' ', '-')}", settings=plan.settings | dict(settings))
        for label, settings in case.variants.items()
        if all(map(knows, settings))
    }
    for variant in variants.values():
        prepare(variant)
    limit = most_tokens_per_second(plan, rates)
    found = compare(plan, peers, alone=case.alone, variants=variants)
    busy: dict[str, float] = {}
    if case.profiled:
        try:
            busy = profiled(plan)
        except SideError as error:  # what was measured stays
            found.left_out["the profile"] = one_line(error)
            print(f"  {name}: how busy the GPU is stays unknown: {error}", flush=True)
    return [row_of(name, case, found, limit, busy)]


def row_of(name: str, case: Case, found: Comparison, limit: float, beside: Mapping[str, float]) -> Row:
    """What was found, with the bars that follow from the peers."""
    ours, others = found.ours, {label: side for label, side in found.sides.items() if label != "gapless"}
    peers = {label: side for label, side in others.items() if label not in case.variants}
    variants = {label: side.rate for label, side in others.items() if label in case.variants}
    bars = [factor * peers[label].rate for label, factor in case.factors.items() if label in peers]
    firsts = {"first_step_s": ours.first_step_s} | {f"first_step_s {x}": peer.first_step_s for x, peer in peers.items()}
    losses = ", ".join(f"{label} {side.losses[0]:.3f} to {side.losses[-1]:.3f}" for label, side in found.sides.items())
    notes = [case.note, f"loss over {len(ours.losses)} steps of the same documents: {losses}"]
    notes += [f"{label} by itself, after ours" for label in case.alone if label in peers]
    notes += [f"without {label}: {why}" for label, why in found.left_out.items()]
    peak = peers[case.peak_of].peak_gib if case.peak_of in peers else None
    return Row(
        case=name,
        unit=UNIT,
        gapless=ours.rate,
        peers={label: peer.rate for label, peer in peers.items()},
        limit=limit,
        peak_gib={"gapless": ours.peak_gib} | {label: peer.peak_gib for label, peer in others.items()},
        beside={**variants, "share of limit": ours.rate / limit, **firsts, **beside},
        note="; ".join(notes),
        bar=max(bars, default=None),
        peak_bar=peak,
    )


# ---- how busy the GPU is ----


_SHARE, _OF_PLAIN, _GAPS = "GPU busy %", "GPU busy % of steps without the profiler", "gaps over 5 us, ms a step"


def profiled(plan: Plan) -> dict[str, float]:
    """GPU busy of recorded steps, of steps without the profiler's cost, and what gaps take.

    Nothing where this version has no profiler.
    """
    with Side("profile", plan) as side:
        try:
            found = side.begin()
        except NotInstalled as error:
            print(f"  {plan.name}: how busy the GPU is stays unknown: {error}", flush=True)
            return {}
    return {_SHARE: found["busy"], _OF_PLAIN: found["plain"], _GAPS: found["gaps"]}


def busy_rows(rates: Rates, *, name: str, work: Path, **changed: Any) -> list[Row]:
    """A case of `BUSY`; no row where there are no CUDA graphs, or no profiler."""
    graphs, bar = BUSY[name]
    if graphs and not knows(GRAPHS):
        print(f"{name} is skipped: run files have no {GRAPHS}", flush=True)
        return []
    plan = plan_of(name, CASES["lora-8b"], work, 4, **changed)
    plan = replace(plan, settings=plan.settings | ({GRAPHS: graphs} if knows(GRAPHS) else {}))
    prepare(plan)
    beside = profiled(plan)
    if not beside:
        return []
    note = f"{_AT_8B}; {_ROWS}; {'CUDA graphs' if graphs else 'plain launches'}"
    return [Row(case=name, unit="% busy", gapless=beside.pop(_SHARE), limit=100.0, beside=beside, note=note, bar=bar)]


# ---- the limit ----


def most_tokens_per_second(plan: Plan, rates: Rates) -> float:
    """See the head of this file."""
    tokens = plan.rows * plan.row_tokens
    matmuls, flops, again = linear_layers(plan.shape, tokens, lora=plan.lora, device=plan.device)
    rate = flops / matmuls
    if plan.lora:
        forwards = 1 + plan.recompute
        matmuls += (4 + 2 * forwards) * adapter_elements(plan.shape) * tokens / rate
    if plan.recompute:
        matmuls += again
    documents = lengths(plan)[plan.checked * plan.rows :]
    squares = sum(length**2 for length in documents) / sum(documents)
    attention = 2 * squares * _width(plan.shape) * plan.shape["num_hidden_layers"] * (3.5 + plan.recompute)
    per_token = matmuls / tokens + attention / (ATTENTION_SHARE * rate)
    print(
        f"  {plan.name}: linear layers {flops / 1e9 / tokens:.1f} GFLOP a token at {rate / 1e9:.0f} TFLOP/s (of 8192^3 "
        f"{rates.matmul:.0f}), attention {attention / 1e9:.2f} GFLOP: at most {1e3 / per_token:.0f} tokens/s",
        flush=True,
    )
    return 1e3 / per_token


def _width(shape: Mapping[str, Any]) -> int:
    """Features of all query heads."""
    return shape["num_attention_heads"] * _head_dim(shape)


def _head_dim(shape: Mapping[str, Any]) -> int:
    return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]


def linear_shapes(shape: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """(inputs, outputs, how many in a model) of the linear layers, q, k and v as one, gate and up as one."""
    hidden, ffn, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    kv = shape["num_key_value_heads"] * _head_dim(shape)
    return {
        "qkv": (hidden, _width(shape) + 2 * kv, layers),
        "out": (_width(shape), hidden, layers),
        "gate_up": (hidden, 2 * ffn, layers),
        "down": (ffn, hidden, layers),
        "head": (hidden, shape["vocab_size"], 1),
    }


def adapter_elements(shape: Mapping[str, Any]) -> int:
    """Of adapters on all linear layers but the head."""
    hidden, ffn, q = shape["hidden_size"], shape["intermediate_size"], _width(shape)
    kv = shape["num_key_value_heads"] * _head_dim(shape)
    pairs = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]
    return shape["num_hidden_layers"] * R * sum(map(sum, pairs))


def linear_layers(shape: Mapping[str, Any], tokens: int, *, lora: bool, device: str) -> tuple[float, float, float]:
    """Milliseconds and FLOPs of a step's matmuls without adapters, and milliseconds of what recomputed layers add."""
    time = flops = again = 0.0
    for name, (inputs, outputs, count) in linear_shapes(shape).items():
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        grad = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        works = {"forward": partial(torch.mm, x, weight.t()), "grad_input": partial(torch.mm, grad, weight)}
        if not lora:
            works["grad_weight"] = partial(torch.mm, grad.t(), x)
        times = medians(works, warmup=10, rep=40)
        of_one = 2.0 * tokens * inputs * outputs
        time += count * sum(times.values())
        flops += count * of_one * len(works)
        if name not in ("head", "down"):  # a layer's last product is not made again
            again += count * times["forward"]
        del x, weight, grad, works
        free_memory()
    return time, flops, again


def cases(work: Path, names: Sequence[str], peers: Sequence[str] | None) -> dict[str, Any]:
    """Functions of the machine's rates, by name."""
    found: dict[str, Any] = {}
    for name in names:
        if name in BUSY:
            found[name] = partial(busy_rows, name=name, work=work)
        else:
            found[name] = partial(rows, name=name, case=CASES[name], work=work, peers=peers)
    return found
