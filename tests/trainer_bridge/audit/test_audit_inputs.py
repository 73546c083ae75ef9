"""What paths mean to an audit, and what becomes of files that cannot be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from keptset.schemas.errors import DamagedFile, InvalidInput, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import write_archive
from keptset.schemas.storage.archive.place import Place
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit
from keptset.trainer_bridge.audit.checks import NEED_SCORES
from keptset.trainer_bridge.audit.planning import plan
from keptset.trainer_bridge.audit.reading.inputs import find_inputs

ALONE = AuditOptions(workers=1)


@pytest.fixture(scope="module")
def batch(honest: Callable[..., RolloutBatch]) -> RolloutBatch:
    return honest(20)


@pytest.fixture
def spool(batch: RolloutBatch, tmp_path: Path) -> Path:
    """Two published files of ten responses."""
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        writer.append(batch.slice(0, 10).compact())
        writer.rotate()
        writer.append(batch.slice(10, 10).compact())
    return tmp_path / "spool"


def responses(*paths: str | Path) -> int:
    return audit(paths, ALONE).totals.responses


def test_a_folder_a_file_a_glob_and_an_address_are_read(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert responses(spool) == 20
    assert responses(str(spool)) == 20
    assert responses(spool / "writer-00000001.arrow") == 10
    assert responses(f"{spool}/*-00000000.arrow") == 10
    assert responses(f"file://{spool}") == 20
    monkeypatch.chdir(spool.parent)
    assert responses("spool") == 20
    assert responses("sp*") == 20


def test_folders_are_searched_at_any_depth(
    spool: Path, batch: RolloutBatch, honest: Callable[..., RolloutBatch]
) -> None:
    deep = spool.parent / "runs" / "one" / "night"
    deep.parent.mkdir(parents=True)
    spool.rename(deep)
    write_archive([honest(5, first=100)], spool.parent / "runs" / "archive.parquet")
    (spool.parent / "runs" / "notes.txt").write_text("not a rollout")
    (spool.parent / "runs" / ".hidden.parquet").write_text("nor this")
    assert responses(spool.parent / "runs") == 25


def test_a_file_named_twice_is_read_once(spool: Path) -> None:
    report = audit([spool, spool / "writer-00000000.arrow", f"{spool}/*.arrow"], ALONE)
    assert (report.totals.files, report.totals.responses, report.findings) == (2, 20, ())


def test_open_streams_are_read_up_to_their_last_whole_batch(batch: RolloutBatch, tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        for begin in range(0, 20, 5):
            writer.append(batch.slice(begin, 5).compact())
        assert responses(tmp_path / "spool") == 20
        with writer.path.open("ab") as file:
            file.write(b"\xff\xff\xff\xff\x10")
        assert responses(tmp_path / "spool") == 20


def test_an_open_file_that_is_published_meanwhile_is_read_from_there(batch: RolloutBatch, tmp_path: Path) -> None:
    from keptset.trainer_bridge.audit import Partial, audit_unit

    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        for begin in range(0, 20, 5):
            writer.append(batch.slice(begin, 5).compact())
        planned = plan([tmp_path / "spool"], ALONE)
    assert not (tmp_path / "spool" / "writer-00000000.open").exists()
    total = Partial.start(ALONE)
    for unit in planned.units:
        total.merge(audit_unit(unit, ALONE))
    assert (total.responses, total.damaged) == (20, {})


def test_an_open_file_beside_its_published_one_is_passed_over(spool: Path) -> None:
    (spool / "writer-00000000.open").write_bytes(b"")
    assert [Path(file.shown).name for file in find_inputs([spool])] == [
        "writer-00000000.arrow",
        "writer-00000001.arrow",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_plain_arrow_files_of_the_schema_are_read(batch: RolloutBatch, tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "rollouts.arrows"
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), batch.arrow.schema) as writer:
        for begin in range(0, 20, 5):
            writer.write_batch(batch.arrow.slice(begin, 5))
    with pytest.raises(DamagedFile, match="--unguarded takes files of other writers"):
        audit([path], ALONE)
    report = audit([path], AuditOptions(workers=1, unguarded=True))
    assert (report.totals.responses, report.findings) == (20, ())


def test_a_spool_file_under_another_name_needs_no_leave(spool: Path) -> None:
    (spool / "writer-00000000.arrow").rename(spool / "monday.feather")
    assert responses(spool / "monday.feather") == 10


def test_parquet_of_another_writer_is_read_if_it_is_said_to_be_one(batch: RolloutBatch, tmp_path: Path) -> None:
    path = tmp_path / "others.parquet"
    pq.write_table(pa.Table.from_batches([batch.arrow]), path)
    with pytest.raises(DamagedFile, match="no keptset guard.*--unguarded takes files of other writers"):
        audit([path], ALONE)
    assert audit([path], AuditOptions(workers=1, unguarded=True)).totals.responses == 20


@pytest.mark.parametrize("unguarded", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.arrow", b"", "is empty"),
        ("a.parquet", b"", "is empty"),
        ("w-00000000.arrow", b"", "is empty"),
        ("a.arrow", b"two lines\nof text\n", "is not an Arrow file"),
        ("a.parquet", b"two lines\nof text\n", "is not a Parquet file"),
    ],
)
def test_a_file_that_is_nothing_of_the_kind_is_called_that_and_no_option_is_offered(
    tmp_path: Path, name: str, content: bytes, said: str, unguarded: bool
) -> None:
    (tmp_path / name).write_bytes(content)
    if unguarded and name == "a.parquet" and content:
        said = "Parquet"  # Arrow's own words
    with pytest.raises(DamagedFile, match=said) as raised:
        audit([tmp_path / name], AuditOptions(workers=1, unguarded=unguarded))
    assert "unguarded" not in str(raised.value)


def test_other_file_systems_are_read(spool: Path, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this machine, reached as S3 would be: by its address alone."""
    write_archive([batch], spool / "a.parquet")
    elsewhere = fs.SubTreeFileSystem(str(spool.parent), fs.LocalFileSystem())
    monkeypatch.setattr(Place, "of", lambda uri, filesystem=None: Place(elsewhere, uri.partition("://")[2], uri))
    report = audit(["far://spool"], ALONE)
    assert (report.totals.files, report.totals.responses) == (3, 40)


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "is not there"), ("missing*", "nothing matches"), ("empty", "holds nothing to audit")],
)
def test_a_path_that_means_nothing_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=message):
        audit([tmp_path / name], ALONE)


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing to audit"):
        audit([], ALONE)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def test_a_damaged_file_is_named_and_the_others_are_read(spool: Path) -> None:
    damage(spool / "writer-00000000.arrow")
    report = audit([spool], ALONE)
    assert report.totals.responses == 10
    (file,) = report.totals.damaged_files
    assert file.rollout_id.endswith("writer-00000000.arrow") and "crc32" in file.detail
    assert "1 damaged file not read" in report.verdict


def test_a_path_with_damaged_files_alone_is_an_error(spool: Path) -> None:
    damage(spool / "writer-00000000.arrow")
    with pytest.raises(DamagedFile, match="writer-00000000.arrow is damaged"):
        audit([spool / "writer-00000000.arrow"], ALONE)


def test_an_archive_counts_up_to_where_it_is_damaged(
    batch: RolloutBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    write_archive([batch], path)
    damage(path)
    good = tmp_path / "b.parquet"
    write_archive([batch.slice(0, 4)], good)
    report = audit([path, good], ALONE)
    assert report.totals.responses == 4
    assert [entry.rollout_id for entry in report.totals.damaged_files] == [str(path)]


def test_a_damaged_open_stream_counts_up_to_the_damage(batch: RolloutBatch, tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        ends = []
        for begin in range(0, 20, 5):
            writer.append(batch.slice(begin, 5).compact())
            ends.append(writer.path.stat().st_size)
        (tmp_path / "copy").mkdir()
        copy = Path(shutil.copy(writer.path, tmp_path / "copy"))
    with copy.open("r+b") as file:
        file.seek(ends[1] + (ends[2] - ends[1]) // 2)
        file.write(b"\x55" * 8)
    report = audit([copy.parent], ALONE)
    assert report.totals.responses == 10
    assert len(report.totals.damaged_files) == 1


def test_arrow_files_that_are_no_rollouts_are_named(spool: Path) -> None:
    table = pa.table({"a": [1]})
    with pa.ipc.new_file(str(spool / "other.feather"), table.schema) as writer:
        writer.write_table(table)
    report = audit([spool], AuditOptions(workers=1, unguarded=True))
    assert report.totals.responses == 20 and "schema_version" in report.totals.damaged_files[0].detail
    with pytest.raises(SchemaError, match="schema_version"):
        audit([spool / "other.feather"], AuditOptions(workers=1, unguarded=True))


def test_a_file_that_may_not_be_read_is_named(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = spool / "writer-00000000.arrow"
    os.replace(target, spool / "moved")
    target.symlink_to(spool / "moved")
    inputs = find_inputs([spool])
    assert len(inputs) == 2
    (spool / "moved").unlink()
    with pytest.raises(StorageError, match="cannot read"):
        find_inputs([spool])


def test_a_file_that_changes_while_it_is_worked_on_is_named_and_not_read(spool: Path) -> None:
    from keptset.trainer_bridge.audit import audit_unit

    planned = plan([spool], ALONE)
    damage(spool / "writer-00000000.arrow")
    partial = audit_unit(planned.units[0], ALONE)
    assert partial.responses == 0 and "changed while it was audited" in next(iter(partial.damaged.values()))


def test_a_file_that_is_gone_by_the_time_it_is_worked_on_is_named(spool: Path) -> None:
    from keptset.trainer_bridge.audit import audit_unit

    planned = plan([spool], ALONE)
    shutil.rmtree(spool)
    partial = audit_unit(planned.units[0], ALONE)
    assert partial.responses == 0 and "cannot read" in next(iter(partial.damaged.values()))


def report_of(batch: RolloutBatch, tmp_path: Path) -> AuditReport:
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        writer.append(batch)
    return audit([tmp_path / "spool"], ALONE)


def test_responses_without_a_token_are_no_trouble(honest: Callable[..., RolloutBatch], tmp_path: Path) -> None:
    report = report_of(honest(3, tokens=2), tmp_path)
    assert report.totals.sampled_tokens == 6
    assert {entry.check for entry in report.not_tested} - set(NEED_SCORES) == {"surprisal", "draws", "staleness"}
