"""Pipeline stages give one process's losses and gradients under every schedule."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pool import run
from torch.distributed import barrier
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gapless.adapters.lora import apply_lora
from gapless.batch import BatchLayout, Document, build_batch
from gapless.config import AdapterConfig, ParallelConfig
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import local_tensor
from gapless.models.weights import materialise
from gapless.parallel.mesh import build_mesh
from gapless.parallel.pipeline import Pipeline, check_pipeline, split_stages, stage_layers
from tiny import DTYPES, randomise, tiny_config

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LAYOUT = BatchLayout(rows=1, row_tokens=40, row_documents=8)
ROWS = [((40,), 0.9), ((3, 20, 10), 0.0), ((1, 5), 1.0), ((17, 17), 0.1), ((2, 30), 1.0), ((11,), 0.5)]
"""Lengths of each micro-batch's documents and the share of their tokens that is trained: very unlike, one has none."""


@dataclass(frozen=True)
class Case:
    schedule: str = "1f1b"
    micro_batches: int = 2
    kind: str = "full"
    """"full", "lora", "last" (one adapter, in the last layer), "saved" (adapters, and embedding and head in full)."""
    tied: bool = False
    dtype: str = "fp32"
    steps: int = 1
    """With plain gradient descent between."""
    layers: int = 5
    reshard: bool | None = None
    """Whether FSDP2 frees weights after a forward; None for no FSDP2."""


def make_model(case: Case, device: str = "cpu") -> Decoder:
    fields = {"num_hidden_layers": case.layers, "tie_word_embeddings": case.tied}
    model = Decoder(decoder_config(tiny_config("qwen3", **fields)), dtype=DTYPES[case.dtype], device=device)
    if device != "meta":
        randomise(model)
    if case.kind != "full":
        targets = ("model.layers.4.self_attn.q_proj",) if case.kind == "last" else ("all-linear",)
        saved = ("embed_tokens", "lm_head") if case.kind == "saved" else ()
        apply_lora(model, AdapterConfig(r=4, lora_dropout=0.1, target_modules=targets, modules_to_save=saved), seed=1)
    if device != "meta":
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():  # B starts at 0, where A would have no gradient
            if "lora_b" in name:
                parameter.data.normal_(std=0.1, generator=generator)
    return model


def window(count: int, step: int = 0) -> list:
    """The micro-batches of a step, all in one shape, however much of it is padding."""
    random = np.random.default_rng(step)
    rows = [
        [Document(random.integers(0, 256, n).astype(np.int32), random.random(n) < share) for n in lengths]
        for lengths, share in (ROWS[index % len(ROWS)] for index in range(count))
    ]
    trained = sum(int(document.trained[1:].sum()) for row in rows for document in row)
    return [
        build_batch(LAYOUT, [row], row_ids=[index], step_trained=trained, step=step, seed=5)
        for index, row in enumerate(rows)
    ]


def loss_of(model: Decoder, hidden: torch.Tensor, batch) -> torch.Tensor:
    return model.head_loss(*model.select_trained(hidden, batch))


def totals_of(model) -> dict[str, torch.Tensor]:
    """Float32 buffers that gradients add up in, as the optimizer has them."""
    totals = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            totals[name] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.float32:
                parameter.grad = totals[name]
            else:
                parameter.register_post_accumulate_grad_hook(_adder(totals[name]))
    return totals


def _adder(total):
    def add(parameter):
        total.add_(parameter.grad)
        parameter.grad = None

    return add


@torch.no_grad()
def descend(model, totals) -> dict[str, np.ndarray]:
    """A step against the gradients, which are returned and cleared."""
    found = {}
    for name, parameter in model.named_parameters():
        if name in totals:
            total = totals[name]
            if parameter.dtype == torch.float32:
                assert parameter.grad is total, name
            parameter -= 0.1 * total
            whole = total.full_tensor() if isinstance(total, DTensor) else total
            found[name] = whole.numpy(force=True).copy()
            total.zero_()
        else:
            assert parameter.grad is None, name
    return found


# ---- in one process ----


def alone(case: Case, ranks: int = 1) -> list:
    """(loss, gradients by name) of every step."""
    model, results = make_model(case), []
    totals = totals_of(model)
    for step in range(case.steps):
        loss = 0.0
        for batch in window(case.micro_batches * ranks, step):
            share = loss_of(model, model(batch.tokens, batch.segments), batch) / batch.scalars.num_trained
            share.backward()
            loss += share.item()
        results.append((loss, descend(model, totals)))
    return results


# ---- on the ranks ----


def build(case: Case, mesh) -> tuple[list[Decoder], Pipeline]:
    stages = split_stages(make_model(case, "meta"), mesh, case.schedule)
    whole = dict(make_model(case).named_parameters())
    for stage in stages:
        assert all(parameter.is_meta for parameter in stage.parameters())
        materialise(stage, "cpu")
        for name, parameter in stage.named_parameters():
            source = whole["embed.weight" if case.tied and name == "head.weight" else name]
            parameter.data.copy_(source.data)
            assert parameter.requires_grad == source.requires_grad
        if case.reshard is not None:
            shard(stage, mesh, case.reshard)
    pipeline = Pipeline(
        stages, mesh, case.schedule, micro_batches=case.micro_batches, tokens=LAYOUT.tokens, device="cpu"
    )
    return stages, pipeline


def shard(stage, mesh, reshard):
    settings = {"mesh": mesh.device_mesh["shard"], "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    for layer in stage.layers.values():
        fully_shard(layer, reshard_after_forward=reshard, **settings)
    fully_shard(stage, reshard_after_forward=reshard, **settings)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def train_cases(rank, world, cases):
    return [train_case(rank, world, case) for case in cases]


def train_case(rank, world, case: Case) -> list:
    sharded = case.reshard is not None
    config = ParallelConfig(pp_size=2 if sharded else world, dp_shard_size=2 if sharded else 1)
    mesh = build_mesh(config, rank=rank, world_size=world)
    stages, pipeline = build(case, mesh)
    model = torch.nn.ModuleList(stages)
    totals, results = totals_of(model), []
    for step in range(case.steps):
        batches = window(case.micro_batches * mesh.data_size, step)[mesh.data_rank :: mesh.data_size]
        loss = pipeline.train(batches, loss_of)
        assert not loss.requires_grad
        if (tied := pipeline.tied) is not None:
            name = next(name for name, value in model.named_parameters() if value is tied)
            pipeline.sum_tied(local_tensor(totals[name]))
        mesh.sum(loss)
        # Names begin with the place in the list.
        gradients = {name.partition(".")[2]: value for name, value in descend(model, totals).items()}
        results.append((loss.item(), gradients))
    return results


def assembled(by_rank: list, case: Case) -> list:
    """Like `alone`; what several ranks have must be the same on all."""
    steps = []
    for results in zip(*by_rank, strict=True):
        gradients = {}
        for loss, found in results:
            assert loss == results[0][0]
            for name, value in found.items():
                own = "embed.weight" if case.tied and name == "head.weight" else name
                assert np.array_equal(gradients.setdefault(own, value), value), name
        steps.append((results[0][0], gradients))
    return steps


def relative_error(found, expected) -> float:
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check(world: int, cases: list[Case], tolerance=1e-5) -> None:
    by_case = zip(*run(world, train_cases, cases), strict=True)
    for case, by_rank in zip(cases, by_case, strict=True):
        expected = alone(case, 1 if case.reshard is None else 2)
        for (loss, found), (expected_loss, expected_found) in zip(assembled(by_rank, case), expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=tolerance), case
            assert found.keys() == expected_found.keys(), case
            for name, value in expected_found.items():
                assert relative_error(found[name], value) < tolerance, (case, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_a_rank_or_one(schedule):
    check(
        2,
        [
            Case(schedule, micro_batches=2),
            Case(schedule, micro_batches=4, tied=True, steps=2),
            Case(schedule, micro_batches=4, kind="lora", steps=2),
            Case(schedule, micro_batches=2, kind="saved", tied=True),
            # No stage but the last has anything to train, so the first gives an output that has no gradient.
            Case(schedule, micro_batches=2, kind="last"),
        ],
    )


def test_four_ranks():
    check(4, [Case(micro_batches=6, tied=True, steps=2), Case(micro_batches=4, kind="lora")])


@pytest.mark.slow  # at once there is test_layouts.py
def test_with_sharded_weights():
    check(
        4,
        [
            Case("1f1b", reshard=True, tied=True, micro_batches=4, steps=2),
            Case("interleaved", reshard=True, steps=2),
            Case("interleaved", reshard=False, kind="lora"),
            Case("zero_bubble", reshard=False, kind="saved", tied=True, steps=2),
        ],
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_low_precision_gradients_add_up_in_float32(schedule):
    """Every micro-batch's bf16 gradients reach the optimizer's hook on their own."""
    case = Case(schedule, micro_batches=6, dtype="bf16")
    ((loss, found),) = assembled(run(2, train_case, case), case)
    ((expected_loss, expected),) = alone(case)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-6, name


# ---- evaluation ----


def evaluate_cases(rank, world, cases):
    mesh = build_mesh(ParallelConfig(pp_size=world), rank=rank, world_size=world)
    results = []
    for case in cases:
        stages, pipeline = build(case, mesh)
        model = torch.nn.ModuleList(stages)
        totals_of(model)
        for count in (3, 1):  # before any training, and not as many as in training
            model.eval()
            results.append(mesh.sum(pipeline.evaluate(window(count), loss_of)).item())
            model.train()
            pipeline.train(window(case.micro_batches), loss_of)
        assert any(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)
    return results


def test_evaluation():
    cases = [Case(schedule, kind="lora") for schedule in ("1f1b", "interleaved")]
    model = make_model(cases[0]).eval()
    with torch.no_grad():
        expected = [
            sum(loss_of(model, model(b.tokens, b.segments), b).item() for b in window(count)) for count in (3, 1)
        ]
    for results in run(2, evaluate_cases, cases):
        assert results == pytest.approx(expected * 2, rel=1e-6)


# ---- refusals ----


def failing(rank, world):
    """Both ranks raise, each after it has given the other what that waits for."""

    def loss(model, hidden, batch):
        raise ValueError("one line for the user")

    mesh = build_mesh(ParallelConfig(pp_size=world), rank=rank, world_size=world)
    _, pipeline = build(Case("gpipe"), mesh)
    good, batch = window(2)
    try:
        pipeline.train([good, replace(batch, tokens=batch.tokens + 256)], loss)
    except (ValueError, IndexError) as error:
        found = type(error), str(error)
    barrier()
    return found


def test_what_a_stage_raises_comes_through():
    first, last = run(2, failing)
    assert first == (IndexError, "index out of range in self")
    assert last == (ValueError, "one line for the user")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((3, 4, "1f1b", 4), "pp_size 4 is more than the model's 3 layers; pp_size can be at most 3$"),
        (
            (6, 4, "interleaved", 4),
            r"pp_size 4 x 2 stages a rank \(pp_schedule interleaved\) is more than the model's 6 layers; "
            "pp_size can be at most 3 with this schedule; 1f1b needs half as many",
        ),
        ((1, 2, "zero_bubble", 4), "1 layers; the model is too small for a pipeline"),
        ((8, 4, "1f1b", 3), "gradient_accumulation_steps is 3, pp_size 4; raise gradient_accumulation_steps to 4, or"),
        (
            (8, 2, "interleaved", 5),
            "in 2 equal rounds .* is 5, pp_size 2; set gradient_accumulation_steps to 4 or 6, or",
        ),
        ((16, 4, "zero_bubble", 9), "is 9, pp_size 4; set gradient_accumulation_steps to 8 or 10, or use 1f1b"),
    ],
)
def test_refused_with_the_numbers(settings, message):
    with pytest.raises(ValueError, match=message):
        check_pipeline(*settings)


def test_zero_bubble_needs_its_weights():
    with pytest.raises(ValueError, match="zero_stage 3 has freed them by then; set zero_stage = 2, or use interleaved"):
        check_pipeline(8, 2, "zero_bubble", 4, frees_weights=True)
    check_pipeline(8, 2, "interleaved", 4, frees_weights=True)


def test_zero_bubble_does_not_run_layers_thrice():
    with pytest.raises(ValueError, match="the layer would run again in both; use interleaved"):
        check_pipeline(8, 2, "zero_bubble", 4, runs_again=True)
    check_pipeline(8, 2, "interleaved", 4, runs_again=True)


# ---- cutting ----


def test_stages_are_balanced():
    def sizes(layers, stages):
        parts = stage_layers(layers, stages)
        assert [layer for part in parts for layer in part] == list(range(layers))
        return [len(part) for part in parts]

    assert sizes(32, 4) == [8, 8, 8, 8]
    assert sizes(28, 4) == [7, 7, 7, 7]
    assert sizes(10, 4) == [2, 3, 3, 2]
    assert sizes(11, 4) == [3, 3, 3, 2]
    assert sizes(5, 1) == [5]
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            counts = sizes(layers, stages)
            loads = [count + (stage == 0) + (stage == stages - 1) for stage, count in enumerate(counts)]
            assert min(counts) >= 1
            assert max(loads) - min(loads) <= 1
    with pytest.raises(ValueError, match="3 layers do not fill 4 pipeline stages; lower pp_size"):
        stage_layers(3, 4)
