"""The spool: a folder through which batches go from rollouts to trainers and outlive both.

Each writer owns one open file, an Arrow IPC stream to which a batch is appended; full ones are published as compressed
Arrow IPC files. Readers take either. docs/schema.md describes the files.
"""

from keptset.schemas.storage.spool.reader import Position, SetAside, SpoolReader
from keptset.schemas.storage.spool.recovery import Recovered, recover
from keptset.schemas.storage.spool.writer import SpoolWriter

__all__ = ["Position", "Recovered", "SetAside", "SpoolReader", "SpoolWriter", "recover"]
