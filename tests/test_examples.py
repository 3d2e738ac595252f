"""Every run file in examples/ is read, and trains a step: with its own data where that is there, on a tiny model."""

import json
from pathlib import Path

import pytest

from gapless import cli
from gapless.config_file import load_config
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN_FILES = sorted(path for ending in ("toml", "yaml") for path in EXAMPLES.rglob(f"*.{ending}"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "model"
    write_tiny_model(folder, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=2048)
    write_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_run_file(path, model, tmp_path):
    config = load_config(path)
    overrides = [
        "--model.path",
        str(model),
        "--training.output_dir",
        str(tmp_path / "run"),
        "--training.max_steps",
        "1",
    ]
    made_by_a_script = [
        name for name in ("train", "eval") if not all(map(Path.exists, map(Path, getattr(config.data, name))))
    ]
    for name in made_by_a_script:
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
        overrides += [f"--data.{name}", str(tmp_path / f"{name}.jsonl")]
    assert cli.main(["train", str(path), *overrides]) == 0
    result = "model" if config.adapter.type == "none" else "adapter"
    assert (tmp_path / "run" / result / "config.json").exists() or (
        tmp_path / "run" / result / "adapter_config.json"
    ).exists()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["step"] == 1 and "loss" in line for line in steps)
    if path.parent == EXAMPLES:
        assert not made_by_a_script
