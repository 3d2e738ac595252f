"""The arithmetic of the benchmarks, and every case of attention's on small documents on a CPU, without its times."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gapless.kernels.runtime import triton

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = ("common", "cases", "cases.attention", "cases.attention_sides")
pytestmark = pytest.mark.skipif(triton is None, reason="the benchmarks need Triton")


@pytest.fixture
def attention(monkeypatch):
    """benchmarks/cases/attention.py on a CPU, each call of which takes one millisecond."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from cases import attention, attention_sides

    def medians(works, **_):
        for work in works.values():
            work()
        return dict.fromkeys(works, 1.0)

    monkeypatch.setattr(attention, "medians", medians)
    monkeypatch.setattr(attention, "Problem", partial(attention_sides.Problem, device="cpu"))
    yield attention
    for module in MODULES:
        sys.modules.pop(module, None)


def rows_of(attention, case, peers=("fa2",)):
    from cases import Rates

    return {row.case: row for row in case(Rates(copy=1.0, matmul=700.0), peers)}


def small(case):
    """The same case with two documents of 24 tokens and few heads."""
    problem = case.keywords["problem"]
    hidden = max(2, problem.groups) * problem.v_head_dim
    return partial(case, problem=replace(problem, lengths=(24, 24), hidden=hidden, device="cpu"))


def test_results_do_not_make_a_commit_dirty(attention, tmp_path, monkeypatch):
    import common

    def git(*command):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True)

    kept = [tmp_path / "benchmarks" / "results" / "attention.json", tmp_path / "docs" / "benchmarks.md"]
    script = tmp_path / "benchmarks" / "common.py"
    for file in (*kept, script):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1\n")
    monkeypatch.setattr(common, "__file__", str(script))
    assert common.commit.__wrapped__() == "unknown"
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    clean = common.commit.__wrapped__()
    for file in kept:
        file.write_text("2\n")
    assert common.commit.__wrapped__() == clean
    script.write_text("2\n")
    assert common.commit.__wrapped__() == f"{clean}-dirty"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("script", ["attention.py", "kernels.py"])
def test_a_machine_without_a_gpu_is_told(script):
    run = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("error: this benchmark needs a GPU")
    assert "Traceback" not in run.stderr


def test_flops_are_of_the_documents_true_lengths(attention):
    options = {"head_dim": 64, "v_head_dim": 64, "hidden": 128}
    full = attention.Problem(lengths=(3, 5), causal=False, **options)
    assert full.flops("fwd") == 4 * 128 * (3 * 3 + 5 * 5)
    assert full.flops("bwd") == 2.5 * full.flops("fwd")
    causal = attention.Problem(lengths=(3, 5), **options)
    assert causal.flops("fwd") == full.flops("fwd") / 2
    assert attention.Problem(lengths=(8,), **options).flops("fwd") > causal.flops("fwd")
    grouped = attention.Problem(lengths=(3, 5), groups=2, **options)
    assert grouped.flops("bwd") == causal.flops("bwd")


def test_flops_where_values_are_narrower_than_keys(attention):
    problem = attention.Problem(lengths=(4,), head_dim=192, v_head_dim=128, hidden=256, causal=False)
    products = {"fwd": (192, 128), "bwd": (192, 128, 128, 192, 192)}
    for kind, widths in products.items():
        assert problem.flops(kind) == sum(2 * problem.heads * 4 * 4 * width for width in widths)


def test_mixed_lengths_fill_the_row_and_stay_the_same(attention):
    lengths = attention.mixed_lengths()
    assert sum(lengths) == attention.PACKED_TOKENS
    assert max(lengths) <= attention.LONGEST
    assert len(set(lengths)) > 5
    assert lengths == attention.mixed_lengths()


def test_versus_is_the_geometric_mean_of_common_cases(attention):
    def record(case, ours, peers, unit="TFLOP/s"):
        return {"case": case, "unit": unit, "gapless": ours, "peers": peers, "limit": 700.0}

    records = [
        record("fwd-a", 400, {"fa4": 200}),
        record("bwd-a", 100, {"fa4": 200, "fa2": 1}),
        record("fwd-b", 300, {"fa2": 100}),
        record("bwd-c", 800, {"fa4": 100}),
        record("packed-mix", 0.9, {"fa4": 0.1}, unit="x of dense"),
    ]
    row = attention.versus(records, "fa4")
    assert row.case == "vs-fa4"
    assert math.isclose(row.gapless, 2.0)  # the cube root of 2 x 1/2 x 8
    assert row.beside == pytest.approx({"forward": 2.0, "backward": 2.0, "lowest": 0.5})
    assert "3 cases" in row.note
    assert "bwd-a" in row.note
    assert attention.versus(records[2:3], "fa4") is None


def test_the_bars_are_those_of_cases(attention):
    assert set(attention.BARS) - {"vs-fa4"} == set(attention.QUICK)


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
@pytest.mark.parametrize("shape", ["hd64-full-8k", "hd128-gqa4-causal-2k", "hd192-128-causal-8k"])
def test_speed_of_dense_documents(attention, kind, shape):
    case = small(attention.CASES[f"{kind}-{shape}"])
    row = rows_of(attention, case)[f"{kind}-{shape}"]
    assert row.gapless == case.keywords["problem"].flops(kind) / 1e9
    assert ("fa2" in row.peers) == ("192" not in shape)
    assert "without" not in row.note


def test_a_wrong_peer_is_left_out_and_a_wrong_kernel_fails(attention, monkeypatch):
    from cases import attention_sides

    case = small(attention.CASES["fwd-hd64-causal-8k"])
    sides = attention_sides.sides

    def wrong(name, problem, names):
        return [
            replace(side, back=lambda x, back=side.back: back(x) * 1.05) if side.name == name else side
            for side in sides(problem, names)
        ]

    monkeypatch.setattr(attention, "sides", partial(wrong, "fa2"))
    row = rows_of(attention, case)["fwd-hd64-causal-8k"]
    assert not row.peers
    assert "without fa2: AssertionError" in row.note
    monkeypatch.setattr(attention, "sides", partial(wrong, "gapless"))
    with pytest.raises(AssertionError, match="gapless: off by"):
        rows_of(attention, case)


def test_share_of_packed_documents(attention, monkeypatch):
    for name, value in (("PACKED_TOKENS", 256), ("SHORTEST", 8), ("LONGEST", 100)):
        monkeypatch.setattr(attention, name, value)
    rows = rows_of(attention, attention.CASES["packed-mix"])
    lengths = attention.mixed_lengths()
    even = sum(n * n for n in lengths) // sum(lengths)
    share = sum(n * n for n in lengths) / (256 // even * even * even)  # FLOPs, as every call takes the same time
    assert list(rows) == ["packed-mix", "packed-mix-fwd", "packed-mix-bwd"]
    assert all(math.isclose(row.gapless, share) for row in rows.values())


def test_share_of_the_deterministic_backward(attention):
    seen = []

    def watched(works, **_):
        for name, work in works.items():
            work()
            seen.append(name)
        return {name: 2.0 if "deterministic" in name else 1.0 for name in works}

    attention.medians = watched
    row = rows_of(attention, small(attention.CASES["deterministic-hd64-causal-8k"]))["deterministic-hd64-causal-8k"]
    assert row.gapless == 0.5
    assert seen == ["gapless fast", "gapless deterministic"]
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
def test_errors_are_those_of_rounding(attention, kind):
    row = rows_of(attention, small(attention.CASES[f"error-{kind}-hd128-gqa4-causal"]))[
        f"error-{kind}-hd128-gqa4-causal"
    ]
    assert 0 < row.limit <= row.gapless <= 1.5 * row.limit
    assert row.bar == 2 * row.peers["fa2"]
    assert not row.missed()


def test_a_case_that_fails_is_named_and_the_others_go_on(attention, monkeypatch, tmp_path, capsys):
    import common

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for name, value in (("synchronize", None), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    def fails():
        raise ValueError("no such\nthing")

    row = common.Row(case="b", unit="TFLOP/s", gapless=1.0, limit=2.0)
    rows, failed = common.run_cases("some", {"a": fails, "b": lambda: [row]}, "the command")
    assert rows == [row]
    assert failed == {"a": "ValueError: no such thing"}
    kept = json.loads((tmp_path / "some.json").read_text())["rows"]
    assert [record["case"] for record in kept] == ["b"]
    common.print_failed(failed)
    assert capsys.readouterr().out.endswith("a FAILED ValueError: no such thing\n")
