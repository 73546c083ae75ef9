"""Bytes of an archive that are not what was written never become numbers, and never take the process down."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, SchemaError
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import blocks, read_archive, write_archive, writer
from keptset.schemas.storage.archive.blocks import GuardedSink, GuardedSource

BatchOf = Callable[..., RolloutBatch]


@pytest.fixture
def file(tmp_path: Path, batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of some row groups and many blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 1_000)
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 2_000)
    path = tmp_path / "rollouts.parquet"
    write_archive([batch_of(0, 12)], path)
    return path


def test_any_altered_byte_is_noticed(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    assert len(whole) > 20_000
    for at in [*range(0, len(whole), 61), *range(len(whole) - 60, len(whole))]:
        for flip in (0x01, 0x80, 0xFF):
            whole[at] ^= flip
            file.write_bytes(whole)
            with pytest.raises(DamagedFile, match=r"rollouts\.parquet"):
                list(read_archive(file))
            whole[at] ^= flip


def test_a_file_cut_off_anywhere_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for size in [*range(40), *range(40, len(whole), 211), *range(len(whole) - 40, len(whole))]:
        file.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match=r"rollouts\.parquet"):
            list(read_archive(file))


def test_bytes_left_out_or_put_in_are_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for at in range(3, len(whole), 997):
        for changed in (whole[:at] + whole[at + 8 :], whole[:at] + bytes(8) + whole[at:]):
            file.write_bytes(changed)
            with pytest.raises(DamagedFile):
                list(read_archive(file))


def test_what_lies_before_the_damage_is_read_and_what_lies_behind_is_not(
    batch_of: BatchOf, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row group is checked when its turn comes, and the end of the file when it is opened."""
    batch = batch_of(0, 700)
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", batch.arrow.nbytes // 3)
    write_archive([batch], file, overwrite=True)
    expected = list(read_archive(file))
    second = pq.ParquetFile(file).metadata.row_group(1).column(0)
    at = second.dictionary_page_offset + 2_000  # not in a block that the first row group reaches into
    assert file.stat().st_size - at > 2**16, "Arrow reads as much with the footer"
    with file.open("r+b") as raw:
        raw.seek(at)
        raw.write(b"\xee\xee")
    rows = read_archive(file)
    assert next(rows).arrow.equals(expected[0].arrow)
    begin = at // 1_000 * 1_000
    with pytest.raises(DamagedFile, match=f"damaged between bytes {begin} and {begin + 1_000}: crc32"):
        next(rows)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a Parquet file"),
        (b"PAR1", "cut off or overwritten at its end"),
        (b"PAR1PAR1", "footer would begin before the file|cut off"),
        (b"ARROW1\0\0" + bytes(100), "not a Parquet file: it does not begin with PAR1"),
        (b"PAR1" + bytes(100) + b"\xff\xff\xff\xffPAR1", "its footer would begin before the file"),
        (b"PAR1" + bytes(100) + b"\x04\0\0\0PAR1", "no keptset guard"),
        (b"PAR1" + bytes(80) + b"keptset1" + bytes(4) + b"\x04\0\0\0PAR1", "its guard and its size do not agree"),
    ],
)
def test_what_is_no_archive_is_told_as_such(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=told):
        list(read_archive(path))


def test_parquet_from_elsewhere_needs_to_be_called_so(batch_of: BatchOf, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    batch = batch_of(0, 3)
    pq.write_table(pa.Table.from_batches([batch.arrow]), path)
    with pytest.raises(DamagedFile, match=r"a\.parquet has no keptset guard .*guarded=False"):
        list(read_archive(path))
    (back,) = read_archive(path, guarded=False)
    assert back.arrow.equals(batch.arrow)


def test_an_archive_rewritten_by_duckdb_lost_its_identity(batch_of: BatchOf, file: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.execute(f"copy (from '{file}') to '{tmp_path}/b.parquet' (format parquet)")
    connection.close()
    with pytest.raises(SchemaError, match=r"b\.parquet: .*its metadata was lost"):
        list(read_archive(tmp_path / "b.parquet", guarded=False))


def test_an_archive_filtered_by_pyarrow_is_read(batch_of: BatchOf, file: Path, tmp_path: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.filter(pa.compute.field("sample_index") == 1), tmp_path / "b.parquet")
    back = concat_batches(list(read_archive(tmp_path / "b.parquet", guarded=False)))
    assert back.arrow.equals(batch_of(0, 12).filter(np.arange(12) % 2 == 1).arrow)


def rewritten(file: Path, schema: pa.Schema) -> None:
    """The archive's rows under another schema, with a sound guard."""
    table = pq.read_table(file)
    arrow = pa.Table.from_arrays([table.column(name) for name in schema.names], schema=schema)
    with pa.OSFile(str(file), "wb") as raw:
        sink = GuardedSink(raw)
        with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema) as parquet:
            parquet.write_table(arrow)
            sink.ending()
        sink.finish()


def test_another_schema_version_is_refused_with_both_numbers(file: Path) -> None:
    schema = pq.read_schema(file)
    rewritten(file, schema.with_metadata({**schema.metadata, b"keptset.schema_version": b"7"}))
    with pytest.raises(
        SchemaError, match=r"rollouts\.parquet: batch has schema version 7, this keptset reads version 1"
    ):
        list(read_archive(file))


def test_parquet_that_holds_no_rollouts_is_refused(file: Path) -> None:
    schema = pq.read_schema(file)
    rewritten(file, schema.remove_metadata())
    with pytest.raises(SchemaError, match=r"rollouts\.parquet: .*not a keptset batch"):
        list(read_archive(file))


def test_a_missing_column_is_refused(file: Path) -> None:
    schema = pq.read_schema(file)
    rewritten(file, schema.remove(schema.get_field_index("token_ids")))
    with pytest.raises(SchemaError, match=r"rollouts\.parquet, row group 0: column token_ids .* is missing"):
        list(read_archive(file))


def test_text_that_is_no_utf8_is_noticed_before_anything_reads_it(batch_of: BatchOf, tmp_path: Path) -> None:
    """The guard vouches for the bytes that were written, not for what wrote them."""
    path = tmp_path / "a.parquet"
    arrow = batch_of(0, 1).arrow
    strange = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    arrow = arrow.set_column(1, "prompt_id", strange)
    write_archive([RolloutBatch(arrow, Identity.from_metadata(arrow.schema.metadata))], path)
    with pytest.raises(DamagedFile, match="row group 0: not what was written: .*UTF8"):
        list(read_archive(path))


class Raw:
    """A file in memory, as Arrow would open it, that counts what is read of it."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.at = 0
        self.reads: list[int] = []

    def write(self, data: bytes) -> None:
        self.content += data

    def size(self) -> int:
        return len(self.content)

    def seek(self, at: int) -> None:
        self.at = at

    def read(self, size: int) -> bytes:
        self.reads.append(size)
        return bytes(self.content[self.at : self.at + size])


def guarded(data: bytes, pieces: list[int]) -> bytes:
    """A file of these bytes with a guard, written in pieces."""
    raw = Raw()
    sink = GuardedSink(raw)
    data = b"PAR1" + data
    cuts = sorted({min(cut, len(data)) for cut in pieces} | {0, len(data)})
    for start, stop in pairwise(cuts):
        sink.write(data[start:stop])
    sink.ending()
    assert sink.tell() == len(data)
    sink.write(b"index" + b"foot" + b"\x04\0\0\0PAR1")
    assert sink.finish() == len(raw.content)
    assert bytes(raw.content).startswith(data + b"index")
    return bytes(raw.content)


@given(
    data=st.binary(max_size=200),
    block=st.integers(1, 64),
    pieces=st.lists(st.integers(0, 200), max_size=6),
    reads=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 120)), max_size=8),
)
def test_a_guarded_source_gives_the_bytes_of_the_file(
    data: bytes, block: int, pieces: list[int], reads: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        content = guarded(data, pieces)
    source = GuardedSource(Raw(content), "it")
    for at, size in reads:
        source.seek(at)
        assert source.read(size) == content[at : at + size]
        assert source.tell() == at + len(content[at : at + size])
    assert source.seek(-4, 2) == len(content) - 4
    assert source.read() == b"PAR1"


@given(data=st.binary(max_size=200), block=st.integers(1, 64), at=st.integers(0), bit=st.integers(0, 7))
def test_a_guarded_source_gives_no_byte_of_an_altered_file_as_it_is_not(
    data: bytes, block: int, at: int, bit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        content = guarded(data, [])
    altered = bytearray(content)
    altered[at % len(content)] ^= 1 << bit
    with pytest.raises(DamagedFile, match="it "):
        GuardedSource(Raw(bytes(altered)), "it").read()


def test_a_guarded_source_reads_next_to_nothing_twice() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 100)
        raw = Raw(guarded(bytes(10_000), []))
    source = GuardedSource(raw, "it")
    raw.reads.clear()
    while source.read(37):
        pass
    assert sum(raw.reads) <= len(raw.content)
    raw.reads.clear()
    source.seek(150)
    source.read(5_000)
    assert raw.reads == [5_100]


def test_an_abandoned_sink_writes_nothing_more() -> None:
    """Arrow's writer puts a footer behind anything when it is closed, and a full disk would refuse that once more."""
    raw = Raw()
    sink = GuardedSink(raw)
    sink.write(b"PAR1")
    sink.abandon()
    assert sink.write(b"footer") == 6
    assert raw.content == b"PAR1"


def test_a_file_that_becomes_shorter_while_it_is_read_is_noticed() -> None:
    raw = Raw(guarded(bytes(10_000), []))
    source = GuardedSource(raw, "it")
    del raw.content[500:]
    with pytest.raises(DamagedFile, match="it became shorter while it was read"):
        source.read(1_000)


UNGUARDED = """
import random, sys
from pathlib import Path
from keptset.schemas.errors import KeptsetError
from keptset.schemas.storage.archive import read_archive
path, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
whole = path.read_bytes()
seen = 0
for number in range(int(sys.argv[3])):
    changed = bytearray(whole)
    for _ in range(chance.choice([1, 1, 2, 5])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    path.write_bytes(changed)
    try:
        list(read_archive(path))
    except KeptsetError:
        seen += 1
print(seen)
"""


def test_no_alteration_ends_a_reading_process(file: Path, run_python: Callable[..., CompletedProcess[str]]) -> None:
    done = run_python(UNGUARDED, file, 1, 400)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 395  # a byte may have been set to what it was
