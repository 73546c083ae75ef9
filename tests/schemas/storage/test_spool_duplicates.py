"""A response that was stored twice is read once, the first of each id counts, and what was passed over is counted."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.schemas.storage.spool.names import SpoolFile
from keptset.schemas.storage.spool.seen import SeenResponses

BatchOf = Callable[..., RolloutBatch]


def write(folder: Path, writer: str, *batches: RolloutBatch) -> None:
    with SpoolWriter(folder, writer) as spool:
        for batch in batches:
            spool.append(batch)


def ids(reader: SpoolReader) -> list[list[str]]:
    return [batch.rollout_ids for batch in reader]


def counts(reader: SpoolReader) -> dict[str, int]:
    return {finding.kind.value: finding.count for finding in reader.findings}


def test_what_was_stored_twice_comes_once_across_batches_files_and_writers(folder: Path, batch_of: BatchOf) -> None:
    write(folder, "a", batch_of(0, 3), concat_batches([batch_of(2, 1), batch_of(3, 2), batch_of(3, 1)]))
    write(folder, "b", batch_of(0, 2), batch_of(4, 3))
    with SpoolReader(folder) as reader:
        assert ids(reader) == [
            ["rollout-0", "rollout-1", "rollout-2"],
            ["rollout-3", "rollout-4"],
            ["rollout-5", "rollout-6"],
        ]
        assert reader.position == {"a": (1, 0), "b": (1, 0)}
        (finding,) = reader.findings
        assert (finding.kind, finding.severity, finding.count) == (FindingKind.DUPLICATE, Severity.WARNING, 5)
        assert [example.rollout_id for example in finding.examples] == ["rollout-2", "rollout-3", "rollout-0"]
        assert finding.examples[0].detail == (
            "a-00000000 batch 1 row 0; a-00000000 batch 0 row 2 has the same content and came first"
        )
        assert finding.examples[2].detail.startswith("b-00000000 batch 0 row 0; a-00000000 batch 0 row 0 has the same")
        assert ids(reader) == []


def test_the_first_of_an_id_wins_and_another_content_is_a_conflict(folder: Path, batch_of: BatchOf) -> None:
    write(folder, "a", batch_of(0, 2))
    write(folder, "b", batch_of(0, 1, seed=5), batch_of(0, 1), batch_of(1, 1, finish_reason="length"))
    with SpoolReader(folder) as reader:
        (batch,) = reader
        assert batch.arrow.equals(batch_of(0, 2).arrow)
        assert counts(reader) == {"conflict": 2, "duplicate": 1}
        conflict, duplicate = reader.findings
        assert conflict.severity is Severity.ERROR
        assert [example.rollout_id for example in conflict.examples] == ["rollout-0", "rollout-1"]
        assert conflict.examples[0].detail == (
            "b-00000000 batch 0 row 0; a-00000000 batch 0 row 0 has other content and came first"
        )
        assert duplicate.examples[0].rollout_id == "rollout-0"


def test_examples_are_bounded_and_totals_are_not(folder: Path, batch_of: BatchOf) -> None:
    write(folder, "a", *[batch_of(0, 4)] * 6)
    with SpoolReader(folder) as reader:
        assert len(list(reader)) == 1
        (finding,) = reader.findings
        assert (finding.count, len(finding.examples)) == (20, 3)


def test_everything_comes_where_duplicates_are_kept(folder: Path, batch_of: BatchOf) -> None:
    write(folder, "a", batch_of(0, 1), batch_of(0, 1))
    with SpoolReader(folder, duplicates="keep") as reader:
        assert ids(reader) == [["rollout-0"], ["rollout-0"]]
        assert reader.findings == ()


def test_rows_without_an_id_are_handed_on_for_validation_to_refuse(folder: Path, batch_of: BatchOf) -> None:
    batch = batch_of(0, 3)
    index = batch.arrow.schema.get_field_index("rollout_id")
    nameless = RolloutBatch.from_arrow(
        batch.arrow.set_column(index, batch.arrow.schema.field(index), pa.array([None, "rollout-1", None]))
    )
    write(folder, "a", batch_of(1, 1), nameless, nameless)
    assert ids(SpoolReader(folder)) == [["rollout-1"], [None, None], [None, None]]


def test_a_reader_that_goes_on_knows_what_came_before_its_position_if_it_was_kept(
    folder: Path, tmp_path: Path, batch_of: BatchOf
) -> None:
    seen = tmp_path / "trainer.seen"
    write(folder, "a", batch_of(0, 2))
    with SpoolReader(folder, seen=seen) as reader:
        assert ids(reader) == [["rollout-0", "rollout-1"]]
        position = reader.position
    write(folder, "a", batch_of(1, 2), batch_of(0, 1, seed=5))
    with SpoolReader(folder, position=position) as forgetful:
        assert ids(forgetful) == [["rollout-1", "rollout-2"], ["rollout-0"]]
    with SpoolReader(folder, position=position, seen=seen) as reader:
        assert ids(reader) == [["rollout-2"]]
        assert counts(reader) == {"conflict": 1, "duplicate": 1}


def test_what_was_not_dealt_with_comes_again_though_it_was_seen(
    folder: Path, tmp_path: Path, batch_of: BatchOf
) -> None:
    """The table may be ahead of the position that a trainer saved before it died: nothing may be lost by that."""
    seen = tmp_path / "trainer.seen"
    write(folder, "a", batch_of(0, 2), batch_of(2, 1), batch_of(0, 1))
    for _ in range(3):
        with SpoolReader(folder, seen=seen) as reader:
            assert ids(reader) == [["rollout-0", "rollout-1"], ["rollout-2"]]
            assert counts(reader) == {"duplicate": 1}
    with SpoolWriter(folder, "b") as writer:  # the same place, read while it was open and once it is published
        writer.append(batch_of(7, 1))
        with SpoolReader(folder, seen=seen, position={"a": (1, 0)}) as reader:
            assert ids(reader) == [["rollout-7"]]
        writer.rotate()
        with SpoolReader(folder, seen=seen, position={"a": (1, 0)}) as reader:
            assert ids(reader) == [["rollout-7"]]


def test_what_was_handed_out_is_remembered_before_it_is_handed_out(
    folder: Path, tmp_path: Path, batch_of: BatchOf, run_python
) -> None:
    seen = tmp_path / "trainer.seen"
    write(folder, "a", batch_of(0, 1), batch_of(1, 1))
    died = run_python(
        "import os, sys\nfrom keptset.schemas.storage.spool import SpoolReader\n"
        "for batch in SpoolReader(sys.argv[1], seen=sys.argv[2]):\n    os.kill(os.getpid(), 9)\n",
        folder,
        seen,
    )
    assert died.returncode == -9
    write(folder, "a", batch_of(0, 1))
    with SpoolReader(folder, seen=seen, position={"a": (0, 1)}) as reader:
        assert ids(reader) == [["rollout-1"]]


def test_a_table_larger_than_its_memory_goes_on_in_a_file_and_still_knows_everything(batch_of: BatchOf) -> None:
    def temporary_files() -> list[str]:
        names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return [name for name in names if "etilqs" in name]

    template = batch_of(0, 1).take(np.zeros(500, int)).arrow
    index = template.schema.get_field_index("rollout_id")

    def named(first: int) -> RolloutBatch:
        names = pa.array([f"{number}" for number in range(first, first + 500)])
        return RolloutBatch.from_arrow(template.set_column(index, template.schema.field(index), names))

    seen = SeenResponses(memory_bytes=2**16)
    for number in range(8):
        batch = named(500 * number)
        assert seen.first_of_their_ids(batch, SpoolFile("a", 0, ".arrow"), number) is batch
    assert temporary_files()
    for number in range(8):
        assert seen.first_of_their_ids(named(500 * number), SpoolFile("b", 0, ".arrow"), number) is None
    (finding,) = seen.findings
    assert (finding.kind, finding.count) == (FindingKind.DUPLICATE, 4000)
    seen.close()
    assert not temporary_files()


def test_a_table_that_cannot_be_used_is_named(folder: Path, tmp_path: Path, batch_of: BatchOf) -> None:
    write(folder, "a", batch_of(0, 1))
    foreign = tmp_path / "foreign.seen"
    with sqlite3.connect(foreign) as table:
        table.execute("create table t (a)")
    table.close()
    with pytest.raises(StorageError, match=r"foreign\.seen is a database of another kind or version; name a file of"):
        SpoolReader(folder, seen=foreign)
    text = tmp_path / "text.seen"
    text.write_text("rollouts of tuesday, and more of them on wednesday" * 20)
    with pytest.raises(StorageError, match=r"cannot use .*text\.seen: file is not a database"):
        SpoolReader(folder, seen=text)
    with pytest.raises(StorageError, match=r"cannot use .*nowhere.*: unable to open database file"):
        SpoolReader(folder, seen=tmp_path / "nowhere" / "t.seen")
    reader = SpoolReader(folder)
    reader.close()
    reader.close()
    with pytest.raises(StorageError, match="cannot use the table of rollout_ids read: Cannot operate on a closed"):
        list(reader)


def test_settings_that_contradict_each_other_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="duplicates is 'drop'; it must be skip or keep"):
        SpoolReader(folder, duplicates="drop")
    with pytest.raises(InvalidInput, match="seen is 'x', and duplicates are kept: nothing would be remembered"):
        SpoolReader(folder, duplicates="keep", seen="x")
