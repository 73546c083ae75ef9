"""The readers that are tried, by name."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pyarrow as pa
from engine_targets import EngineOutput, PrimeRl, Transformers
from file_targets import Archive, OpenFile, PublishedFile, Recovery
from trial import Fault, Target

from keptset.schemas.errors import SchemaError
from keptset.schemas.storage.spool import reader as spool_reader

ENGINES = ("vllm", "sglang", "fastdeploy", "slime")
READERS = ("spool-published", "spool-open", "spool-recovery", "archive", *ENGINES, "prime_rl", "transformers")
"""All of them."""

# Inputs are small, and their children many.
pa.set_cpu_count(1)
pa.set_io_thread_count(1)
# No writer is at work on a file that is tried here, so that a second look need not wait for it.
spool_reader.SECOND_LOOK_SECONDS = 0.0


class Broken(Target):
    """No reader of keptset's: one that does all that a reader must not, to try the trial itself."""

    name, suffix = "broken", ".bin"

    def make(self, random: Random) -> bytes:
        return random.choice((b"sound", b"sound", b"refused", b"abort", b"hang", b"foreign", b"let through"))

    def take(self, data: bytes) -> str:
        if data == b"refused":
            raise SchemaError("refused")
        if data == b"abort":
            os.abort()
        while data == b"hang":
            pass
        if data == b"foreign":
            raise KeyError("foreign")
        if data == b"let through":
            raise Fault("a violation was let through")
        return "taken"


def target(name: str, folder: Path) -> Target:
    """The reader of that name, at work in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in ENGINES:
        return EngineOutput(folder, name)
    kinds = (PublishedFile, OpenFile, Recovery, Archive, PrimeRl, Transformers, Broken)
    return {kind.name: kind for kind in kinds}[name](folder)
