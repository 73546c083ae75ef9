"""`keptset bench step`: its batch is sound, and the parts of a step make up the step."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("paddle", reason="needs the package paddlepaddle or paddlepaddle-gpu")

from keptset.schemas.validation import validate
from keptset.scripts import bench_step, main


def test_the_batch_is_sound() -> None:
    batch = bench_step.recorded(4, 2048)
    assert batch.num_tokens == 4 * bench_step.NEW_TOKENS
    assert not validate(batch)


def test_the_parts_of_a_step_make_up_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "step", "--tokens", "64", "--layers", "1", "--vocab", "1024", "--rounds", "1", "--json"]
    main.command_line()(options, standalone_mode=False)
    numbers = json.loads(capsys.readouterr().out)
    assert sum(numbers[f"{part}_share"] for part in bench_step.PARTS) == pytest.approx(1)
    assert numbers["diagnostics_ms"] > 0
