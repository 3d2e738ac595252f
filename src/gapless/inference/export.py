"""A trained model as a folder that other tools load, read back and compared before it is called done.

Everything is written into a temporary folder beside the target, which takes the target's name when all checks have
passed; a failed or killed export leaves no target folder.
"""

from __future__ import annotations

import filecmp
import shlex
import shutil
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from gapless.adapters.merge import merged_tensors
from gapless.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, file_views, load_adapter, save_adapter
from gapless.inference.load import DTYPES, ModelSource, find_model, load_source
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import hf_views
from gapless.models.weights import read_json, save_weights, write_config
from gapless.parallel.launch import refuse_others

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as --max-lora-rank."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    tensors: int
    """Tensors written and read back."""
    changed: int | None
    """Those that differ from the model the training began with; None if that is not known."""
    next_commands: tuple[str, ...]
    """How other tools load the folder."""
    note: str | None = None
    """What other tools will not know."""


def export(
    source: str | Path,
    out: str | Path,
    *,
    kind: Literal["merged", "adapter"] = "merged",
    max_shard_bytes: int = 5_000_000_000,
) -> Exported:
    """Writes a model for other tools, checks what was written, and prints how to load it.

    Args:
        source: a run folder, a checkpoint in one, a PEFT adapter folder (its config names the base), or a Hugging Face
            model folder.
        out: folder to write; it must not exist or be empty.
        kind: merged: a whole Hugging Face folder, in the dtype of the base's weights, with tokenizer, chat template
            and generation config as they were; adapter: a PEFT folder, its files as they were (of a checkpoint: as
            training would write them).
        max_shard_bytes: most bytes of weights in a file (merged).

    Raises:
        FileNotFoundError: the source or its base model is missing.
        ValueError: the target is not empty, there is no adapter to export, a merged model would equal its base, or
            what was written does not read back as it should.
    """
    refuse_others("export", remedy="call it where the result of train has rank 0", main=False)
    found, out = find_model(source), Path(out)
    if kind not in ("merged", "adapter"):
        raise ValueError(f"kind must be merged or adapter, not {kind}")
    if kind == "adapter" and found.adapter is None and found.lora is None:
        raise ValueError(f"{source} has no adapter; export it as merged")
    with _folder_in_making(out) as folder:
        if kind == "adapter":
            exported = _write_adapter(found, folder, out)
        else:
            exported = _write_merged(found, folder, out, max_shard_bytes)
    _report(exported)
    return exported


@contextmanager
def _folder_in_making(out: Path) -> Generator[Path]:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; name a new folder")
    temporary = out.absolute().with_name(f".tmp-{out.absolute().name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(out)
    except OSError as error:
        if error.filename is not None and temporary not in (Path(error.filename), *Path(error.filename).parents):
            raise  # about a file that was read
        raise ValueError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- merged ----


def _write_merged(source: ModelSource, folder: Path, out: Path, max_shard_bytes: int) -> Exported:
    dtype = _merged_dtype(source)
    model = load_source(source, dtype=dtype)
    save_weights(folder, merged_tensors(model), max_shard_bytes=max_shard_bytes)
    write_config(source.model / "config.json", folder / "config.json", dtype)
    source.tokenizer().save(folder)
    base = source.model if source.adapter or source.checkpoint else source.trained_from
    if base is not None and not (base / "config.json").is_file():
        base = None
    tensors, changed = _check_merged(model, folder, base)
    commands = (
        f"vllm serve {shlex.quote(str(out))}",
        _python(f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(out)!r})"),
    )
    end = source.tokenizer().unlisted_end
    note = end and (
        f"generation_config.json is the base model's and does not list {end}, which ends a turn of the chat template: "
        f"vLLM and transformers stop there only if told (stop = {end!r}), or once its id is in eos_token_id"
    )
    return Exported(out, tensors, changed, commands, note)


def _check_merged(model: Decoder, folder: Path, base: Path | None) -> tuple[int, int | None]:
    """Compares the files with the live weights, with config.json, and with the base.

    Returns:
        The number of tensors, and of those that differ from the base.

    Raises:
        ValueError: a difference, or none from the base.
    """
    meta = Decoder(decoder_config(read_json(folder / "config.json")), device="meta")
    expected = {view.name: view.shape for view in hf_views(meta)}
    changed = 0
    with _stored(folder) as written, _stored(base or folder) as before:
        if written.keys() != expected.keys():
            difference = sorted(written.keys() ^ expected.keys())
            raise ValueError(f"the written weights do not match config.json: {', '.join(difference[:5])}")
        for name, tensor in merged_tensors(model):
            stored = written[name].get_tensor(name)
            if tuple(stored.shape) != expected[name] or not _same(stored, tensor):
                raise ValueError(f"{name} did not read back as it was written; check the disk")
            if base is not None:
                changed += name not in before or not _same(before[name].get_tensor(name).to(tensor.dtype), tensor)
    if base is not None and not changed:
        raise ValueError(
            f"the merged model would equal its base {base} in all {len(expected)} tensors: nothing was trained, or "
            "the changes are too small for the dtype of its weights"
        )
    return len(expected), changed if base is not None else None


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.to(second.device).view(torch.uint8), second.contiguous().view(torch.uint8))


@contextmanager
def _stored(folder: Path) -> Generator[Mapping[str, Any]]:
    """The open safetensors file of each tensor in a folder, by the tensor's name."""
    with ExitStack() as stack:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        yield files


def _merged_dtype(source: ModelSource) -> torch.dtype:
    if source.run is not None and source.lora is None:
        return DTYPES[source.run.model.dtype]  # full fine-tuning: what its result would have
    return _stored_dtype(source.model)


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the embedding on disk, which the merged weights get."""
    with _stored(folder) as files:
        for name, file in files.items():
            if name.endswith("embed_tokens.weight"):
                stored = file.get_slice(name).get_dtype()
                if stored not in _TORCH_DTYPES:
                    raise ValueError(f"{folder}: {name} is {stored}; only {', '.join(_TORCH_DTYPES)} can be merged")
                return _TORCH_DTYPES[stored]
    raise ValueError(f"{folder} has no embed_tokens.weight in its safetensors files")


# ---- adapter ----


def _write_adapter(source: ModelSource, folder: Path, out: Path) -> Exported:
    adapter = source.adapter or folder
    if source.adapter is None:
        _write_checkpoint_adapter(source, folder)
    # Checks every name and shape against the base's architecture, without its weights.
    model = Decoder(decoder_config(read_json(source.model / "config.json")), device="meta")
    config = load_adapter(model, adapter)
    for name in (CONFIG_FILE, WEIGHTS_FILE) if adapter != folder else ():
        shutil.copyfile(adapter / name, folder / name)
        if not filecmp.cmp(adapter / name, folder / name, shallow=False):
            raise ValueError(f"{name} did not read back as it was written; check the disk")
    if source.chat_template is not None or (adapter / "tokenizer.json").is_file():
        # Prompts must be rendered as in training, which the base's own template would not do.
        source.tokenizer().save(folder)
    commands = [_python(f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({str(out)!r})")]
    rank = next((rank for rank in _VLLM_RANKS if rank >= config.r), None)
    if rank is not None and not config.modules_to_save:  # vLLM takes neither larger ranks nor modules trained in full
        lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {shlex.quote(f'{out.name}={out}')}"
        commands.insert(0, f"vllm serve {shlex.quote(str(source.model.absolute()))} {lora}")
    return Exported(out, len(list(file_views(model))), None, tuple(commands))


def _write_checkpoint_adapter(source: ModelSource, folder: Path) -> None:
    assert source.run is not None
    model = load_source(source, dtype=DTYPES[source.run.model.dtype])
    save_adapter(model, source.run.adapter, folder, source.model.absolute())
    with _stored(folder) as written:
        for view in file_views(model):
            if not _same(written[view.name].get_tensor(view.name), view.read(view.parameter)):
                raise ValueError(f"{view.name} did not read back as it was written; check the disk")


def _python(script: str) -> str:
    return f"python -c {shlex.quote(script)}" if '"' in script or "$" in script else f'python -c "{script}"'


def _report(exported: Exported) -> None:
    changed = "" if exported.changed is None else f", {exported.changed} of them changed by the training"
    print(f"wrote {exported.folder}: {exported.tensors} tensors, read back and compared{changed}")
    if exported.note:
        print(f"note: {exported.note}")
    print("next:", *exported.next_commands, sep="\n  ")
