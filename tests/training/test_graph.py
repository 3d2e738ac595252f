"""A step in parts that are recorded once: the same bits as `train_step`. On a CPU to replay is to run a part again."""

import copy
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import gapless
from gapless.adapters.lora import lora_layers
from gapless.batch import Document, build_batch
from gapless.config import OptimConfig
from gapless.kernels.lora import WideWeight
from gapless.kernels.runtime import forced
from gapless.training import trainer as trainer_module
from gapless.training.callbacks import Callback
from gapless.training.graph import GraphStep, obstacle
from gapless.training.step import mean_loss, train_step
from gapless.training.trainer import Trainer
from kernels.tools import kernels
from training.runs import assert_same_outcome, make_config, outcome, write_inputs
from training.steps import Again, Step, assert_same_state, make_training, state_of, varied_steps

ALONE = dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor"), 1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def layout_of(model, **sizes):
    return model.stages[0].batch_layout(**{"rows": 2, "row_tokens": 24, "row_documents": 6, **sizes})


def both(kind, count, **settings):
    """Train twice, plainly and in parts; returns the recorder, the steps that were made, and all their parts."""
    plain, plain_optimizer = make_training(kind, **settings)
    model, optimizer = make_training(kind, **settings)
    layout = layout_of(model)
    recorder = Again()
    graphs = GraphStep(model, optimizer, layout, recorder)
    steps = zip(varied_steps(layout, count), varied_steps(layout, count), strict=True)
    made = parts = 0
    for index, (here, there) in enumerate(steps):
        expected = train_step(plain, plain_optimizer, here, stop=index == 5)
        found = graphs(there, stop=index == 5)
        if expected is None:
            assert found is None
            continue
        made += 1
        parts += 2 + sum(batch.num_trained > 0 for batch in here.micro_batches)
        assert torch.equal(found.values, expected.values), index
    assert_same_state(optimizer, plain_optimizer)
    return recorder, made, parts


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lora", {}),
        ("lora", {"dtype": "bf16"}),
        ("full", {}),
        ("full", {"dtype": "bf16", "optim": OptimConfig(max_grad_norm=0.3)}),
        ("full", {"dtype": "bf16", "optim": OptimConfig(pure_bf16=True)}),
    ],
)
def test_fifty_steps_have_the_bits_of_plain_ones(kind, settings):
    recorder, made, parts = both(kind, 50, **settings)
    assert made == 49  # one has nothing to train
    names = [name for name, *_ in recorder.recorded]
    assert names.count("_begin") == names.count("_end") == 1
    assert len(set(recorder.recorded)) == len(recorder.recorded) >= 2 + 7  # of each bucket one
    assert recorder.replays + len(recorder.recorded) == parts > 150  # where nothing is trained nothing is done
    assert not recorder.forgotten


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_kernels_go_by_what_is_in_the_buffer(kind):
    """Replayed with the host's numbers of the batch that was recorded, as in a graph: one of fewer documents."""
    draw = np.random.default_rng(0)
    with kernels():
        (plain, plain_optimizer), (model, optimizer) = (
            make_training(kind, dtype="bf16", num_hidden_layers=1) for _ in range(2)
        )
        layout, recorder = layout_of(model, rows=1, row_tokens=32, row_documents=40), Again(stale=True)
        graphs = GraphStep(model, optimizer, layout, recorder)
        for index, lengths in enumerate([(20, 4, 4, 4), (3,) * 10, (2, 9, 1, 1, 8)]):
            tokens = [draw.integers(0, 256, length).astype(np.int32) for length in lengths]
            row = [
                Document(text, np.arange(len(text)) == (1 if place < 2 else -1)) for place, text in enumerate(tokens)
            ]
            here, there = (
                build_batch(layout, [row], learning_rate=1e-2 / (1 + index), step=index, seed=5) for _ in range(2)
            )
            expected = train_step(plain, plain_optimizer, Step([here], 2))
            assert torch.equal(graphs(Step([there], 2)).values, expected.values)
        assert len(recorder.recorded) == 3
        assert_same_state(optimizer, plain_optimizer)


def test_adapters_are_copied_once_a_step(monkeypatch):
    copies = []
    plain = WideWeight.refresh
    monkeypatch.setattr(
        WideWeight, "refresh", lambda self, *args, **kw: [copies.append(self), plain(self, *args, **kw)]
    )
    with kernels():
        model, optimizer = make_training("lora", dtype="bf16", num_hidden_layers=1)
        layout = layout_of(model, rows=1, row_tokens=16, row_documents=2)
        graphs = GraphStep(model, optimizer, layout, Again())
        layers = list(lora_layers(model.stages[0]))
        for index, step in enumerate(varied_steps(layout, 2)):
            graphs(step)
            assert len(copies) == (index + 1) * len(layers)
        assert not any(layer.copied for layer in layers)


def test_a_replay_tells_autograd_of_what_it_changes():
    """Whoever has kept a forward for a backward hears of it; the low-precision copies count too."""

    class Nothing(Again):
        def record(self, work, *args):
            return lambda *_: None

    with kernels():
        model, optimizer = make_training("lora", dtype="bf16", num_hidden_layers=1)
        layout = layout_of(model, rows=1, row_tokens=16, row_documents=2)
        graphs = GraphStep(model, optimizer, layout, Nothing())
        first, second = varied_steps(layout, 2)
        graphs(first)
        layer = next(lora_layers(model.stages[0]))
        versions = [parameter._version for parameter in layer.parameters() if parameter.requires_grad]
        changes = layer._wide.changes
        graphs(second)
        assert [parameter._version for parameter in layer.parameters() if parameter.requires_grad] == [
            version + 1 for version in versions
        ]
        assert layer._wide.changes == changes + 1


def test_each_choice_that_attention_makes_has_its_graphs(monkeypatch):
    """What the host chooses by the documents stays as it was recorded."""
    choices = iter([(True,), (False,), (True,), (False,)])
    model, optimizer = make_training("lora")
    layout, recorder = layout_of(model), Again()
    monkeypatch.setattr(type(model.stages[0]), "shared_tiles", lambda *_: next(choices))
    graphs = GraphStep(model, optimizer, layout, recorder)
    step = next(step for step in varied_steps(layout, 9, accumulation=1) if step.num_trained)
    for _ in range(4):
        graphs(Step([step.micro_batches[0].in_buffer(step.micro_batches[0].buffer.clone())], step.num_trained))
    names = [name for name, *_ in recorder.recorded]
    assert names.count("_micro_batch") == 2
    assert recorder.replays == 3 * 4 - 4


def test_evaluation_between_steps_changes_nothing():
    model, optimizer = make_training("lora")
    layout = layout_of(model)
    recorder = Again()
    graphs = GraphStep(model, optimizer, layout, recorder)
    plain, plain_optimizer = make_training("lora")
    for here, there in zip(varied_steps(layout, 4), varied_steps(layout, 4), strict=True):
        train_step(plain, plain_optimizer, here)
        mean_loss(model, there.micro_batches)
        graphs(there)
    assert_same_state(optimizer, plain_optimizer)
    assert not recorder.forgotten


def test_a_bad_step_closes_the_optimizer():
    model, optimizer = make_training("lora")
    layout = layout_of(model)
    graphs = GraphStep(model, optimizer, layout, Again())
    first, bad, last = varied_steps(layout, 3)
    graphs(first)
    before = state_of(optimizer)
    for batch in bad.micro_batches:
        batch.scalars.num_trained.zero_()
    assert not graphs(bad).finite
    graphs(last)
    assert all(torch.equal(value, before[name]) for name, value in state_of(optimizer).items())


def replace_memory(decoder):
    decoder.norm.weight.data = decoder.norm.weight.data.clone()


def replace_parameter(decoder):
    decoder.norm.weight = nn.Parameter(decoder.norm.weight.detach().clone(), requires_grad=False)


def replace_buffer(decoder):
    decoder.rotary_frequencies = decoder.rotary_frequencies.clone()


def replace_module(decoder):
    norm = decoder.norm
    decoder.norm = copy.copy(norm)  # with the same parameter
    decoder.norm.eps = 2 * norm.eps


def drop_out_less(decoder):
    for layer in lora_layers(decoder):
        layer.dropout /= 2


def freeze(decoder):
    next(lora_layers(decoder)).lora_a.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [replace_memory, replace_parameter, replace_buffer, replace_module, drop_out_less, freeze, nn.Module.eval],
)
def test_what_is_not_as_it_was_is_recorded_anew(change):
    model, optimizer = make_training("lora")
    (decoder,) = model.stages
    layout, recorder = layout_of(model), Again()
    graphs = GraphStep(model, optimizer, layout, recorder)
    first, second, third = varied_steps(layout, 3)
    graphs(first)
    count = len(recorder.recorded)
    change(decoder)
    graphs(second)
    assert recorder.forgotten == 1
    assert len(recorder.recorded) >= count + 3
    graphs(third)
    assert recorder.forgotten == 1


HOOKS = {
    "forward": lambda decoder, hook: decoder.layers["1"].mlp.register_forward_hook(hook),
    "of all modules": lambda _, hook: register_module_forward_hook(hook),
    "gradient": lambda decoder, hook: trained(decoder).register_hook(hook),
    "accumulated gradient": lambda decoder, hook: trained(decoder).register_post_accumulate_grad_hook(hook),
}


def trained(decoder):
    return next(parameter for parameter in decoder.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("where", HOOKS)
@pytest.mark.parametrize(("kind", "dtype"), [("lora", "fp32"), ("full", "bf16")])
def test_hooks_are_called_in_every_step(where, kind, dtype):
    model, optimizer = make_training(kind, dtype=dtype)
    (decoder,) = model.stages
    shown, layout, recorder = [], layout_of(model), Again()
    graphs = GraphStep(model, optimizer, layout, recorder, show=shown.append)
    first, *rest, last = varied_steps(layout, 5)
    graphs(first)
    recorded, replays, calls = len(recorder.recorded), recorder.replays, []
    hook = HOOKS[where](decoder, lambda *_: calls.append(1))
    try:
        for step in rest:
            graphs(step)
    finally:
        hook.remove()
    assert len(calls) >= sum(batch.num_trained > 0 for step in rest for batch in step.micro_batches)
    assert len(recorder.recorded) == recorded
    assert recorder.replays == replays
    assert len(shown) == 1
    assert "hooks" in shown[0]
    graphs(last)
    assert len(recorder.recorded) > recorded


def test_a_gradient_cleared_between_steps_is_taken_in():
    model, optimizer = make_training("lora")
    layout = layout_of(model)
    graphs = GraphStep(model, optimizer, layout, Again())
    plain, plain_optimizer = make_training("lora")
    for here, there in zip(varied_steps(layout, 3), varied_steps(layout, 3), strict=True):
        train_step(plain, plain_optimizer, here)
        graphs(there)
        model.stages[0].zero_grad()
    assert_same_state(optimizer, plain_optimizer)


def test_close_lets_go():
    model, optimizer = make_training("lora")
    recorder = Again()
    graphs = GraphStep(model, optimizer, layout_of(model), recorder)
    graphs(varied_steps(layout_of(model), 1)[0])
    graphs.close()
    graphs.close()
    assert recorder.forgotten == 1


# ---- what cannot be recorded ----


@pytest.mark.parametrize(
    ("sizes", "own_loss", "device", "reason"),
    [
        ({}, False, "cpu", "the device is cpu"),
        ({}, True, "cuda", "loss_fn"),
        ({"pipeline": 2}, False, "cuda", "2 pipeline stages"),
        ({"tensor": 4}, False, "cuda", "4 tensor-parallel"),
        ({"shard": 2}, False, "cuda", "2 ranks gather"),
        ({"replicate": 8}, False, "cuda", "8 replicas"),
        ({}, False, "cuda", None),
    ],
)
def test_obstacles(sizes, own_loss, device, reason):
    config = make_training("lora")[0].stages[0].config
    with forced("triton", architecture=90):
        found = obstacle(config, torch.bfloat16, torch.device(device), {**ALONE, **sizes}, own_loss=own_loss)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(("head_dim", "found"), [(64, None), (512, "512 features")])
def test_attention_without_kernels_is_an_obstacle(head_dim, found):
    config = make_training("lora", family="qwen3", head_dim=head_dim)[0].stages[0].config
    with forced("triton", architecture=90):
        reason = obstacle(config, torch.bfloat16, torch.device("cuda"), ALONE, own_loss=False)
    assert (reason is None) if found is None else (found in reason)


@pytest.mark.parametrize(("allocator", "found"), [("native", None), ("cudaMallocAsync", "chooses cudaMallocAsync")])
def test_another_allocator_is_an_obstacle(monkeypatch, allocator, found):
    config = make_training("lora")[0].stages[0].config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    with forced("triton", architecture=90):
        reason = obstacle(config, torch.bfloat16, torch.device("cuda"), ALONE, own_loss=False)
    assert (reason is None) if found is None else (found in reason)


def test_true_is_refused_with_the_reason_before_a_folder_is_made(inputs, tmp_path):
    with pytest.raises(
        ValueError, match="training.cuda_graphs is true, but they need an NVIDIA GPU, and the device is"
    ):
        gapless.train(make_config(inputs, tmp_path / "run", cuda_graphs=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["auto", False])
def test_auto_says_why_not(inputs, tmp_path, capsys, setting):
    gapless.train(make_config(inputs, tmp_path / "run", max_steps=2, cuda_graphs=setting))
    output = "".join(capsys.readouterr())
    assert ("note: training steps are not CUDA graphs: they need an NVIDIA GPU" in output) is (setting == "auto")


# ---- a whole run ----


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_and_one_that_was_stopped_have_the_bits_of_a_plain_one(inputs, tmp_path, monkeypatch, kind):
    class StopAtFive(Callback):
        def on_step_end(self, trainer, metrics):
            if metrics["step"] == 5:
                signal.raise_signal(signal.SIGTERM)

    settings = {"eval": (str(inputs / "eval.jsonl"),), "eval_steps": 3}
    gapless.train(make_config(inputs, tmp_path / "plain", kind, cuda_graphs=False, **settings))
    recorders = []

    def recorder(device):
        recorders.append(Again())
        return recorders[-1]

    monkeypatch.setattr(trainer_module, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(trainer_module, "CudaRecorder", recorder)
    gapless.train(make_config(inputs, tmp_path / "graphs", kind, **settings))
    assert_same_outcome(outcome(tmp_path / "graphs"), outcome(tmp_path / "plain"))
    assert recorders[0].replays
    assert recorders[0].forgotten == 1
    stopped = make_config(inputs, tmp_path / "stopped", kind, **settings)
    assert not Trainer(stopped, callbacks=[StopAtFive()]).train().finished
    assert gapless.train(stopped).finished
    assert_same_outcome(outcome(tmp_path / "stopped"), outcome(tmp_path / "plain"))
