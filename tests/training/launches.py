"""Kernels that runs launch beside those that were foreseen: a script, without an interpreter.

    python launches.py keys FOLDER KIND ...

compares keys of Triton's caches for runs of some kinds, compiles nothing, and prints a line of JSON for each: the keys
that the run has and that were not foreseen, how many it has, and how many were foreseen in vain.

    python launches.py steps FOLDER

compiles what a run in the folder launches, and prints how many kernels there are and how many were compiled anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from triton import knobs
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[1]))

from gapless.adapters.lora import lora_layers, unchanged
from gapless.config import RunConfig
from gapless.config_file import load_config
from gapless.data.tokenizer import Tokenizer
from gapless.kernels.compiling import compile_kernels
from gapless.kernels.runtime import Chip, compiled_only
from gapless.parallel.mesh import Mesh
from gapless.parallel.world import World
from gapless.training import setup
from gapless.training.compile_ahead import _decisive, _read_config, go_through
from gapless.training.optim import AdamW
from gapless.training.step import train_step
from kernels.compile_check import CompilingDriver
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE
from training.runs import make_config, write_inputs

CPU = torch.device("cpu")
CHIPS = {86: Chip(86, 84, 6 << 20), 90: Chip(90, 132, 50 << 20)}
KINDS = {
    "lora": ("lora", {"dtype": "bf16"}),
    "documents of one length": ("full", {"packing": False}),
    "lora of some layers": (
        "lora",
        {"dtype": "bf16", "lora_dropout": 0.0, "target_modules": ("q_proj", "v_proj", "down_proj"), "r": 8},
    ),
    "lora in rows of any length": ("lora", {"dtype": "bf16", "max_length": 99, "per_device_train_batch_size": 3}),
    "lora and a head": ("lora", {"dtype": "bf16", "modules_to_save": ("lm_head",), "packing": False}),
    "lora in float32": ("lora", {}),
    "lora in layers that run again": ("lora", {"dtype": "bf16", "checkpointing": "full"}),
    "full": ("full", {}),
    "full in layers that run again": ("full", {"checkpointing": "full"}),
    "full in rows of any length": (
        "full",
        {"max_length": 99, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 1, "max_documents": 2},
    ),
    "full with moments in 8 bits": ("full", {"optim": "adamw_8bit", "deterministic": False}),
    "full in pure bf16": ("full", {"pure_bf16": True, "adam_beta2": 0.95}),
}


def run_steps(config: RunConfig) -> None:
    """What a trainer does until its third step is launched, on a CPU: its numbers are whatever memory holds."""
    tokenizer, world, mesh = Tokenizer.from_folder(config.model.path, None), World.single(), Mesh.single()
    described = setup.describe_model(config, tokenizer)
    rows = setup.open_data(config, None, None)
    stores = setup.build_stores(config, tokenizer, rows, lambda _: None, world)
    parallel = setup.build_model(config, described, mesh, CPU, world)
    (model,) = parallel.stages
    optimizer = AdamW(setup.trained_views(config, model), config.optim, CPU)
    parallel.bind(optimizer.buffers())
    size = config.training.per_device_train_batch_size
    layout = setup.build_layout(config, model, size)
    loader = setup.build_loader(config, stores[0], layout, lambda _: 0.1, mesh, CPU)
    with setup.determinism(config.training.deterministic), closing(optimizer), closing(loader):
        for _ in range(3):
            with unchanged(*lora_layers(model)):
                train_step(parallel, optimizer, loader.next_step())
        if stores[1] is not None:
            layout = setup.build_layout(config, model, config.training.per_device_eval_batch_size or size)
            parallel.modes(training=False)
            with unchanged(*lora_layers(model)):
                parallel.loss_sum(list(setup.evaluation_batches(config, stores[1], layout, mesh, CPU)))


def keys(work: Callable[[], None], chip: Chip) -> set[str]:
    found = set()

    def note(*, key, fn, **_) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # which leaves out the compilation

    knobs.runtime.jit_cache_hook = note
    driver.set_active(CompilingDriver(chip.architecture))
    with compiled_only(chip):
        work()
    return found


def write_grouped(folder: Path) -> None:
    """Inputs of runs, with a model of two query heads to a key head."""
    write_inputs(folder)
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=2, num_key_value_heads=3)


def compare_keys(folder: Path, names: list[str]) -> None:
    write_grouped(folder)
    for name in names:
        kind, settings = KINDS[name]
        config = make_config(folder, folder / "run", kind, eval=(str(folder / "eval.jsonl"),), **settings)
        config_read = _read_config(json.loads(json.dumps(asdict(_decisive(config)))))
        for architecture, chip in CHIPS.items():
            foreseen = keys(partial(go_through, config_read, evaluates=True), chip)
            launched = keys(partial(run_steps, config), chip)
            missed = sorted(launched - foreseen)
            line = {"kind": f"{name} on {architecture}", "missed": missed, "launched": len(launched)}
            print(json.dumps(line | {"in vain": len(foreseen - launched)}), flush=True)


def compile_steps(folder: Path) -> None:
    found = compile_kernels(partial(run_steps, load_config(folder / "run.toml")), CHIPS[86], threads=2)
    print(json.dumps({"kernels": len(found.files), "fresh": found.fresh, "failed": found.failed}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "keys":
        compare_keys(Path(sys.argv[2]), sys.argv[3:])
    else:
        compile_steps(Path(sys.argv[2]))
