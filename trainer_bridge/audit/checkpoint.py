"""What an interrupted audit goes on from: the sum of its first units, in a folder, replaced whole.

It belongs to one input and one set of options; for others it starts over and says so. Where nothing can be kept an
audit goes on all the same, and says so once: it matters only if it is interrupted. Several audits may have one folder:
each replaces the file whole, and none needs it while it runs. The file is Python's own pickle
format: only a folder that nobody else writes to is to be trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import keptset
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Plan

SAVE_SECONDS = 1.0
"""At most so often is it stored."""
ABANDONED_SECONDS = 3600.0
"""A file that was begun so long ago is of an audit that was killed."""
_NAME = "audit.partial"


@dataclass
class Checkpoint:
    """The file in a work folder; without a folder nothing is kept."""

    folder: Path | None
    digest: str
    note: str | None = None
    """Why it starts over, if it does."""
    saved: float = 0.0

    @classmethod
    def of(cls, plan: Plan, options: AuditOptions) -> Checkpoint:
        """That of an audit with this plan."""
        told = [
            (unit.file, unit.first, unit.last, unit.start, unit.uncounted.tobytes(), _bytes(unit.chosen))
            for unit in plan.units
        ]
        digest = hashlib.blake2b(
            repr((keptset.__version__, options.digest(), plan.damaged, told)).encode(), digest_size=16
        ).hexdigest()
        return cls(options.work, digest)

    def load(self) -> tuple[int, Partial] | None:
        """How many units were counted, and their sum; None where there is nothing to go on from."""
        if self.folder is None:
            return None
        try:
            data = (self.folder / _NAME).read_bytes()
        except (FileNotFoundError, NotADirectoryError):  # saving says it, if that is not possible
            return None
        except OSError as error:
            self.note = f"cannot read {self.folder / _NAME}: {error.strerror or error}; starting over"
            return None
        digest, checksum, body = data[:32].decode("ascii", "replace"), data[32:64], data[64:]
        if hashlib.blake2b(body, digest_size=16).hexdigest().encode() != checksum:
            self.note = f"{self.folder / _NAME} is damaged: starting over"
        elif digest != self.digest:
            self.note = "the input or the options are not those of the interrupted audit: starting over"
        else:
            done, partial = pickle.loads(body)
            return done, partial
        return None

    def save(self, done: int, partial: Partial, *, now: bool = False) -> str | None:
        """Keep the sum of the first `done` units, unless that was done a moment ago.

        Returns why it could not be kept; then nothing is kept from there on.
        """
        if self.folder is None or (not now and time.monotonic() - self.saved < SAVE_SECONDS):
            return None
        body = pickle.dumps((done, partial), protocol=5)
        data = self.digest.encode() + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + body
        path, unfinished = self.folder / _NAME, self.folder / f".{_NAME}.{uuid.uuid4().hex}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(data)
                os.replace(unfinished, path)
            finally:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)
        except FileNotFoundError:  # another audit that is done has just removed the folder: the next save makes it
            return None
        except OSError as error:
            self.folder = None
            return f"cannot write {path}: {error.strerror or error}; if it is interrupted it starts over"
        self.saved = time.monotonic()
        return None

    def remove(self) -> None:
        """The audit is done."""
        if self.folder is not None:
            remove(self.folder)


def is_kept(folder: Path) -> bool:
    """Whether there is something to go on from."""
    return os.path.exists(folder / _NAME)  # False too where the folder may not be entered


def remove(folder: Path) -> None:
    """Nothing goes on from this folder any more. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        (folder / _NAME).unlink(missing_ok=True)
        for left in folder.glob(f".{_NAME}.*.tmp"):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                left.unlink(missing_ok=True)


def _bytes(rows: NDArray[np.int64] | None) -> bytes | None:
    return None if rows is None else rows.tobytes()
