"""Data parallelism: whatever ranks share the rows and the weights, gradients and losses are those of one process."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import RankError, run

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import BatchLayout, Document, build_batch
from gapless.config import AdapterConfig, ParallelConfig
from gapless.models.views import hf_views, local_tensor
from gapless.parallel.data import GradientReducer, before_backward, check_replicas, reshard, shard_model
from gapless.parallel.mesh import build_mesh
from tiny import tiny_model

ROW_TOKENS, MICRO_BATCHES = 40, 2


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


def batches_of(rows, mesh, step):
    """This rank's micro-batches: consecutive rows, cut into as many ranks as there are."""
    each = len(rows) // mesh.data_size
    first, size = mesh.data_rank * each, each // MICRO_BATCHES
    layout = BatchLayout(rows=size, row_tokens=ROW_TOKENS, row_documents=8)
    trained = sum(int(document.trained[1:].sum()) for row in rows for document in row)
    return [
        build_batch(
            layout, rows[start : start + size], row_ids=range(start, start + size), step_trained=trained, step=step
        )
        for start in range(first, first + each, size)
    ]


def make_model(case):
    model = tiny_model(
        dtype=case.get("dtype", "fp32"), tie_word_embeddings=case.get("tied", False), **dict(case.get("model", ()))
    )
    if case["kind"] == "full":
        return model, hf_views
    apply_lora(model, AdapterConfig(r=4, lora_dropout=0.1, modules_to_save=case.get("save", ())), seed=1)
    with torch.no_grad():
        for view in adapter_views(model):  # B starts at 0, where A would have no gradient
            if "lora_B" in view.name:
                view.parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(view.name)))
    return model, adapter_views


class Sharded:
    """Ranks that run a case: the model, cut as the case says, and what a step of it takes."""

    def __init__(self, rank, world, case):
        self.config = ParallelConfig(**case.get("parallel", {}))
        self.mesh = build_mesh(self.config, rank=rank, world_size=world)
        self.model, views = make_model(case)
        self.model.train()
        self.sharded = self.mesh.size("shard") > 1
        if self.sharded:
            dtype = next(self.model.parameters()).dtype
            shard_model(self.model, self.mesh, self.config, lambda module: None, dtype=dtype)
        self.views = list(views(self.model))
        self.parameters = list(dict.fromkeys(view.parameter for view in self.views))
        self.reducer = None
        if not self.sharded:
            check_replicas(self.model, self.mesh)
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            if world > 1:
                gradients = [(p, p.grad) for p in self.model.parameters() if p.requires_grad]
                self.reducer = GradientReducer(gradients, self.mesh.group("replicate"), bucket_bytes=20_000)

    def backward(self, batches):
        """Gradients of a step; returns its loss."""
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if self.sharded:
                before_backward(self.model, last=last, zero_stage=self.config.zero_stage)
            elif self.reducer is not None:
                if last:
                    self.reducer.arm()
                if not batch.num_trained:
                    continue  # whole replicas need no backward; shards do
            loss = self.model.loss(batch) / batch.scalars.num_trained
            loss.backward()
            total += loss.detach()
        if self.reducer is not None:
            self.reducer.finish()
        return self.mesh.sum(total).item()

    def gradient(self, parameter):
        return local_tensor(parameter.grad)

    @torch.no_grad()
    def update(self, rate=0.02):
        for parameter in self.parameters:
            local_tensor(parameter).sub_(self.gradient(parameter), alpha=rate)
            local_tensor(parameter.grad).zero_()

    def boxes(self, tensor_of):
        return [
            (view.name, view.offset, view.full_shape, view.read(tensor_of(view.parameter)).double())
            for view in self.views
        ]


def train(rank, world, cases):
    """Losses of three steps, and gradients of the first and weights after the last as boxes."""
    results = []
    for case in cases:
        run_ = Sharded(rank, world, case)
        losses, gradients = [], None
        for step in range(3):
            batches = batches_of(rows_of_step(step, case.get("idle", ())), run_.mesh, step)
            losses.append(run_.backward(batches))
            gradients = gradients or run_.boxes(run_.gradient)
            run_.update()
        results.append((losses, gradients, run_.boxes(local_tensor)))
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
            assert torch.equal(tensor[place][seen], box[seen]), name
            tensor[place] = box
            count[place] += 1
    for name, count in counts.items():
        assert (count == copies).all(), f"{name} is on {count.unique().tolist()} ranks, not {copies}"
    return tensors


def relative_error(found, expected):
    assert found.keys() == expected.keys()
    difference = sum((found[name] - expected[name]).square().sum() for name in expected)
    return float((difference / sum(value.square().sum() for value in expected.values())).sqrt())


@cache
def alone(items):
    """What one process finds."""
    losses, gradients, weights = train(0, 1, [dict(items)])[0]
    return losses, whole([gradients], 1), whole([weights], 1)


def check(cases, world, bound=1e-5):
    by_rank = run(world, train, cases)
    for index, case in enumerate(cases):
        found = [results[index] for results in by_rank]
        expected_losses, expected_gradients, expected_weights = alone(
            tuple((name, value) for name, value in case.items() if name != "parallel")
        )
        copies = world // case["parallel"].get("dp_shard_size", 1)
        for losses, _, _ in found:
            assert losses == pytest.approx(expected_losses, rel=bound), case
        assert relative_error(whole([g for _, g, _ in found], copies), expected_gradients) < bound, case
        assert relative_error(whole([w for _, _, w in found], copies), expected_weights) < bound, case


def shards(ranks, level=3, **more):
    return {"dp_shard_size": ranks, "zero_stage": level, **more}


LAYOUTS = {
    2: [{}, *(shards(2, level) for level in (1, 2, 3))],
    4: [{}, *(shards(4, level) for level in (1, 2, 3)), shards(2, dp_replicate_size=2)],
}
MODELS = [{"kind": kind, "tied": tied} for kind in ("full", "lora") for tied in (False, True)]


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_gradients_and_losses_are_those_of_one_process(model, world):
    check([{**model, "parallel": layout} for layout in LAYOUTS[world]], world)


def test_ranks_with_nothing_to_train():
    idle = (4, 5, 6, 7)  # all rows of the second rank
    models = [{**model, "idle": idle} for model in (MODELS[1], MODELS[2])]
    check([{**model, "parallel": layout} for model in models for layout in LAYOUTS[2]], 2)
    check([{**MODELS[2], "idle": idle, "parallel": LAYOUTS[4][-1]}], 4)


def test_frozen_weights_may_stay_whole_and_modules_be_trained_beside_adapters():
    saved = {"kind": "lora", "save": ("lm_head",)}
    layouts = [shards(2, level, shard_frozen=False) for level in (1, 2, 3)]
    cases = [{**MODELS[2], "parallel": layouts[0]}, *({**saved, "parallel": layout} for layout in layouts)]
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
        run_ = Sharded(rank, world, case)
        batches = batches_of(rows_of_step(0), run_.mesh, 0)
        run_.backward(batches)  # the first forward sets up
        counts.append(collectives(lambda run_=run_, batches=batches: run_.backward(batches)))
    return counts


def test_levels_communicate_as_they_say():
    # Four groups: three layers, and what is around them. The last sum is that of the loss.
    cases = [{"kind": "full", "parallel": layout} for layout in LAYOUTS[4][1:]]
    expected = [[4, 4, 1], [4, 8, 1], [2 * (2 * 3 + 1), 8, 1], [14, 8, 4 + 1]]
    assert run(4, count_collectives, cases) == [expected] * 4


def shard_and_evaluate(rank, world, level):
    run_ = Sharded(rank, world, {"kind": "full", "tied": True, "parallel": shards(2, level)})
    model = run_.model
    batch = batches_of(rows_of_step(0), run_.mesh, 0)[0]
    tied = [model.head.weight is model.embed.weight]
    with torch.no_grad():
        before = model.loss(batch).item()
        tied.append(model.head.weight is model.embed.weight)
        whole_after_forward = not hasattr(model.embed.weight, "placements")
        for parameter in run_.parameters:
            local_tensor(parameter).mul_(0.5)
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
    case = {"kind": "lora", "save": ("lm_head",), "parallel": shards(2, shard_frozen=not whole_frozen)}
    reference, _ = make_model(case)
    expected = {name: value.requires_grad for name, value in reference.named_parameters()}
    run_ = Sharded(rank, world, case)
    before = {view.name: view.read(view.local) for view in hf_views(run_.model)}
    for step in range(2):
        run_.backward(batches_of(rows_of_step(step), run_.mesh, step))
        run_.update()
    assert {name: value.requires_grad for name, value in run_.model.named_parameters()} == expected
    after = {view.name: view.read(view.local) for view in hf_views(run_.model)}
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    sharded = {value.requires_grad for value in run_.model.parameters() if hasattr(value, "placements")}
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
