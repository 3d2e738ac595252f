"""`gapless profile` on a GPU: what is known of a tiny run is found in its report."""

import json
import time

import pytest
import torch
from runs import make_config, write_inputs

from gapless.data.loader import Loader
from gapless.models.decoder import Decoder
from gapless.profiling.kinds import KERNELS
from gapless.profiling.report import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("profile"))


def report_of(inputs, folder, kind, *, graphs):
    config = make_config(inputs, folder / "none", kind, device="cuda", dtype="bf16", max_steps=2, cuda_graphs=graphs)
    # So many that there is a graph for every batch.
    report = profile(config, folder / "profile", steps=STEPS, before=25 if graphs else 2)
    assert (report["steps"]["graphs_recorded"], report["steps"]["launched_ms"] is not None) == (
        (0, True) if graphs else (None, False)
    )
    assert not (folder / "none").exists()
    assert json.loads((folder / "profile" / "report-rank0.json").read_text()) == report
    return report


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_run(inputs, tmp_path, kind, graphs):
    report = report_of(inputs, tmp_path, kind, graphs=graphs)
    gpu = report["gpu"]
    assert 0 < gpu["busy_percent"] <= 100
    assert len(gpu["steps"]) == STEPS
    assert all(row["launches"] > 50 for row in gpu["steps"])
    gaps = sum(row["ms"] for row in gpu["causes"])
    assert gpu["busy_ms"] + gaps + gpu["idle_in_short_gaps_ms"] == pytest.approx(gpu["wall_ms"], rel=0.01)
    assert gpu["gaps_over_5_us"] == sum(row["gaps"] for row in gpu["causes"])
    assert {row["cause"] for row in gpu["causes"]} - {"unknown"}, "launches were recorded"
    late = [row for row in gpu["causes"] if row["cause"] not in ("device", "unknown")]
    assert late, "so small a model keeps no GPU busy"
    assert any((row["place"] or "").startswith("gapless/") for row in late), "lines of ours are found"
    assert graphs or any(row["cause"] == "launch late" for row in late)

    kinds = {row["kind"]: row for row in report["kinds"]}
    wanted = {"matmul", "attention forward", "attention backward", "norm", "rope", "activation", "head and loss"}
    assert wanted | {"optimizer"} | ({"lora"} if kind == "lora" else set()) <= kinds.keys()
    for name in ("matmul", "norm", "activation", "attention forward", "attention backward", "optimizer"):
        assert kinds[name]["limit_ms"] > 0, name
        assert kinds[name]["limit_ms"] < kinds[name]["ms"], f"{name} is faster than its limit"
    names = {row["kernel"] for row in report["kernels"]}
    assert names & KERNELS.keys()
    assert report["rates"]["matmul_tflops"] > 1
    assert report["memory"]["peak_gib"] > 0
    assert {"forward", "backward", "optimizer"} <= {row["part"] for row in report["memory"]["parts"]}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_has_no_synchronisation(inputs, tmp_path, graphs):
    report = report_of(inputs, tmp_path, "lora", graphs=graphs)
    held = [row for row in report["syncs"] if not row["reads_metrics"] and row["thread"] != "worker"]
    assert not [row for row in held if row["kind"] != "allocation"], held
    (read,) = [row for row in report["syncs"] if row["reads_metrics"]]
    assert read["per_step"] == 1
    assert read["place"].startswith("gapless/training/step.py:")


def test_a_synchronisation_is_found(inputs, tmp_path, monkeypatch):
    """One that is put into the forward, with its line, and the gaps after it."""

    def forward(self, tokens, segments, cache=None, original=Decoder.forward):
        hidden = original(self, tokens, segments, cache)
        hidden.sum().item()
        return hidden

    monkeypatch.setattr(Decoder, "forward", forward)
    report = report_of(inputs, tmp_path, "lora", graphs=False)
    held = [row for row in report["syncs"] if row["call"] == "cudaStreamSynchronize" and not row["reads_metrics"]]
    assert sum(row["per_step"] for row in held) == 2, "one in each micro-batch"
    assert any(row["cause"] in ("synchronisation", "copy") for row in report["gpu"]["causes"])


@pytest.mark.parametrize("graphs", [False, True])
def test_waiting_for_the_data_is_found(inputs, tmp_path, monkeypatch, graphs):
    """A batch that comes late, and the gap that it makes."""

    def next_step(self, original=Loader.next_step):
        time.sleep(0.1)
        return original(self)

    monkeypatch.setattr(Loader, "next_step", next_step)
    report = report_of(inputs, tmp_path, "lora", graphs=graphs)
    waits = [row for row in report["gpu"]["causes"] if row["cause"] == "data"]
    assert sum(row["ms"] for row in waits) > 50 * (STEPS - 1)
