"""`keptset audit --ray` on a cluster of two nodes, and on a Ray of its own: the answers of an audit without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

ray = pytest.importorskip("ray", reason="needs the package ray")
pytest.importorskip("ray.cluster_utils")
pytest.importorskip("pandas", reason="Ray Data needs the package pandas")

from keptset.schemas.rollout_batch import RolloutBatch  # noqa: E402
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter  # noqa: E402
from keptset.scripts.audit_ray import audit_on_ray  # noqa: E402
from keptset.scripts.bench_wire_rollouts import made_up_rollouts  # noqa: E402
from keptset.trainer_bridge.audit import AuditOptions, Progress, audit  # noqa: E402
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedColumn  # noqa: E402

# Ray Data sets options of its own that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

RunAudit = Callable[..., tuple[int, str, str]]
FILES, ROWS = 20, 4
STORE = 2**27


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unit of work in each file; draws that nobody could have drawn, and a response that came twice."""
    folder = tmp_path_factory.mktemp("rollouts") / "spool"
    batch = made_up_rollouts(FILES * ROWS * 25, row_tokens=25)
    with SpoolWriter(folder, fsync="never") as writer:
        for number in range(FILES):
            writer.append(batch.slice(number * ROWS, ROWS).compact())
            writer.rotate()
        writer.append(batch.slice(2, 1).compact())
    return folder


def test_a_cluster_gives_the_same_report_and_tells_how_far_it_is(cluster: str, spool: Path) -> None:
    seen: list[Progress] = []
    report = audit_on_ray([spool], AuditOptions(max_version_lag=1, progress=seen.append), cluster)
    assert report == audit([spool], AuditOptions(workers=1, max_version_lag=1))
    assert report.findings and report.totals.responses == FILES * ROWS + 1
    done = [now.units_done for now in seen]
    assert done[0] == 0 and done[-1] == FILES + 1 and done == sorted(done) and len(done) > 4
    assert not ray.is_initialized()


def test_ratios_are_the_same_to_the_last_digit(cluster: str, spool: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    with SpoolWriter(tmp_path / "scored", fsync="never") as writer:
        for batch in SpoolReader(spool):
            b = batch.arrow.column("behavior_logprobs")
            off = np.float32(generator.normal(0.0, 0.1, len(b.flatten())))
            scores = pa.ListArray.from_arrays(b.offsets, pa.array(b.flatten().to_numpy() + off))
            writer.append(RolloutBatch.from_arrow(batch.arrow.append_column("x_trainer", scores)))
            writer.rotate()
    options = AuditOptions(workers=1, scorer=RecordedColumn(column="x_trainer"))
    alone = audit([tmp_path / "scored"], options)
    assert all(row.kept_ratio and row.kept_ratio.std_error for row in alone.settings)
    assert audit_on_ray([tmp_path / "scored"], options, cluster) == alone


def test_the_command_ends_and_prints_alike_with_a_ray_of_its_own(
    run_audit: RunAudit, spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own: Ray Data does not come back to a cluster after it has been on another.
    command = [sys.executable, "-m", "keptset.scripts.main", "audit", "--ray", spool.name, "--json"]
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    spread = subprocess.run(
        command,
        cwd=spool.parent,
        env={**inherited, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    monkeypatch.chdir(spool.parent)
    code, out, _ = run_audit(spool.name, "--json")
    assert (spread.returncode, json.loads(spread.stdout), spread.stderr) == (code, json.loads(out), "") and code == 1


def test_an_interrupted_audit_goes_on_on_a_cluster(cluster: str, spool: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []

    def interrupt(now: Progress) -> None:
        if now.units_done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit([spool], AuditOptions(workers=1, work=tmp_path, progress=interrupt))
    report = audit_on_ray([spool], AuditOptions(work=tmp_path, progress=seen.append), cluster)
    assert seen[0].units_done == 5 and report == audit([spool], AuditOptions(workers=1))


def test_an_error_of_a_task_ends_the_command_as_it_does_without_ray(
    run_audit: RunAudit, cluster: str, spool: Path, tmp_path: Path
) -> None:
    pytest.importorskip("paddle", reason="the model is opened by Paddle")
    (tmp_path / "config.json").write_text("{")
    plain, spread = (run_audit(spool, "--model", tmp_path, *more) for more in ([], ["--ray", cluster]))
    assert spread == plain and plain[0] == 3 and "config.json" in plain[2]


def test_files_that_a_node_does_not_see_are_an_error_and_not_damage(
    run_audit: RunAudit, cluster: str, spool: Path
) -> None:
    folder = os.open(spool, os.O_RDONLY)  # under this name nobody but this process has it
    try:
        code, out, err = run_audit(f"/proc/self/fd/{folder}", "--ray", cluster)
    finally:
        os.close(folder)
    assert (code, out) == (3, "") and "does not see /proc/self/fd" in err


def test_no_cluster_and_other_wrong_uses_are_told(
    run_audit: RunAudit, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keptset.scripts import audit_ray

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        code, _, err = run_audit(spool, "--ray", address)
        assert code == 2 and f"no Ray answers at {address}" in err
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert run_audit(spool, "--ray")[::2] == (code, err)
    code, _, err = run_audit(spool, "--against", spool, "--ray")
    assert code == 2 and "--ray" in err
    there: Any = audit_ray.find_spec
    for missing in ("ray", "pandas"):
        monkeypatch.setattr(audit_ray, "find_spec", lambda name, gone=missing: None if name == gone else there(name))
        code, _, err = run_audit(spool, "--ray")
        assert code == 2 and f"needs the package {missing}: pip install 'keptset[ray]'" in err
