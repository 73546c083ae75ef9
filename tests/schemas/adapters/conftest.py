"""Recorded output of every engine: tests/data/engines, with the logits behind it and a manifest of planted faults."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keptset.schemas.adapters import Adapted, Stated, adapt_files, adapter_for
from keptset.schemas.columns import Identity

ENGINES = Path(__file__).resolve().parents[2] / "data" / "engines"
STATED = Stated(identity=Identity(vocab_size=24))


@pytest.fixture
def engines() -> Path:
    """The folder of recorded output."""
    return ENGINES


@pytest.fixture
def example() -> Callable[[str], Any]:
    """`example(name)`: a recorded tree to change at will."""
    return lambda name: copy.deepcopy(json.loads((ENGINES / name).read_text()))


@pytest.fixture
def adapt(tmp_path: Path) -> Callable[..., Adapted]:
    """`adapt(engine, *trees, stated=...)`: what becomes of trees recorded as JSON lines."""

    def run(engine: str, *trees: Any, stated: Stated = STATED) -> Adapted:
        path = tmp_path / "recorded.jsonl"
        path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
        (adapted,) = adapt_files(adapter_for(engine), [path], stated)
        return adapted

    return run
