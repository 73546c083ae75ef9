"""A spool in another file system: batches wait in a local folder, and each file appears there by one upload."""

from __future__ import annotations

import datetime
import fcntl
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from keptset.schemas.errors import DamagedFile, InvalidInput, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover
from keptset.schemas.storage.spool.folder import RemoteFolder, folder_of

BatchOf = Callable[..., RolloutBatch]
WHERE = "bucket/run/spool"


@pytest.fixture
def mock() -> fs.FileSystem:
    """A file system in memory that is not this machine's."""
    return fs._MockFileSystem(datetime.datetime(2026, 1, 1))


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def names(filesystem: fs.FileSystem, where: str = WHERE) -> list[str]:
    found = filesystem.get_file_info(fs.FileSelector(where, allow_not_found=True))
    return sorted(info.base_name for info in found)


def content(filesystem: fs.FileSystem, name: str) -> bytes:
    with filesystem.open_input_stream(f"{WHERE}/{name}") as file:
        return file.read()


def put(filesystem: fs.FileSystem, name: str, data: bytes) -> None:
    with filesystem.open_output_stream(f"{WHERE}/{name}") as file:
        file.write(data)


def ids(filesystem: fs.FileSystem, **settings: object) -> list[str]:
    with SpoolReader(WHERE, filesystem=filesystem, duplicates="keep", **settings) as reader:
        return [name for batch in reader for name in batch.rollout_ids]


def test_batches_wait_in_the_staging_folder_and_their_files_appear_whole(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf
) -> None:
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging) as writer:
        writer.append(batch_of(0, 2))
        assert (names(mock), os.listdir(staging)) == ([], ["a-00000000.open"])
        assert writer.rotate() == f"{WHERE}/a-00000000.arrow"
        assert (names(mock), os.listdir(staging)) == (["a-00000000.arrow"], ["a-00000001.open"])
        assert writer.rotate() is None
        assert ids(mock) == ["rollout-0", "rollout-1"]
        writer.append(batch_of(2, 1))
    assert (names(mock), os.listdir(staging)) == (["a-00000000.arrow", "a-00000001.arrow"], [])
    batches = list(SpoolReader(WHERE, filesystem=mock))
    assert [batch.arrow for batch in batches] == [batch_of(0, 2).arrow, batch_of(2, 1).arrow]


def test_a_reader_goes_on_from_its_position_and_follows(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging, rotate_bytes=1) as writer:
        numbers = iter(range(5))
        reader = SpoolReader(WHERE, filesystem=mock, follow=True, stop=lambda: writer.position == (4, 1))
        monkeypatch.setattr("time.sleep", lambda seconds: writer.append(batch_of(next(numbers), 1)))
        assert [batch.rollout_ids[0] for batch in reader] == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
        position = reader.position
    assert position == {"a": (4, 0)}
    assert ids(mock, position=position) == ["rollout-4"]


def test_numbers_go_on_behind_what_was_uploaded_also_from_another_machine(
    mock: fs.FileSystem, tmp_path: Path, batch_of: BatchOf
) -> None:
    for number, machine in enumerate(["one", "two", "one"]):
        with SpoolWriter(WHERE, "a", filesystem=mock, staging=tmp_path / machine) as writer:
            assert writer.position == (number, 0)
            writer.append(batch_of(number, 1))
    assert ids(mock) == ["rollout-0", "rollout-1", "rollout-2"]


def test_what_cannot_be_uploaded_is_said_at_once_and_goes_with_the_next_file(
    tmp_path: Path, staging: Path, batch_of: BatchOf
) -> None:
    elsewhere = fs.SubTreeFileSystem(str(tmp_path / "elsewhere"), fs.LocalFileSystem())
    (tmp_path / "elsewhere").mkdir()
    blocked = tmp_path / "elsewhere" / "bucket"
    blocked.write_text("a file where a folder should be")
    writer = SpoolWriter(WHERE, "a", filesystem=elsewhere, staging=staging, rotate_bytes=1)
    writer.append(batch_of(0, 1))
    with pytest.raises(
        StorageError, match=r"cannot upload bucket/run/spool/a-00000000\.arrow: .*; 1 published files are"
    ):
        writer.append(batch_of(1, 1))
    assert sorted(os.listdir(staging)) == ["a-00000000.arrow", "a-00000001.open"]
    assert writer.position == (1, 0), "the batch whose file could not be uploaded is not stored"
    writer.append(batch_of(1, 1))
    with pytest.raises(
        StorageError, match=r"2 published files are safe in .*staging, and go with the next one or with"
    ):
        writer.close()
    assert sorted(os.listdir(staging)) == ["a-00000000.arrow", "a-00000001.arrow"]
    blocked.unlink()
    with SpoolWriter(WHERE, "a", filesystem=elsewhere, staging=staging) as again:
        assert again.position == (2, 0)
        assert ids(elsewhere) == ["rollout-0", "rollout-1"]
    assert os.listdir(staging) == []


def test_a_writer_that_died_is_recovered_from_its_staging_folder(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf, run_python
) -> None:
    died = run_python(
        "import os, sys\nfrom pyarrow import fs\nimport pyarrow as pa\n"
        "from keptset.schemas.rollout_batch import RolloutBatch\n"
        "from keptset.schemas.storage.spool import SpoolWriter\n"
        "with pa.ipc.open_stream(sys.argv[2]) as stream:\n    batches = [RolloutBatch.from_arrow(b) for b in stream]\n"
        "writer = SpoolWriter(sys.argv[1], 'a', rotate_bytes=1)\n"
        "for batch in batches:\n    writer.append(batch)\nos.kill(os.getpid(), 9)\n",
        staging,
        stored(staging.parent / "batches", batch_of(0, 1), batch_of(1, 1)),
    )
    assert died.returncode == -9, died.stderr
    assert sorted(os.listdir(staging)) == ["a-00000000.arrow", "a-00000001.open"]
    found = recover(WHERE, filesystem=mock, staging=staging)
    assert {(one.seq, one.batches, one.published) for one in found} == {
        (0, 1, f"{WHERE}/a-00000000.arrow"),
        (1, 1, f"{WHERE}/a-00000001.arrow"),
    }
    assert (ids(mock), os.listdir(staging)) == (["rollout-0", "rollout-1"], [])
    assert recover(WHERE, filesystem=mock, staging=staging) == []


def stored(path: Path, *batches: RolloutBatch) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].arrow.schema) as stream:
        for batch in batches:
            stream.write_batch(batch.arrow)
    return path


def test_a_file_that_was_uploaded_and_not_removed_is_uploaded_once(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf
) -> None:
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging) as writer:
        writer.append(batch_of(0, 1))
        writer.rotate()
        there = content(mock, "a-00000000.arrow")
        (staging / "a-00000000.arrow").write_bytes(there)
        writer.append(batch_of(1, 1))
    assert os.listdir(staging) == []
    assert content(mock, "a-00000000.arrow") == there
    assert ids(mock) == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"?", lambda data: data + b"?", lambda data: data[:-1]])
def test_a_file_of_another_machine_is_never_replaced(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf, change: Callable[[bytes], bytes]
) -> None:
    writer = SpoolWriter(WHERE, "a", filesystem=mock, staging=staging)
    writer.append(batch_of(0, 1))
    writer.rotate()
    theirs = change(content(mock, "a-00000000.arrow"))
    (staging / "a-00000000.arrow").write_bytes(content(mock, "a-00000000.arrow"))
    put(mock, "a-00000000.arrow", theirs)
    writer.append(batch_of(1, 1))
    with pytest.raises(StorageError, match=r"is there with other content: another machine writes under the name of"):
        writer.close()
    assert content(mock, "a-00000000.arrow") == theirs
    assert "a-00000000.arrow" in os.listdir(staging)


def test_two_that_upload_the_same_file_leave_it_there_once_and_whole(
    tmp_path: Path, staging: Path, batch_of: BatchOf
) -> None:
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    with SpoolWriter(staging, "a", rotate_bytes=1) as writer:
        for number in range(20):
            writer.append(batch_of(number, 1))
    errors: list[StorageError] = []

    def upload() -> None:
        try:
            recover(WHERE, filesystem=elsewhere, staging=staging)
        except StorageError as error:
            errors.append(error)

    threads = [threading.Thread(target=upload) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ids(elsewhere) == [f"rollout-{number}" for number in range(20)]
    assert sorted(os.listdir(tmp_path / WHERE)) == sorted(f"a-{number:08d}.arrow" for number in range(20))


def test_an_upload_waits_for_another_one_of_the_same_file(mock: fs.FileSystem, staging: Path) -> None:
    remote = folder_of(WHERE, mock)
    assert isinstance(remote, RemoteFolder)
    staging.mkdir()
    local = staging / "a-00000000.arrow"
    local.write_bytes(b"rollouts")
    told: list[str] = []
    with local.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: told.append(remote.upload(local)))
        waiting.start()
        waiting.join(0.2)
        assert told == []
        mock.create_dir(WHERE, recursive=True)
        put(mock, "a-00000000.arrow", local.read_bytes())
        local.unlink()
    waiting.join()
    assert told == [f"{WHERE}/a-00000000.arrow"]


def test_a_number_is_given_once_though_another_uploads_its_file_while_a_writer_starts(
    mock: fs.FileSystem, staging: Path, batch_of: BatchOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SpoolWriter(staging, "a") as crashed:
        crashed.append(batch_of(0, 1))
    real = RemoteFolder.names

    def names_then_upload(remote: RemoteFolder) -> list[str]:
        found = real(remote)
        monkeypatch.undo()
        recover(WHERE, filesystem=mock, staging=staging)
        return found

    monkeypatch.setattr(RemoteFolder, "names", names_then_upload)
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging) as writer:
        assert writer.position == (1, 0)
        writer.append(batch_of(1, 1))
    assert ids(mock) == ["rollout-0", "rollout-1"]


def test_a_file_that_comes_in_short_pieces_is_known_again(tmp_path: Path, staging: Path) -> None:
    """Streams of other file systems may give less than they were asked for."""

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(size if size is None or size < 0 else min(size, 7))

    class ShortPieces(fs.FSSpecHandler):
        def open_input_stream(self, path: str) -> pa.PythonFile:
            return pa.PythonFile(Stream((tmp_path / path).read_bytes()), mode="r")

        def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
            return [fs.FileInfo(path, fs.FileType.File) for path in paths]

    data = bytes(range(100))
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "a-00000000.arrow").write_bytes(data)
    remote = RemoteFolder(fs.PyFileSystem(ShortPieces(None)), "spool", "elsewhere")
    for told, here in ((True, data), (False, data + b"?"), (False, data[:-1]), (False, data[:-1] + b"?")):
        assert remote._has_content("a-00000000.arrow", io.BytesIO(here)) is told


def test_a_writer_uploads_its_own_files_alone(mock: fs.FileSystem, staging: Path, batch_of: BatchOf) -> None:
    with SpoolWriter(staging, "b") as crashed:
        crashed.append(batch_of(0, 1))
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging) as writer:
        writer.append(batch_of(1, 1))
    assert (names(mock), os.listdir(staging)) == (["a-00000000.arrow"], ["b-00000000.arrow"])
    (recovered,) = recover(WHERE, filesystem=mock, staging=staging)
    assert (recovered.writer, recovered.batches, recovered.dropped_bytes) == ("b", 1, 0)
    assert (sorted(ids(mock)), os.listdir(staging)) == (["rollout-0", "rollout-1"], [])


def test_a_file_that_is_gone_before_it_was_uploaded_is_missed(mock: fs.FileSystem, staging: Path) -> None:
    remote = folder_of(WHERE, mock)
    assert isinstance(remote, RemoteFolder)
    with pytest.raises(StorageError, match=r"a-00000000\.arrow was removed before it was uploaded to bucket/run/spool"):
        remote.upload(staging / "a-00000000.arrow")


def test_damage_is_named_by_its_address_and_set_aside(mock: fs.FileSystem, staging: Path, batch_of: BatchOf) -> None:
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging, rotate_bytes=1) as writer:
        for number in range(3):
            writer.append(batch_of(number, 1))
    put(mock, "a-00000001.arrow", content(mock, "a-00000001.arrow")[:-1])
    with pytest.raises(DamagedFile, match=r"^bucket/run/spool/a-00000001\.arrow was cut off"):
        ids(mock)
    put(mock, "elsewhere.arrow", b"?")
    put(mock, "README.txt", b"rollouts of tuesday")
    reader = SpoolReader(WHERE, filesystem=mock, on_damaged="skip")
    assert [batch.rollout_ids for batch in reader] == [["rollout-0"], ["rollout-2"]]
    assert sorted(entry.name for entry in reader.set_aside) == ["a-00000001.arrow", "elsewhere.arrow"]


def test_a_file_removed_since_it_was_listed_is_passed_by(mock: fs.FileSystem, staging: Path, batch_of: BatchOf) -> None:
    with SpoolWriter(WHERE, "a", filesystem=mock, staging=staging, rotate_bytes=1) as writer:
        for number in range(3):
            writer.append(batch_of(number, 1))
    reading = iter(SpoolReader(WHERE, filesystem=mock))
    assert next(reading).rollout_ids == ["rollout-0"]
    mock.delete_file(f"{WHERE}/a-00000001.arrow")
    assert [batch.rollout_ids for batch in reading] == [["rollout-2"]]


def test_a_spool_without_a_file_yet_is_empty(mock: fs.FileSystem) -> None:
    assert ids(mock) == []


def test_a_staging_folder_is_asked_for_where_it_is_needed_alone(mock: fs.FileSystem, tmp_path: Path) -> None:
    for use in (lambda: SpoolWriter(WHERE, filesystem=mock), lambda: recover(WHERE, filesystem=mock)):
        with pytest.raises(
            InvalidInput, match="bucket/run/spool is not on this machine.* name a local folder, staging="
        ):
            use()
    for use in (lambda: SpoolWriter(tmp_path, staging="s"), lambda: recover(tmp_path, staging="s")):
        with pytest.raises(InvalidInput, match="staging is 's', but .* is on this machine and needs none"):
            use()


def test_addresses_lead_to_the_file_system_they_name(tmp_path: Path, batch_of: BatchOf) -> None:
    with SpoolWriter(f"file://{tmp_path}/spool", "a") as writer:
        writer.append(batch_of(0, 1))
        assert writer.folder == tmp_path / "spool"
    assert len(list(SpoolReader(f"file://{tmp_path}/spool"))) == 1
    remote = folder_of("mock:///run/spool/")
    assert isinstance(remote, RemoteFolder)
    assert remote.address("a-00000000.arrow") == "mock:///run/spool/a-00000000.arrow"
    with pytest.raises(InvalidInput, match="nowhere://run is no address"):
        SpoolReader("nowhere://run")


def test_a_listing_that_fails_is_said(batch_of: BatchOf, tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    with pytest.raises(StorageError, match="cannot list spool folder spool: "):
        list(SpoolReader("spool", filesystem=elsewhere))
