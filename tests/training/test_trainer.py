"""The trainer: a run from a configuration to its result, what it writes, and what it refuses."""

import inspect
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from runs import log_without_timing, make_config, write_inputs
from torch.nn import functional

from gapless.adapters.lora import LoraLinear, adapter_views, lora_layers
from gapless.adapters.peft import load_adapter
from gapless.batch import segments
from gapless.config_file import load_config
from gapless.data.tokenizer import Tokenizer
from gapless.inference.generate import generate
from gapless.inference.load import load_model
from gapless.models.views import hf_views
from gapless.models.weights import load_weights, save_weights
from gapless.training import samples
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import list_checkpoints, open_newest
from gapless.training.metrics import TIMING_FIELDS, read_metrics
from gapless.training.setup import row_progress
from gapless.training.trainer import NonFiniteLossError, Trainer, train
from tiny import write_tiny_model
from tiny_tokenizer import TEMPLATES


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="sum")


class Poison:
    """A loss that is not finite in one of its calls."""

    def __init__(self, call: int, value: float = float("nan")) -> None:
        self.call, self.value, self.calls = call, value, 0

    def __call__(self, logits, labels):
        self.calls += 1
        loss = cross_entropy(logits, labels)
        return loss * self.value if self.calls == self.call else loss


class Record(Callback):
    """Notes what it is called for, in order."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls = []
        self.stop_at = stop_at

    def on_train_begin(self, trainer):
        self.calls.append(("begin", trainer.step, trainer.total_steps, trainer.model.config.layers))

    def on_step_end(self, trainer, metrics):
        self.calls.append(("step", metrics["step"]))
        if metrics["step"] == self.stop_at:
            trainer.stop()

    def on_evaluate(self, trainer, metrics):
        self.calls.append(("evaluate", metrics["step"]))

    def on_save(self, trainer, folder):
        self.calls.append(("save", folder.name))

    def on_train_end(self, trainer, result):
        self.calls.append(("end", result.step))


def test_a_run_learns_and_logs(inputs, tmp_path, capsys):
    config = make_config(inputs, tmp_path, eval=(str(inputs / "eval.jsonl"),), eval_steps=4, max_steps=10)
    result = train(config)
    assert (result.step, result.finished, result.output_dir) == (10, True, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 4, 8, 10]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert result.eval_loss == lines[-1]["eval_loss"] < lines[0]["eval_loss"] - 0.5
    counts = [line["trained_tokens"] for line in steps]
    shares = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    expected = sum(line["loss"] * share for line, share in zip(steps, shares, strict=True)) / counts[-1]
    assert result.train_loss == pytest.approx(expected, rel=1e-12)
    assert [line["learning_rate"] for line in steps][:3] == [0.0, 0.005, 0.01]
    assert all(line[name] > 0 for line in steps for name in TIMING_FIELDS)
    assert load_config(tmp_path / "config.toml") == config
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")
    shown = capsys.readouterr().out
    assert f"step 10/10  loss {steps[-1]['loss']:.4f}" in shown
    assert "tokens/s" in shown
    assert " left" in shown


def test_the_logged_loss_does_not_depend_on_the_cut(inputs, tmp_path):
    logs = []
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        output = tmp_path / str(rows)
        train(
            make_config(
                inputs, output, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, max_steps=4
            )
        )
        logs.append(log_without_timing(output))
    for log in logs[1:]:
        for line, expected in zip(log, logs[0], strict=True):
            assert line == pytest.approx(expected, rel=1e-5)


def test_lora_result_is_the_adapter_that_was_trained(inputs, tmp_path):
    trainer = Trainer(make_config(inputs, tmp_path, max_steps=2))
    assert trainer.train().result_dir == tmp_path / "adapter"
    model = load_weights(inputs / "model")
    load_adapter(model, tmp_path / "adapter")
    trained = {view.name: view.read(view.parameter) for view in adapter_views(trainer.model)}
    loaded = {view.name: view.read(view.parameter) for view in adapter_views(model)}
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    assert any(value.any() for name, value in trained.items() if "lora_B" in name)


def test_an_adapter_keeps_the_template_it_was_trained_with(inputs, tmp_path):
    template = TEMPLATES / "llama3.jinja"
    config = make_config(inputs, tmp_path / "run", chat_template=str(template), cache_dir=None, max_length=256)
    adapter = train(config).result_dir
    _, tokenizer = load_model(adapter, device="cpu")
    question = [{"role": "user", "content": "a"}]
    assert tokenizer.render(question) == Tokenizer.from_folder(inputs / "model", template).render(question)


def test_a_long_tokenisation_says_how_far_it_is():
    shown = []
    progress = row_progress(shown.append, seconds=0.05)
    progress(256, 1000)
    time.sleep(0.06)
    progress(512, 1000)
    progress(768, 1000)
    assert shown == ["tokenised 512 of 1,000 rows"]


def test_rows_longer_than_the_model_is_made_for_are_named(inputs, tmp_path, capsys):
    train(make_config(inputs, tmp_path / "fits", max_length=512, max_steps=2))
    assert "note: max_length" not in capsys.readouterr().out
    train(make_config(inputs, tmp_path / "longer", max_length=513, max_steps=2))
    assert "note: max_length 513 exceeds the 512 tokens the model is made for" in capsys.readouterr().out


def test_full_result_is_the_model_that_was_trained(inputs, tmp_path):
    trainer = Trainer(make_config(inputs, tmp_path, "full", max_steps=3, save_steps=None))
    assert trainer.train().result_dir == tmp_path / "model"
    model = load_weights(tmp_path / "model", dtype=torch.bfloat16)
    for (name, trained), (_, loaded) in zip(trainer.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(trained, loaded), name
    before = json.loads((inputs / "model" / "config.json").read_text())
    assert before["torch_dtype"] == "float32"
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == before | {"torch_dtype": "bfloat16"}
    checkpoint = open_newest(tmp_path / "checkpoints")
    kinds = {name.split("/")[0] for name in checkpoint.shapes()}
    assert kinds == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert checkpoint.shapes()["exp_avg/model.layers.1.self_attn.k_proj.weight"] == (16, 48)
    for file in Tokenizer.from_folder(inputs / "model").files:
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()


def test_evaluation_equals_an_evaluation_of_the_result(inputs, tmp_path):
    trainer = Trainer(make_config(inputs, tmp_path, eval=(str(inputs / "eval.jsonl"),), per_device_eval_batch_size=3))
    result = trainer.train()
    # One document a batch, by a loss of our own.
    store, losses, count = trainer._eval_store, 0.0, 0
    trainer.model.eval()
    for index in range(len(store)):
        document = store.document(index)
        with torch.no_grad():
            tokens = torch.from_numpy(document.tokens).int()
            logits = trainer.model.logits(trainer.model(tokens, segments([len(tokens)])))
        targets = tokens[1:].long()[document.trained[1:]]
        losses += functional.cross_entropy(logits[:-1][document.trained[1:]], targets, reduction="sum").item()
        count += len(targets)
    assert result.eval_loss == pytest.approx(losses / count, rel=1e-5)


# ---- a script's own loss and callbacks ----


def test_a_custom_loss_and_a_callback(inputs, tmp_path):
    plain = tmp_path / "plain"
    train(make_config(inputs, plain, max_steps=5))
    record = Record()
    config = make_config(inputs, tmp_path / "own", max_steps=5, eval=(str(inputs / "eval.jsonl"),))
    Trainer(config, loss_fn=cross_entropy, callbacks=iter([record])).train()
    assert record.calls == [
        ("begin", 0, 5, 2), ("evaluate", 0), ("step", 1), ("step", 2), ("save", "step-000002"), ("step", 3),
        ("step", 4), ("save", "step-000004"), ("step", 5), ("evaluate", 5), ("save", "step-000005"), ("end", 5),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="loss_fn = .*a script's own.*, now it is None"):
        train(config)
    own = [line for line in log_without_timing(tmp_path / "own") if "loss" in line]
    for line, expected in zip(own, log_without_timing(plain), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


def test_copies_of_adapters_are_renewed_once_a_step_and_an_evaluation(inputs, tmp_path):
    """And in every forward of a callback, which may change adapters behind autograd's back."""
    seen = []

    def note(name):
        seen.append((name, {layer.trusted for layer in lora_layers(trainer.model)}))

    def loss_fn(logits, labels):
        note("loss")
        return cross_entropy(logits, labels)

    class Edit(Callback):
        def on_step_end(self, trainer, metrics):
            note("callback")

        on_evaluate = on_step_end

    config = make_config(inputs, tmp_path, max_steps=2, save_steps=None, eval=(str(inputs / "eval.jsonl"),))
    trainer = Trainer(config, loss_fn=loss_fn, callbacks=[Edit()])
    with mock.patch.object(LoraLinear, "trust", autospec=True, side_effect=LoraLinear.trust) as trust:
        trainer.train()
    assert all(flags == {name == "loss"} for name, flags in seen)
    assert {name for name, _ in seen} == {"loss", "callback"}
    layers = len(list(lora_layers(trainer.model)))
    assert trust.call_count == (2 + 2) * layers  # steps and evaluations, whatever their micro-batches


def test_a_callback_that_clears_gradients_changes_nothing(inputs, tmp_path):
    class Clear(Callback):
        def on_train_begin(self, trainer):
            trainer.model.zero_grad()

        def on_step_end(self, trainer, metrics):
            trainer.model.zero_grad()

    train(make_config(inputs, tmp_path / "plain", max_steps=3))
    Trainer(make_config(inputs, tmp_path / "cleared", max_steps=3), callbacks=[Clear()]).train()
    assert log_without_timing(tmp_path / "cleared") == log_without_timing(tmp_path / "plain")


class Dataset:
    """What a Hugging Face dataset has of a sequence: rows by index, and their number."""

    def __init__(self, rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return dict(self._rows[index])


@pytest.mark.parametrize("kind", [list, Dataset])
def test_rows_in_memory_train_as_those_of_a_file(inputs, tmp_path, kind):
    rows, eval_rows = (
        [json.loads(line) for line in (inputs / name).read_text().splitlines()]
        for name in ("train.jsonl", "eval.jsonl")
    )
    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
    train(make_config(inputs, tmp_path / "file", eval=(str(inputs / "eval.jsonl"),), **settings))
    config = make_config(inputs, tmp_path / "memory", train=(), **settings)
    result = train(config, train_rows=kind(rows), eval_rows=kind(eval_rows))
    assert log_without_timing(tmp_path / "memory") == log_without_timing(tmp_path / "file")
    shutil.rmtree(tmp_path / "memory" / "checkpoints" / "step-000004")
    assert train(config, train_rows=kind(rows), eval_rows=kind(eval_rows)) == result
    with pytest.raises(ValueError, match="other training data"):
        train(config, train_rows=kind(rows[1:]), eval_rows=kind(eval_rows))
    with pytest.raises(ValueError, match="data.train: is missing"):
        train(load_config(tmp_path / "memory" / "config.toml"))
    load_model(tmp_path / "memory", device="cpu")


def test_the_signatures_are_frozen():
    rows = "train_rows: 'setup.RowSequence | None' = None, eval_rows: 'setup.RowSequence | None' = None"
    assert str(inspect.signature(train)) == f"(config: 'RunConfig', *, {rows}) -> 'TrainResult'"
    assert str(inspect.signature(Trainer)) == (
        "(config: 'RunConfig', loss_fn: 'LossFunction | None' = None, "
        f"callbacks: 'Iterable[Callback]' = (), *, {rows}) -> 'None'"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": Record()}, r"callbacks must be a list, not Record; write callbacks=\[...\]"),
        ({"callbacks": [Record]}, "Record'> is no callback; it must be an object of a class derived from"),
        ({"callbacks": [object()]}, "is no callback"),
        ({"train_rows": {"text": "a"}}, "train_rows must be a sequence of dicts, .* not dict"),
        ({"train_rows": iter([{"text": "a"}])}, "train_rows must be a sequence of dicts, .* not list_iterator"),
        ({"train_rows": ["train.jsonl"]}, "train_rows must be a sequence of dicts, .* not list"),
        ({"train_rows": []}, "train_rows has no rows"),
        ({"loss_fn": 1.0}, "loss_fn must be a function, not float"),
    ],
)
def test_arguments_of_another_kind_are_refused(inputs, tmp_path, arguments, words):
    config = make_config(inputs, tmp_path / "run")
    if "train_rows" in arguments:
        config = replace(config, data=replace(config.data, train=()))
    with pytest.raises(ValueError, match=words):
        Trainer(config, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_callback_stops_the_run(inputs, tmp_path):
    record = Record(stop_at=3)
    config = make_config(inputs, tmp_path, save_steps=None, eval=(str(inputs / "eval.jsonl"),))
    result = Trainer(config, callbacks=[record]).train()
    assert (result.step, result.finished, result.result_dir) == (4, False, tmp_path / "adapter")
    assert record.calls[-3:] == [("evaluate", 4), ("save", "step-000004"), ("end", 4)]
    assert train(config).step == 10  # the same command goes on
    seconds = [line["seconds"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert seconds == sorted(seconds)  # and so does the clock


# ---- length ----


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (1.5, 1.5)])
def test_epochs(inputs, tmp_path, epochs, expected):
    config = make_config(inputs, tmp_path, max_steps=None, num_train_epochs=epochs, save_steps=None)
    trainer = Trainer(config)
    trainer.train()
    steps = [trainer._loader.steps_per_epoch(epoch) for epoch in range(2)]
    whole = sum(steps[: int(epochs)])
    assert trainer.total_steps == whole + math.ceil((epochs % 1) * steps[int(epochs) % 2])
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == trainer.total_steps
    assert expected <= last["epoch"] < expected + 1 / min(steps)


def test_every_row_is_trained_once_in_an_epoch(inputs, tmp_path):
    trainer = Trainer(make_config(inputs, tmp_path, max_steps=None, num_train_epochs=1.0))
    trainer.train()
    store = trainer._loader._store
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["trained_tokens"] == store.trained.sum()


def test_logging_steps(inputs, tmp_path):
    train(make_config(inputs, tmp_path, logging_steps=4))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [4, 8, 10]


# ---- bad steps ----


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_stops_the_run_and_touches_nothing(inputs, tmp_path, value):
    loss_fn = Poison(2 * 4 - 1, value)  # the first micro-batch of step 4
    trainer = Trainer(make_config(inputs, tmp_path, save_steps=3), loss_fn=loss_fn)
    with pytest.raises(NonFiniteLossError) as error:
        trainer.train()
    message = str(error.value)
    assert "\n" not in message
    assert "step 4: the loss is " in message
    assert "a lower optim.learning_rate usually helps, or a look at the rows of the step: train.jsonl:" in message
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-000003'}" in message
    assert loss_fn.calls == 2 * 5  # step 5 had begun, and changed nothing
    saved = dict(open_newest(tmp_path / "checkpoints").tensors())
    now = {name: value for name, _, value in trainer.optimizer.tensors()}
    assert saved.keys() == now.keys()
    assert all(torch.equal(now[name], value) for name, value in saved.items())
    assert int(trainer.optimizer.step_count) == 3
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3


def test_a_bad_step_is_never_saved(inputs, tmp_path):
    with pytest.raises(NonFiniteLossError, match="step 2: .*no checkpoint yet"):
        Trainer(make_config(inputs, tmp_path, save_steps=2), loss_fn=Poison(4)).train()
    assert not list_checkpoints(tmp_path / "checkpoints")


def test_an_evaluation_that_is_not_finite_stops_the_run(inputs, tmp_path):
    trained = []

    def loss_fn(logits, labels):
        loss = cross_entropy(logits, labels)
        if torch.is_grad_enabled():
            trained.append(loss.item())
        return loss * float("nan") if len(trained) == 4 and not torch.is_grad_enabled() else loss

    config = make_config(inputs, tmp_path, eval=(str(inputs / "eval.jsonl"),), eval_steps=2, save_steps=1)
    with pytest.raises(
        NonFiniteLossError,
        match="step 2: the evaluation loss is nan.*look at loss_fn.*the evaluation rows.*step-000001",
    ):
        Trainer(config, loss_fn=loss_fn).train()


def test_a_model_that_is_not_finite_is_named_before_the_first_step(inputs, tmp_path):
    Tokenizer.from_folder(inputs / "model").save(write_tiny_model(tmp_path / "model", vocab_size=384))
    model = load_weights(tmp_path / "model")
    model.norm.weight.data[0] = float("nan")
    save_weights(tmp_path / "model", ((view.name, view.read(view.parameter)) for view in hf_views(model)))
    config = make_config(inputs, tmp_path / "run", path=str(tmp_path / "model"), eval=(str(inputs / "eval.jsonl"),))
    with pytest.raises(NonFiniteLossError, match="step 0: .* before the first training step; look at the model's wei"):
        train(config)


class Flag(Callback):
    """Whether torch had to be deterministic."""

    def on_step_end(self, trainer, metrics):
        self.seen = torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_algorithms_while_training_if_asked_for(inputs, tmp_path, deterministic):
    flag = Flag()
    Trainer(make_config(inputs, tmp_path, max_steps=2, deterministic=deterministic), callbacks=[flag]).train()
    assert flag.seen is deterministic
    assert not torch.are_deterministic_algorithms_enabled()


# ---- samples, TensorBoard, wandb ----


def test_samples_are_the_answers_of_the_model(inputs, tmp_path, monkeypatch):
    config = make_config(
        inputs, tmp_path, sample_prompts=("hello\nthere", "what?"), sample_tokens=5, eval_steps=2, max_steps=4
    )
    asked = []
    monkeypatch.setattr(
        samples, "generate", lambda *args, **settings: asked.append(len(asked)) or generate(*args, **settings)
    )
    train(config)
    assert len(asked) == 3
    text = (tmp_path / "samples.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Step 0", "## Step 2", "## Step 4"]
    assert text.count("**hello there**") == text.count("**what?**") == 3
    train(config)
    assert (tmp_path / "samples.md").read_text() == text


def test_tensorboard_has_the_lines_of_the_log(inputs, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(inputs, tmp_path, max_steps=3, report_to=("tensorboard",), eval=(str(inputs / "eval.jsonl"),))
    train(config)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    for tag, name in (("train/loss", "loss"), ("eval/loss", "eval_loss"), ("train/learning_rate", "learning_rate")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines if name in line]


class FakeWandb:
    """Records what a run logs."""

    def __init__(self) -> None:
        self.opened, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        self.opened.append(settings)
        return SimpleNamespace(id="run-7", log=self.log, finish=self.finish)

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_gets_the_lines_and_goes_on_in_the_same_run(inputs, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(inputs, tmp_path, max_steps=4, report_to=("wandb",))
    Trainer(config, callbacks=[Record(stop_at=1)]).train()
    train(config)
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4]
    assert fake.logged[0][1]["train/loss"] == read_metrics(tmp_path / "metrics.jsonl")[0]["loss"]
    assert [(settings["id"], settings["resume"]) for settings in fake.opened] == [(None, None), ("run-7", "allow")]
    assert fake.opened[0]["config"]["optim"]["learning_rate"] == 1e-2
    assert fake.finished == 2


def test_wandb_that_is_not_installed_is_refused(inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb.* not installed"):
        train(make_config(inputs, tmp_path, report_to=("wandb",)))


def test_a_signal_while_the_last_checkpoint_is_written_is_only_noted(inputs, tmp_path):
    """With an asynchronous save the loop is over by then; the second of two SIGTERMs, as job systems send them."""
    got = []

    class Stop(Callback):
        def on_step_end(self, trainer, metrics):
            if metrics["step"] == 3:
                signal.raise_signal(signal.SIGTERM)

    def again(point):
        if point == "state written":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    trainer = Trainer(make_config(inputs, tmp_path, async_save=True, save_steps=None), callbacks=[Stop()])
    trainer.fault = again
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        result = trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not got
    assert result.stopped_by == "SIGTERM"
    assert list_checkpoints(tmp_path / "checkpoints")
