"""The pages keep step with the source: `make docs` has nothing to do, and what they show works."""

import dataclasses
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from gapless.config_file import load_config
from gapless.training.callbacks import Callback, TrainResult
from gapless.training.run_folder import FREE
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

ROOT = Path(__file__).parents[1]


def test_pages_are_fresh():
    for path, text in runpy.run_path(str(ROOT / "docs" / "make.py"))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: make docs"


@pytest.mark.parametrize("name", ["README.md", "docs/run-files.md"])
def test_run_files_in_the_pages_load(name, tmp_path):
    blocks = (ROOT / name).read_text(encoding="utf-8").split("```toml\n")[1:]
    assert blocks
    for block in blocks:
        (tmp_path / "run.toml").write_text(block.partition("```")[0], encoding="utf-8")
        assert load_config(tmp_path / "run.toml").adapter.r == tomllib.loads(block.partition("```")[0])["adapter"]["r"]


def test_the_script_of_the_readme_runs(tmp_path, monkeypatch):
    write_tiny_model(tmp_path / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    write_tiny_tokenizer(tmp_path / "model")
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "run.toml").write_text("model = 'model'\ntrain = 'train.jsonl'\noutput_dir = 'run'\nmax_length = 64")
    monkeypatch.chdir(tmp_path)
    exec((ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0], {})
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_script_of_the_python_page_runs(tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "models/SmolLM2-135M-Instruct", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    write_tiny_tokenizer(model)
    monkeypatch.chdir(tmp_path)
    blocks = (ROOT / "docs/python.md").read_text(encoding="utf-8").split("```python\n")[1:]
    names = {}
    exec("\n".join(block.partition("```")[0] for block in blocks), names)
    assert names["result"].step == names["trainer"].total_steps == 4
    assert {path.name for path in tmp_path.iterdir()} == {"models", "runs", "exported"}


def test_the_script_of_the_kernels_page_runs():
    blocks = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").split("```python\n")[1:]
    names = {}
    exec("\n".join(block.partition("```")[0] for block in blocks), names)
    assert names["out"].shape == (1000, 8, 64)
    assert names["a"].grad.shape == names["a"].shape
    assert names["finite"]
    assert names["note"] is None or names["device"] == "cuda"


def test_the_python_page_names_all_there_is():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    attributes = [field.name for field in dataclasses.fields(TrainResult)]
    named = re.findall(r"^\| `(\w+)", page, re.MULTILINE)
    assert named == [*attributes, "exit_code", *methods]
    assert "Trainer(config, loss_fn=None, callbacks=(), *, train_rows=None, eval_rows=None)" in page


def test_settings_that_may_change_are_listed():
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    listed = page.partition("These may change:")[2].partition("`training.resume = ")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", listed)) == FREE


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in page.read_text(encoding="utf-8").split("](")[1:]:
            assert (page.parent / link.partition(")")[0].partition("#")[0]).exists(), f"{page.name}: {link[:60]}"
