"""Data parallelism: whatever ranks share the rows and the weights, gradients and losses are those of one process."""

import weakref
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import RankError, run

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import BatchLayout, Document, build_batch
from gapless.config import AdapterConfig, OptimConfig, ParallelConfig
from gapless.models.decoder import Decoder
from gapless.models.views import hf_views
from gapless.models.weights import materialise
from gapless.parallel.data import GradientReducer, check_replicas, reshard, shard_model
from gapless.parallel.mesh import build_mesh
from gapless.parallel.model import ParallelModel
from gapless.training.optim import AdamW
from tiny import DTYPES, tiny_model

ROW_TOKENS = 40


def rows_of_step(step, idle=()):
    """Eight rows of unlike lengths with very unlike shares of trained tokens; those in `idle` have none."""
    lengths = [(40,), (3, 20, 10), (1,), (17, 17), (2, 30), (11,), (5, 5, 5, 5), (39,)]
    shares = [0.9, 0.1, 0.5, 0.05, 1.0, 0.0, 0.5, 0.3]
    random = np.random.default_rng(step)
    return [
        [
            Document(
                random.integers(0, 256, length).astype(np.int32),
                random.random(length) < (0 if index in idle else share),
            )
            for length in row
        ]
        for index, (row, share) in enumerate(zip(lengths, shares, strict=True))
    ]


def batches_of(rows, mesh, step, micro_batches):
    """This rank's micro-batches: consecutive rows, cut into as many ranks as there are."""
    each = len(rows) // mesh.data_size
    first, size = mesh.data_rank * each, each // micro_batches
    layout = BatchLayout(rows=size, row_tokens=ROW_TOKENS, row_documents=8)
    trained = sum(int(document.trained[1:].sum()) for row in rows for document in row)
    return [
        build_batch(
            layout,
            rows[start : start + size],
            row_ids=range(start, start + size),
            step_trained=trained,
            learning_rate=0.01,
            step=step,
        )
        for start in range(first, first + each, size)
    ]


def make_model(case):
    model = tiny_model(
        dtype=case.get("dtype", "fp32"), tie_word_embeddings=case.get("tied", False), **dict(case.get("model", ()))
    )
    if case["kind"] == "full":
        return model, hf_views
    apply_lora(model, AdapterConfig(r=4, lora_dropout=0.1, **dict(case.get("adapter", ()))), seed=1)
    with torch.no_grad():
        for view in adapter_views(model):  # B starts at 0, where A would have no gradient
            if "lora_B" in view.name:
                view.parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(view.name)))
    return model, adapter_views


class Trained:
    """A rank's part of a case: the model, cut as the case says, and its optimizer."""

    def __init__(self, rank, world, case):
        config = ParallelConfig(**case.get("parallel", {}))
        self.case, self.mesh = case, build_mesh(config, rank=rank, world_size=world)
        self.decoder, views = make_model(case)
        self.decoder.train()
        optim = OptimConfig(adam_epsilon=1e-3, weight_decay=0.01, pure_bf16=case.get("pure_bf16", False))
        if self.mesh.size("shard") > 1:
            dtype = DTYPES[case.get("dtype", "fp32")]
            shard_model(self.decoder, self.mesh, config, lambda module: None, dtype=dtype, pure_bf16=optim.pure_bf16)
        self.model = ParallelModel([self.decoder], self.mesh, config)
        self.optimizer = AdamW(list(views(self.decoder)), optim)
        self.model.bind(self.optimizer.buffers())

    def batches(self, step):
        return batches_of(rows_of_step(step, self.case.get("idle", ())), self.mesh, step, self.case.get("micro", 2))

    def step(self, step, notice=lambda: None):
        """One update; returns loss and gradient norm, and calls `notice` when the gradients are there."""
        batches = self.batches(step)
        share = self.model.accumulate(batches)
        self.model.reduce(self.optimizer.gradient)
        notice()
        squares = self.optimizer.squares(lambda parameter: self.mesh.coordinate("replicate") == 0)
        loss, squares = self.mesh.sum(torch.stack([share, squares])).unbind()
        norm, _ = self.optimizer.step(loss, batches[0].scalars.learning_rate, squares.sqrt())
        return loss.item(), norm.item()


def train(rank, world, cases):
    """Of three steps: losses and norms; gradients of the first and the state after the last as boxes."""
    results = []
    for case in cases:
        trained = Trained(rank, world, case)
        boxes = []

        def notice(optimizer=trained.optimizer, boxes=boxes):
            boxes.extend(
                (f"gradient/{view.name}", view.offset, view.full_shape, view.read(optimizer.gradient(view.parameter)))
                for view in optimizer.views
                if optimizer.step_count == 0
            )

        numbers = [trained.step(step, notice) for step in range(3)]
        boxes += [(key, view.offset, view.full_shape, value) for key, view, value in trained.optimizer.tensors()]
        results.append((numbers, boxes))
    return results


def whole(boxes_by_rank, copies):
    """The tensors that boxes of all ranks make up; every element is on exactly `copies` ranks, with the same bits."""
    tensors, counts = {}, {}
    for boxes in boxes_by_rank:
        for name, offset, full, box in boxes:
            place = tuple(slice(start, start + length) for start, length in zip(offset, box.shape, strict=True))
            tensor = tensors.setdefault(name, torch.full(full, torch.nan, dtype=torch.float64))
            count = counts.setdefault(name, torch.zeros(full))
            seen = count[place] > 0
            assert torch.equal(tensor[place][seen], box[seen].double()), name
            tensor[place] = box
            count[place] += 1
    for name, count in counts.items():
        assert (count == copies).all(), f"{name} is on {count.unique().tolist()} ranks, not {copies}"
    return tensors


def errors(found, expected):
    """Relative error by kind: of gradients, weights, moments."""
    assert found.keys() == expected.keys()
    squares = {}
    for name, value in expected.items():
        difference, norm = squares.get(name.split("/")[0], (0, 0))
        squares[name.split("/")[0]] = (difference + (found[name] - value).square().sum(), norm + value.square().sum())
    return {kind: float((difference / norm).sqrt()) for kind, (difference, norm) in squares.items()}


@cache
def alone(items):
    """What one process finds."""
    numbers, boxes = train(0, 1, [dict(items)])[0]
    return numbers, whole([boxes], 1)


def check(cases, world, *, numbers_within=1e-5, gradients_within=1e-5, state_within=1e-4):
    by_rank = run(world, train, cases)
    for index, case in enumerate(cases):
        found = [results[index] for results in by_rank]
        expected, tensors = alone(
            tuple((name, value) for name, value in (case | case.get("alone", {})).items() if name not in IN_RANKS)
        )
        for numbers, _ in found:
            np.testing.assert_allclose(numbers, expected, rtol=numbers_within, err_msg=str(case))
        copies = world // case["parallel"].get("dp_shard_size", 1)
        for kind, error in errors(whole([boxes for _, boxes in found], copies), tensors).items():
            assert error < (gradients_within if kind == "gradient" else state_within), (case, kind, error)


IN_RANKS = ("parallel", "alone")


def shards(ranks, level=3, **more):
    return {"dp_shard_size": ranks, "zero_stage": level, **more}


SAVED_HEAD = (("modules_to_save", ("lm_head",)),)
ONE_LAYER = (("target_modules", ("layers.1.mlp.down_proj",)),)
LAYOUTS = {
    2: [{}, *(shards(2, level) for level in (1, 2, 3))],
    4: [{}, *(shards(4, level) for level in (1, 2, 3)), shards(2, dp_replicate_size=2)],
}
MODELS = [{"kind": kind, "tied": tied} for kind in ("full", "lora") for tied in (False, True)]


@pytest.mark.slow  # at once there is test_layouts.py
@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_gradients_and_losses_are_those_of_one_process(model, world):
    check([{**model, "parallel": layout} for layout in LAYOUTS[world]], world)


@pytest.mark.slow  # at once there is test_layouts.py
def test_ranks_with_nothing_to_train():
    idle = (4, 5, 6, 7)  # all rows of the second rank
    models = [{**model, "idle": idle} for model in (MODELS[1], MODELS[2])]
    check([{**model, "parallel": layout} for model in models for layout in LAYOUTS[2]], 2)
    check([{**MODELS[2], "idle": idle, "parallel": LAYOUTS[4][-1]}], 4)


def test_frozen_weights_may_stay_whole_and_modules_be_trained_beside_adapters():
    saved, one_layer = ({"kind": "lora", "adapter": adapter} for adapter in (SAVED_HEAD, ONE_LAYER))
    layouts = [shards(2, level, shard_frozen=False) for level in (1, 2, 3)]
    cases = [{**MODELS[2], "parallel": layouts[0]}, *({**saved, "parallel": layout} for layout in layouts)]
    cases += [{**one_layer, "parallel": layout} for layout in (*layouts, shards(2, 2), shards(2, 3))]
    check([*cases, {**MODELS[3], "parallel": layouts[2]}, {**saved, "parallel": shards(2)}], 2)


SHAPES = {
    "uneven vocabulary": {"vocab_size": 257},
    "no even axis": {"hidden_size": 42, "head_dim": 14, "num_attention_heads": 3, "num_key_value_heads": 3}
    | {"intermediate_size": 81},
    "fewer heads than ranks": {"num_key_value_heads": 1},
}


def test_shards_are_boxes_of_the_tensors_on_disk_whatever_the_shapes():
    models = [("full", shape) for shape in SHAPES.values()] + [("lora", SHAPES["no even axis"])]
    cases = [
        {"kind": kind, "model": tuple({"num_hidden_layers": 1, **shape}.items()), "parallel": shards(4)}
        for kind, shape in models
    ]
    check(cases, 4)


@pytest.mark.parametrize(
    ("settings", "gradients_within"),
    [
        ({}, 1e-6),
        ({"kind": "lora", "adapter": SAVED_HEAD}, 1e-6),
        ({"pure_bf16": True}, 5e-3),  # FSDP2 rounds the sums of bf16 parameters
    ],
    ids=["full", "lora", "pure"],
)
def test_bf16_masters_are_those_of_one_process(settings, gradients_within):
    """Of the same micro-batches, which bf16 gradients depend on: the first gradients differ in the order of sums only.

    Later a few weights are rounded up instead of down.
    """
    case = {"kind": "full", "dtype": "bf16", "alone": {"micro": 4}} | settings
    check(
        [{**case, "parallel": layout} for layout in LAYOUTS[2]],
        2,
        numbers_within=1e-2,
        gradients_within=gradients_within,
        state_within=3e-2,
    )


# ---- what the levels do ----


# Methods of a process group, by their names in torch 2.13 and 2.11.
METHODS = [("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"), ("allreduce",)]


def collectives(function):
    """How often a function gathers, scatters sums and adds up."""
    counts = [0] * len(METHODS)

    def counted(kind, original):
        def call(*args, **kwargs):
            counts[kind] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in enumerate(METHODS):
            for name in filter(lambda name: hasattr(dist.ProcessGroup, name), names):
                patch.setattr(dist.ProcessGroup, name, counted(kind, getattr(dist.ProcessGroup, name)))
        function()
    return counts


def count_collectives(rank, world, cases):
    counts = []
    for case in cases:
        model, batches = (trained := Trained(rank, world, case)).model, trained.batches(0)
        model.accumulate(batches)  # the first forward sets up
        counts.append(collectives(lambda model=model, batches=batches: model.accumulate(batches)))
    return counts


def test_levels_communicate_as_they_say():
    # Four groups: three layers, and what is around them.
    cases = [{"kind": "full", "parallel": layout} for layout in LAYOUTS[4][1:]]
    expected = [[4, 4, 0], [4, 8, 0], [2 * (2 * 3 + 1), 8, 0], [14, 8, 4]]
    assert run(4, count_collectives, cases) == [expected] * 4


def shard_from_meta(rank, world, tied):
    reference = tiny_model(tie_word_embeddings=tied, num_attention_heads=4)
    values = {view.name: view.read(view.local) for view in hf_views(reference)}
    model = Decoder(reference.config, device="meta")
    whole_elements, filled = [], weakref.WeakSet()

    def fill(module):
        assert all(parameter.is_meta for parameter in module.parameters())
        assert not filled, "earlier groups are still whole somewhere"
        materialise(module, "cpu")
        filled.update(module.parameters())
        own = {id(parameter) for parameter in module.parameters()}
        for view in hf_views(model):
            if id(view.parameter) in own:
                view.write(view.local, values[view.name])
        here = [value for value in model.parameters() if not value.is_meta and not hasattr(value, "placements")]
        whole_elements.append(sum(value.numel() for value in here))

    config = ParallelConfig(**shards(world))
    shard_model(model, build_mesh(config, rank=rank, world_size=world), config, fill, dtype=torch.float32)
    boxes = [(view.name, view.offset, view.full_shape, view.read(view.local)) for view in hf_views(model)]
    return boxes, whole_elements, model.head.weight is model.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_memory_is_filled_one_group_at_a_time(tied):
    reference = tiny_model(tie_word_embeddings=tied, num_attention_heads=4)
    by_rank = run(4, shard_from_meta, tied)
    found = whole([boxes for boxes, _, _ in by_rank], 1)
    assert found.keys() == {view.name for view in hf_views(reference)}
    for view in hf_views(reference):
        assert torch.equal(found[view.name], view.read(view.local).double()), view.name
    layer = sum(value.numel() for value in reference.layers["0"].parameters())
    stem = sum(value.numel() for value in reference.parameters()) - 3 * layer
    matrices = sum(value.numel() for value in found.values() if value.ndim == 2)
    for boxes, whole_elements, one_weight in by_rank:
        assert sum(box.numel() for _, _, full, box in boxes if len(full) == 2) == matrices // 4
        assert whole_elements == [layer, layer, layer, stem]
        assert one_weight == tied


def shard_and_evaluate(rank, world, level):
    trained = Trained(rank, world, {"kind": "full", "tied": True, "parallel": shards(2, level)})
    model, batch = trained.decoder, trained.batches(0)[0]
    tied = [model.head.weight is model.embed.weight]
    with torch.no_grad():
        before = model.loss(batch).item()
        tied.append(model.head.weight is model.embed.weight)
        whole_after_forward = not hasattr(model.embed.weight, "placements")
        for view in trained.optimizer.views:
            view.view(view.local).mul_(0.5)
        stale = model.loss(batch).item()
        reshard(model)
        all_sharded = all(hasattr(parameter, "placements") for parameter in model.parameters())
        fresh = model.loss(batch).item()
    return before, stale, fresh, whole_after_forward, all_sharded, tied


@pytest.mark.parametrize("level", [1, 3])
def test_gathered_weights_are_freed_after_an_evaluation(level):
    for before, stale, fresh, whole_after_forward, all_sharded, tied in run(2, shard_and_evaluate, level):
        assert whole_after_forward
        assert stale != fresh  # the trap: some of the weights are those before the change, at level 1 all
        assert (stale == before) == (level == 1)
        assert all_sharded
        assert tied == [True, True]


def shard_frozen(rank, world, whole_frozen):
    case = {"kind": "lora", "adapter": SAVED_HEAD, "parallel": shards(2, shard_frozen=not whole_frozen)}
    reference, _ = make_model(case)
    expected = {name: value.requires_grad for name, value in reference.named_parameters()}
    trained = Trained(rank, world, case)
    before = {view.name: view.read(view.local) for view in hf_views(trained.decoder)}
    for step in range(2):
        trained.step(step)
    assert {name: value.requires_grad for name, value in trained.decoder.named_parameters()} == expected
    after = {view.name: view.read(view.local) for view in hf_views(trained.decoder)}
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    sharded = {value.requires_grad for value in trained.decoder.parameters() if hasattr(value, "placements")}
    return changed, sharded


@pytest.mark.parametrize(("whole_frozen", "sharded"), [(False, {True, False}), (True, {True})])
def test_frozen_weights_stay_as_they_are(whole_frozen, sharded):
    assert run(2, shard_frozen, whole_frozen) == [(["lm_head.weight"], sharded)] * 2


def differ(rank, world, layout):
    config = ParallelConfig(**layout)
    mesh = build_mesh(config, rank=rank, world_size=world)
    model = tiny_model()
    if rank == world - 1:
        model.layers["1"].mlp.down.bias.data[3] += 1
    try:
        if mesh.size("shard") > 1:
            shard_model(model, mesh, config, lambda module: None, dtype=torch.float32)
        else:
            check_replicas(model, mesh)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("layout", [{}, shards(2), shards(2, dp_replicate_size=2)])
def test_ranks_with_other_weights_are_refused(layout):
    world = 4 if "dp_replicate_size" in layout else 2
    for error in run(world, differ, layout):
        assert "1 of 33 parameters differ" in error
        assert "layers.1.mlp.down.bias" in error


# ---- sums over replicas ----


def reduce(rank, world, bucket_bytes):
    """Windows in which ranks use other parameters, or none; hooks of an optimizer before those of the reducer."""
    parameters = [torch.nn.Parameter(torch.full((size,), 1.0 + size)) for size in (3, 1, 40, 2, 5)]
    low = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    buffers = [torch.zeros_like(parameter) for parameter in parameters]
    low_buffer = torch.zeros(4)
    for parameter, buffer in zip(parameters, buffers, strict=True):
        parameter.grad = buffer

    def move(parameter):
        low_buffer.add_(parameter.grad)
        parameter.grad = None

    low.register_post_accumulate_grad_hook(move)
    everything = [*zip(parameters, buffers, strict=True), (low, low_buffer)]
    mesh = build_mesh(ParallelConfig(), rank=rank, world_size=world)
    reducer = GradientReducer(everything, mesh.group("replicate"), bucket_bytes=bucket_bytes)

    def backward(used):
        sum((parameter.float() * (index + 1 + rank)).sum() for index, parameter in used).backward()

    used = list(enumerate([*parameters, low]))
    found, overlapped = [], []
    for first, second in [(used, used), (used[rank::2], used[1 - rank :: 2]), ([], used[:1] if rank else [])]:
        if first:
            backward(first)
        reducer.arm()
        overlapped.append(collectives(lambda second=second: backward(second) if second else None)[2])
        reducer.finish()
        found.append([buffer.clone() for _, buffer in everything])
        torch._foreach_zero_([buffer for _, buffer in everything])
    reducer.close()
    backward(used)
    return found, overlapped


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 6), (30, 4), (10**6, 1)])
def test_sums_over_replicas_are_exact_and_overlap_with_the_backward(bucket_bytes, buckets):
    for found, overlapped in run(2, reduce, bucket_bytes):
        everywhere = [2 * (index + 1) + 2 * (index + 2) for index in range(6)]
        once = [2 * index + 3 for index in range(6)]
        for sums, expected in zip(found, (everywhere, once, [2, 0, 0, 0, 0, 0]), strict=True):
            for total, value in zip(sums, expected, strict=True):
                assert torch.equal(total, torch.full_like(total, value))
        assert overlapped[0] == buckets
        assert overlapped[2] == 0  # the first parameter is in the last bucket


def backward_twice(rank, world):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    mesh = build_mesh(ParallelConfig(), rank=rank, world_size=world)
    reducer = GradientReducer([(parameter, parameter.grad)], mesh.group("replicate"))
    reducer.arm()
    parameter.sum().backward()
    parameter.sum().backward()


def test_a_second_backward_after_arm_is_noticed():
    with pytest.raises(RankError, match=r"a second backward after arm"):
        run(2, backward_twice)
