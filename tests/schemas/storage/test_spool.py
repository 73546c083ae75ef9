"""What is appended to a spool comes out of it: whole, once, in order, from wherever a reader left off."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.columns import Identity
from keptset.schemas.errors import InvalidInput, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.schemas.storage.spool import writer as spool_writer
from keptset.schemas.storage.spool.join import JOINED_BYTES
from keptset.schemas.storage.spool.names import SpoolFile, unique_writer

IdsIn = Callable[..., list[str]]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def same(ours: list[RolloutBatch], theirs: list[RolloutBatch]) -> bool:
    return len(ours) == len(theirs) and all(
        one.arrow.equals(other.arrow, check_metadata=True) for one, other in zip(ours, theirs, strict=True)
    )


def test_batches_come_back_equal_and_in_order_before_and_after_publishing(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        for batch in batches:
            writer.append(batch)
        assert names(folder) == ["a-00000000.open"]
        assert same(list(SpoolReader(folder)), batches)
    assert names(folder) == ["a-00000000.arrow"]
    assert same(list(SpoolReader(folder)), batches)


def test_each_writer_is_read_in_the_order_of_its_writing(folder: Path, batches, ids_in: IdsIn) -> None:
    with SpoolWriter(folder, "b") as second, SpoolWriter(folder, "a") as first:
        second.append(batches[0])
        first.append(batches[1])
        second.rotate()
        second.append(batches[2])
        first.append(batches[3])
    expected = [batches[1], batches[3], batches[0], batches[2]]
    assert same(list(SpoolReader(folder)), expected)


def test_readers_may_leave_open_files_alone(folder: Path, batches, ids_in: IdsIn) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        assert ids_in(folder, include_open=False) == []
        assert ids_in(folder) == batches[0].rollout_ids
        writer.rotate()
        assert ids_in(folder, include_open=False) == batches[0].rollout_ids


def test_rotation_publishes_what_was_appended_and_nothing_when_there_was_nothing(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        assert writer.rotate() is None
        writer.append(batches[0])
        assert writer.position == (0, 1)
        assert writer.rotate() == folder / "a-00000000.arrow"
        assert writer.position == (1, 0)
        assert names(folder) == ["a-00000000.arrow", "a-00000001.open"]
    assert names(folder) == ["a-00000000.arrow"]


def test_a_file_that_is_full_is_published_when_the_next_batch_comes(folder: Path, batches, ids_in: IdsIn) -> None:
    with SpoolWriter(folder, "a", rotate_bytes=1) as writer:
        for batch in batches[:3]:
            writer.append(batch)
        assert names(folder) == ["a-00000000.arrow", "a-00000001.arrow", "a-00000002.open"]
    assert ids_in(folder) == [name for batch in batches[:3] for name in batch.rollout_ids]


def test_a_file_that_is_old_is_published_when_the_next_batch_comes(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a", rotate_seconds=0.05) as writer:
        writer.append(batches[0])
        time.sleep(0.06)
        writer.append(batches[1])
        assert names(folder) == ["a-00000000.arrow", "a-00000001.open"]


def test_another_identity_or_other_own_columns_start_another_file(folder: Path, batch_of) -> None:
    parts = [
        batch_of(0, 2),
        batch_of(2, 2),
        batch_of(4, 2, identity=Identity(vocab_size=60)),
        batch_of(6, 2, extra={"x_note": "n", "x_more": 1}),
        batch_of(8, 2, extra={}),
    ]
    with SpoolWriter(folder, "a") as writer:
        for part in parts:
            writer.append(part)
        assert [name.split(".")[0][-1] for name in names(folder)] == ["0", "1", "2", "3"]
    assert same(list(SpoolReader(folder)), parts)


def test_a_batch_without_rows_is_nothing_to_store(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0].slice(0, 0))
        assert writer.position == (0, 0)
    assert names(folder) == []


def test_a_slice_is_stored_without_its_parent(folder: Path, batch_of) -> None:
    parent = batch_of(0, 400)
    with SpoolWriter(folder, "a") as writer:
        writer.append(parent.slice(100, 1))
        assert writer.path.stat().st_size < 30_000 < parent.arrow.nbytes
    (back,) = SpoolReader(folder)
    assert back.arrow.equals(parent.slice(100, 1).arrow)


def test_what_is_read_is_of_its_own_size_and_can_be_kept(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        for batch in batches:
            writer.append(batch)
    kept = list(SpoolReader(folder))
    (folder / "a-00000000.arrow").unlink()
    assert same(kept, batches)
    assert kept[1].kept_ids.inner.values.tolist() == batches[1].kept_ids.inner.values.tolist()


@pytest.mark.parametrize("published", [True, False])
def test_a_reader_goes_on_from_any_position(folder: Path, batches, published: bool) -> None:
    with SpoolWriter(folder, "a", rotate_bytes=1 if published else 2**30) as writer:
        for batch in batches:
            writer.append(batch)
        positions = [{}]
        reader = SpoolReader(folder)
        for _ in reader:
            positions.append(json.loads(json.dumps(reader.position)))
        for number, position in enumerate(positions):
            assert same(list(SpoolReader(folder, position=position)), batches[number:])


def test_a_position_in_an_open_file_holds_when_it_is_published(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        for batch in batches[:3]:
            writer.append(batch)
        reader = SpoolReader(folder)
        assert same(list(itertools.islice(reader, 2)), batches[:2])
        position = reader.position
        writer.append(batches[3])
        writer.rotate()
        writer.append(batches[4])
        assert same(list(SpoolReader(folder, position=position)), batches[2:])


def test_iterating_again_gives_what_has_come_since_and_nothing_twice(folder: Path, batches) -> None:
    seen: list[RolloutBatch] = []
    reader = SpoolReader(folder)
    with SpoolWriter(folder, "a") as writer:
        for number, batch in enumerate(batches):
            writer.append(batch)
            seen += reader
            assert len(seen) == number + 1
            if number == 2:
                writer.rotate()
                assert list(reader) == []
    assert list(reader) == []
    assert same(seen, batches)


def test_a_file_published_while_others_are_read_is_not_missed(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as first, SpoolWriter(folder, "b") as second:
        first.append(batches[0])
        second.append(batches[1])
        reading = iter(SpoolReader(folder))
        seen = [next(reading)]
        second.append(batches[2])
        second.rotate()
        assert same([*seen, *reading], batches[:3])


def test_an_open_file_that_is_gone_when_its_turn_comes_is_passed_by(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as first:
        second = SpoolWriter(folder, "b")
        first.append(batches[0])
        reading = iter(SpoolReader(folder))
        assert same([next(reading)], batches[:1])
        second.close()
        assert list(reading) == []


def test_published_files_that_were_dealt_with_can_be_removed(folder: Path, batches) -> None:
    reader = SpoolReader(folder)
    with SpoolWriter(folder, "a", rotate_bytes=1) as writer:
        for batch in batches[:3]:
            writer.append(batch)
        assert len(list(reader)) == 3
        (folder / "a-00000000.arrow").unlink()
        writer.append(batches[3])
        assert same(list(reader), batches[3:4])


def test_a_number_is_given_once_even_where_its_file_is_removed_at_once(folder: Path, batches, monkeypatch) -> None:
    """A reader that removes what it dealt with may be faster than the writer's look for its next number."""
    reader = SpoolReader(folder)
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        assert same(list(reader), batches[:1])
        real = os.listdir
        published = folder / "a-00000000.arrow"
        monkeypatch.setattr(os, "listdir", lambda path: (published.unlink(missing_ok=True), real(path))[1])
        writer.rotate()
        monkeypatch.undo()
        assert not published.exists()
        writer.append(batches[1])
        assert same(list(reader), batches[1:2])


def test_an_uncompressed_file_is_read_without_a_copy(folder: Path, batch_of) -> None:
    batch = batch_of(0, 200)
    with SpoolWriter(folder, "a", compression="none") as writer:
        writer.append(batch)
    before = pa.total_allocated_bytes()
    (back,) = SpoolReader(folder, duplicates="keep")
    assert np.array_equal(back.kept_ids.inner.values, batch.kept_ids.inner.values)
    assert pa.total_allocated_bytes() - before < 0.05 * batch.arrow.nbytes
    assert same([back], [batch])
    with pytest.raises(InvalidInput, match="compression is 'lz4'; it must be zstd or none"):
        SpoolWriter(folder, compression="lz4")


def test_a_spool_is_read_by_plain_arrow(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        for batch in batches:
            writer.append(batch)
        with pa.ipc.open_stream(writer.path.read_bytes()) as stream:
            assert [batch.num_rows for batch in stream] == [len(batch) for batch in batches]
    with pa.ipc.open_file(str(folder / "a-00000000.arrow")) as file:
        assert file.read_all().to_pylist() == [row for batch in batches for row in batch.arrow.to_pylist()]
        _, metadata = file.get_batch_with_custom_metadata(0)
    told = dict(metadata)
    assert told[b"keptset.writer"] == b"a"
    assert abs(int(told[b"keptset.time_ns"]) - time.time_ns()) < 60e9
    assert len(told[b"keptset.crc32"]) == 8
    assert b"keptset.header_crc32" not in told


@pytest.mark.parametrize("fsync", ["never", "rotate", "batch"])
def test_fsync_is_asked_for_where_it_was_promised(folder: Path, batches, fsync: str, monkeypatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    with SpoolWriter(folder, "a", fsync=fsync) as writer:
        synced.clear()
        writer.append(batches[0])
        appended = [Path(path).name for path in synced]
        synced.clear()
        writer.rotate()
        rotated = [Path(path).name for path in synced]
    assert appended == (["a-00000000.open"] if fsync == "batch" else [])
    if fsync == "never":
        assert rotated == []
    else:
        assert rotated[:2] == [".a-00000000.arrow.tmp", "spool"]


def test_own_columns_of_every_plain_kind_come_back(folder: Path, batch_of) -> None:
    batch = batch_of(0, 3, extra={})
    kinds = {
        "x_int": pa.array([1, None, 3], pa.int8()),
        "x_bool": pa.array([True, None, False]),
        "x_text": pa.array(["a", None, ""], pa.large_string()),
        "x_bytes": pa.array([b"a", b"", None]),
        "x_fixed": pa.array([b"ab", b"cd", None], pa.binary(2)),
        "x_time": pa.array([0, 1, None], pa.timestamp("ns", "UTC")),
        "x_decimal": pa.array([None, 1, 2], pa.decimal128(10, 2)),
        "x_null": pa.nulls(3),
        "x_struct": pa.array([{"a": 1, "b": [1.5]}, None, {"a": None, "b": []}]),
        "x_map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "x_vector": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "x_lists": pa.array([[[["deep"]], None], [], None], pa.large_list(pa.list_(pa.list_(pa.string())))),
    }
    arrow = batch.arrow
    for name, array in kinds.items():
        arrow = arrow.append_column(name, array)
    own = RolloutBatch.from_arrow(arrow)
    with SpoolWriter(folder, "a") as writer:
        writer.append(own)
        writer.append(own.slice(1))
        assert same(list(SpoolReader(folder, duplicates="keep")), [own, own.slice(1)])
    assert same(list(SpoolReader(folder, duplicates="keep")), [own, own.slice(1)])


def test_own_dictionaries_are_stored_as_the_values_they_stand_for(folder: Path, batch_of) -> None:
    def with_words(first: int, words: list[str]) -> RolloutBatch:
        batch = batch_of(first, len(words), extra={})
        return RolloutBatch.from_arrow(batch.arrow.append_column("x_word", pa.array(words).dictionary_encode()))

    with SpoolWriter(folder, "a") as writer:
        writer.append(with_words(0, ["yes", "no"]))
        writer.append(with_words(2, ["maybe", "yes"]))
        assert writer.position == (0, 2)
    assert [batch.column("x_word").to_pylist() for batch in SpoolReader(folder)] == [["yes", "no"], ["maybe", "yes"]]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([{"w": "yes"}], pa.struct([("w", pa.dictionary(pa.int8(), pa.string()))])),
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
    ],
    ids=["a dictionary in a struct", "a union"],
)
def test_own_columns_a_spool_cannot_hold_are_refused_before_anything_is_written(folder: Path, batch_of, array) -> None:
    batch = RolloutBatch.from_arrow(batch_of(0, 1, extra={}).arrow.append_column("x_odd", array))
    with SpoolWriter(folder, "a") as writer:
        with pytest.raises(SchemaError, match="column x_odd has type .* a spool cannot hold"):
            writer.append(batch)
        assert writer.path.stat().st_size == 0
        writer.append(batch_of(1, 1))
    assert [len(batch) for batch in SpoolReader(folder)] == [1]


def test_a_name_has_one_live_writer(folder: Path, batches, monkeypatch) -> None:
    monkeypatch.setattr(spool_writer, "PATIENCE_SECONDS", 0.05)
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        with pytest.raises(StorageError, match=r"a-00000000\.open belongs to another live writer named a"):
            SpoolWriter(folder, "a")
        writer.append(batches[1])
    with SpoolWriter(folder, "a") as again:
        assert again.position == (1, 0)


def test_a_writer_waits_for_whoever_recovers_what_the_last_one_left(folder: Path, batches, monkeypatch) -> None:
    folder.mkdir()
    orphan = folder / "a-00000000.open"
    orphan.touch()
    with orphan.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(file, fcntl.LOCK_UN))
        with SpoolWriter(folder, "a") as writer:
            assert [(recovered.seq, recovered.batches) for recovered in writer.recovered] == [(0, 0)]
            writer.append(batches[0])


def test_writers_without_a_name_get_names_of_their_own(folder: Path, batches) -> None:
    assert unique_writer() != unique_writer()
    with SpoolWriter(folder) as one, SpoolWriter(folder) as other:
        one.append(batches[0])
        other.append(batches[1])
    assert len(list(SpoolReader(folder))) == 2


def test_a_writer_whose_block_ends_in_an_error_publishes_all_the_same(folder: Path, batches) -> None:
    with pytest.raises(RuntimeError, match="the rollout failed"), SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        raise RuntimeError("the rollout failed")
    assert names(folder) == ["a-00000000.arrow"]


def test_a_closed_writer_takes_nothing_and_may_be_closed_again(folder: Path, batches) -> None:
    writer = SpoolWriter(folder, "a")
    writer.close()
    writer.close()
    for use in (lambda: writer.append(batches[0]), writer.rotate):
        with pytest.raises(StorageError, match="spool writer a of .* is closed"):
            use()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fsync": "always"}, "fsync is 'always'; it must be never, rotate or batch"),
        ({"rotate_bytes": 0}, "rotate_bytes is 0"),
        ({"rotate_seconds": 0}, "rotate_seconds 0"),
        ({"writer": "a/b"}, "writer is 'a/b'"),
        ({"writer": ""}, "writer is ''"),
        ({"writer": ".hidden"}, "writer is '.hidden'"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder: Path, settings: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        SpoolWriter(folder, **settings)


@pytest.mark.parametrize("position", [{"a": [1]}, {"a": [0, -1]}, {"a": ["0", 1]}])
def test_positions_that_cannot_be_are_refused(folder: Path, position) -> None:
    with pytest.raises(InvalidInput, match="position of writer a"):
        SpoolReader(folder, position=position)
    with pytest.raises(InvalidInput, match="on_damaged is 'ignore'"):
        SpoolReader(folder, on_damaged="ignore")


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot list spool folder .*nowhere: No such file"):
        list(SpoolReader(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot make spool folder .*file"):
        SpoolWriter(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot make spool folder .*spool: Not a directory"):
        SpoolWriter(tmp_path / "file" / "spool")


def test_other_files_in_the_folder_are_no_part_of_the_spool(folder: Path, batches, ids_in: IdsIn) -> None:
    folder.mkdir()
    (folder / "README.txt").write_text("rollouts of tuesday")
    (folder / ".a-00000000.arrow.tmp").write_bytes(b"half")
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
    assert ids_in(folder) == batches[0].rollout_ids


def test_file_names_are_read_as_they_are_written() -> None:
    for place in (SpoolFile("a-1", 2, ".open"), SpoolFile("host.7-x_y", 123456789, ".arrow")):
        assert SpoolFile.of(Path("anywhere") / place.name) == place
    for name in ("a-1.arrow", "a-00000001.parquet", "00000001.arrow", "a-000000001.arrow", "-00000001.open"):
        assert SpoolFile.of(Path(name)) is None


def test_a_reader_holds_one_batch_at_a_time_and_those_joined_with_it(folder: Path, batch_of) -> None:
    batch = batch_of(0, 300)
    with SpoolWriter(folder, "a") as writer:
        for _ in range(100):
            writer.append(batch)
        for bound in (4 * batch.arrow.nbytes, 1.1 * JOINED_BYTES):
            before, most = pa.total_allocated_bytes(), 0
            for read in SpoolReader(folder, duplicates="keep"):
                most = max(most, pa.total_allocated_bytes() - before)
                assert len(read) == 300
            assert most < bound
            writer.rotate()


def test_numbers_read_from_a_spool_are_views_that_cannot_be_written(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[4])
    (batch,) = SpoolReader(folder)
    assert np.array_equal(batch.token_ids.values, batches[4].token_ids.values)
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids.values[0] = 0
