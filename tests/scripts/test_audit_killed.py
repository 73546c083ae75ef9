"""`keptset audit`, killed outright in the middle: the same command goes on, says so, and has the same answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keptset.schemas.storage.spool import SpoolWriter
from keptset.scripts.bench_wire_rollouts import made_up_rollouts

FILES, ROWS = 40, 4
"""Each file is a unit of work, of some 30 ms."""


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "spool"
    batch = made_up_rollouts(FILES * ROWS * 25, row_tokens=25)
    with SpoolWriter(folder, fsync="never") as writer:
        for number in range(FILES):
            writer.append(batch.slice(number * ROWS, ROWS).compact())
            writer.rotate()
    return folder


def test_a_killed_audit_goes_on_says_so_and_has_the_same_answer(spool: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keptset.scripts.main", "audit", str(spool), "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    kept = tmp_path / "keptset" / "audits"

    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(kept.glob("*/audit.partial")):
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL

    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"of {FILES} units of work are done already" in again.stderr
    whole = subprocess.run([*command, "--no-resume"], env=environment, capture_output=True, text=True, check=False)
    assert whole.stderr == "" and whole.stdout.startswith("{")
    assert (again.returncode, again.stdout) == (whole.returncode, whole.stdout)
    assert not list(kept.iterdir())
