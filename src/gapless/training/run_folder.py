"""The run folder: who may write in it, and which run it belongs to.

    config.toml     the resolved run file
    metrics.jsonl   what was measured (also tensorboard/, loss.svg, samples.md)
    tokens/         the tokenised rows, reused by a resumed run
    logs/           of a job of many ranks: what each of them did
    checkpoints/    step-000100, ...
    adapter/        the result of LoRA, as PEFT's files
    model/          the result of full fine-tuning, as a Hugging Face folder

A checkpoint carries the settings that its numbers follow from. A run that would go on with others is refused, by name.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gapless.config import RunConfig
from gapless.config_file import dump_config
from gapless.parallel.watch import OtherRankFailed
from gapless.parallel.world import World
from gapless.training import files
from gapless.training.checkpoint import Checkpoint, open_newest

FREE = {
    "model.device",
    "data.eval",
    "data.cache_dir",
    "training.output_dir",
    "training.per_device_eval_batch_size",
    "training.eval_steps",
    "training.save_steps",
    "training.save_total_limit",
    "training.resume",
    "training.async_save",
    "training.cuda_graphs",
    "parallel.dp_replicate_size",
    "parallel.dp_shard_size",
    "parallel.tp_size",
    "parallel.pp_size",
    "parallel.zero_stage",
    "parallel.shard_frozen",
    "parallel.sequence_parallel",
    "parallel.pp_schedule",
    "parallel.timeout",
    "memory.checkpointing",
    # Their product with the number of ranks is compared with the loader's state.
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "logging.logging_steps",
    "logging.report_to",
    "logging.sample_prompts",
    "logging.sample_tokens",
    # Compared by what follows from them: the content of the files, the number of steps.
    "model.path",
    "data.train",
    "data.chat_template",
    "training.num_train_epochs",
    "training.max_steps",
}
"""Settings that may change when a run goes on: no number of the training follows from them."""

RUN_FILE = "config.toml"
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@contextmanager
def open_run_folder(config: RunConfig) -> Generator[Path]:
    """The run folder, made if missing, free of half-written files, and locked while entered.

    A folder made here goes again if the run is refused, by whichever rank, before its run file was written.

    Raises:
        ValueError: it cannot be written, another process trains in it, or it has checkpoints and resume is "never".
    """
    folder = Path(config.training.output_dir)
    made = next((path for path in reversed([folder, *folder.parents]) if not path.exists()), None)
    with files.writing(folder):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    with lock:
        with files.writing(folder):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another process is training in {folder}; wait for it or name another folder"
                ) from error
            files.clear_temporary(folder)
            files.clear_temporary(folder / "checkpoints")
        try:
            yield folder
        except (ValueError, OSError, OtherRankFailed):
            if made is not None and not (folder / RUN_FILE).exists():
                shutil.rmtree(made, ignore_errors=True)  # the refusal matters more; a file may be open on NFS
            raise


def open_checkpoint_to_resume(config: RunConfig, now: dict[str, Any], folder: Path, world: World) -> Checkpoint | None:
    """The newest checkpoint of the run, if this is how the run begins; `now` are its `settings`.

    Raises:
        ValueError: there is one although resume is "never", it is damaged, or it belongs to other settings; or there is
            none and the folder has a result.
    """
    checkpoint = open_newest(folder / "checkpoints", world)
    if checkpoint is None:
        for name in ("adapter", "model"):
            if (folder / name).exists():
                raise ValueError(
                    f"{folder / name} is the result of a run whose checkpoints are gone; name another "
                    "training.output_dir, or move it away"
                )
        return None
    if config.training.resume == "never":
        raise ValueError(
            f"{folder} has {checkpoint.path.name} and training.resume is never; name another training.output_dir"
        )
    _compare(checkpoint.state["settings"], now, folder)
    return checkpoint


def write_resolved(config: RunConfig, folder: Path) -> None:
    """Write config.toml, which starts or continues the same run."""
    with files.writing(folder / "config.toml"):
        files.write_text(folder / "config.toml", dump_config(config))


def settings(config: RunConfig, *, own_loss: bool = False) -> dict[str, Any]:
    """The settings that the numbers of a run follow from, by section.key, as JSON has them.

    Args:
        config: the run.
        own_loss: whether a script brings its own loss. Which one cannot be compared, but going on without it can be
            refused.
    """
    values = {
        f"{section}.{key}": value for section, keys in dataclasses.asdict(config).items() for key, value in keys.items()
    }
    kept = {name: value for name, value in values.items() if name not in FREE}
    return json.loads(json.dumps(kept | ({"loss_fn": "one of a script's own"} if own_loss else {})))


def check_total_steps(checkpoint: Checkpoint, config: RunConfig, total_steps: int) -> None:
    """Refuse a length that the run has exceeded, or with which the learning rates so far would have been others.

    Raises:
        ValueError: with both numbers.
    """
    if checkpoint.step > total_steps:
        raise ValueError(
            f"{checkpoint.path} is past the end of a run of {total_steps} steps; raise training.max_steps or "
            "num_train_epochs, or name another training.output_dir"
        )
    fixed = config.optim.lr_scheduler_type == "constant" and (
        config.optim.warmup_steps or not config.optim.warmup_ratio
    )
    before = checkpoint.state["total_steps"]
    if before != total_steps and not fixed:
        raise ValueError(
            f"{checkpoint.path}: the learning rates so far are those of a run of {before} steps, now there are "
            f"{total_steps}; restore training.max_steps or num_train_epochs, or name another training.output_dir"
        )


def base_identity(path: str | Path) -> dict[str, str]:
    """The path of a model folder and a digest of config.json and, of each weights file, name, size, header and samples.

    Reading all weights would take as long as loading them. The samples, 64 blocks of 4 KiB spread over each file, see
    any change that training, merging or quantising makes, but not the edit of a single number.
    """
    digest = hashlib.sha256()
    config = Path(path) / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in sorted(Path(path).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as handle:
            start = min(8 + int.from_bytes(handle.read(8), "little"), size)
            digest.update(handle.read(start - 8))
            for sample in range(_SAMPLES):
                handle.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(handle.read(_SAMPLE_BYTES))
    return {"path": str(Path(path).absolute()), "digest": digest.hexdigest()}


def check_base(checkpoint: Checkpoint, base: dict[str, str]) -> None:
    """Refuse to go on upon other base weights.

    Raises:
        ValueError: names both folders.
    """
    before = checkpoint.state["base"]
    if before["digest"] != base["digest"]:
        raise ValueError(
            f"the model in {base['path']} is not the one this run began with ({before['path']}, digest "
            f"{before['digest'][:12]}); restore it, or name another training.output_dir"
        )


def _compare(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    # What kind of thing it is before what it is like: of another kind all else differs, and may have no meaning.
    for name in sorted(before.keys() | now.keys(), key=lambda name: (not name.endswith(".type"), name)):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{folder} belongs to a run with {name} = {before.get(name)!r}, now it is {now.get(name)!r}; restore "
                "it, or name another training.output_dir"
            )
