"""`keptset bench audit`: it audits what it says, and its memory is that of every process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts import bench_audit, main
from keptset.scripts.bench_audit import AuditBench, loop, measure, peak_of
from keptset.scripts.bench_wire_rollouts import made_up_rollouts


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AuditBench:
    return measure(tmp_path_factory.mktemp("bench"), 3_000, rounds=1)


def test_every_rate_is_measured(result: AuditBench) -> None:
    assert result.tokens == 3_000 and result.kept_ids == made_up_rollouts(3_000).num_kept_ids
    rates = (result.ids_per_second, result.ids_per_second_draws, result.read_ids_per_second, result.loop_ids_per_second)
    assert min(rates) > 0 and result.peak_mb > 30


def test_the_loop_finds_what_the_audit_would() -> None:
    batch = made_up_rollouts(200, row_tokens=50)
    assert loop(batch) == 0
    rows = batch.arrow.to_pylist()
    rows[0]["kept_ids"][0] = [5, 3]
    rows[1]["token_ids"][4] = -7
    assert loop(RolloutBatch.from_arrow(batch.arrow.from_pylist(rows, schema=batch.arrow.schema))) == 2


def test_memory_of_children_counts() -> None:
    child = "x = bytearray(80 * 2**20); import time; time.sleep(0.6)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert peak_of([sys.executable, "-c", parent]) > 80


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        peak_of([sys.executable, "-c", "raise SystemExit(3)"])


def test_json_names_the_numbers_and_their_goals(
    result: AuditBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench_audit, "measure", lambda folder, tokens, rounds: result if Path(folder).is_dir() else None
    )
    monkeypatch.setattr(sys, "argv", ["keptset", "bench", "audit", "--json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["goals"] == {"ids_per_second": 20e6, "ids_per_second_draws": 10e6, "peak_mb": 600}
    assert report["ids_per_second"] == result.ids_per_second
