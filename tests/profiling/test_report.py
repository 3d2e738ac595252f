"""The report and the page of made-up steps on a GPU, and of real ones on a CPU."""

import fcntl
import io
import json
import os
import signal
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from runs import make_config, write_inputs
from synthetic import call, frame, kernel, mark, op, recording, step

from gapless import cli
from gapless.batch import BatchLayout
from gapless.profiling.limits import AttentionWork, Rates
from gapless.profiling.record import Recorded, Recorder, _Steps, record
from gapless.profiling.report import show
from gapless.profiling.summary import analyse
from gapless.profiling.timeline import page
from gapless.training import trainer as trainer_module
from gapless.training.trainer import Trainer
from training.steps import Again, varied_steps

BF16 = "c10::BFloat16"


def gpu_steps(*, traced):
    """Two steps of 100 us: a matmul, attention, a norm, a read of a number, the update."""
    events = {"calls": [], "activities": [], "ops": [], "frames": [], "marks": []}
    for n in (0, 1):
        at, first = 100 * n, 10 * n
        names = ["gemm", "hopper_forward", "_norm_forward", "Memcpy DtoH (Device -> Pageable)", "_update_kernel"]
        for place, name in enumerate(names, start=1):
            launch = "cudaMemcpyAsync" if name.startswith("Memcpy") else "cudaLaunchKernel"
            events["calls"].append(call(first + place, at + 15 * place, at + 15 * place + 2, launch))
            kind, start = ("copy" if launch == "cudaMemcpyAsync" else "kernel"), at + 15 * place + 5
            events["activities"].append(kernel(first + place, start, start + 8, name, kind=kind, size=4))
        # The second kernel of the matmul.
        events["calls"].append(call(first + 6, at + 17, at + 17.5))
        events["activities"].append(kernel(first + 6, at + 28, at + 29, "splitKreduce"))
        events["calls"].append(call(first + 9, at + 62, at + 72, "cudaStreamSynchronize"))
        shapes = {"shapes": ((1000, 1000), (1000, 1000)), "dtypes": (BF16, BF16)} if traced else {}
        events["ops"] += [
            op("aten::mm", at + 14, at + 18, **shapes),
            op(
                "_RMSNorm",
                at + 44,
                at + 48,
                **({"shapes": ((10, 50), (50,)), "dtypes": (BF16, BF16)} if traced else {}),
            ),
            op("aten::item", at + 59, at + 73),
        ]
        events["marks"].append(mark("next batch", at + 1, at + 3))
        if traced:
            events["frames"].append(frame("/x/gapless/training/step.py", "</script><b>", at + 5, at + 95, line=60 + n))
    return recording([step(1, 0, 100), step(2, 100, 200)], **events)


@pytest.fixture(scope="module")
def recorded():
    return Recorded(
        rank=0,
        device="a GPU",
        first_step=8,
        plain=[90e-6, 100e-6, 95e-6],
        measured=gpu_steps(traced=False),
        traced=gpu_steps(traced=True),
        rates=Rates(matmul=1e15, copy=1e12, dtype=BF16),
        attention=AttentionWork(forward=6 * 10**9, backward=15 * 10**9, calls=2),
        update_bytes=10**6,
        micro_batches=(1, 2),
        tokens=1000,
    )


def test_numbers_of_a_gpu(recorded):
    report = json.loads(json.dumps(analyse(recorded, "made up").report, allow_nan=False))
    gpu = report["gpu"]
    assert gpu["wall_ms"] == pytest.approx((188 - 20) / 1e3)
    assert gpu["busy_ms"] == pytest.approx(82 / 1e3)
    assert gpu["busy_percent"] == pytest.approx(100 * 82 / 168)
    assert gpu["busy_percent_of_plain_steps"] == pytest.approx(100 * 41 / 95)
    assert [(row["step"], row["launches"]) for row in gpu["steps"]] == [(8, 6), (9, 6)]
    assert gpu["gaps_over_5_us"] == 9
    assert sum(row["ms"] for row in gpu["causes"]) == pytest.approx(86 / 1e3)
    assert sum(row["gaps"] for row in gpu["causes"]) == 9
    assert {row["cause"] for row in gpu["causes"]} == {"launch late", "synchronisation"}
    assert gpu["gaps"][0]["us"] == pytest.approx(32)
    kinds = {row["kind"]: row for row in report["kinds"]}
    assert sum(row["percent"] for row in kinds.values()) == pytest.approx(100)
    assert kinds["matmul"]["limit_ms"] == pytest.approx(2e9 / 1e15 * 1e3)
    assert kinds["matmul"]["limit_percent"] == pytest.approx(100 * 2 / (8 + 1))
    assert kinds["attention forward"]["limit_ms"] == pytest.approx(3 / 1e3)
    assert kinds["norm"]["limit_ms"] == pytest.approx(2e-3 / 1e3)
    assert kinds["optimizer"]["limit_ms"] == pytest.approx(1 / 1e3)
    assert kinds["copies"]["limit_ms"] is None
    assert [(row["call"], row["per_step"], row["place"]) for row in report["syncs"]] == [
        ("cudaStreamSynchronize", 1, "gapless/training/step.py:60 in </script><b>"),
        ("cudaMemcpyAsync: Memcpy DtoH (Device -> Pageable)", 1, "gapless/training/step.py:60 in </script><b>"),
    ]


@pytest.mark.parametrize(("calls", "forwards"), [(1, 2), (2, 1), (3, None)])
def test_attention_has_a_limit_where_layers_ran_equally_often(recorded, calls, forwards):
    """Two launches in two steps: each layer twice, once, or who knows."""
    changed = replace(recorded, attention=AttentionWork(forward=6 * 10**9, backward=15 * 10**9, calls=calls))
    changed = replace(changed, traced=with_backward(changed.traced))
    kinds = {row["kind"]: row for row in analyse(changed, "made up").report["kinds"]}
    limits = [kinds[f"attention {part}"]["limit_ms"] for part in ("forward", "backward")]
    assert limits == ([None, None] if forwards is None else pytest.approx([forwards * 3 / 1e3, 7.5 / 1e3]))


def with_backward(seen):
    """The recording with the backward of attention in place of the norm."""
    activities = [
        replace(event, name="hopper_backward") if event.name == "_norm_forward" else event for event in seen.activities
    ]
    return replace(seen, activities=tuple(activities))


def test_tables_show_it(recorded):
    text = io.StringIO()
    show(analyse(recorded, "made up").report, Console(file=text, width=200))
    shown = text.getvalue()
    for part in ("GPU busy 48.81 %", "GPU by step", "9 gaps over 5 us", "cudaStreamSynchronize", "hopper_forward"):
        assert part in shown


class Page(HTMLParser):
    """Elements that are open, what they refer to, and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.scripts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def check_page(text):
    parsed = Page(text)
    assert not parsed.open
    assert not parsed.references
    data, code = parsed.scripts
    assert not any(
        word in text.replace(data, "") for word in ("://", "url(", "@import", "fetch(", "XMLHttp", "/*DATA*/")
    )
    assert "import " not in code
    return json.loads(data)


def test_the_page_of_a_gpu(recorded):
    data = check_page(page(recorded, analyse(recorded, "made up")))
    measured, traced = data["recordings"]
    rows = {row["name"]: row["events"] for row in measured["rows"]}
    assert len(rows["GPU stream 7"]) == 12
    assert len(rows["GPU idle"]) == 9
    assert any("</script><b>" in event[4] for event in rows["GPU idle"])
    start, duration, name, kind, _ = rows["GPU stream 7"][0]
    assert (start, duration, measured["names"][name], measured["names"][kind]) == (20, 8, "gemm", "matmul")
    assert any("</script><b>" in name for name in traced["names"])
    assert traced["left_out"] == measured["left_out"] == 0


# ---- on a CPU ----


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("profile"))
    keys = ["eval = 'eval.jsonl'", "output_dir = 'runs/tiny'", "max_length = 128", "gradient_accumulation_steps = 2"]
    keys += ["r = 4", "dtype = 'fp32'", "device = 'cpu'", "eval_steps = 1", "sample_prompts = ['Hello']"]
    keys += ["sample_tokens = 7", "per_device_eval_batch_size = 2", "save_steps = 1", "warmup_steps = 100"]
    (folder / "run.toml").write_text("\n".join(["model = 'model'", "train = 'train.jsonl'", *keys]))
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "metrics.jsonl").write_text("of the real run\n")
    return folder


def test_the_command(inputs, capsys):
    arguments = ["--steps", "2", "--before=1", "--training.seed", "3"]
    assert cli.main(["profile", str(inputs / "run.toml"), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "there is no GPU in this run" in shown
    assert "Operations on the host" in shown
    folder = inputs / "runs" / "tiny-profile"
    assert {path.name for path in folder.iterdir()} == {
        "report-rank0.json",
        "timeline-rank0.html",
        "trace-measured-rank0.json.gz",
        "trace-traced-rank0.json.gz",
        "tokens",
    }
    assert [path.name for path in (inputs / "runs" / "tiny").iterdir()] == ["metrics.jsonl"]
    report = json.loads((folder / "report-rank0.json").read_text())
    assert report["gpu"] is report["kinds"] is report["memory"] is report["rates"] is None
    assert report["steps"]["first"] == 1 + 2 + 4
    assert report["steps"]["recorded"] == len(report["steps"]["plain_ms"]) == len(report["steps"]["traced_ms"]) == 2
    assert (report["steps"]["micro_batches"], report["steps"]["tokens"]) == ([2, 2], 128)
    calls = {(row["op"], row["kind"]): row["calls"] for row in report["host"]["ops"]}
    # Of each micro-batch: queries, output, gate and up, down in two layers; the backward of all but the first input.
    assert calls["aten::addmm", "matmul"] == 2 * 4 * 2
    assert calls["_RMSNorm", "norm"] == 2 * 5
    data = check_page((folder / "timeline-rank0.html").read_text())
    assert not any(row["name"].startswith("GPU") for recording in data["recordings"] for row in recording["rows"])
    names = data["recordings"][1]["names"]
    assert any(name.startswith("train_step (gapless/training/step.py:") for name in names)


def test_full_fine_tuning(inputs, tmp_path):
    config = make_config(inputs, tmp_path / "none", "full", max_steps=2)
    found = record(config, tmp_path / "profile", steps=1, before=1)
    assert not (tmp_path / "none").exists()
    assert found.first_step == 1 + 1 + 4
    assert len(found.traced.steps) == 1
    assert {name for name in (mark.name for mark in found.measured.marks)} == {"next batch", "read metrics"}
    assert found.attention.calls == 2 * 2
    assert any(frame.caller and frame.file for frame in found.traced.frames)


def test_steps_that_follow_change_nothing(inputs, tmp_path, monkeypatch):
    """Many ranks stop up to two steps after one of them asks for it, and read the metrics of all."""
    own, collected = Recorder.on_step_end, []

    def on_step_end(recorder, trainer, metrics):
        own(recorder, trainer, metrics)
        if recorder.recorded is not None:
            collected.append(recorder.recorded)
            for _ in range(4):
                own(recorder, trainer, metrics)
            assert recorder.recorded is collected[0]

    monkeypatch.setattr(Recorder, "on_step_end", on_step_end)
    found = record(make_config(inputs, tmp_path / "none", max_steps=2), tmp_path / "profile", steps=1, before=1)
    assert found is collected[0]


@pytest.mark.parametrize("together", [False, True])
def test_micro_batches_that_run_are_counted(monkeypatch, together):
    """Without trained tokens a rank leaves one out, unless its layers are other ranks', too; if all are, the step."""
    seen, run = [], object.__new__(_Steps)
    run._parallel, run.launching = SimpleNamespace(together=together), seen.append
    monkeypatch.setattr(Trainer, "_launch", lambda *_, **__: None)
    steps = varied_steps(BatchLayout(rows=1, row_tokens=12, row_documents=3), 8)
    for data in steps:
        run._launch(data, stop=False)
    trained = [[bool(batch.num_trained) for batch in data.micro_batches] for data in steps[:-1]]
    assert [len(batches) for batches in seen[:-1]] == [len(each) if together else sum(each) for each in trained]
    assert not all(map(all, trained))
    assert seen[-1] == []


def test_steps_that_are_graphs(inputs, tmp_path, monkeypatch):
    """Lines are those of replays; shapes and memory those of steps launched kernel by kernel."""
    recorders = []

    def recorder(device):
        recorders.append(Again())
        return recorders[-1]

    monkeypatch.setattr(trainer_module, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(trainer_module, "CudaRecorder", recorder)
    found = record(make_config(inputs, tmp_path / "none", max_steps=2), tmp_path / "profile", steps=1, before=1)
    assert recorders[0].replays
    assert recorders[0].forgotten == 1
    frames = {name: {frame.function for frame in getattr(found, name).frames} for name in ("traced", "launched")}
    assert "replay" in frames["traced"]
    assert "train_step" not in frames["traced"]
    assert "replay" not in frames["launched"]
    assert "train_step" in frames["launched"]
    assert found.by_kernel is found.launched
    assert set(found.traces) == {"measured", "traced", "launched"}
    assert found.attention.calls == 2 * 2
    report = analyse(found, "graphs").report
    assert len(report["steps"]["launched_ms"]) == 1
    assert report["steps"]["graphs_recorded"] == found.graphs
    text = io.StringIO()
    show({**report, "steps": {**report["steps"], "graphs_recorded": 3}}, Console(file=text, width=200))
    assert "steps are CUDA graphs" in text.getvalue()
    assert "3 graphs were recorded during the measured steps" in text.getvalue()
    assert len(check_page(page(found, analyse(found, "graphs")))["recordings"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--before", "0"], "--before must be at least 1, not 0"),
        (["--steps", "many"], "many"),
        (["--stepz", "3"], "stepz"),
        (["--output", "runs/tiny"], "is the run's own folder"),
        (["--output", "runs/tiny/../tiny/profile"], "is the run's own folder or in it"),
        (["--data.max_length", "0"], "data.max_length: must be at least 2, not 0"),
    ],
)
def test_mistakes(inputs, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(inputs)
    assert cli.main(["profile", "run.toml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/tiny/report-rank0.json").exists()


def test_folders_of_others_are_left_alone(inputs, tmp_path, capsys):
    """A run in a folder that profiles use, and another profile's that is under way; files of an earlier one go."""
    run, old = tmp_path / "profiled-run", tmp_path / "report-rank7.json"
    arguments = ["profile", str(inputs / "run.toml"), "--steps", "1", "--before", "1", "--output", str(tmp_path)]
    run.mkdir()
    (run / "notes.txt").touch()
    old.touch()
    assert cli.main(arguments) == 2
    assert f"{run} is not of a profile, and would be removed" in capsys.readouterr().err
    assert (run / "notes.txt").exists()
    (run / "notes.txt").rename(run / "made-by-gapless-profile")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(arguments) == 2
    assert "another process is training in" in capsys.readouterr().err
    assert run.exists()
    assert old.exists()
    assert cli.main(arguments) == 0
    assert not run.exists()
    assert not old.exists()


def test_too_few_steps_with_something_to_train(inputs, tmp_path, monkeypatch):
    """Skipped steps have no metrics."""
    launch, nothing = Trainer._launch, iter([False, True, True, True, True, True])

    def skipping(self, data, *, stop):
        return None if next(nothing, False) else launch(self, data, stop=stop)

    monkeypatch.setattr(Trainer, "_launch", skipping)
    with pytest.raises(ValueError, match="7 steps of 12 had something to train, and 8 are needed"):
        record(make_config(inputs, tmp_path / "none", max_steps=2), tmp_path / "profile", steps=1, before=1)


def test_a_signal_stops_it(inputs, tmp_path, capsys, monkeypatch):
    """While the profiler runs: it is switched off, and what was begun is removed."""

    def interrupted(recorder, trainer, metrics, on_step_end=Recorder.on_step_end):
        on_step_end(recorder, trainer, metrics)
        if metrics["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Recorder, "on_step_end", interrupted)
    arguments = ["--steps", "1", "--before", "1", "--output", str(tmp_path / "profile")]
    assert cli.main(["profile", str(inputs / "run.toml"), *arguments]) == 143
    assert "stopped before its steps were recorded" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["tokens"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # it would complain of one that is on
