"""What an interrupted audit goes on from: the sum of its first units, in a folder, replaced whole.

It belongs to one input and one set of options; for others it starts over and says so. The file is Python's own pickle
format: only a folder that nobody else writes to is to be trusted.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import keptset
from keptset.schemas.errors import StorageError
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.planning import Plan

SAVE_SECONDS = 1.0
"""At most so often is it stored."""
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
        """Errors: StorageError where the folder cannot be made."""
        folder = options.work
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot make work folder {folder}: {error.strerror or error}") from error
        told = [
            (unit.file, unit.first, unit.last, unit.start, unit.uncounted.tobytes(), _bytes(unit.chosen))
            for unit in plan.units
        ]
        digest = hashlib.blake2b(
            repr((keptset.__version__, options.digest(), plan.damaged, told)).encode(), digest_size=16
        ).hexdigest()
        return cls(folder, digest)

    def load(self) -> tuple[int, Partial] | None:
        """How many units were counted, and their sum; None where there is nothing to go on from."""
        if self.folder is None:
            return None
        try:
            data = (self.folder / _NAME).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self.folder / _NAME}: {error.strerror or error}") from error
        digest, checksum, body = data[:32].decode("ascii", "replace"), data[32:64], data[64:]
        if hashlib.blake2b(body, digest_size=16).hexdigest().encode() != checksum:
            self.note = f"{self.folder / _NAME} is damaged: starting over"
        elif digest != self.digest:
            self.note = "the input or the options are not those of the interrupted audit: starting over"
        else:
            done, partial = pickle.loads(body)
            return done, partial
        return None

    def save(self, done: int, partial: Partial, *, now: bool = False) -> None:
        """Keep the sum of the first `done` units, unless that was done a moment ago. Errors: StorageError."""
        if self.folder is None or (not now and time.monotonic() - self.saved < SAVE_SECONDS):
            return
        body = pickle.dumps((done, partial), protocol=5)
        data = self.digest.encode() + hashlib.blake2b(body, digest_size=16).hexdigest().encode() + body
        path, unfinished = self.folder / _NAME, self.folder / f".{_NAME}.tmp"
        try:
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
        self.saved = time.monotonic()

    def remove(self) -> None:
        """The audit is done."""
        if self.folder is not None:
            (self.folder / _NAME).unlink(missing_ok=True)


def _bytes(rows: NDArray[np.int64] | None) -> bytes | None:
    return None if rows is None else rows.tobytes()
