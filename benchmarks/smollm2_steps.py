"""Training steps on a real model: kernels against references, against transformers with PEFT, and against themselves.

    python benchmarks/smollm2_steps.py MODEL ROWS.jsonl [--steps 200] [--full-steps 50] [--device cuda]

MODEL is a folder of SmolLM2-135M-Instruct (examples/demo makes one), ROWS conversations ({"messages": [...]} a line).
All start from the same adapter and train on the same packed rows, whose documents transformers gets as a padded batch.
What rounding does is measured: transformers in bf16 against transformers in float32. Ours is as exact if its losses are
as close to those in float32, by a factor of 2. Two runs on the kernels' path must have the same bits. Exits with 1 if
any of it does not hold. References are slow on a GPU (one document at a time) and make a fourth of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from gapless.adapters.peft import save_adapter
from gapless.batch import PackedBatch
from gapless.config import AdapterConfig, DataConfig, LoggingConfig, ModelConfig, OptimConfig, RunConfig, TrainingConfig
from gapless.data.tokenizer import Tokenizer
from gapless.kernels import runtime
from gapless.parallel.mesh import Mesh
from gapless.parallel.world import World
from gapless.training import setup
from gapless.training.callbacks import Callback
from gapless.training.trainer import Trainer

FACTOR, SLACK = 2.0, 2e-3
"""A mean difference to float32 may be this many times that of transformers in bf16, and this much more (nats)."""


class Recorder(Callback):
    """Keeps the losses, and writes down the adapter that the run starts from."""

    def __init__(self, start: Path | None) -> None:
        self.losses: list[float] = []
        self._start = start

    def on_train_begin(self, trainer) -> None:
        """See `Callback`."""
        if self._start is not None:
            save_adapter(trainer.model, trainer.config.adapter, self._start, trainer.config.model.path)

    def on_step_end(self, trainer, metrics) -> None:
        """See `Callback`."""
        self.losses.append(metrics["loss"])


def configuration(options: argparse.Namespace, output: Path, *, lora: bool, steps: int) -> RunConfig:
    cache = str(output.parent / "tokens")
    return RunConfig(
        model=ModelConfig(path=str(options.model), dtype="bf16", device=options.device),
        data=DataConfig(train=(str(options.rows),), max_length=options.max_length, cache_dir=cache),
        adapter=AdapterConfig(r=options.r, lora_alpha=2.0 * options.r) if lora else AdapterConfig(type="none"),
        optim=OptimConfig(learning_rate=5e-4 if lora else 2e-5, lr_scheduler_type="constant"),
        training=TrainingConfig(
            output_dir=str(output), max_steps=steps, per_device_train_batch_size=options.batch, seed=1
        ),
        logging=LoggingConfig(report_to=()),
    )


def train(config: RunConfig, path: runtime.Path | None = None, start: Path | None = None) -> list[float]:
    """Losses of a run of gapless; `start` gets the adapter before the first step."""
    recorder = Recorder(start)
    forced = contextlib.nullcontext() if path is None else runtime.forced(path)
    with forced, contextlib.redirect_stdout(io.StringIO()):
        Trainer(config, callbacks=[recorder]).train()
    return recorder.losses


def result_bytes(config: RunConfig) -> list[bytes]:
    """The files of weights of a finished run."""
    return [path.read_bytes() for path in sorted(Path(config.training.output_dir).glob("*/*.safetensors"))]


def batches(config: RunConfig, steps: int) -> list[PackedBatch]:
    """The rows that gapless trains on, on the host."""
    tokenizer, cpu = Tokenizer.from_folder(config.model.path), torch.device("cpu")
    described = setup.describe_model(config, tokenizer)
    store, _ = setup.build_stores(
        config, tokenizer, setup.open_data(config, None, None), lambda _: None, World.single()
    )
    layout = setup.build_layout(config, described, config.training.per_device_train_batch_size)
    loader = setup.build_loader(config, store, layout, lambda _: 0.0, Mesh.single(), cpu)
    with contextlib.closing(loader):
        return [loader.next_step().micro_batches[0] for _ in range(steps)]


def padded(batch: PackedBatch, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and (shifted) labels, a document a row; a causal model needs no mask for padding on the right."""
    spans = list(zip(batch.segments.starts, batch.segments.lengths, strict=True))
    tokens = torch.zeros(len(spans), batch.segments.max_seqlen, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, (start, length) in enumerate(spans):
        tokens[row, :length] = batch.tokens[start : start + length]
        labels[row, :length] = batch.labels[start : start + length]
    return tokens.to(device), labels.to(device)


def train_transformers(
    config: RunConfig, rows: Sequence[PackedBatch], device: str, dtype: torch.dtype, adapter: Path | None
) -> list[float]:
    """Losses of transformers with torch's AdamW on float32 masters; with PEFT from an adapter, else all weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype).to(device)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float() for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr=config.optim.learning_rate, weight_decay=0.0)
    losses = []
    for batch in rows:
        tokens, labels = padded(batch, device)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_trained
        loss.backward()
        for master, parameter in zip(masters, trained, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, config.optim.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(trained, masters)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def compare(options: argparse.Namespace, work: Path, *, lora: bool, steps: int) -> bool:
    """All ways to make the steps; prints them side by side, and whether ours are as exact as they must be."""
    made = {name: configuration(options, work / name, lora=lora, steps=steps) for name in ("kernels", "again")}
    few = max(steps // 4, 2)
    made["reference"] = configuration(options, work / "reference", lora=lora, steps=few)
    adapter = work / "start" if lora else None
    losses = {}

    def timed(name: str, work) -> None:
        start = time.perf_counter()
        losses[name] = work()
        print(f"{name}: {len(losses[name])} steps in {time.perf_counter() - start:.0f} s", flush=True)

    timed("kernels", lambda: train(made["kernels"], start=adapter))
    timed("again", lambda: train(made["again"]))
    timed("reference", lambda: train(made["reference"], "reference"))
    rows = batches(made["kernels"], steps)
    for name, dtype in (("hf-bf16", torch.bfloat16), ("hf-fp32", torch.float32)):
        timed(name, lambda dtype=dtype: train_transformers(made["kernels"], rows, options.device, dtype, adapter))
    same = losses["kernels"] == losses.pop("again") and result_bytes(made["kernels"]) == result_bytes(made["again"])
    kind = f"LoRA r {options.r}" if lora else "full fine-tuning"
    print(f"\n{kind}, {steps} steps of {rows[0].num_tokens} tokens in {len(rows[0].segments.lengths)} documents")
    print(f"{'step':>5}" + "".join(f"{name:>11}" for name in losses))
    for step in range(0, steps, max(1, steps // 20)):
        found = (f"{values[step]:11.4f}" if step < len(values) else f"{'':11}" for values in losses.values())
        print(f"{step + 1:5}" + "".join(found))
    passed = judge(losses)
    print(f"two runs have the same bits: {'yes' if same else 'NO'}")
    return passed and same


def judge(losses: dict[str, list[float]]) -> bool:
    """Print the differences of all pairs; whether ours are as close to float32 as transformers in bf16 is."""
    for one, other in itertools.combinations(losses, 2):
        apart = differences(losses[one], losses[other])
        print(f"{one:>10} - {other:9} mean |difference| {sum(apart) / len(apart):.5f}, largest {max(apart):.5f}")
    passed = True
    for name in ("kernels", "reference"):
        count = len(losses[name])
        mine, theirs = (sum(differences(losses[way][:count], losses["hf-fp32"])) / count for way in (name, "hf-bf16"))
        fine = mine <= FACTOR * theirs + SLACK
        passed &= fine
        print(f"{name} to float32: {mine:.5f}; transformers in bf16: {theirs:.5f}: {'ok' if fine else 'TOO FAR'}")
    return passed


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Absolute ones, of the steps that both have."""
    return [abs(a - b) for a, b in zip(one, other, strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--full-steps", type=int, default=50)
    parser.add_argument("--max-length", type=int, default=640, help="tokens in a packed row")
    parser.add_argument("--batch", type=int, default=2, help="packed rows a step")
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    options = parser.parse_args()
    # transformers looks for a package of the name of kernels.py.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    torch.backends.cuda.matmul.allow_tf32 = False
    work = Path(tempfile.mkdtemp())
    try:
        passed = compare(options, work / "lora", lora=True, steps=options.steps)
        passed &= compare(options, work / "full", lora=False, steps=options.full_steps)
    finally:
        shutil.rmtree(work)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
