"""An archive appears whole, or not at all, in whatever file system it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from keptset.schemas.errors import InvalidInput, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import place, read_archive, write_archive

BatchOf = Callable[..., RolloutBatch]


def ids(path: str | Path, **settings: object) -> list[str]:
    return [name for batch in read_archive(path, **settings) for name in batch.rollout_ids]


def names(filesystem: fs.FileSystem) -> list[str]:
    return [info.path for info in filesystem.get_file_info(fs.FileSelector("", recursive=True)) if info.is_file]


def failing(batch: RolloutBatch) -> Iterator[RolloutBatch]:
    yield batch
    raise KeyboardInterrupt


@pytest.fixture
def mock() -> fs.FileSystem:
    """A file system in memory."""
    return fs._MockFileSystem()


def test_an_archive_in_another_file_system_comes_back(batch_of: BatchOf, mock: fs.FileSystem) -> None:
    mock.create_dir("run/archives")
    write_archive([batch_of(0, 3)], "run/archives/a.parquet", filesystem=mock)
    assert names(mock) == ["run/archives/a.parquet"]
    assert ids("run/archives/a.parquet", filesystem=mock) == batch_of(0, 3).rollout_ids


def test_a_uri_names_file_system_and_path(batch_of: BatchOf, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/a.parquet"
    write_archive([batch_of(0, 3)], uri)
    assert ids(uri) == ids(tmp_path / "a.parquet") == batch_of(0, 3).rollout_ids


def test_a_relative_path_is_one_of_this_machine(
    batch_of: BatchOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_archive([batch_of(0, 1)], "a.parquet")
    assert ids("a.parquet") == ids(tmp_path / "a.parquet")


@pytest.mark.parametrize("uri", ["nosuch://bucket/a.parquet", "file://elsewhere/a", "://a"])
def test_a_uri_that_arrow_does_not_know_is_refused(batch_of: BatchOf, uri: str) -> None:
    with pytest.raises(InvalidInput, match="no address of a file that Arrow can open"):
        write_archive([batch_of(0, 1)], uri)
    with pytest.raises(InvalidInput, match="no address of a file that Arrow can open"):
        list(read_archive(uri))


@pytest.mark.parametrize("object_store", [False, True], ids=["moved into place", "uploaded"])
def test_a_write_that_is_broken_off_leaves_nothing(
    batch_of: BatchOf, mock: fs.FileSystem, monkeypatch: pytest.MonkeyPatch, object_store: bool
) -> None:
    if object_store:
        monkeypatch.setattr(place, "_OBJECT_STORES", ("mock",))
    with pytest.raises(KeyboardInterrupt):
        write_archive(failing(batch_of(0, 1)), "a.parquet", filesystem=mock)
    assert names(mock) == []


@pytest.mark.parametrize("object_store", [False, True], ids=["moved into place", "uploaded"])
def test_while_it_is_written_an_archive_has_its_own_name_only_in_an_object_store(
    batch_of: BatchOf, mock: fs.FileSystem, monkeypatch: pytest.MonkeyPatch, object_store: bool
) -> None:
    """There the name appears when the upload is complete; the file system in memory shows it from the start."""
    if object_store:
        monkeypatch.setattr(place, "_OBJECT_STORES", ("mock",))
    seen: list[str] = []

    def stream() -> Iterator[RolloutBatch]:
        yield batch_of(0, 1)
        seen.extend(names(mock))
        yield batch_of(1, 1)

    write_archive(stream(), "a.parquet", filesystem=mock)
    assert (seen == ["a.parquet"]) is object_store
    assert names(mock) == ["a.parquet"]
    assert ids("a.parquet", filesystem=mock) == batch_of(0, 2).rollout_ids


def test_readers_of_a_folder_pass_over_an_unfinished_archive(batch_of: BatchOf, tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    write_archive([batch_of(0, 2)], tmp_path / "whole.parquet")
    found: list[int] = []

    def stream() -> Iterator[RolloutBatch]:
        yield batch_of(2, 1)
        assert len(list(tmp_path.iterdir())) == 2
        found.append(ds.dataset(tmp_path).count_rows())

    write_archive(stream(), tmp_path / "next.parquet")
    assert found == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next.parquet", "whole.parquet"]


def test_an_archive_that_exists_is_kept_unless_told_otherwise(batch_of: BatchOf, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_archive([batch_of(0, 1)], file)
    with pytest.raises(StorageError, match=r"a\.parquet exists; remove it, allow overwriting"):
        write_archive([batch_of(1, 1)], file)
    with pytest.raises(KeyboardInterrupt):
        write_archive(failing(batch_of(1, 1)), file, overwrite=True)
    assert ids(file) == ["rollout-0"]
    write_archive([batch_of(1, 1)], file, overwrite=True)
    assert ids(file) == ["rollout-1"]
    assert list(tmp_path.iterdir()) == [file]


def test_an_archive_is_on_the_device_before_it_has_its_name(
    batch_of: BatchOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(done) == 1:
            assert not (tmp_path / "a.parquet").exists()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_archive([batch_of(0, 1)], tmp_path / "a.parquet")
    assert len(done) == 2
    assert done[0].endswith(".tmp")
    assert done[1] == str(tmp_path)


def test_what_the_system_refuses_is_an_error_that_names_the_file(batch_of: BatchOf, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*no-folder/a\.parquet"):
        write_archive([batch_of(0, 1)], tmp_path / "no-folder" / "a.parquet")
    with pytest.raises(StorageError, match=r"cannot read .*absent\.parquet"):
        list(read_archive(tmp_path / "absent.parquet"))
    with pytest.raises(StorageError, match=f"cannot read {tmp_path}"):
        list(read_archive(tmp_path))
    with pytest.raises(StorageError, match=f"{tmp_path} exists"):
        write_archive([batch_of(0, 1)], tmp_path)
    with pytest.raises(StorageError, match=f"cannot publish {tmp_path}"):
        write_archive([batch_of(0, 1)], tmp_path, overwrite=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_and_leaves_nothing(
    batch_of: BatchOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / ".full.tmp"
    full.symlink_to("/dev/full")
    monkeypatch.setattr(place.Place, "_unfinished_path", lambda self: str(full))
    with pytest.raises(StorageError, match=r"cannot write .*a\.parquet: .*No space left"):
        write_archive([batch_of(0, 50)], tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_batches_source_is_not_taken_for_the_files(batch_of: BatchOf, tmp_path: Path) -> None:
    def stream() -> Iterator[RolloutBatch]:
        yield batch_of(0, 1)
        raise ConnectionError("the source is gone")

    with pytest.raises(ConnectionError, match="the source is gone"):
        write_archive(stream(), tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())
