"""Who owns an open spool file: whoever holds its `flock`.

The kernel drops the lock when its process dies, however it dies, so there is no stale owner to guess at from process
numbers or times. A child made by fork shares its parent's lock; the file then counts as owned until both are gone,
which errs on the safe side. On network file systems the lock holds as far as they implement flock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from keptset.schemas.errors import StorageError


def try_lock(file: int, path: Path) -> bool:
    """Take the lock; False where another has it. Errors: StorageError where the file system has no locks."""
    return _lock(file, path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def hold_lock(file: int, path: Path) -> None:
    """Take the lock, waiting for whoever has it. Errors: as `try_lock`."""
    _lock(file, path, fcntl.LOCK_EX)


def _lock(file: int, path: Path, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StorageError(
            f"cannot lock {path}: {error.strerror}; a spool needs a file system with flock, by which files of live "
            "writers are told from orphaned ones"
        ) from error
    return True


def still_there(file: int, path: Path) -> bool:
    """Whether the path still names the locked file, which another may have removed before the lock was taken."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
