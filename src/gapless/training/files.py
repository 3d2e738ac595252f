"""Files that are whole or absent: written beside their final name, synced, renamed.

Names that begin with `.tmp-` are work in progress. A killed process leaves them behind; the next one clears them.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
_ASIDE = f"{TEMPORARY}old-"
"""Of a folder that another one is about to replace."""


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a folder and everything in it durable."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def temporary(path: Path, mark: str = "") -> Path:
    """Where to write what will become `path`: a free name in the same folder, one of its own for each `mark`."""
    return path.with_name(f"{TEMPORARY}{path.name}" + (f"-{mark}" if mark else ""))


def clear_temporary(folder: Path) -> None:
    """Remove what killed processes left behind in `folder`; what they had only moved aside goes back to its place."""
    for path in folder.glob(f"{_ASIDE}*"):
        place = path.with_name(path.name.removeprefix(_ASIDE))
        if not place.exists():
            path.rename(place)
    for path in folder.glob(f"{TEMPORARY}*"):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            # A process that is about to end still writes or removes there: what stays is cleared the next time.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise


def publish(path: Path, written: Path | None = None) -> None:
    """Put a synced folder or file, `temporary(path)` by default, in the place of `path`.

    A folder that is in the way is moved aside first and removed last. If the process is killed in between,
    `clear_temporary` moves it back.
    """
    aside = path.with_name(f"{_ASIDE}{path.name}")
    if path.is_dir():
        path.rename(aside)
    (written or temporary(path)).rename(path)
    sync(path.parent)
    if aside.is_dir():
        shutil.rmtree(aside)


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill in between leaves no half of it under its name."""
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    partial = temporary(path)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    publish(path)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn a failed write (disk full, no permission) into one line.

    Raises:
        ValueError: names `path` and the reason.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; put that right and run the same command again"
        ) from error
