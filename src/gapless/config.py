"""Every setting of a run: keyword-only dataclasses whose field docstrings are the help text of the command line.

A run file (TOML, YAML accepted) holds one table per section below. This module imports nothing heavy: the command line
parses, validates and prints help from it before torch is loaded. Strictness about run files (unknown keys, wrong types,
aliases) lives in `gapless.config_file`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """The model to start from."""

    path: str
    """Folder with config.json, *.safetensors, tokenizer.json and a chat template, as Hugging Face writes it."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations; norms, softmax and loss are in float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU if there is one."""


@dataclass(kw_only=True, frozen=True)
class DataConfig:
    """The rows to train on and how they become packed batches."""

    train: tuple[str, ...]
    """Files of training rows (.jsonl, .json, .csv, .parquet, .txt), in this order."""
    eval: tuple[str, ...] = ()
    """Files of evaluation rows."""
    format: Literal["auto", "messages", "prompt_completion", "text", "sharegpt", "alpaca"] = "auto"
    """What a row is; auto recognises it by its columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Own column names: {canonical name: name in the file}, like {prompt = "question", completion = "answer"}."""
    chat_template: str | None = None
    """File with a Jinja chat template to use instead of the tokenizer's own."""
    max_length: int = 2048
    """Tokens in a packed row; the longest document."""
    long_rows: Literal["drop", "truncate"] = "drop"
    """What to do with a document over max_length; either way it is counted and reported."""
    train_on: Literal["completions", "all"] = "completions"
    """completions: the assistant's turns with their end tokens (all of a text row); all: every token."""
    packing: bool = True
    """Pack several documents in a row; false gives each document a row of its own."""
    packing_window: int = 4096
    """Documents considered together by the packer."""
    max_documents: int | None = None
    """Most documents in a row; by default max_length / 16, and at least 8."""
    shuffle: bool = True
    """Draw a new order of the documents every epoch, from the seed."""
    cache_dir: str | None = None
    """Where tokenised rows are kept; by default the run folder."""


@dataclass(kw_only=True, frozen=True)
class AdapterConfig:
    """What is trained."""

    type: Literal["lora", "none"] = "lora"
    """lora: low-rank adapters on frozen weights; none: full fine-tuning."""
    r: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Scale: the update is multiplied by lora_alpha / r."""
    lora_dropout: float = 0.0
    """Dropout on the adapters' input."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers to adapt (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full and saved with the adapter (embed_tokens, lm_head)."""


@dataclass(kw_only=True, frozen=True)
class OptimConfig:
    """AdamW, its schedule and the clip."""

    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments in 8 bits, 2 bytes a parameter, not 8; embeddings, tensors under 4,096 values: float32."""
    learning_rate: float = 2e-4
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up; wsd holds the peak and decays at the end."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    warmup_ratio: float = 0.0
    """Warm-up as a share of all steps, in place of warmup_steps."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end as a share of the peak."""
    decay_ratio: float = 0.1
    """wsd: share of all steps that decay."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 switches clipping off."""
    pure_bf16: bool = False
    """Full fine-tuning in bf16 without float32 master weights; saves memory, loses small updates."""


@dataclass(kw_only=True, frozen=True)
class TrainingConfig:
    """How long to train, in which portions, and what to keep."""

    output_dir: str
    """The run folder: resolved run file, logs, plot, samples, checkpoints, the final result."""
    num_train_epochs: float = 1.0
    """Passes over the training rows."""
    max_steps: int | None = None
    """Optimizer steps; overrides num_train_epochs."""
    per_device_train_batch_size: int = 1
    """Packed rows in a micro-batch."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step; gradients and loss are exactly those of one large batch."""
    per_device_eval_batch_size: int | None = None
    """Packed rows in an evaluation batch; by default that of training."""
    eval_steps: int | None = None
    """Evaluate every so many steps; by default before the first step and after the last."""
    save_steps: int | None = None
    """Write a checkpoint every so many steps; by default only at the end."""
    save_total_limit: int | None = 2
    """Keep only the newest checkpoints; "none" keeps all."""
    async_save: bool = False
    """Go on training while a checkpoint is written; takes host memory for a copy of it."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint in output_dir; never: refuse an output_dir that has one."""
    seed: int = 42
    """Seed of the order of rows, new weights and dropout."""
    deterministic: bool = True
    """Same seed, same bits; false may be faster."""
    cuda_graphs: Literal["auto", True, False] = "auto"
    """Launch a step as a few CUDA graphs, with the same bits; auto: where that is possible, with a line where not."""


@dataclass(kw_only=True, frozen=True)
class ParallelConfig:
    """How the processes that torchrun starts share the work; the numbers are the same in every layout."""

    dp_replicate_size: int | None = None
    """Replicas that train on different rows; by default as many as there are ranks for."""
    dp_shard_size: int = 1
    """Ranks that also train on different rows and keep a shard of the weights and optimizer state each (FSDP2)."""
    tp_size: int = 1
    """Ranks that share every layer (tensor parallel); divides the kv heads."""
    pp_size: int = 1
    """Ranks with a range of layers each (pipeline parallel); with 1f1b at most gradient_accumulation_steps."""
    zero_stage: int = 3
    """What dp_shard_size shards: 1 optimizer state, 2 gradients too, 3 weights too. In a pipeline gradients, and
    weights that were used backward, are whole until the step's last backward, as with 1."""
    shard_frozen: bool = True
    """Shard frozen weights too (LoRA); false keeps them whole on every rank, which saves gathering them."""
    sequence_parallel: bool = True
    """With tp_size: also share the norms and the residual stream, by tokens."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the micro-batches in the pipeline; the last two give each rank two ranges of layers."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others in a collective before the job ends."""


@dataclass(kw_only=True, frozen=True)
class MemoryConfig:
    """What is kept of a forward for its backward; the numbers are the same to the last bit."""

    checkpointing: Literal["none", "full"] = "none"
    """full: a layer keeps its input alone, and runs again in the backward; none: all that the backward needs."""


@dataclass(kw_only=True, frozen=True)
class LoggingConfig:
    """What is shown and written while training."""

    logging_steps: int = 1
    """Show and write the metrics of every so many-th step: those of the one step, not averaged."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Besides metrics.jsonl, which is always written."""
    sample_prompts: tuple[str, ...] = ()
    """User messages that are answered at each evaluation, into samples.md."""
    sample_tokens: int = 128
    """Longest sample answer, in tokens."""


@dataclass(kw_only=True, frozen=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
