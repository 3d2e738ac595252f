"""The benchmarks of training on a CPU: tiny models, the same code, and what must not be published is not."""

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gapless.kernels.runtime import triton

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
pytestmark = pytest.mark.skipif(triton is None, reason="the benchmarks need Triton")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Modules of benchmarks/ can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "common" or name.split(".")[0] in ("cases", "finetune_gpu", "ablations"):
            del sys.modules[name]


class Script:
    """A channel with what is to be done, that keeps the answers."""

    def __init__(self, *todo):
        self.todo = [{"do": "begin"}, *todo, {"do": "end"}]
        self.sent = []

    def send(self, message):
        self.sent.append(json.loads(json.dumps(message)))

    def receive(self):
        return self.todo.pop(0)


@pytest.fixture
def plan(tmp_path):
    from cases.finetune_plan import Plan, prepare

    plan = Plan(
        name="tiny",
        work=str(tmp_path / "tiny"),
        shape=SHAPE,
        rows=2,
        row_tokens=48,
        learning_rate=3e-3,
        checked=4,
        timed=2,
        steps=16,
        device="cpu",
    )
    prepare(plan)
    return plan


def answers(side, plan, *todo):
    from cases.finetune_worker import work

    script = Script(*todo)
    work(side, plan, script)
    assert not [answer for answer in script.sent if "error" in answer], script.sent
    return script.sent


# ---- what is trained ----


def test_first_steps_repeat_their_documents_and_later_ones_have_other_lengths(plan):
    from cases.finetune_plan import batches

    planned = batches(plan)
    first = planned[0].tokens
    assert all(torch.equal(batch.tokens, first) for batch in planned[: plan.checked])
    assert first.unique().numel() > 30
    assert planned[0].num_trained == plan.rows * (plan.row_tokens - 1)
    later = [batch.segments.lengths for batch in planned[plan.checked :]]
    assert len(set(later)) > 3
    assert all(45 <= length <= 48 for pair in later for length in pair)
    texts = [json.loads(line)["text"] for line in plan.data.read_text().splitlines()]
    assert texts[0].split()[:5] == [str(token) for token in first[:5].tolist()]


def test_packed_rows_hold_documents_that_are_one_to_a_peer(plan, tmp_path):
    from cases.finetune_plan import batches, prepare
    from cases.finetune_worker import as_rows

    packed = replace(plan, work=str(tmp_path / "packed"), rows=1, row_tokens=1024, packed=True)
    prepare(packed)
    planned = batches(packed)
    assert all(batch.segments.lengths == (1024,) for batch in planned[: packed.checked])
    assert max(len(batch.segments.lengths) for batch in planned) > 1
    batch = next(batch for batch in planned[packed.checked :] if len(batch.segments.lengths) > 1)
    tokens, labels = as_rows(batch, packed)
    assert tokens.shape == (1, 1024)
    assert torch.equal(tokens[0], batch.tokens.long())
    assert torch.equal(labels[0, : batch.num_tokens], tokens[0, : batch.num_tokens])
    assert (labels[0, batch.num_tokens :] == -100).all()


def test_a_peer_gets_a_document_a_row(plan):
    from cases.finetune_plan import batches
    from cases.finetune_worker import as_rows

    batch = batches(plan)[-1]
    tokens, labels = as_rows(batch, plan)
    for row, (start, length) in enumerate(zip(batch.segments.starts, batch.segments.lengths, strict=True)):
        assert torch.equal(tokens[row, :length], batch.tokens[start : start + length].long())
        assert (labels[row, length:] == -100).all()
        assert torch.equal(labels[row, :length], tokens[row, :length])
    assert (labels[:, 1:] != -100).sum() == batch.num_trained


def test_lengths_are_those_of_the_bar():
    from cases.finetune_plan import drawn_lengths

    def ratio(count):
        batches = drawn_lengths(count, 4096).reshape(-1, 8)
        return 8 * batches.max(axis=1).sum() / batches.sum()

    assert ratio(4096) == pytest.approx(2.97, abs=0.005)
    assert ratio(456) == pytest.approx(2.96, abs=0.005)
    assert drawn_lengths(456, 4096).tolist() == drawn_lengths(4096, 4096)[:456].tolist()


# ---- sides ----


@pytest.mark.parametrize("lora", [True, False])
def test_our_side_and_transformers_train_the_same(plan, lora):
    from cases.finetune_sides import Measured, disagreement

    plan = replace(plan, lora=lora, settings={} if lora else {"optim.pure_bf16": True})
    turn = {"do": "steps", "count": plan.timed}
    ready, first, *turns = answers("gapless", plan, turn, turn)
    assert ready == {"ready": True}
    ours = Measured(**first)
    assert ours.losses[0] - ours.losses[-1] > 0.01
    for answer in turns:
        ours.add(answer)
    assert len(ours.rates) == 2 * plan.timed
    assert ours.rate > 0
    theirs = Measured(**answers("hf", plan, turn)[1])
    assert disagreement(ours, theirs, plan.slack) is None
    still = Measured(**answers("hf", replace(plan, learning_rate=plan.learning_rate / 2))[1])
    assert "the loss of step" in disagreement(ours, still, plan.slack)


def test_adapters_of_peers_compute_in_the_dtype_of_the_model(plan):
    from cases.finetune_worker import build_transformers

    answers("gapless", plan)  # writes the adapter
    model = build_transformers(plan)
    seen = set()
    for name, module in model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            module.register_forward_hook(lambda module, given, out: seen.add((module.weight.dtype, out.dtype)))
    model(input_ids=torch.ones(1, 8, dtype=torch.long))
    assert seen == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("recompute", [False, True])
def test_unsloth_recomputes_only_where_all_do(plan, monkeypatch, recompute):
    """Its `for_training` switches that on unless told otherwise."""
    import peft
    from cases.finetune_worker import build_unsloth
    from transformers import AutoModelForCausalLM

    class FastLanguageModel:
        recomputes = None

        @staticmethod
        def from_pretrained(path, **_):
            return AutoModelForCausalLM.from_pretrained(path), None

        @classmethod
        def get_peft_model(cls, model, *, use_gradient_checkpointing, **settings):
            cls.recomputes = bool(use_gradient_checkpointing)
            return peft.get_peft_model(model, peft.LoraConfig(**settings))

        @classmethod
        def for_training(cls, model, use_gradient_checkpointing=True):
            cls.recomputes = use_gradient_checkpointing

    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=FastLanguageModel))
    plan = replace(plan, recompute=recompute)
    answers("gapless", plan)  # writes the adapter
    build_unsloth(plan)
    assert FastLanguageModel.recomputes == recompute


def test_tokens_are_those_of_the_timed_steps(plan):
    from cases.finetune_plan import batches
    from cases.finetune_worker import LEAD

    planned = [batch.num_tokens for batch in batches(plan)]
    first = plan.checked + LEAD
    # Of ours another step is under way when one is done.
    found = answers("gapless", plan, {"do": "steps", "count": 3})[2]["tokens"]
    assert found == planned[first + 1 : first + 4]
    found = answers("hf", plan, {"do": "steps", "count": 3})[2]["tokens"]
    assert found == planned[first : first + 3]


@pytest.mark.parametrize("graphs", [None, 0, 2])
def test_steps_that_were_measured_while_graphs_were_recorded_do_not_count(plan, monkeypatch, graphs):
    from gapless.profiling import report

    gpu = {"busy_percent": 98.5, "busy_percent_of_plain_steps": 99.0, "causes": [{"ms": 1.0}], "steps": [{}, {}]}
    profile = {"gpu": gpu, "steps": {"graphs_recorded": graphs}}
    monkeypatch.setattr(report, "profile", lambda *_, **__: profile)
    if graphs:
        with pytest.raises(AssertionError, match="2 graphs were recorded in the measured steps"):
            answers("profile", plan)
    else:
        assert answers("profile", plan)[1] == {"busy": 98.5, "plain": 99.0, "gaps": 0.5}


def test_what_is_not_installed_says_so(plan, monkeypatch):
    from cases import finetune_worker

    monkeypatch.setitem(finetune_worker.PACKAGES, "unsloth", ("no_such_package",))
    assert "no_such_package" in answers("unsloth", plan)[0]["missing"]


def test_sides_disagree_about_losses_falls_and_norms():
    from cases.finetune_sides import Measured, disagreement

    ours = Measured([5.0, 4.9, 4.6], [1.0, 1.1, 1.2], 0.0)
    assert disagreement(ours, Measured([5.01, 4.91, 4.62], [1.03, 1.2, 1.1], 0.0), 0.1) is None
    for losses, norms, why in (
        ([5.03, 4.93, 4.63], ours.norms, "loss of step 1"),
        ([5.0, 4.92, 4.6], ours.norms, "loss of step 2"),
        ([5.0, 4.9, float("nan")], ours.norms, "loss of step 3"),
        (ours.losses, [1.06, 1.1, 1.2], "norm of step 1"),
        (ours.losses, [1.0, 1.1, 1.6], "norm of step 3"),
    ):
        assert why in disagreement(ours, Measured(losses, norms, 0.0), 0.1)


class FakeSide:
    """A side without a process: what it answers, by name."""

    losses = {}
    fails = {}
    alive = set()
    seen = []

    def __init__(self, name, plan, label=None):
        self.name, self.label = name, label or name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def begin(self):
        from cases.finetune_sides import NotInstalled, SideError

        if self.name == "profile" and self.name not in self.fails:
            return {"busy": 98.5, "plain": 99.0, "gaps": 0.25}
        if self.name in self.fails:
            raise {"missing": NotInstalled, "error": SideError}[self.fails[self.name]](f"{self.label} cannot")
        self.alive.add(self.label)
        return {"losses": self.losses.get(self.name, [5.0, 4.0]), "norms": [1.0, 1.0], "first_step_s": 0.5}

    def steps(self, count):
        self.seen.append((self.label, frozenset(self.alive)))
        return {"ms": [1.0] * count, "tokens": [8] * count, "peak_gib": 1.5}

    def end(self):
        self.alive.discard(self.label)


def _one_call_each(works, **_):
    for work in works.values():
        work()
    return dict.fromkeys(works, 1.0)


@pytest.fixture
def fakes(monkeypatch):
    from cases import finetune, finetune_sides

    for name in ("losses", "fails"):
        monkeypatch.setattr(FakeSide, name, {})
    monkeypatch.setattr(FakeSide, "seen", [])
    for module in (finetune_sides, finetune):
        monkeypatch.setattr(module, "Side", FakeSide)
    monkeypatch.setattr(finetune, "free_memory", lambda: None)
    monkeypatch.setattr(finetune, "medians", _one_call_each)
    return FakeSide


def test_sides_take_turns_and_large_ones_come_last(plan, fakes):
    from cases.finetune_sides import compare

    found = compare(plan, ["hf", "unsloth"], alone=["hf"], variants={"eager": plan})
    assert list(found.sides) == ["gapless", "eager", "unsloth", "hf"]
    labels = [label for label, _ in fakes.seen]
    assert labels == ["gapless", "eager"] * 2 + ["gapless", "unsloth"] * 2 + ["hf"] * 2
    assert fakes.seen[-1] == ("hf", frozenset({"hf"}))
    assert found.ours.rate == 8000
    assert not fakes.alive


def test_peers_that_fail_are_left_out_and_ours_without_any_is_not_published(plan, fakes, capsys):
    from cases.finetune_sides import SideError, compare

    fakes.fails = {"unsloth": "missing"}
    fakes.losses = {"hf": [5.0, 4.5]}
    found = compare(plan, ["hf", "unsloth", "hf-liger"])
    assert list(found.sides) == ["gapless", "hf-liger"]
    assert set(found.left_out) == {"hf", "unsloth"}
    assert "without unsloth: NotInstalled: unsloth cannot" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="nothing says that our steps are right: hf: .*the loss of step 2"):
        compare(plan, ["hf"])
    fakes.fails = {"gapless": "error"}
    with pytest.raises(SideError, match="gapless cannot"):
        compare(plan, ["hf"])


def test_bars_are_factors_of_what_peers_reach():
    from cases.finetune import CASES, row_of
    from cases.finetune_sides import Comparison, Measured

    def side(rate, peak):
        return Measured([5.0, 4.5], [1.0, 1.0], 0.5, [rate], peak)

    sides = {"gapless": side(16500.0, 40.0), "unsloth": side(15000.0, 45.0), "hf-liger": side(10000.0, 77.0)}
    row = row_of("lora-8b", CASES["lora-8b"], Comparison(sides, {"hf": "SideError: no"}), 20000.0, {"more": 1.0})
    assert row.bar == pytest.approx(16500.0)
    assert not row.missed()
    assert row.peers == {"unsloth": 15000.0, "hf-liger": 10000.0}
    assert row.beside["share of limit"] == 0.825
    assert "without hf: SideError: no" in row.note
    assert "hf-liger by itself" in row.note
    sides["hf-liger"].rates = [10400.0]
    sides["gapless"].peak_gib = 46.0
    row = row_of("lora-8b", CASES["lora-8b"], Comparison(sides, {}), 20000.0, {})
    assert row.missed() == ["bar", "45 GiB"]


def test_a_case_without_its_key_is_skipped_and_known_ones_fit_the_run_file(tmp_path, capsys):
    from cases import finetune
    from cases.finetune_plan import run_config

    from gapless.config_file import check_config

    case = replace(finetune.CASES["lora-8b"], needs="memory.no_such_key")
    assert finetune.rows(None, name="lora-8b", case=case, work=tmp_path) == []
    assert "lora-8b is skipped: run files have no memory.no_such_key" in capsys.readouterr().out
    for name, case in finetune.CASES.items():
        if all(map(finetune.knows, case.settings)):
            check_config(run_config(finetune.plan_of(name, case, tmp_path, 3)))


def test_a_case_from_its_plan_to_its_row(tmp_path, fakes):
    from cases import Rates, finetune

    changed = {"shape": SHAPE, "row_tokens": 48, "device": "cpu"}
    rates = Rates(copy=1.0, matmul=700.0)
    case = finetune.CASES["lora-8b"]
    (row,) = finetune.rows(rates, name="lora-8b", case=case, work=tmp_path, **changed)
    assert row.gapless == row.peers["unsloth"] == row.beside["not deterministic"] == 8000
    assert row.bar == pytest.approx(1.6 * 8000)
    assert row.limit > 0
    (row,) = finetune.rows(rates, name="full-1b", case=finetune.CASES["full-1b"], work=tmp_path, **changed)
    assert list(row.peers) == ["hf-liger"]
    assert "weights and moments in bf16" in row.note


def test_how_busy_the_gpu_is_has_a_row_for_each_way(tmp_path, fakes):
    from cases import finetune
    from cases.finetune_sides import SideError

    functions = finetune.cases(tmp_path, list(finetune.BUSY), None)
    changed = {"shape": SHAPE, "row_tokens": 48, "device": "cpu"}
    found = [row for case in functions.values() for row in case(None, **changed)]
    assert [(row.case, row.gapless, row.bar) for row in found] == [
        ("busy-lora-8b-eager", 98.5, 97.0),
        ("busy-lora-8b", 98.5, 99.0),
    ]
    assert found[0].beside == {"GPU busy % of steps without the profiler": 99.0, "gaps over 5 us, ms a step": 0.25}
    fakes.fails = {"profile": "missing"}
    assert not any(case(None, **changed) for case in functions.values())
    fakes.fails = {"profile": "error"}
    with pytest.raises(SideError, match="profile cannot"):
        functions["busy-lora-8b"](None, **changed)


def test_a_profile_that_fails_hides_no_row(tmp_path, fakes):
    """What was measured is kept; the row says what it is without."""
    from cases import Rates, finetune

    changed = {"shape": SHAPE, "row_tokens": 48, "device": "cpu"}
    measure = partial(
        finetune.rows, Rates(copy=1.0, matmul=700.0), name="small-135m", case=finetune.CASES["small-135m"], **changed
    )
    (row,) = measure(work=tmp_path / "whole")
    assert row.beside["GPU busy %"] == 98.5
    assert row.beside["gaps over 5 us, ms a step"] == 0.25
    fakes.fails = {"profile": "error"}
    (row,) = measure(work=tmp_path / "failed")
    assert row.gapless == row.peers["unsloth"] == 8000
    assert "without the profile: SideError: profile cannot" in row.note
    assert "GPU busy %" not in row.beside


def test_what_recomputed_layers_add_is_their_forward_but_for_the_last_product(fakes):
    from cases import finetune

    time, flops, again = finetune.linear_layers(SHAPE, 8, lora=True, device="cpu")
    layers = SHAPE["num_hidden_layers"]
    assert time == 2 * (4 * layers + 1)
    products = [k * n * count for k, n, count in finetune.linear_shapes(SHAPE).values()]
    assert flops == 2 * 2.0 * 8 * sum(products)
    assert again == 3 * layers


def test_limits_are_those_of_the_notes(tmp_path, monkeypatch, capsys):
    from cases import Rates, finetune

    def linear_layers(shape, tokens, *, lora, device):
        kinds = 2 if lora else 3
        flops = {name: 2.0 * tokens * k * n * count for name, (k, n, count) in finetune.linear_shapes(shape).items()}
        total = kinds * sum(flops.values())
        return total / 700e9, total, sum(flops[name] for name in ("qkv", "out", "gate_up")) / 700e9

    monkeypatch.setattr(finetune, "linear_layers", linear_layers)
    limits = {}
    for name, case in finetune.CASES.items():
        plan = finetune.plan_of(name, case, tmp_path, 3)
        limits[name] = finetune.most_tokens_per_second(plan, Rates(copy=1.0, matmul=700.0))
    assert limits["lora-8b"] == pytest.approx(20_100, rel=0.01)
    assert limits["lora-8b-recompute"] == pytest.approx(15_200, rel=0.01)
    assert limits["full-1b"] == pytest.approx(82_500, rel=0.02)
    assert "30.0 GFLOP a token at 700 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("finetune_gpu", ["--cases", "lora-8b, lora-9b"], "no case is lora-9b; there are lora-8b"),
        ("finetune_gpu", ["--peers", "trl"], "no peer is trl; there are hf, hf-liger, unsloth"),
        ("ablations", ["--cases", "metadata-8"], "no case is metadata-8; there are metadata-16, metadata-32"),
        ("attention", ["--peers", "fa5"], "no peer is fa5; there are"),
    ],
)
def test_names_that_are_unknown_are_refused(script, arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr("common.require_gpu", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match=message):
        importlib.import_module(script).main()


@pytest.mark.slow
def test_sides_in_processes_of_their_own(plan):
    from cases.finetune_sides import compare

    found = compare(plan, ["hf"])
    assert list(found.sides) == ["gapless", "hf"]
    assert len(found.ours.rates) == plan.turns * plan.timed


# ---- steps of ours in this process ----


def test_packing_counts_the_same_documents(monkeypatch):
    from cases import packing

    setting = packing.Setting(shape=SHAPE, documents=20, row_tokens=64, batch=4, passes=1, device="cpu")
    (row,) = packing.rows(setting)
    lengths = packing.drawn_lengths(20, 64).reshape(-1, 4)
    assert row.limit == pytest.approx(4 * lengths.max(axis=1).sum() / lengths.sum())
    assert row.gapless == pytest.approx(row.beside["packed tokens/s"] / row.beside["padded tokens/s"])
    assert row.bar == pytest.approx(0.9 * row.limit)

    def trained_padding(document, tokens):
        return replace(padded(document, tokens), trained=np.ones(tokens, dtype=bool))

    padded = packing.padded_document
    monkeypatch.setattr(packing, "padded_document", trained_padding)
    with pytest.raises(AssertionError, match="the mean loss of all documents is"):
        packing.rows(setting)


def test_each_shape_of_packing_was_there_before_it_is_timed(monkeypatch):
    """Kernels and heuristics of a shape that is new would count against the padded batches, which have many."""
    from cases import packing

    seen, new, step = set(), [], packing.Training.step

    def noted(training, data):
        new.append({batch.layout for batch in data.micro_batches} - seen)
        seen.update(batch.layout for batch in data.micro_batches)
        return step(training, data)

    def seconds(training, steps, original=packing._seconds):
        new.clear()
        found = original(training, steps)
        passes.append((found, any(new)))
        return found

    passes = []
    monkeypatch.setattr(packing.Training, "step", noted)
    monkeypatch.setattr(packing, "_seconds", seconds)
    setting = packing.Setting(shape=SHAPE, documents=16, row_tokens=512, batch=2, passes=1, device="cpu")
    (row,) = packing.rows(setting)
    timed = [(found, fresh) for found, fresh in passes if packing_rate(found, setting) in row.beside.values()]
    assert [fresh for _, fresh in timed] == [False, False]


def packing_rate(seconds, setting):
    """Trained tokens per second of a pass: of each document all but its first token."""
    from cases import packing

    return int((packing.drawn_lengths(setting.documents, setting.row_tokens) - 1).sum()) / seconds


@pytest.fixture
def tiny_metadata():
    from cases import metadata

    setting = metadata.Setting(shape=SHAPE, row_tokens=64, warm_up=1, rounds=3, device="cpu")
    return metadata, partial(metadata.rows, "metadata-2", setting)


def test_ways_to_know_documents_are_timed_part_by_part(tiny_metadata):
    metadata, rows = tiny_metadata
    found = {row.case: row for row in rows()}
    assert list(found) == ["metadata-2-forward", "metadata-2-backward", "metadata-2"]
    for row in found.values():
        assert row.gapless == pytest.approx(row.beside["rebuilt ms"] / row.beside["once ms"])
        assert row.beside["masked adds %"] == pytest.approx(100 * (row.beside["masked ms"] / row.beside["once ms"] - 1))
    assert found["metadata-2"].beside["once ms"] > found["metadata-2-forward"].beside["once ms"]


def test_what_is_rebuilt_is_what_was_known(tiny_metadata, monkeypatch):
    from gapless.batch import segments

    metadata, _ = tiny_metadata
    seen = []
    monkeypatch.setattr(metadata, "attention", lambda q, k, v, again, *_, **options: seen.append(again))
    known = segments([3, 9, 1], tokens=20, max_documents=6)
    metadata.rebuilt(None, None, None, known, known, window=None, spare=0)
    assert torch.equal(seen[0].cu_seqlens, known.cu_seqlens)
    assert seen[0].cu_seqlens.dtype == torch.int32


def test_a_way_that_attends_wrongly_is_not_published(tiny_metadata, monkeypatch):
    metadata, rows = tiny_metadata

    def wrong(q, k, v, *rest, **options):
        return metadata.attention(q, k, v.flip(0), *rest, **options)

    for way in ("masked", "rebuilt"):
        with monkeypatch.context() as patch:
            patch.setitem(metadata.WAYS, way, wrong)
            with pytest.raises(AssertionError, match=f"hidden states {way}: off by"):
                rows()
