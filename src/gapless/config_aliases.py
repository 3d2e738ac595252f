"""Names that other tools use for keys of a run file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ALIASES: dict[str, str] = {
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "model_name": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "dataset": "data.train",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "eval_file": "data.eval",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "sample_packing": "data.packing",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "rank": "adapter.r",
    "lora_target_modules": "adapter.target_modules",
    "lora_target": "adapter.target_modules",
    "lora_modules_to_save": "adapter.modules_to_save",
    "optimizer": "optim.optim",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.lr_scheduler_type",
    "gradient_clipping": "optim.max_grad_norm",
    "num_epochs": "training.num_train_epochs",
    "epochs": "training.num_train_epochs",
    "micro_batch_size": "training.per_device_train_batch_size",
    "tensor_parallel_size": "parallel.tp_size",
    "tensor_parallel_degree": "parallel.tp_size",
    "pipeline_parallel_size": "parallel.pp_size",
    "pipeline_parallel_degree": "parallel.pp_size",
    "data_parallel_shard_degree": "parallel.dp_shard_size",
    "data_parallel_replicate_degree": "parallel.dp_replicate_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "gradient_checkpointing": "memory.checkpointing",
    "activation_checkpointing": "memory.checkpointing",
}
"""Name there: `section.key` here."""

VALUES: dict[str, dict[str, str]] = {
    "optim.optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
    },
}
"""Values there: values here, by `section.key`."""

TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _either(yes: str, no: str) -> Callable[[Any], Any]:
    """What a truth value there is here; anything else stays as it is."""
    return lambda value: (no, yes)[TRUTH[str(value).lower()]] if str(value).lower() in TRUTH else value


ALIAS_VALUES: dict[str, Callable[[Any], Any]] = {
    "bf16": _either("bf16", "fp32"),
    "torch_dtype": lambda value: {"bfloat16": "bf16", "float32": "fp32"}.get(str(value), value),
    "gradient_checkpointing": _either("full", "none"),
    "activation_checkpointing": _either("full", "none"),
}
"""From a value there to the value here, by name there."""
