"""Spool folders and what is done to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def batches(batch_of: Callable[..., RolloutBatch]) -> list[RolloutBatch]:
    """Five batches of one identity, of different sizes."""
    return [batch_of(10 * number, 1 + number % 3) for number in range(5)]


@pytest.fixture
def ids_in() -> Callable[..., list[str]]:
    """`ids_in(folder, **settings)`: all rollout_ids that are stored, as often as they are."""

    def read(folder: Path, **settings: object) -> list[str]:
        with SpoolReader(folder, **{"duplicates": "keep", **settings}) as reader:
            return [name for batch in reader for name in batch.rollout_ids]

    return read


@pytest.fixture
def run_python(repository: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(code, *arguments)`: a script in a process of its own, which may end in any way."""

    def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONPATH": str(repository)},
        )

    return run
