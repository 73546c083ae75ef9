"""An audit gives one answer, however its input is cut, whoever works on it, and whatever interrupts it."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import InvalidInput, KeptsetError
from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import write_archive
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, Partial, Progress, audit, audit_unit, conclude, plan
from keptset.trainer_bridge.audit.unit_audit import batches_of

planning = importlib.import_module("keptset.trainer_bridge.audit.planning")
pieces = importlib.import_module("keptset.trainer_bridge.audit.pieces")
runner = importlib.import_module("keptset.trainer_bridge.audit.runner")
ALONE = AuditOptions(workers=1, max_version_lag=1)


@pytest.fixture(scope="module")
def batch(honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch]) -> RolloutBatch:
    """Rollouts with several faults, a copy, a shared seed, and versions that lag."""

    def spoil(rows: list[dict[str, Any]]) -> None:
        rows[3]["behavior_logprobs"][2] = 0.5
        rows[20]["kept_ids"][0].reverse()
        rows[41]["kept_logprobs"][0] = [p - 0.2 for p in rows[41]["kept_logprobs"][0]]
        rows[30]["seed"] = rows[7]["seed"]
        rows[50]["policy_versions"] = [2] * len(rows[50]["policy_versions"])
        rows[59] = rows[11]

    return edited(honest(60, tokens=20), spoil)


def in_parts(batch: RolloutBatch, folder: Path, sizes: list[int], *, files: bool = False) -> Path:
    """The batch in a spool, appended in parts; `files`: each is published before the next comes."""
    begin = 0
    with SpoolWriter(folder, "writer") as writer:
        for size in sizes:
            writer.append(batch.slice(begin, size).compact())
            begin += size
            if files:
                writer.rotate()
    assert begin == len(batch)
    return folder


def told(report: AuditReport) -> AuditReport:
    """What a report says, apart from where the rows lie."""

    def plain(finding: Any) -> Any:
        examples = tuple(replace(e, detail="") if " part " in e.detail else e for e in finding.examples)
        return replace(finding, examples=examples, symptoms=tuple(map(plain, finding.symptoms)))

    return replace(report, findings=tuple(map(plain, report.findings)), totals=replace(report.totals, files=0))


@pytest.fixture(scope="module")
def expected(batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    folder = in_parts(batch, tmp_path_factory.mktemp("whole") / "spool", [60])
    return audit([folder], ALONE)


def test_the_answer_has_every_planted_fault(expected: AuditReport) -> None:
    assert {finding.kind for finding in expected.findings} == {
        FindingKind.LOGPROB,
        FindingKind.SORTED,
        FindingKind.DISTRIBUTION,
        FindingKind.SEED_REUSED,
        FindingKind.DUPLICATE,
        FindingKind.STALENESS,
    }


@pytest.mark.parametrize(("sizes", "files"), [([1] * 60, False), ([7, 1, 30, 22], True), ([59, 1], True)])
def test_how_rows_are_cut_into_batches_and_files_does_not_matter(
    batch: RolloutBatch, expected: AuditReport, tmp_path: Path, sizes: list[int], files: bool, monkeypatch: Any
) -> None:
    folder = in_parts(batch, tmp_path / "spool", sizes, files=files)
    assert told(audit([folder], ALONE)) == told(expected)
    monkeypatch.setattr(pieces, "SLICE_IDS", 100)
    monkeypatch.setattr(pieces, "JOIN_BYTES", 1)
    assert told(audit([folder], ALONE)) == told(expected)


def test_an_archive_gives_the_same_answer_as_the_spool(
    batch: RolloutBatch, expected: AuditReport, tmp_path: Path
) -> None:
    write_archive([batch], tmp_path / "a.parquet")
    assert told(audit([tmp_path / "a.parquet"], ALONE)) == told(expected)


def test_how_many_processes_there_are_does_not_matter(
    batch: RolloutBatch, expected: AuditReport, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(planning, "UNIT_BYTES", 1)
    folder = in_parts(batch, tmp_path / "spool", [10] * 6, files=True)
    alone, several = (audit([folder], replace(ALONE, workers=n)) for n in (1, 2))
    assert alone == several and told(alone) == told(expected)


def test_its_pieces_add_up_elsewhere_as_they_do_here(batch: RolloutBatch, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(planning, "UNIT_BYTES", 1)
    folder = in_parts(batch, tmp_path / "spool", [10] * 6, files=True)
    planned = plan([folder], ALONE)
    first, second = Partial.start(ALONE), Partial.start(ALONE)
    for unit in planned.units[:2]:
        first.merge(audit_unit(unit, ALONE))
    for unit in planned.units[2:]:
        second.merge(audit_unit(unit, ALONE))
    first.merge(second)
    assert len(planned.units) == 6
    assert conclude(first, planned, ALONE) == audit([folder], ALONE)


def test_progress_is_told_after_each_unit(batch: RolloutBatch, tmp_path: Path) -> None:
    told_: list[Progress] = []
    folder = in_parts(batch, tmp_path / "spool", [30, 30], files=True)
    audit([folder], replace(ALONE, progress=told_.append))
    assert [(p.units_done, p.units_total, p.tokens) for p in told_] == [(0, 2, 0), (1, 2, 600), (2, 2, 1200)]


KILLED = """
    import importlib, os, signal, sys
    from pathlib import Path
    from keptset.trainer_bridge.audit import AuditOptions, audit
    checkpoint = importlib.import_module("keptset.trainer_bridge.audit.checkpoint")
    checkpoint.SAVE_SECONDS = 0

    def progress(at):
        if at.units_done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    audit([sys.argv[1]], AuditOptions(workers=1, max_version_lag=1, work=Path(sys.argv[2]), progress=progress))
"""


@pytest.fixture(scope="module")
def scene(batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spool and work folder of an audit that was killed after two of four units."""
    scene = tmp_path_factory.mktemp("killed")
    folder = in_parts(batch, scene / "spool", [15] * 4, files=True)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(scene / "work")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    return scene


@pytest.fixture
def killed(scene: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The same scene for each test, at the place where it was."""
    shutil.copytree(scene, tmp_path / "kept")
    yield scene / "spool", scene / "work"
    shutil.rmtree(scene)
    (tmp_path / "kept").rename(scene)


def test_a_killed_audit_goes_on_where_it_was(killed: tuple[Path, Path]) -> None:
    folder, work = killed
    seen: list[Progress] = []
    report = audit([folder], replace(ALONE, work=work, progress=seen.append))
    assert report == audit([folder], ALONE)
    assert [p.units_done for p in seen] == [2, 3, 4] and seen[0].tokens == 600
    assert list(work.iterdir()) == []


def test_a_changed_input_starts_over_and_says_so(killed: tuple[Path, Path], batch: RolloutBatch) -> None:
    folder, work = killed
    with SpoolWriter(folder, "another") as writer:
        writer.append(batch.slice(0, 3).compact())
    seen: list[Progress] = []
    report = audit([folder], replace(ALONE, work=work, progress=seen.append))
    assert report == audit([folder], ALONE)
    assert seen[0].units_done == 0 and "not those of the interrupted audit: starting over" in str(seen[0].note)


def test_other_options_start_over(killed: tuple[Path, Path]) -> None:
    folder, work = killed
    seen: list[Progress] = []
    audit([folder], replace(ALONE, work=work, filtered=True, progress=seen.append))
    assert seen[0].units_done == 0


def test_a_damaged_checkpoint_starts_over(killed: tuple[Path, Path]) -> None:
    folder, work = killed
    (stored,) = work.iterdir()
    data = bytearray(stored.read_bytes())
    data[-10] ^= 1
    stored.write_bytes(data)
    seen: list[Progress] = []
    assert audit([folder], replace(ALONE, work=work, progress=seen.append)) == audit([folder], ALONE)
    assert "is damaged: starting over" in str(seen[0].note)


def test_an_interrupt_keeps_what_was_done(batch: RolloutBatch, tmp_path: Path) -> None:
    folder, work = in_parts(batch, tmp_path / "spool", [15] * 4, files=True), tmp_path / "work"

    def interrupt(at: Progress) -> None:
        if at.units_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit([folder], replace(ALONE, work=work, progress=interrupt))
    seen: list[Progress] = []
    audit([folder], replace(ALONE, work=work, progress=seen.append))
    assert seen[0].units_done == 3


def test_a_process_that_ends_early_is_an_error_that_says_what_to_do(
    batch: RolloutBatch, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = in_parts(batch, tmp_path / "spool", [30, 30], files=True)
    monkeypatch.setattr(runner, "_begin_worker", signal.raise_signal)  # without its argument it fails at once
    with pytest.raises(KeptsetError, match="run with workers=1"):
        audit([folder], replace(ALONE, workers=2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"sample": 0}, "sample is 0"),
        ({"max_version_lag": -1}, "max_version_lag is -1"),
        ({"family_level": 0.0}, "family_level is 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AuditOptions(**wrong)


def test_a_sample_takes_so_many_rows_and_says_how_much_that_is(batch: RolloutBatch, tmp_path: Path) -> None:
    folder = in_parts(batch, tmp_path / "spool", [6] * 10, files=True)
    report = audit([folder], replace(ALONE, sample=15))
    assert report.totals.responses == 15
    assert 0.15 < report.totals.share_read < 0.35
    assert "a sample of 15 responses" in report.verdict
    assert audit([folder], replace(ALONE, sample=15)) == report
    everything = audit([folder], replace(ALONE, sample=1000))
    assert everything.totals.share_read == 1
    assert everything.totals == audit([folder], ALONE).totals


def test_a_sample_of_a_writers_files_is_in_their_order(
    honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch], tmp_path: Path
) -> None:
    """Which version was the newest so far is told from the order of a writer's responses."""
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        for version in range(12):

            def of_version(rows: list[dict[str, Any]], version: int = version) -> None:
                for number, row in enumerate(rows):
                    row["rollout_id"], row["seed"] = f"{version}-{number}", 8 * version + number
                    row["policy_versions"] = [version] * 4

            writer.append(edited(honest(8, tokens=4, seed=version), of_version))
            writer.rotate()
    for seed in range(4):
        report = audit([tmp_path / "spool"], AuditOptions(workers=1, max_version_lag=0, sample=30, seed=seed))
        assert report.totals.responses == 30 and report.findings == ()


def test_a_sample_is_of_more_than_one_place_and_knows_its_repeats(batch: RolloutBatch, tmp_path: Path) -> None:
    twice = concat_batches([batch.slice(0, 30), batch.slice(0, 30)])
    folder = in_parts(twice, tmp_path / "spool", [5] * 12, files=True)
    options = replace(ALONE, sample=40)
    found = plan([folder], options)
    assert sum(unit.rows for unit in found.units) == 40
    assert len(found.units) >= 8
    read = [one for unit in found.units for one in batches_of(unit, options)]
    assert [len(one) for one in read] == [unit.rows for unit in found.units]
    seen: set[str] = set()
    for unit, one in zip(found.units, read, strict=True):
        counted = np.setdiff1d(np.arange(unit.rows), unit.uncounted)
        ids = [one.rollout_ids[row] for row in counted]
        assert seen.isdisjoint(ids), "a row that repeats another does not count, whichever of its rows were chosen"
        seen.update(ids)
