"""What all ranks of a job must have in common when it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

import gapless
from gapless.config import RunConfig


def start_facts(config: RunConfig, **more: Any) -> dict[str, Any]:
    """Versions, source and settings by name, for `World.agree`: ranks that differ in one would train apart.

    Args:
        config: the run; all of its settings count.
        more: further facts, JSON values, such as digests of the model and of the rows.
    """
    return {
        "gapless": gapless.__version__,
        "gapless's source": source_digest(),
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{
            f"{section}.{key}": value
            for section, keys in dataclasses.asdict(config).items()
            for key, value in keys.items()
        },
        **more,
    }


def source_digest() -> str:
    """A digest of this package's source files."""
    folder = Path(gapless.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
