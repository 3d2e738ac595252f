"""Attention: documents of one length beside the peers, packed ones beside dense, determinism, errors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from common import Row, Work, assert_close, medians, one_line

from cases import Rates
from cases.attention_sides import HIDDEN, Problem, Side, failures, sides

TOKENS, PACKED_TOKENS, SHORTEST, LONGEST = 16384, 32768, 128, 8192
REP_MS, AHEAD_US = 60, 500
FORWARD, BACKWARD = "fwd", "bwd"
UNIT = "TFLOP/s"
BARS = {
    "fwd-hd128-causal-8k": 600,
    "fwd-hd128-causal-16k": 620,
    "fwd-hd128-full-16k": 650,
    "fwd-hd64-causal-8k": 480,
    "fwd-hd256-causal-8k": 600,
    "bwd-hd128-causal-8k": 500,
    "bwd-hd128-full-16k": 540,
    "bwd-hd64-causal-8k": 430,
    "packed-mix": 0.85,
    "deterministic-hd128-causal-8k": 0.8,
    "vs-fa4": 0.97,
}

Case = Callable[[Rates, Sequence[str]], list[Row]]
"""Of the machine's rates and the peers that are there."""


def documents(length: int) -> tuple[int, ...]:
    """Documents of one length that fill the stream."""
    return (length,) * max(TOKENS // length, 1)


# ---- what is right ----


def exact(problem: Problem, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of q, k, v in float32; for the documents of `problem` and the heads of `values`."""
    *inputs, grad = (x.detach().float() for x in values)
    inputs = [x.requires_grad_() for x in inputs]
    parts = zip(*(x.split(problem.lengths) for x in inputs), strict=True)
    out = torch.cat([_exact_document(*part, causal=problem.causal) for part in parts])
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _exact_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)  # [K, N/K, S, D]
    k, v = (x.transpose(0, 1).unsqueeze(1) for x in (k, v))
    scores = grouped @ k.mT * q.shape[2] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(1, 2)


def last_group(problem: Problem, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The last document's last key head of each [T, heads, features], with the query heads that share it."""
    kv_heads = problem.heads // problem.groups
    return [x[-problem.lengths[-1] :, -(x.shape[1] // kv_heads) :] for x in tensors]


def results(side: Side, kind: str, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, or the gradients of q, k, v, each [T, heads, features]."""
    found: Any = side.work(kind, values)()
    return [side.back(x.detach()) for x in found]


# ---- rows ----


def checked(
    problem: Problem, kind: str, values: Sequence[torch.Tensor], candidates: Sequence[Side]
) -> tuple[dict[str, Work], str]:
    """What each side repeats, where it gets the last document's last heads right; and why peers are left out.

    Raises:
        AssertionError: ours is wrong.
    """
    document = Problem(**vars(problem) | {"lengths": problem.lengths[-1:]})
    expected = exact(document, last_group(problem, values))
    expected = expected[:1] if kind == FORWARD else expected[1:]
    works, left_out = {}, []
    for side in candidates:
        if kind == BACKWARD and not side.has_backward:
            continue
        try:
            found = last_group(problem, results(side, kind, values))
            for name, ours, wanted in zip("o" if kind == FORWARD else "qkv", found, expected, strict=True):
                assert_close(f"{side.name}, gradient of {name}" if kind == BACKWARD else side.name, ours, wanted, 1e-2)
            works[side.name] = side.work(kind, values)
        except failures() as error:
            if side.name == "gapless":
                raise
            left_out.append(f"without {side.name}: {one_line(error)}")
            print(left_out[-1])
    return works, "; ".join(left_out)


def speed(works: Mapping[str, Work], flops: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s of each, in turns, without launches."""
    times = medians(works, rep=REP_MS, ahead_us=AHEAD_US)
    return {name: flops[name] / time / 1e9 for name, time in times.items()}


def dense(rates: Rates, peers: Sequence[str], *, case: str, problem: Problem, kind: str) -> list[Row]:
    """Documents of one length."""
    values = problem.values()
    works, left_out = checked(problem, kind, values, sides(problem, peers))
    rate = speed(works, dict.fromkeys(works, problem.flops(kind)))
    count = len(problem.lengths)
    note = f"{count} document{'s' if count > 1 else ''}, {problem.heads} heads"
    return [
        Row(
            case=case,
            unit=UNIT,
            gapless=rate.pop("gapless"),
            peers=rate,
            limit=rates.matmul,
            note="; ".join(filter(None, [note, left_out])),
            bar=BARS.get(case),
        )
    ]


def mixed_lengths(seed: int = 0) -> tuple[int, ...]:
    """Log-uniform between `SHORTEST` and `LONGEST`, `PACKED_TOKENS` together."""
    draw, lengths = random.Random(seed), []
    while (left := PACKED_TOKENS - sum(lengths)) > 0:
        length = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
        lengths.append(min(length, left))
    draw.shuffle(lengths)
    return tuple(lengths)


def packed(_: Rates, peers: Sequence[str], *, case: str, head_dim: int) -> list[Row]:
    """A packed row against documents of one length with about the same tokens and FLOPs, each side by itself."""
    lengths = mixed_lengths()
    even = sum(length**2 for length in lengths) // sum(lengths)
    layouts = {"packed": lengths, "dense": (even,) * (PACKED_TOKENS // even)}
    varlen = [name for name in peers if name in ("fa3", "fa4")]
    rows, shares = [], []
    for kind in (FORWARD, BACKWARD):
        works, flops, left_out = {}, {}, []
        for layout, of in layouts.items():
            problem = Problem(lengths=of, head_dim=head_dim, v_head_dim=head_dim)
            found, why = checked(problem, kind, problem.values(), sides(problem, varlen))
            works |= {f"{name} {layout}": work for name, work in found.items()}
            flops |= {f"{name} {layout}": problem.flops(kind) for name in found}
            left_out += [why] if why else []
        rate = speed(works, flops)
        share = {
            name: rate[f"{name} packed"] / rate[f"{name} dense"]
            for name in ("gapless", *varlen)
            if {f"{name} packed", f"{name} dense"} <= rate.keys()
        }
        shares.append(share)
        documents_ = f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, or all of {even}"
        rows.append(_share(f"{case}-{kind}", share, rate, "; ".join(["TFLOP/s", documents_, *left_out])))
    forward, backward = shares
    both = {name: min(value, backward[name]) for name, value in forward.items() if name in backward}
    beside = {"forward": forward["gapless"], "backward": backward["gapless"]}
    return [_share(case, both, beside, "the lower of forward and backward"), *rows]


def _share(case: str, share: Mapping[str, float], beside: Mapping[str, float], note: str) -> Row:
    peers = {name: value for name, value in share.items() if name != "gapless"}
    options = {"peers": peers, "limit": 1.0, "beside": dict(beside), "note": note, "bar": BARS.get(case)}
    return Row(case=case, unit="x of dense", gapless=share["gapless"], **options)


def deterministic(_: Rates, peers: Sequence[str], *, case: str, problem: Problem) -> list[Row]:
    """The backward with the same bits every time, beside the one without that promise."""
    values, names = problem.values(), [name for name in peers if name == "fa4"]
    fast, left_out = checked(problem, BACKWARD, values, sides(problem, names))
    with determinism():
        same, left_out_too = checked(problem, BACKWARD, values, sides(problem, names, deterministic=True))
    works = {f"{name} fast": work for name, work in fast.items()}
    works |= {f"{name} deterministic": partial(_determined, work) for name, work in same.items()}
    rate = speed(works, dict.fromkeys(works, problem.flops(BACKWARD)))
    share = {name: rate[f"{name} deterministic"] / rate[f"{name} fast"] for name in fast if name in same}
    return [
        Row(
            case=case,
            unit="x of fast",
            gapless=share.pop("gapless"),
            peers=share,
            limit=1.0,
            beside=rate,
            note="; ".join(filter(None, [f"{UNIT} of the backward", left_out, left_out_too])),
            bar=BARS.get(case),
        )
    ]


@contextmanager
def determinism() -> Generator[None]:
    """Torch's setting, as training has it: new memory is not filled."""
    before, memory = torch.get_deterministic_debug_mode(), torch.utils.deterministic
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = fill


def _determined(work: Work) -> object:
    with determinism():
        return work()


def errors(_: Rates, peers: Sequence[str], *, case: str, problem: Problem, kind: str) -> list[Row]:
    """Norm of the error over the norm of what float32 gives; of gradients the worst."""
    values = problem.values()
    wanted = exact(problem, values)
    wanted = wanted[:1] if kind == FORWARD else wanted[1:]
    found: dict[str, list[float]] = {"limit": [_error(x.bfloat16(), x) for x in wanted]}
    left_out = []
    for side in sides(problem, peers):
        if kind == BACKWARD and not side.has_backward:
            continue
        try:
            found[side.name] = [_error(x, y) for x, y in zip(results(side, kind, values), wanted, strict=True)]
        except failures() as error:
            if side.name == "gapless":
                raise
            left_out.append(f"without {side.name}: {one_line(error)}")
    worst = {name: max(each) for name, each in found.items()}
    names = ("out",) if kind == FORWARD else ("dq", "dk", "dv")
    torchs = [worst[name] for name in ("fa2", "cudnn") if name in worst]
    return [
        Row(
            case=case,
            unit="relative error",
            limit=worst.pop("limit"),
            gapless=worst.pop("gapless"),
            peers=worst,
            beside=dict(zip(names, found["gapless"], strict=True)),
            note="; ".join(["limit: float32 rounded once", *left_out]),
            bar=2 * torchs[0] if torchs else None,
            lower_is_better=True,
        )
    ]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def versus(records: Sequence[Mapping[str, Any]], peer: str) -> Row | None:
    """The geometric mean of our speed over a peer's, over all records of speeds that have both; None without any."""
    common = [record for record in records if record["unit"] == UNIT and peer in record["peers"]]
    if not common:
        return None
    ratios = {record["case"]: record["gapless"] / record["peers"][peer] for record in common}
    kinds = {FORWARD: "forward", BACKWARD: "backward"}
    beside = {
        name: _geometric_mean(parts)
        for kind, name in kinds.items()
        if (parts := [ratio for case, ratio in ratios.items() if case.startswith(kind)])
    }
    lowest = min(ratios, key=lambda case: ratios[case])
    return Row(
        case=f"vs-{peer}",
        unit=f"x of {peer}",
        gapless=_geometric_mean(ratios.values()),
        limit=_geometric_mean(record["limit"] / record["peers"][peer] for record in common),
        beside=beside | {"lowest": ratios[lowest]},
        note=f"geometric mean over {len(common)} cases; the lowest is {lowest}",
        bar=BARS.get(f"vs-{peer}"),
    )


def _geometric_mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


# ---- which ----


def _shapes() -> Iterator[tuple[str, Problem]]:
    """Problems by name: head dim, mask, tokens of a document."""
    for head_dim in (64, 128, 256):
        for causal in (True, False):
            for length in (1024, 2048, 4096, 8192, 16384, 32768):
                problem = Problem(lengths=documents(length), head_dim=head_dim, v_head_dim=head_dim, causal=causal)
                yield f"hd{head_dim}-{'causal' if causal else 'full'}-{length // 1024}k", problem
    for length in (2048, 8192, 16384):
        problem = Problem(lengths=documents(length), head_dim=128, v_head_dim=128, groups=4)
        yield f"hd128-gqa4-causal-{length // 1024}k", problem
    yield "hd192-128-causal-8k", Problem(lengths=documents(8192), head_dim=192, v_head_dim=128)


def _small() -> Iterator[tuple[str, Problem]]:
    """Problems whose whole result is computed in float32."""
    dims = ((64, 64, 1), (128, 128, 1), (256, 256, 1), (128, 128, 4), (192, 128, 1))
    for head_dim, v_head_dim, groups in dims:
        name = f"hd{head_dim}" + (f"-{v_head_dim}" if v_head_dim != head_dim else "") + ("-gqa4" if groups > 1 else "")
        for causal in (True, False):
            options = {"head_dim": head_dim, "v_head_dim": v_head_dim, "groups": groups, "causal": causal}
            problem = Problem(lengths=(1024, 1024), hidden=HIDDEN // 2, **options)
            yield f"{name}-{'causal' if causal else 'full'}", problem


def _cases() -> Iterator[tuple[str, Case]]:
    for kind in (FORWARD, BACKWARD):
        for name, problem in _shapes():
            yield f"{kind}-{name}", partial(dense, case=f"{kind}-{name}", problem=problem, kind=kind)
    yield "packed-mix", partial(packed, case="packed-mix", head_dim=128)
    yield "packed-mix-hd64", partial(packed, case="packed-mix-hd64", head_dim=64)
    for name, problem in _shapes():
        if name in ("hd64-causal-8k", "hd128-causal-8k", "hd128-full-16k"):
            yield f"deterministic-{name}", partial(deterministic, case=f"deterministic-{name}", problem=problem)
    for kind in (FORWARD, BACKWARD):
        for name, problem in _small():
            yield f"error-{kind}-{name}", partial(errors, case=f"error-{kind}-{name}", problem=problem, kind=kind)


CASES: dict[str, Case] = dict(_cases())
QUICK = [case for case in CASES if case in BARS]
