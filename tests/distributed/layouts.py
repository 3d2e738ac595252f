"""One short training in any layout: what each rank sees, for comparison with one process."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import torch
from runs import make_config

from gapless.batch import build_batch
from gapless.config import ParallelConfig, RunConfig
from gapless.data.tokenizer import Tokenizer
from gapless.parallel import check_layout
from gapless.parallel.launch import launched
from gapless.parallel.mesh import build_mesh, mesh_sizes
from gapless.parallel.ownership import Ownership
from gapless.parallel.world import World
from gapless.training import setup
from gapless.training.optim import AdamW
from gapless.training.schedule import make_schedule
from gapless.training.step import mean_loss, train_step


def layout_config(inputs: Path, kind: str, **settings) -> RunConfig:
    """A run of 3 steps in float32, with dropout and clipping; keys of [parallel] beside the others."""
    parallel = {name: settings.pop(name) for name in list(settings) if name in ParallelConfig.__dataclass_fields__}
    # With the usual epsilon Adam's update of an element whose gradient is rounding alone has the size of any other.
    settings = {"dtype": "fp32", "max_length": 128, "max_steps": 3, "warmup_steps": 0, "adam_epsilon": 1e-3} | settings
    config = make_config(inputs, inputs / "out", kind, **settings)
    return dataclasses.replace(config, parallel=ParallelConfig(**parallel))


def train_layout(rank: int, world_size: int, config: RunConfig, steps: int = 3) -> dict:
    """Train in a process of an initialised group (or alone): numbers of this rank."""
    with launched(config.parallel, config.model.device) as world:
        return _train(world, config, steps)


def train_alone(config: RunConfig, steps: int = 3) -> dict:
    """The same in this process."""
    return _train(World.single(), config, steps)


def _train(world: World, config: RunConfig, steps: int) -> dict:
    tokenizer = Tokenizer.from_folder(config.model.path)
    described = setup.describe_model(config, tokenizer)
    check_layout(config, described.config, mesh_sizes(config.parallel, world.size))
    device = torch.device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    mesh = build_mesh(config.parallel, rank=world.rank, world_size=world.size, device_type=device.type)
    store, _ = setup.build_stores(config, tokenizer, setup.open_data(config, None, None), print, world)
    model = setup.build_model(config, described, mesh, device, world)
    layout = setup.build_layout(config, model.stages[0], config.training.per_device_train_batch_size)
    schedule = make_schedule(config.optim, steps)
    loader = setup.build_loader(config, store, layout, schedule, mesh, device)
    rows = [loader.rows_per_epoch(epoch) for epoch in (0, 1)]
    views = setup.trained_views(config, *model.stages)
    optimizer = AdamW(views, config.optim, device)
    model.bind(optimizer.buffers())
    ownership = Ownership(views, world)
    result = {"rows": rows, "losses": [], "norms": [], "trained": _trainable(model.stages)}
    first_gradients(result, model, optimizer, ownership)
    frozen = _frozen(model.stages)
    nothing = build_batch(layout, [])
    empty = SimpleNamespace(micro_batches=[nothing] * config.training.gradient_accumulation_steps, num_trained=0)
    assert train_step(model, optimizer, empty, counts=ownership.counts) is None
    for _ in range(steps):
        data = loader.next_step()
        metrics = train_step(model, optimizer, data, counts=ownership.counts)
        result["losses"].append(metrics.loss.item())
        result["norms"].append(metrics.grad_norm.item())
    eval_layout = setup.build_layout(config, model.stages[0], config.training.per_device_eval_batch_size or 1)
    batches = setup.evaluation_batches(config, store, eval_layout, mesh, device)
    result["eval"] = mean_loss(model, batches)
    result["frozen"] = all(torch.equal(before, now) for before, now in zip(frozen, _frozen(model.stages), strict=True))
    result["still_trained"] = _trainable(model.stages)
    result["weights"] = [(view.name, view.offset, view.full_shape, view.read(view.local).cpu()) for view in views]
    loader.close()
    optimizer.close()
    model.close()
    return result


def first_gradients(result: dict, model, optimizer, ownership) -> None:
    """Have the gradients of the next step noted, as they are before the update."""
    plain = optimizer.squares

    def noting(counts):
        result["gradients"] = [
            (view.name, view.offset, view.full_shape, view.read(optimizer.gradient(view.parameter)).cpu())
            for view in optimizer.views
        ]
        optimizer.squares = plain
        return plain(counts)

    optimizer.squares = noting


def assemble(results: list[dict], key: str) -> dict[str, torch.Tensor]:
    """Whole tensors from the boxes of all ranks: nothing is missing, and ranks that hold the same agree."""
    whole: dict[str, torch.Tensor] = {}
    for result in results:
        for name, offset, full, value in result[key]:
            tensor = whole.setdefault(name, torch.full(full, float("nan")))
            region = tensor[tuple(slice(a, a + n) for a, n in zip(offset, value.shape, strict=True))]
            known = ~region.isnan()
            torch.testing.assert_close(region[known], value[known], rtol=1e-4, atol=1e-7)
            region.copy_(value)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def assert_same_numbers(results: list[dict], alone: dict, rel: float = 1e-5) -> None:
    """Losses, norms, gradients and weights are those of one process."""
    for name in ("gradients", "weights"):
        found, expected = assemble(results, name), assemble([alone], name)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            error = (found[tensor] - value).norm() / value.norm().clamp(min=1e-6)
            assert error < rel, (name, tensor, float(error))
    for result in results:
        for name in ("losses", "norms"):
            for value, expected in zip(result[name], alone[name], strict=True):
                assert abs(value - expected) <= rel * abs(expected), (name, result[name], alone[name])
        assert abs(result["eval"] - alone["eval"]) <= rel * alone["eval"]
        assert result["frozen"]
        assert result["trained"] == result["still_trained"]
    trained = set().union(*(result["trained"] for result in results))
    assert trained | {"embed.weight"} == alone["trained"] | {"embed.weight"} | ({"head.weight"} & trained)


def _trainable(stages) -> set[str]:
    return {view_name(name) for stage in stages for name, value in stage.named_parameters() if value.requires_grad}


def view_name(parameter: str) -> str:
    """A parameter's name without the wrappers of tensor parallelism."""
    return parameter.replace(".inner", "")


def _frozen(stages) -> list[torch.Tensor]:
    from gapless.models.views import local_tensor

    return [local_tensor(v).clone() for stage in stages for v in stage.parameters() if not v.requires_grad]
