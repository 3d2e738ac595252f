"""What the sides of a comparison of training have in common: shapes, a model folder, rows, batches, and our run.

Weights are random in the shape of a known model. Rows are random tokens, spelt as numbers for a tokenizer whose words
are numbers, so that they go through our own loader like any text. The first steps have the same documents again and
again, full rows, so that their losses fall and all sides can be compared by them; then every step has other lengths.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from gapless.batch import PackedBatch
from gapless.config import RunConfig
from gapless.config_file import HINTS, SECTIONS
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import DTYPES
from gapless.models.views import hf_views
from gapless.models.weights import meta_decoder, save_weights
from gapless.parallel.mesh import Mesh
from gapless.parallel.world import World
from gapless.training import setup

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = _LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
SMOLLM2_135M = _LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
R = 16
SHORTEST, LOG_MEAN = 16, math.log(350)
"""Of lengths that are packed: round(exp(N(ln 350, 1))), no shorter than this, no longer than a row."""
_END = "<end>"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One fine-tuning, as all sides make it."""

    name: str
    work: str
    """Folder of the case."""
    shape: dict[str, Any]
    """config.json."""
    lora: bool = True
    rows: int
    row_tokens: int
    packed: bool = False
    """Rows of many documents, lengths as `drawn_lengths`; else each row is one document that almost fills it."""
    learning_rate: float
    recompute: bool = False
    """Every layer."""
    checked: int = 5
    """First steps, of the same documents each, that sides are compared by."""
    turns: int = 2
    timed: int = 6
    """Steps that are timed in each turn."""
    steps: int = 64
    """For which there are rows: more than are made."""
    dtype: str = "bf16"
    device: str = "cuda"
    slack: float = 0.1
    """How far apart the fall of the loss may be, as a share of it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of our run file and their values, beyond those that follow from the above."""

    @property
    def model(self) -> Path:
        """Our model folder; the peers' has another tokenizer."""
        return Path(self.work).parent / f"model-{self.shape['model_type']}-{self.shape['hidden_size']}"

    @property
    def data(self) -> Path:
        """The rows."""
        return Path(self.work, "rows.jsonl")

    @property
    def adapter(self) -> Path:
        """Where our side writes the adapter that all start from."""
        return Path(self.work, "adapter")

    def write(self, name: str = "plan") -> Path:
        """As a file, for another process."""
        path = Path(self.work, f"{name}.json")
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """From such a file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def drawn_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """int64 [count]: round(exp(N(ln 350, 1))), clipped to 16..longest."""
    drawn = np.exp(np.random.default_rng(seed).normal(LOG_MEAN, 1.0, count))
    return np.clip(np.round(drawn), min(SHORTEST, longest), longest).astype(np.int64)


def lengths(plan: Plan) -> list[int]:
    """Tokens of each document, the first `checked` steps' included."""
    full = [plan.row_tokens] * (plan.checked * plan.rows)
    tokens = (plan.steps - plan.checked) * plan.rows * plan.row_tokens
    if plan.packed:
        drawn = drawn_lengths(tokens // SHORTEST, plan.row_tokens)
        return full + drawn[: int(np.searchsorted(np.cumsum(drawn), tokens))].tolist()
    random = np.random.default_rng(0)
    low = plan.row_tokens * 15 // 16
    return full + random.integers(low, plan.row_tokens + 1, (plan.steps - plan.checked) * plan.rows).tolist()


# ---- files ----


def prepare(plan: Plan) -> None:
    """Write the model folder, unless it is there, and the rows; what an earlier run left of the case is removed."""
    shutil.rmtree(plan.work, ignore_errors=True)
    Path(plan.work).mkdir(parents=True)
    write_model(plan)
    vocabulary, random = plan.shape["vocab_size"], np.random.default_rng(1)
    checked: list[str] = []
    with plan.data.open("w", encoding="utf-8") as file:
        for index, length in enumerate(lengths(plan)):
            first = index % plan.rows
            repeated = index < plan.checked * plan.rows and len(checked) > first
            text = checked[first] if repeated else _text(random, vocabulary, length)
            if index < plan.rows:
                checked.append(text)
            file.write(json.dumps({"text": text}) + "\n")


def _text(random: np.random.Generator, vocabulary: int, length: int) -> str:
    """A document of so many tokens; the last one is the end of the text, which the loader puts there."""
    return " ".join(map(str, random.integers(1, vocabulary, length - 1).tolist()))


def write_model(plan: Plan) -> None:
    """A model folder with random weights, renamed into its place when it is whole."""
    if plan.model.exists():
        return
    unfinished = plan.model.with_name(f"{plan.model.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(plan.shape, indent=1), encoding="utf-8")
    write_tokenizer(unfinished, plan.shape["vocab_size"])
    save_weights(unfinished, _random_weights(plan, unfinished))
    unfinished.rename(plan.model)


def _random_weights(plan: Plan, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    dtype = DTYPES[plan.dtype]
    torch.manual_seed(0)
    for view in hf_views(meta_decoder(folder, dtype=dtype)):
        weight = torch.empty(view.shape, dtype=dtype, device=plan.device)
        yield view.name, weight.fill_(1.0) if len(view.shape) == 1 else weight.normal_(std=0.02)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose words are the numbers of its tokens; token 0 ends a text."""
    words = {_END: 0} | {str(number): number for number in range(1, vocabulary)}
    tokenizer = FastTokenizer(models.WordLevel(words, unk_token=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, _END)


def peer_model(plan: Plan) -> Path:
    """The same model folder with a tokenizer of the usual kind, which Unsloth wants to see."""
    folder = Path(plan.work, "peer-model")
    if folder.exists():
        return folder
    folder.mkdir()
    for path in plan.model.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            (folder / path.name).symlink_to(path.resolve())
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end_of_text|>", "<|begin_of_text|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one two three four five six seven eight nine ten"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder, *special)
    return folder


def _write_tokenizer_config(folder: Path, end: str, begin: str | None = None, pad: str | None = None) -> None:
    named = {"eos_token": end, "bos_token": begin, "pad_token": pad}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072}
    fields |= {name: token for name, token in named.items() if token}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")


# ---- our run, and the batches that it trains on ----


def knows(key: str) -> bool:
    """Whether run files have a key, as in "training.seed"."""
    return key in HINTS


def run_config(plan: Plan, output: str = "run") -> RunConfig:
    """Our run of a plan, in a folder beside its rows."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(plan.model), "dtype": plan.dtype, "device": plan.device},
        "data": {
            "train": (str(plan.data),),
            "max_length": plan.row_tokens,
            "train_on": "all",
            "shuffle": False,
            "cache_dir": str(Path(plan.work, "tokens")),
        },
        "adapter": {"r": R, "lora_alpha": float(R)} if plan.lora else {"type": "none"},
        "optim": {"learning_rate": plan.learning_rate, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        "training": {
            "output_dir": str(Path(plan.work, output)),
            "max_steps": 10 * plan.steps,
            "per_device_train_batch_size": plan.rows,
            "resume": "never",
        },
        "logging": {"report_to": ()},
    }
    for key, value in plan.settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return RunConfig(**{name: SECTIONS[name](**values) for name, values in sections.items()})


def batches(plan: Plan) -> list[PackedBatch]:
    """The micro-batches of the planned steps, one a step, on the host, in the order of our run."""
    config, cpu = run_config(plan), torch.device("cpu")
    tokenizer = Tokenizer.from_folder(config.model.path)
    described = setup.describe_model(config, tokenizer)
    rows = setup.open_data(config, None, None)
    store, _ = setup.build_stores(config, tokenizer, rows, lambda _: None, World.single())
    layout = setup.build_layout(config, described, plan.rows)
    loader = setup.build_loader(config, store, layout, lambda _: plan.learning_rate, Mesh.single(), cpu)
    with contextlib.closing(loader):
        steps = min(plan.steps, loader.steps_per_epoch(0) - 1)  # without the last, which may be part of one
        return [loader.next_step().micro_batches[0] for _ in range(steps)]
