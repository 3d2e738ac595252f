"""Tiny runs: a random model, its tokenizer, a few conversations; and what two runs must share."""

import json
import random
from dataclasses import replace
from pathlib import Path

from gapless.config import AdapterConfig, DataConfig, LoggingConfig, ModelConfig, OptimConfig, RunConfig, TrainingConfig
from gapless.training.metrics import TIMING_FIELDS, read_metrics
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "does", "not", "mind", "rain", "Berlin")


def write_inputs(folder: Path, rows: int = 40) -> Path:
    """A model folder, train.jsonl and eval.jsonl."""
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    write_tiny_tokenizer(folder / "model")
    draw = random.Random(0)
    for name, count in (("train", rows), ("eval", 6)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                question, answer = (" ".join(draw.sample(_WORDS, draw.randint(1, 5))) for _ in range(2))
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": turns}) + "\n")
    return folder


def make_config(inputs: Path, output: Path, kind: str = "lora", **settings) -> RunConfig:
    """A run of 10 steps of 2 micro-batches; `settings` by key, as in a run file."""
    lora = kind == "lora"
    config = RunConfig(
        model=ModelConfig(path=str(inputs / "model"), dtype="fp32" if lora else "bf16", device="cpu"),
        data=DataConfig(train=(str(inputs / "train.jsonl"),), max_length=128, cache_dir=str(inputs / "tokens")),
        adapter=AdapterConfig(r=4, lora_dropout=0.1) if lora else AdapterConfig(type="none"),
        optim=OptimConfig(learning_rate=1e-2 if lora else 1e-3, weight_decay=0.01, warmup_steps=2),
        training=TrainingConfig(
            output_dir=str(output), max_steps=10, gradient_accumulation_steps=2, save_steps=2, save_total_limit=2
        ),
        logging=LoggingConfig(report_to=()),
    )
    for section in ("model", "data", "adapter", "optim", "training", "memory", "logging"):
        table = getattr(config, section)
        own = {name: settings.pop(name) for name in list(settings) if name in table.__dataclass_fields__}
        config = replace(config, **{section: replace(table, **own)})
    assert not settings
    return config


def log_without_timing(output: Path) -> list[dict[str, float]]:
    lines = read_metrics(output / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMING_FIELDS} for line in lines]


def outcome(output: Path, step: int = 10) -> dict[str, object]:
    """All of a finished run that must be the same bits however often it was interrupted."""
    checkpoint = output / "checkpoints" / f"step-{step:06d}"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["seconds"]
    result = output / ("adapter" if (output / "adapter").exists() else "model")
    return {
        "log": log_without_timing(output),
        "state": state,
        **{path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")},
        **{f"result/{path.name}": path.read_bytes() for path in result.iterdir()},
        "checkpoints": sorted(path.name for path in (output / "checkpoints").iterdir()),
    }


def assert_same_outcome(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value, name
