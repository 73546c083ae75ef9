"""Batches lie joined in published files; readers, positions and recovery count what was appended."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keptset.schemas.errors import DamagedFile
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover
from keptset.schemas.storage.spool.guard import GuardedSink
from keptset.schemas.storage.spool.join import FIRST, JOINED_BYTES, ROWS, joined
from keptset.schemas.storage.spool.publish import publish
from keptset.schemas.storage.spool.stream import CONTENT_CRC, StoredBatch, as_read, read_whole_batches

BatchOf = Callable[..., RolloutBatch]
NAME = "a-00000000"


def open_file(folder: Path, batches: list[RolloutBatch]) -> Path:
    """What a writer that was killed leaves."""
    with SpoolWriter(folder, "a") as writer:
        for batch in batches:
            writer.append(batch)
        content = writer.path.read_bytes()
    (folder / f"{NAME}.arrow").unlink()
    path = folder / f"{NAME}.open"
    path.write_bytes(content)
    return path


def stored(path: Path) -> list[StoredBatch]:
    with path.open("rb", buffering=0) as file:
        return list(read_whole_batches(file.fileno(), path))


def publish_joined(path: Path, joined_bytes: int) -> Path:
    """Publish an open file, with batches joined to so many bytes."""
    published = path.with_suffix(".arrow")
    publish(iter(stored(path)), published, fsync=False, joined_bytes=joined_bytes)
    path.unlink()
    return published


def physical(path: Path) -> list[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
    with pa.ipc.open_file(str(path)) as file:
        found = [file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches)]
    return [(arrow, dict(metadata)) for arrow, metadata in found]


def write_guarded(path: Path, *batches: tuple[pa.RecordBatch, dict[bytes, bytes]]) -> None:
    """A published file with whatever is told of its batches, in a guard that says it is whole."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        sink = GuardedSink(file)
        writer = pa.ipc.new_file(pa.PythonFile(sink, mode="w"), batches[0][0].schema)
        for arrow, metadata in batches:
            writer.write_batch(arrow, custom_metadata=metadata)
        sink.ending()
        writer.close()
        sink.finish()


def same(ours: list[RolloutBatch], theirs: list[RolloutBatch]) -> bool:
    return len(ours) == len(theirs) and all(
        one.arrow.equals(other.arrow, check_metadata=True) for one, other in zip(ours, theirs, strict=True)
    )


def test_small_batches_are_one_in_the_file_and_take_no_more_room_than_one(folder: Path, batch_of: BatchOf) -> None:
    with SpoolWriter(folder, "a") as many, SpoolWriter(folder, "b") as one:
        for number in range(100):
            many.append(batch_of(number, 1))
        one.append(batch_of(0, 100))
    ((arrow, metadata),) = physical(folder / f"{NAME}.arrow")
    assert arrow.equals(batch_of(0, 100).arrow)
    assert (metadata[FIRST], metadata[ROWS]) == (b"0", b",".join([b"1"] * 100))
    size = (folder / f"{NAME}.arrow").stat().st_size
    assert size < 1.05 * (folder / "b-00000000.arrow").stat().st_size


def test_batches_are_joined_up_to_their_bound_and_larger_ones_stay_as_they_were_appended(
    folder: Path, batches: list[RolloutBatch]
) -> None:
    path = open_file(folder, batches)
    appended = stored(path)
    sizes = [batch.arrow.nbytes for batch in appended]
    published = publish_joined(path, sizes[0] + sizes[1])
    told = [(int(metadata[FIRST]), metadata[ROWS]) for _, metadata in physical(published)]
    assert told == [(0, b"1,2"), (2, b"3"), (3, b"1,2")]
    alone = physical(published)[1]
    assert alone[1][CONTENT_CRC] == appended[2].metadata[CONTENT_CRC]
    assert alone[0].equals(batches[2].arrow)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=14),
    joined_bytes=st.sampled_from([0, 4_000, 9_000, 2**22]),
    data=st.data(),
)
def test_a_position_in_an_open_file_holds_in_the_published_one(
    tmp_path_factory: pytest.TempPathFactory,
    batch_of: BatchOf,
    sizes: list[int],
    joined_bytes: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("join") / "spool"
    whole = batch_of(0, sum(sizes))
    batches = [whole.slice(start, size) for start, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False)]
    path = open_file(folder, batches)
    read = data.draw(st.integers(0, len(batches)))
    with SpoolReader(folder, seen=folder.parent / "seen") as reader:
        assert same(list(itertools.islice(reader, read)), batches[:read])
        position = json.loads(json.dumps(reader.position))
        publish_joined(path, joined_bytes)
        # This reader goes on in the published file, and so does a new one.
        assert same(list(reader), batches[read:])
        assert reader.findings == ()
    assert same(list(SpoolReader(folder, position=position)), batches[read:])
    # What was read of the open file is the same, place for place, in the joined one: no duplicate of itself.
    with SpoolReader(folder, seen=folder.parent / "seen") as again:
        assert same(list(again), batches)
        assert again.findings == ()


def test_positions_within_joined_batches_are_those_of_the_batches_appended(
    folder: Path, batches: list[RolloutBatch]
) -> None:
    path = publish_joined(open_file(folder, batches), 2**22)
    reader = SpoolReader(folder)
    positions = [reader.position for _ in reader]
    assert positions == [{"a": (0, number)} for number in range(1, 6)]
    assert reader.position == {"a": (1, 0)}
    assert len(physical(path)) == 1


def test_a_file_that_was_written_before_there_was_joining_is_read_from_any_position(
    folder: Path, batches: list[RolloutBatch]
) -> None:
    appended = stored(open_file(folder, batches))
    write_guarded(folder / f"{NAME}.arrow", *((batch.arrow, batch.metadata) for batch in appended))
    for number in range(6):
        assert same(list(SpoolReader(folder, position={"a": (0, number)})), batches[number:])
    (recovered,) = recover(folder)
    assert recovered.batches == 5


@pytest.mark.parametrize("joined_bytes", [0, 9_000, 2**22])
def test_recovery_counts_the_batches_of_a_file_that_was_published_already(
    folder: Path, batches: list[RolloutBatch], joined_bytes: int
) -> None:
    path = open_file(folder, batches)
    content = path.read_bytes()
    publish_joined(path, joined_bytes)
    path.write_bytes(content)
    (recovered,) = recover(folder)
    assert (recovered.batches, recovered.dropped_bytes) == (5, 0)


def test_recovery_joins_as_publishing_does(folder: Path, batches: list[RolloutBatch]) -> None:
    path = open_file(folder, batches)
    path.write_bytes(path.read_bytes()[:-1])
    (recovered,) = recover(folder)
    assert recovered.batches == 4
    assert [metadata[ROWS] for _, metadata in physical(folder / f"{NAME}.arrow")] == [b"1,2,3,1"]
    assert same(list(SpoolReader(folder)), batches[:4])


def test_publishing_holds_one_joined_batch(folder: Path, batch_of: BatchOf) -> None:
    batch = batch_of(0, 300)
    number = int(6 * JOINED_BYTES / batch.arrow.nbytes)
    path = open_file(folder, [batch] * number)
    before, most = pa.total_allocated_bytes(), 0

    def counted() -> Iterator[StoredBatch]:
        nonlocal most
        with path.open("rb", buffering=0) as file:
            for one in read_whole_batches(file.fileno(), path):
                most = max(most, pa.total_allocated_bytes() - before)
                yield one

    for _ in joined(counted()):
        most = max(most, pa.total_allocated_bytes() - before)
    # Its parts, the whole made of them, and the whole as it is written.
    assert most < 3.1 * JOINED_BYTES < 6 * JOINED_BYTES


def test_joined_batches_of_a_file_that_is_not_compressed_are_read_without_a_copy(
    folder: Path, batch_of: BatchOf
) -> None:
    whole = batch_of(0, 400)
    parts = [whole.slice(number, 40) for number in range(0, 400, 40)]
    with SpoolWriter(folder, "a", compression="none") as writer:
        for part in parts:
            writer.append(part)
    before = pa.total_allocated_bytes()
    read = list(SpoolReader(folder, duplicates="keep"))
    ids = [batch.kept_ids.inner.values.tolist() for batch in read]
    assert pa.total_allocated_bytes() - before < 0.05 * whole.arrow.nbytes
    assert ids == [part.kept_ids.inner.values.tolist() for part in parts]


def test_a_batch_that_is_kept_can_be_kept_without_those_it_was_joined_with(folder: Path, batch_of: BatchOf) -> None:
    whole = batch_of(0, 400)
    with SpoolWriter(folder, "a") as writer:
        for number in range(0, 400, 4):
            writer.append(whole.slice(number, 4))
    before = pa.total_allocated_bytes()
    reading = iter(SpoolReader(folder, duplicates="keep"))
    kept = next(reading)
    held = pa.total_allocated_bytes() - before
    kept = kept.compact()
    reading.close()
    gc.collect()
    assert pa.total_allocated_bytes() - before < 0.2 * held
    assert kept.arrow.equals(whole.slice(0, 4).arrow)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({ROWS: b"1,1", FIRST: b"0"}, r"batch 0: it has 3 rows, and \[1, 1\] were joined"),
        ({ROWS: b"4,-1", FIRST: b"0"}, r"batch 0: it has 3 rows, and \[4, -1\] were joined"),
        ({ROWS: b"1,two", FIRST: b"0"}, "its batch 0 does not say what it was joined from"),
        ({ROWS: b"3"}, "its batch 0 does not say what it was joined from"),
        ({ROWS: b"3", FIRST: b"2"}, "batch 2: it begins with another number than 0"),
    ],
)
def test_a_file_whose_batches_do_not_say_what_they_are_made_of_is_set_aside(
    folder: Path, batch_of: BatchOf, told: dict[bytes, bytes], message: str
) -> None:
    (whole,) = stored(open_file(folder, [batch_of(0, 3)]))
    (folder / f"{NAME}.open").unlink()
    write_guarded(folder / f"{NAME}.arrow", (as_read(whole.arrow), {**whole.metadata, **told}))
    with pytest.raises(DamagedFile, match=message):
        list(SpoolReader(folder))
    reader = SpoolReader(folder, on_damaged="skip")
    assert list(reader) == []
    assert [entry.name for entry in reader.set_aside] == [f"{NAME}.arrow"]
