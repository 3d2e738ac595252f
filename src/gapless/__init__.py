"""gapless: fine-tune large language models at the speed of the matmuls.

The public names load on first use: importing the package imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.config_file import load_config
    from gapless.inference.export import export
    from gapless.inference.generate import generate
    from gapless.inference.load import load_model
    from gapless.kernels.attention import attention
    from gapless.training.trainer import Trainer, train

__version__ = "0.1.0"
__all__ = ["Trainer", "attention", "export", "generate", "load_config", "load_model", "train"]

_HOMES = {
    "Trainer": "gapless.training.trainer",
    "attention": "gapless.kernels.attention",
    "export": "gapless.inference.export",
    "generate": "gapless.inference.generate",
    "load_config": "gapless.config_file",
    "load_model": "gapless.inference.load",
    "train": "gapless.training.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gapless' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
