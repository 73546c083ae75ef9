"""Bytes that are not what was written never become numbers, and never take the process down."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.errors import DamagedFile, SchemaError, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover
from keptset.schemas.storage.spool.checksum import content_crc32
from keptset.schemas.storage.spool.guard import check_guard
from keptset.schemas.storage.spool.publish import publish
from keptset.schemas.storage.spool.stream import CONTENT_CRC, StoredBatch, encode_batch, encode_header

IdsIn = Callable[..., list[str]]


@pytest.fixture
def published(folder: Path, batches) -> Path:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        writer.append(batches[1])
    return folder / "a-00000000.arrow"


def write_published(path: Path, *batches: StoredBatch) -> None:
    """A file with a sound guard around whatever is in it."""
    path.parent.mkdir(exist_ok=True)
    publish(iter(batches), path, fsync=False)


def test_any_altered_byte_of_a_published_file_is_noticed_before_arrow_reads_it(published: Path) -> None:
    whole = published.read_bytes()
    check_guard(published)
    with published.open("r+b", buffering=0) as file:
        for at in range(0, len(whole), 7):
            for flip in (0x01, 0x80, 0xFF):
                file.seek(at)
                file.write(bytes([whole[at] ^ flip]))
                with pytest.raises(DamagedFile):
                    check_guard(published)
            file.seek(at)
            file.write(whole[at : at + 1])
    check_guard(published)


def test_a_published_file_cut_off_anywhere_is_noticed(published: Path) -> None:
    whole = published.read_bytes()
    for size in [*range(40), *range(40, len(whole), 97), *range(len(whole) - 40, len(whole))]:
        published.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match=r"a-00000000\.arrow"):
            list(SpoolReader(published.parent))


def test_the_message_says_whether_a_file_was_cut_altered_or_never_a_spool_file(published: Path, folder: Path) -> None:
    whole = published.read_bytes()
    cases = {
        "is not an Arrow file": b"prompt,response\n1,2\n",
        "was cut off or overwritten at its end": whole[:-20],
        "is damaged: crc32 of its bytes is": whole[:100] + b"?" + whole[101:],
        "no keptset guard": plain_arrow_file(),
    }
    for told, content in cases.items():
        published.write_bytes(content)
        with pytest.raises(DamagedFile, match=told):
            list(SpoolReader(folder))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a-00000000.arrow", "put back a copy of it, or read on with on_damaged='skip'"),
        ("a-00000000.open", "recover the folder .* or read on with on_damaged='skip'"),
        ("from elsewhere.arrow", "move it out of the folder, or read on with on_damaged='skip'"),
    ],
)
def test_the_message_says_what_to_do_and_a_file_set_aside_keeps_the_reason_alone(
    folder: Path, name: str, told: str
) -> None:
    folder.mkdir()
    (folder / name).write_bytes(b"prompt,response\n1,2\n")
    with pytest.raises(DamagedFile, match=told):
        list(SpoolReader(folder))
    reader = SpoolReader(folder, on_damaged="skip")
    assert list(reader) == []
    (entry,) = reader.set_aside
    assert "on_damaged" not in entry.reason


def plain_arrow_file() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1, 2, 3]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_damaged_and_foreign_files_can_be_passed_over_and_are_named_once(folder: Path, batches, ids_in: IdsIn) -> None:
    with SpoolWriter(folder, "a", rotate_bytes=1) as writer:
        for batch in batches[:4]:
            writer.append(batch)
    second = folder / "a-00000001.arrow"
    second.write_bytes(second.read_bytes()[:-1])
    (folder / "from elsewhere.arrow").write_bytes(plain_arrow_file())
    reader = SpoolReader(folder, on_damaged="skip")
    assert [batch.rollout_ids for batch in reader] == [batches[n].rollout_ids for n in (0, 2, 3)]
    assert {entry.name for entry in reader.set_aside} == {"a-00000001.arrow", "from elsewhere.arrow"}
    assert any("not named as spool files are" in entry.reason for entry in reader.set_aside)
    assert any("was cut off" in entry.reason for entry in reader.set_aside)
    assert list(reader) == []
    assert len(reader.set_aside) == 2


def test_what_was_read_before_damage_was_found_stays_read(folder: Path, batches) -> None:
    with SpoolWriter(folder, "a", rotate_bytes=1) as writer:
        for batch in batches[:3]:
            writer.append(batch)
    second = folder / "a-00000001.arrow"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    reader = SpoolReader(folder)
    seen: list[RolloutBatch] = []
    with pytest.raises(DamagedFile):
        seen.extend(reader)
    assert reader.position == {"a": (1, 0)}
    second.write_bytes(whole)
    assert [batch.rollout_ids for batch in reader] == [batch.rollout_ids for batch in batches[1:3]]


def test_a_batch_whose_content_is_not_what_was_appended_is_refused_inside_a_sound_file(folder: Path, batches) -> None:
    arrow = batches[0].arrow
    write_published(folder / "a-00000000.arrow", StoredBatch(arrow, {CONTENT_CRC: b"00c0ffee"}, 0))
    with pytest.raises(DamagedFile, match="batch 0: crc32 of the content is [0-9a-f]{8}, 00c0ffee was written"):
        list(SpoolReader(folder))
    write_published(folder / "a-00000000.arrow", StoredBatch(arrow, {}, 0))
    with pytest.raises(DamagedFile, match=r"no keptset\.crc32 in its metadata"):
        list(SpoolReader(folder))


def test_broken_offsets_are_refused_even_where_every_checksum_holds(folder: Path, batches) -> None:
    arrow = batches[1].arrow
    column = arrow.schema.get_field_index("token_ids")
    tokens = len(batches[1].token_ids.values)
    offsets = np.array([0, 2**30, tokens], np.int32)
    broken = pa.ListArray.from_buffers(
        pa.list_(pa.int32()), 2, [None, pa.py_buffer(offsets)], children=[arrow.column(column).flatten()]
    )
    arrow = arrow.set_column(column, arrow.schema.field(column), broken)
    write_published(
        folder / "a-00000000.arrow", StoredBatch(arrow, {CONTENT_CRC: f"{content_crc32(arrow):08x}".encode()}, 0)
    )
    with pytest.raises(DamagedFile, match="not valid Arrow data"):
        list(SpoolReader(folder))


def sealed_again(content: bytes) -> bytes:
    """A published file with another guard, as if it had been damaged before it was guarded."""
    (footer,) = struct.unpack_from("<i", content, len(content) - 10)
    at = len(content) - 10 - footer - 16
    crc = zlib.crc32(content[at + 16 :], zlib.crc32(content[:at]))
    return content[: at + 8] + f"{crc:08x}".encode() + content[at + 16 :]


def without_a_name(content: bytes) -> bytes:
    return content.replace(b"x_note", b"x_\xff\xffte")


def without_a_footer(content: bytes) -> bytes:
    """Arrow reports it as an error of the system, though without a number."""
    (footer,) = struct.unpack_from("<i", content, len(content) - 10)
    at = len(content) - 10 - footer
    return content[:at] + b"\xff\xff\xff\xff" + content[at + 4 :]


@pytest.mark.parametrize("spoilt", [without_a_name, without_a_footer])
def test_what_a_guard_vouches_for_and_arrow_cannot_read_is_damage_and_no_other_error(
    published: Path, folder: Path, batches, spoilt: Callable[[bytes], bytes]
) -> None:
    published.write_bytes(sealed_again(spoilt(published.read_bytes())))
    check_guard(published)
    with pytest.raises(DamagedFile, match=r"a-00000000\.arrow is not what Arrow wrote"):
        list(SpoolReader(folder))
    reader = SpoolReader(folder, on_damaged="skip")
    assert list(reader) == []
    assert reader.position == {"a": (1, 0)}
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[2])
    assert [batch.rollout_ids for batch in reader] == [batches[2].rollout_ids]
    assert [entry.name for entry in reader.set_aside] == ["a-00000000.arrow"]


def of_version_2(batch: RolloutBatch) -> pa.RecordBatch:
    return batch.arrow.replace_schema_metadata({**batch.arrow.schema.metadata, b"keptset.schema_version": b"2"})


def test_another_schema_version_is_refused_with_both_numbers(folder: Path, batches) -> None:
    told = r"-00000000\.\w+: batch has schema version 2, this keptset reads version 1"
    arrow = of_version_2(batches[0])
    write_published(
        folder / "a-00000000.arrow", StoredBatch(arrow, {CONTENT_CRC: f"{content_crc32(arrow):08x}".encode()}, 0)
    )
    for settings in ({}, {"on_damaged": "skip"}):
        with pytest.raises(SchemaError, match=told):
            list(SpoolReader(folder, **settings))
    (folder / "a-00000000.arrow").unlink()
    newer = folder / "b-00000000.open"
    header = encode_header(arrow.schema)
    newer.write_bytes(header + encode_batch(arrow, header, "b").to_pybytes())
    with pytest.raises(SchemaError, match=told):
        list(SpoolReader(folder))
    (recovered,) = recover(folder)
    assert recovered.published is None
    assert "left as it is" in recovered.damage
    assert "schema version 2, this keptset reads version 1" in recovered.damage
    assert newer.exists()


EVERY_FLIP = """
import os, sys
from pathlib import Path
from keptset.schemas.errors import DamagedFile, SchemaError
from keptset.schemas.storage.spool.stream import read_whole_batches

path, stride = Path(sys.argv[1]), int(sys.argv[2])
whole = path.read_bytes()
file = os.open(path, os.O_RDWR)
sound = [stored.arrow for stored in read_whole_batches(file, path)]
outcomes = dict.fromkeys(["same", "fewer", "damaged", "refused"], 0)
for number, at in enumerate(range(0, len(whole), stride)):
    os.pwrite(file, bytes([whole[at] ^ (0x01, 0x80, 0xFF)[number % 3]]), at)
    try:
        found = [stored.arrow for stored in read_whole_batches(file, path)]
    except DamagedFile:
        outcomes["damaged"] += 1
    except SchemaError:
        outcomes["refused"] += 1
    else:
        assert all(one.equals(other, check_metadata=True) for one, other in zip(found, sound)), at
        outcomes["same" if len(found) == len(sound) else "fewer"] += 1
    os.pwrite(file, whole[at:at + 1], at)
print(outcomes)
"""


def test_an_altered_byte_of_an_open_file_gives_fewer_batches_or_an_error_and_never_others(
    folder: Path, batches, run_python
) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        writer.append(batches[1])
        copy = folder / "copy"
        copy.write_bytes(writer.path.read_bytes())
    ended = run_python(EVERY_FLIP, copy, 5)
    assert (ended.returncode, ended.stderr) == (0, "")
    outcomes = eval(ended.stdout)
    assert outcomes["damaged"] > 1000
    assert outcomes["refused"] == 0


def test_damage_in_an_open_file_is_reported_and_its_sound_batches_come_first(folder: Path, batches, ids_in) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        first = writer.path.stat().st_size
        writer.append(batches[1])
        content = bytearray(writer.path.read_bytes())
    folder = folder.parent / "orphaned"
    folder.mkdir()
    content[content.rindex(b"note")] ^= 0xFF
    (folder / "a-00000000.open").write_bytes(content)
    reader = SpoolReader(folder)
    assert next(iter(reader)).rollout_ids == batches[0].rollout_ids
    with pytest.raises(DamagedFile, match=r"a-00000000\.open, batch before byte \d+: crc32 of the content"):
        list(reader)
    assert ids_in(folder, on_damaged="skip") == batches[0].rollout_ids
    (recovered,) = recover(folder)
    assert (recovered.batches, recovered.dropped_bytes) == (1, len(content) - first)
    assert recovered.damage is not None
    assert recovered.set_aside == folder / "a-00000000.open.damaged"
    assert recovered.set_aside.read_bytes() == bytes(content)
    assert ids_in(folder) == batches[0].rollout_ids


@pytest.mark.parametrize("content", [b"prompt,response\n", b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(60)])
def test_an_open_file_that_is_no_stream_is_foreign(folder: Path, content: bytes, ids_in: IdsIn) -> None:
    folder.mkdir()
    (folder / "a-00000000.open").write_bytes(content)
    with pytest.raises(DamagedFile, match="does not begin with an Arrow schema"):
        list(SpoolReader(folder))
    assert ids_in(folder, on_damaged="skip") == []
    (recovered,) = recover(folder)
    assert (recovered.published, recovered.batches) == (None, 0)
    assert recovered.set_aside.read_bytes() == content


def test_a_stream_that_is_not_of_a_spool_is_foreign(folder: Path, batches) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].arrow.schema) as writer:
        writer.write_batch(batches[0].arrow)
    folder.mkdir()
    (folder / "a-00000000.open").write_bytes(sink.getvalue().to_pybytes())
    with pytest.raises(DamagedFile, match="its schema is not the one that its batches were written with"):
        list(SpoolReader(folder))


def test_bytes_of_a_batch_that_did_not_get_through_may_be_replaced_while_a_reader_looks(
    folder: Path, batches, monkeypatch
) -> None:
    """A reader may see one half of a batch that was cut off and one half of its successor: a second look settles it."""
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        whole = writer.path.read_bytes()
        writer.append(batches[1])
        later = writer.path.read_bytes()
    folder = folder.parent / "live"
    folder.mkdir()
    path = folder / "a-00000000.open"
    torn = bytearray(later)
    torn[len(whole) + 600 : -100] = bytes(len(torn) - len(whole) - 700)
    path.write_bytes(torn)
    monkeypatch.setattr("time.sleep", lambda seconds: path.write_bytes(later))
    assert [batch.rollout_ids for batch in SpoolReader(folder)] == [batch.rollout_ids for batch in batches[:2]]


def test_a_checksum_covers_order_nulls_and_lengths_but_no_bytes_without_meaning() -> None:
    def crc(array: pa.Array) -> int:
        return content_crc32(pa.record_batch({"a": array}))

    lists = pa.list_(pa.int32())
    different = [
        pa.array([[1], [2, 3]], lists),
        pa.array([[1, 2], [3]], lists),
        pa.array([[1, 2, 3]], lists),
        pa.array([[1], None, [2, 3]], lists),
        pa.array([[1], [], [2, 3]], lists),
        pa.array([[1], [3, 2]], lists),
        pa.array([[1], [2, None]], lists),
        pa.array([None, None], pa.int32()),
        pa.array([0, 0], pa.int32()),
        pa.array(["ab", "c"]),
        pa.array(["a", "bc"]),
        pa.array([True, False]),
        pa.array([True, None]),
    ]
    assert len({crc(array) for array in different}) == len(different)
    bits = [pa.Array.from_buffers(pa.bool_(), 2, [None, pa.py_buffer(bytes([byte]))]) for byte in (0b01, 0b11111101)]
    assert crc(bits[0]) == crc(bits[1])
    padded = pa.Array.from_buffers(pa.int32(), 1, [None, pa.py_buffer(struct.pack("<4i", 7, 1, 2, 3))])
    assert crc(padded) == crc(pa.array([7], pa.int32()))


def test_a_checksum_is_the_documented_one() -> None:
    batch = pa.record_batch(
        {
            "lists": pa.array([[1], None, [2, 3]], pa.list_(pa.int32())),
            "text": pa.array(["a", "bc", ""]),
            "flags": pa.array([True, False, True]),
        }
    )
    absent, present = b"\0", b"\1"
    content = [
        struct.pack("<q", 3),
        present + bytes([0b101]) + struct.pack("<4i", 0, 1, 1, 3) + absent + struct.pack("<3i", 1, 2, 3),
        absent + struct.pack("<4i", 0, 1, 3, 3) + b"abc",
        absent + present + bytes([0b101]),
    ]
    assert content_crc32(batch) == zlib.crc32(b"".join(content))


def test_an_error_of_the_system_while_reading_is_no_damage(folder: Path, batches, monkeypatch) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])

        def fail(*args: object) -> Iterator[bytes]:
            raise OSError(5, "Input/output error")

        real = __import__("os").pread
        monkeypatch.setattr("os.pread", lambda fd, size, at: real(fd, size, at) if at == 0 else fail())
        with pytest.raises(StorageError, match="cannot read .*Input/output error") as told:
            list(SpoolReader(folder))
        assert not isinstance(told.value, DamagedFile)
        monkeypatch.undo()
