"""Which errors are a user's to put right: those are told in one line, anything else keeps its traceback."""

from __future__ import annotations

import errno

_FILE_ERRORS = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENFILE,
        errno.ESTALE,
        errno.ENOMEM,
    }
)
"""What a user can put right; EBADF or EINVAL, for instance, would be a mistake of ours."""


def user_message(error: BaseException) -> str | None:
    """What to tell the user, or None for an error that is not theirs to put right."""
    if isinstance(error, OSError):
        if error.errno not in _FILE_ERRORS and not (error.errno is None and _raised_here(error)):
            return None
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return str(error) if isinstance(error, ValueError) and _raised_here(error) else None


def _raised_here(error: BaseException) -> bool:
    """Whether our own code raised the error on purpose, rather than a library that our code called wrongly."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").split(".")[0] == "gapless"
