"""What a reader is tried with, and what may become of it.

An input may be refused with one of keptset's errors. What is let through must be what was written (files of keptset's
own) or keep the contract and come from the input (other engines' output). All else is a `Fault`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from random import Random

from keptset.schemas.errors import InvalidInput, SchemaError, StorageError

REFUSALS = (SchemaError, StorageError, InvalidInput)


class Fault(Exception):
    """An input that had a consequence it must not have."""


class Target(ABC):
    """One reader."""

    name: str
    suffix: str

    def __init__(self, folder: Path) -> None:
        """Make the sound inputs. `folder` is this target's own, empty."""
        self.folder = folder

    @abstractmethod
    def make(self, random: Random) -> bytes:
        """An unsound input."""

    @abstractmethod
    def take(self, data: bytes) -> str:
        """Read it; what became of it in a word. Errors: those of REFUSALS, Fault."""
