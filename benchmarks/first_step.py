"""How long a run takes to its first step, from the lines that it shows: with an empty cache of kernels, and a full one.

    python benchmarks/first_step.py [--layers 4] [--max-length 8192] [--device cuda]

The model has random weights and layers of Llama-3.1-8B's sizes. Each line is a run by itself: seconds from its start to
the end of the load, from there to the first step's loss, from there to the next, and how much was put in the cache
before the load ended and after the run had waited. "alone" compiles nothing ahead. Exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import require_gpu
from tokenizers import Tokenizer, models, pre_tokenizers

from gapless.config import AdapterConfig, DataConfig, LoggingConfig, ModelConfig, RunConfig, TrainingConfig
from gapless.config_file import dump_config
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import hf_views
from gapless.models.weights import save_weights

VOCABULARY = 32768
WORDS = [f"w{index}" for index in range(64)]
ALONE = "from gapless.training import trainer; trainer.compile_ahead = lambda *_, **__: None; "
COMMAND = "import sys; from gapless.cli import main; sys.exit(main(sys.argv[1:]))"


def write_model(folder: Path, layers: int) -> None:
    """A folder as Hugging Face writes it, and rows beside it."""
    folder.mkdir()
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
        **{"vocab_size": VOCABULARY, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(decoder_config(config, None), dtype=torch.bfloat16, device=device)
    save_weights(folder, ((view.name, view.read(view.parameter)) for view in hf_views(model)))
    words = ["<unk>", "<s>", "</s>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def write_rows(path: Path, max_length: int) -> None:
    with path.open("w") as file:
        for row in range(64):
            file.write(json.dumps({"text": " ".join(WORDS * (1 + (row % 8) * max_length // 512 // 8))}) + "\n")


def run(config: RunConfig, work: Path, cache: Path, *, ahead: bool) -> str | None:
    """Train; the line of a table, None if the run failed."""
    file = work / "run.toml"
    file.write_text(dump_config(config))
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", ("" if ahead else ALONE) + COMMAND, "train", str(file)]
    marks: dict[str, float] = {}
    kept: dict[str, int] = {}
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for mark in ("training", "step 1/", "step 2/", "compiled"):
                if line.startswith(mark):
                    marks.setdefault(mark, time.perf_counter() - began)
                    kept[mark] = len(list(cache.iterdir())) if cache.is_dir() else 0
            if line.startswith(("compiled", "waiting", "note: kernel")):
                print(f"    {time.perf_counter() - began:5.1f} s: {line.strip()}")
            if "step 2/" in marks:
                process.kill()  # what comes after it is not asked for
    if "step 2/" not in marks:
        return None
    loaded, first, second = (marks[mark] for mark in ("training", "step 1/", "step 2/"))
    late = kept["step 2/"] - kept.get("compiled", kept["training"])
    return f"{loaded:8.1f} {first - loaded:12.1f} {second - first:12.2f} {kept['training']:10} {late:10}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a packed row; 512 or more")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    if options.layers < 1 or options.max_length < 512:
        parser.error("--layers must be at least 1, and --max-length 512")
    if options.device == "cuda":
        require_gpu()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_model(work / "model", options.layers)
        write_rows(work / "rows.jsonl", options.max_length)
        print(f"{'run':24}{'load':>8} {'first step':>12} {'second':>12} {'cached':>10} {'late':>10}")
        for kind in ("lora", "none"):
            for label, cache, ahead in (
                ("empty cache", f"cache-{kind}", True),
                ("full cache", f"cache-{kind}", True),
                ("empty cache, alone", f"cache-{kind}-alone", False),
                ("full cache, alone", f"cache-{kind}-alone", False),
            ):
                config = RunConfig(
                    model=ModelConfig(path=str(work / "model"), device=options.device),
                    data=DataConfig(train=(str(work / "rows.jsonl"),), max_length=options.max_length),
                    adapter=AdapterConfig(type=kind),
                    training=TrainingConfig(output_dir=str(work / "run"), max_steps=100),
                    logging=LoggingConfig(report_to=()),
                )
                line = run(config, work, work / cache, ahead=ahead)
                print(f"{kind} {label}".ljust(24) + (line or "failed"), flush=True)
                failed += line is None
                shutil.rmtree(work / "run", ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
