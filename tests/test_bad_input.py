"""Mistakes of users: each is one clear line and exit code 2, and leaves the files as they were.

All cases run in one process, through the function behind the command line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gapless import cli
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Paris"}]}
RUN_FILE = """
model = "model"
train = "train.jsonl"
output_dir = "run"
max_length = 64
max_steps = 1
r = 4
dtype = "fp32"
device = "cpu"
"""


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    """A folder in which everything is right, with a finished run, its adapter and an exported model."""
    folder = tmp_path_factory.mktemp("bad-input") / "good"
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    write_tiny_tokenizer(folder / "model")
    rows(folder / "train.jsonl", [CHAT] * 3)
    (folder / "run.toml").write_text(RUN_FILE)
    assert cli.main(["train", str(folder / "run.toml"), "--training.output_dir", str(folder / "done")]) == 0
    return folder


@pytest.fixture
def good(template, tmp_path, monkeypatch) -> Path:
    """A copy of `template` to spoil, as the current folder."""
    shutil.copytree(template, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return Path()


def rows(path: Path, values: list) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path, part: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


Spoil = Callable[[], object]
P = Path


def on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")


def nothing() -> None:
    """The command line alone is wrong."""


TRAIN = "train run.toml"
DONE = "train run.toml --training.output_dir done"
ASK = "generate model --max-new-tokens 2 --prompt Hello"
FILE = "generate model --max-new-tokens 2 --file train.jsonl"
MODEL = P("model")
CONFIG = MODEL / "config.json"
STEP = P("done/checkpoints/step-000001")

# id: (command, what spoils the folder, what the message must say)
CASES: dict[str, tuple[str, Spoil, str]] = {
    # the command line
    "verb": ("trian run.toml", nothing, "there is no verb 'trian'; the verbs are train, profile, generate, export"),
    "no-run-file": ("train", nothing, "name the run file first"),
    "options-before-file": ("train --optim.learning_rate 1 run.toml", nothing, "name the run file first"),
    "run-file-missing": ("train rum.toml", nothing, "rum.toml: no such run file"),
    "run-file-of-an-endless-name": (f"train {'a' * 300}.toml", nothing, "aaa.toml: File name too long"),
    "option-of-another-tool": (f"{TRAIN} --lr 1", nothing, "there is no option --lr; perhaps you meant --optim.learn"),
    "run-file-is-folder": ("train model", nothing, "model: is a folder; name the run file in it"),
    "unknown-option": (f"{TRAIN} --optim.lerning_rate 1", nothing, "Perhaps you meant: --optim.learning_rate FLOAT"),
    # the run file
    "unknown-key": (
        TRAIN,
        lambda: replace(P("run.toml"), "r = 4", "lora_rnk = 4"),
        "lora_rnk: unknown key; perhaps you meant adapter.r",
    ),
    "wrong-type": (TRAIN, lambda: replace(P("run.toml"), "r = 4", 'r = "4"'), "r: must be an integer"),
    "out-of-range": (TRAIN, lambda: replace(P("run.toml"), "r = 4", "r = 0"), "adapter.r: must be at least 1, not 0"),
    "required": (TRAIN, lambda: replace(P("run.toml"), 'train = "train.jsonl"', ""), "data.train: is missing"),
    "not-toml": (TRAIN, lambda: replace(P("run.toml"), "r = 4", "r : 4"), "run.toml: is not TOML"),
    "no-gpu": (f"{TRAIN} --model.device cuda", on_a_cpu, "device is cuda, but torch sees no GPU"),
    # data
    "data-missing": (TRAIN, lambda: P("train.jsonl").unlink(), "train.jsonl: no such file or folder"),
    "data-empty": (TRAIN, lambda: P("train.jsonl").write_text(""), "train.jsonl is empty"),
    "data-blank": (TRAIN, lambda: P("train.jsonl").write_text("\n\n"), "train.jsonl holds no rows"),
    "data-broken": (
        TRAIN,
        lambda: P("train.jsonl").write_text('{"text": "a"}\n{"text": \n'),
        "train.jsonl:2: not valid",
    ),
    "data-not-utf8": (TRAIN, lambda: P("train.jsonl").write_bytes(b'{"text": "\xe4"}\n'), "train.jsonl:1: not UTF-8"),
    "data-not-objects": (TRAIN, lambda: rows(P("train.jsonl"), [[1]]), "train.jsonl:1"),
    "data-folder": (f"{TRAIN} --data.train model", nothing, "is a folder; name the files in it"),
    "data-ending": (f"{TRAIN} --data.train run.toml", nothing, "has an unknown ending"),
    "columns-unknown": (TRAIN, lambda: rows(P("train.jsonl"), [{"question": "a"}]), "are no known format"),
    "columns-missing": (
        f"{TRAIN} --data.format alpaca",
        nothing,
        "no column 'instruction', 'output' for format alpaca",
    ),
    "columns-typo": (f"{TRAIN} --data.columns promt question", nothing, "'promt'"),
    "role-unknown": (TRAIN, lambda: rows(P("train.jsonl"), [{"messages": [{"content": "a"}]}]), "train.jsonl:1"),
    "nothing-to-train": (
        TRAIN,
        lambda: rows(P("train.jsonl"), [{"messages": CHAT["messages"][:1]}]),
        "nothing to train on (no assistant turn or completion)",
    ),
    "all-too-long": (f"{TRAIN} --data.max_length 4", nothing, "longer than max_length"),
    "eval-broken": (f"{TRAIN} --data.eval eval.csv", lambda: P("eval.csv").write_text("a,b\n1,2,3\n"), "eval.csv:2"),
    "template-missing": (f"{TRAIN} --data.chat_template none.jinja", nothing, "none.jinja does not exist"),
    "template-broken": (
        f"{TRAIN} --data.chat_template bad.jinja",
        lambda: P("bad.jinja").write_text("{% if %}"),
        "is not Jinja",
    ),
    # the model
    "model-missing": (
        f"{TRAIN} --model.path modle",
        nothing,
        "modle: no such folder; models are read from local folders",
    ),
    "config-missing": (TRAIN, lambda: CONFIG.unlink(), "model/config.json: No such file"),
    "config-corrupt": (TRAIN, lambda: truncate(CONFIG), "model/config.json is not JSON"),
    "architecture": (
        TRAIN,
        lambda: edit_json(CONFIG, model_type="mamba", architectures=["MambaForCausalLM"]),
        "architecture MambaForCausalLM is not supported",
    ),
    "family": (
        TRAIN,
        lambda: edit_json(CONFIG, model_type="mamba", architectures=None),
        "architecture mamba is not supported",
    ),
    "field-unknown": (TRAIN, lambda: edit_json(CONFIG, logit_cap=30.0), "logit_cap = 30.0"),
    "head-counts": (TRAIN, lambda: edit_json(CONFIG, num_key_value_heads=4), "4 key-value heads do not divide 6"),
    "tokenizer-missing": (TRAIN, lambda: (MODEL / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "tokenizer-corrupt": (TRAIN, lambda: truncate(MODEL / "tokenizer.json"), "tokenizer.json is not a tokenizer"),
    "weights-missing": (TRAIN, lambda: (MODEL / "model.safetensors").unlink(), "model.safetensors does not exist"),
    "weights-truncated": (TRAIN, lambda: truncate(MODEL / "model.safetensors"), "model.safetensors is truncated"),
    "weights-of-another-shape": (TRAIN, lambda: edit_json(CONFIG, intermediate_size=64), "config.json says [48, 64]"),
    "weights-of-more-layers": (
        TRAIN,
        lambda: edit_json(CONFIG, num_hidden_layers=2),
        "16 weights are missing: model.layers.1.",
    ),
    # what is trained
    "target-unknown": (f"{TRAIN} --adapter.target_modules q_prj", nothing, "this model has no q_prj to adapt"),
    "rank-too-large": (f"{TRAIN} --adapter.r 4096", nothing, "r = 4096 exceeds the smaller side"),
    "module-to-save": (f"{TRAIN} --adapter.modules_to_save norm", nothing, "modules_to_save: norm is not possible"),
    "warm-up-too-long": (f"{TRAIN} --optim.warmup_steps 9", nothing, "9 steps of warm-up"),
    # the run folder
    "output-under-a-file": (f"{TRAIN} --training.output_dir run.toml/run", nothing, "run.toml/run: Not a directory"),
    "output-is-a-file": (f"{TRAIN} --training.output_dir run.toml", nothing, "run.toml: Not a directory"),
    "resume-never": (f"{DONE} --training.resume never", nothing, "training.resume is never"),
    "resume-other-seed": (f"{DONE} --training.seed 1", nothing, "a run with training.seed = 42, now it is 1"),
    "resume-other-schedule": (
        f"{DONE} --optim.lr_scheduler_type linear",
        nothing,
        "optim.lr_scheduler_type = 'cosine'",
    ),
    "resume-other-data": (DONE, lambda: rows(P("train.jsonl"), [CHAT] * 4), "made with other training data"),
    "checkpoint-truncated": (
        DONE,
        lambda: truncate(STEP / "rank0-00001.safetensors"),
        "rank0-00001.safetensors is damaged",
    ),
    "checkpoint-of-the-future": (
        DONE,
        lambda: edit_json(STEP / "index.json", format_version=99),
        "has format_version 99",
    ),
    # generate
    "generate-missing": ("generate modle --prompt a", nothing, "modle: no such folder"),
    "generate-no-prompt": ("generate model", nothing, "give either --prompt (any number of times) or --file"),
    "generate-both": (f"{FILE} --prompt a", nothing, "give either --prompt"),
    "generate-output": (f"{ASK} --output a", nothing, "--output is for the answers to --file"),
    "generate-output-exists": (f"{FILE} --output run.toml", nothing, "run.toml: exists already"),
    "generate-output-folder": (f"{FILE} --output a/b", nothing, "a/b: its folder does not exist"),
    "generate-system": (f"{FILE} --system a", nothing, "--system goes with --prompt"),
    "generate-rows": (FILE, lambda: rows(P("train.jsonl"), [{"a": 1}]), "train.jsonl:1: the row has no `messages`"),
    "generate-raw-rows": (f"{FILE} --raw", nothing, "train.jsonl:1: the row has no `prompt`"),
    "generate-nothing-to-answer": (
        FILE,
        lambda: rows(P("train.jsonl"), [CHAT, {"messages": CHAT["messages"][1:]}]),
        "train.jsonl:2: no message is left to answer",
    ),
    "generate-row-refused": (
        FILE,
        lambda: rows(P("train.jsonl"), [{"messages": [{"role": "user", "content": None, "tool_calls": [{}]}]}]),
        "train.jsonl:1: the row has tool calls, which the chat template leaves out",
    ),
    "generate-row-role": (
        FILE,
        lambda: rows(
            P("train.jsonl"), [{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}]
        ),
        "train.jsonl:1: message 1 has the role 'asistant'",
    ),
    "generate-no-template": (ASK, lambda: (MODEL / "chat_template.jinja").unlink(), "or generate with --raw"),
    "generate-raw-empty": (
        f"{FILE} --raw",
        lambda: rows(P("train.jsonl"), [{"prompt": ""}]),
        "train.jsonl:1: the text has no tokens",
    ),
    "generate-temperature": (f"{ASK} --temperature -1", nothing, "temperature must be 0 (greedy) or a positive number"),
    "generate-top-p": (f"{ASK} --top-p 0", nothing, "top_p must be above 0 and at most 1"),
    "generate-tokens": (f"{ASK} --max-new-tokens 0", nothing, "max_new_tokens must be at least 1, not 0"),
    "generate-adapter": (f"{ASK} --adapter model", nothing, "adapter_config.json is missing"),
    "generate-not-a-model": (
        "generate done/checkpoints --prompt a",
        nothing,
        "done/checkpoints is no model, adapter or run",
    ),
    "adapter-truncated": (
        "generate done/adapter --prompt a",
        lambda: truncate(P("done/adapter/adapter_model.safetensors")),
        "adapter_model.safetensors is not a whole safetensors file",
    ),
    "adapter-config-not-text": (
        f"{ASK} --adapter done/adapter",
        lambda: P("done/adapter/adapter_config.json").write_bytes(b"\xff"),
        "adapter_config.json is not JSON",
    ),
    "adapter-config-no-object": (
        f"{ASK} --adapter done/adapter",
        lambda: P("done/adapter/adapter_config.json").write_text("[1]"),
        "adapter_config.json holds no JSON object",
    ),
    "adapter-alpha": (
        f"{ASK} --adapter done/adapter",
        lambda: edit_json(P("done/adapter/adapter_config.json"), lora_alpha=None),
        "lora_alpha must be a number, not null",
    ),
    "adapter-rank": (
        f"{ASK} --adapter done/adapter",
        lambda: edit_json(P("done/adapter/adapter_config.json"), r=4.5),
        "r must be a whole number, not 4.5",
    ),
    "adapter-pattern": (
        f"{ASK} --adapter done/adapter",
        lambda: edit_json(P("done/adapter/adapter_config.json"), target_modules="q_proj("),
        "target_modules 'q_proj(' is no regular expression",
    ),
    "adapter-of-another-kind": (
        f"{ASK} --adapter done/adapter",
        lambda: edit_json(P("done/adapter/adapter_config.json"), use_dora=True),
        "not supported: use_dora = True",
    ),
    # export
    "export-missing": ("export nothing --to merged --out out", nothing, "nothing: no such folder"),
    "export-kind": ("export done --to gguf --out out", nothing, "Expected one of ('merged', 'adapter')"),
    "export-no-target": ("export done --to merged", nothing, "Missing from gapless export: --out STR"),
    "export-not-empty": ("export done --to merged --out model", nothing, "model is not empty"),
    "export-to-a-file": ("export done --to merged --out run.toml", nothing, "run.toml is not empty"),
    "export-no-adapter": ("export model --to adapter --out out", nothing, "model has no adapter"),
}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but those of a run that was begun, the cache of tokenised rows and the resolved run file."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parts[0] != "run"]
    return {str(path): path.read_bytes() for path in files if not {"tokens", "config.toml"} & set(path.parts)}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, good, capsys):
    command, spoil, fragment = CASES[name]
    spoil()
    before = snapshot(good)
    assert cli.main(command.split()) == 2
    output = capsys.readouterr()
    errors = [line for line in output.err.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1, output.err
    assert errors[0].startswith("error: ")
    assert fragment in errors[0]
    assert len(errors[0]) < 600
    assert snapshot(good) == before
    assert not Path("run/adapter").exists()
    assert not Path("out").exists()
