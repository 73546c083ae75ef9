"""A disk that is full, a file that cannot be written: said at once, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.errors import StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover

IdsIn = Callable[..., list[str]]

# The limit on a file's size is the one real way to run out of room that needs no privilege: write(2) comes back short,
# then fails, as on a full disk.
RUN_OUT_OF_ROOM = """
import os, resource, sys
from pathlib import Path
import pyarrow as pa
from keptset.schemas.errors import StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter

folder, source = Path(sys.argv[1]), sys.argv[2]
with pa.ipc.open_stream(source) as stream:
    batches = [RolloutBatch.from_arrow(batch) for batch in stream]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def stored():
    return [name for batch in SpoolReader(folder) for name in batch.rollout_ids]

def names(count):
    return [name for batch in batches[:count] for name in batch.rollout_ids]

writer = SpoolWriter(folder, "a")
writer.append(batches[0])
size = writer.path.stat().st_size

limit(size + 1000)                      # in the middle of the next batch
try:
    writer.append(batches[1])
except StorageError as error:
    print(error)
assert writer.path.stat().st_size == size, "the half batch is gone"
assert stored() == names(1)

limit(resource.RLIM_INFINITY)           # room again: the same batch, once
writer.append(batches[1])
assert stored() == names(2)

limit(100)                              # no room to publish
for publish in (writer.rotate, lambda: writer.close()):
    try:
        publish()
    except StorageError as error:
        print(error)
    assert stored() == names(2)
assert [path.name for path in folder.iterdir()] == ["a-00000000.open"], "no half file is left"

limit(resource.RLIM_INFINITY)
with SpoolWriter(folder, "a") as writer:
    assert writer.recovered[0].batches == 2
    limit(0)                            # not even the first byte of a new file
    try:
        writer.append(batches[2])
    except StorageError as error:
        print(error)
    assert writer.path.stat().st_size == 0
    limit(resource.RLIM_INFINITY)
    writer.append(batches[2])
assert stored() == names(3)
"""


@pytest.fixture
def source(tmp_path: Path, batches) -> Path:
    path = tmp_path / "source"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].arrow.schema) as stream:
        for batch in batches:
            stream.write_batch(batch.arrow)
    return path


def test_running_out_of_room_is_said_at_once_and_loses_nothing(folder: Path, source: Path, run_python) -> None:
    ended = run_python(RUN_OUT_OF_ROOM, folder, source)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = ended.stdout.splitlines()
    assert len(said) == 4
    too_large = os.strerror(errno.EFBIG)
    assert said[0].startswith(
        f"cannot write {folder / 'a-00000000.open'}: {too_large}; the 1 batches acknowledged before"
    )
    assert said[0].endswith("are safe there, this one is not stored: free space, then append it again")
    for line in said[1:3]:
        assert line.startswith(f"cannot publish {folder / 'a-00000000.arrow'}: {too_large}; the 2 batches acknowledged")
        assert "stay in a-00000000.open" in line
    assert said[3].startswith(f"cannot write {folder / 'a-00000001.open'}: {too_large}; the 0 batches")


def test_a_rotation_that_fails_in_append_stores_nothing_of_the_new_batch(
    folder: Path, batches, ids_in, monkeypatch
) -> None:
    writer = SpoolWriter(folder, "a", rotate_bytes=1)
    writer.append(batches[0])
    fail_with(monkeypatch, "replace", errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left on device; the 1 batches .*no batch was added"):
        writer.append(batches[1])
    assert ids_in(folder) == batches[0].rollout_ids
    monkeypatch.undo()
    writer.append(batches[1])
    writer.close()
    assert ids_in(folder) == batches[0].rollout_ids + batches[1].rollout_ids


def fail_with(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*args: object, **settings: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)


def test_a_writer_that_cannot_cut_off_a_half_batch_takes_no_more(folder: Path, batches, ids_in, monkeypatch) -> None:
    writer = SpoolWriter(folder, "a")
    writer.append(batches[0])
    real = os.pwrite

    def half(fd: int, data: memoryview, at: int) -> int:
        if at > writer_end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:500], at)

    writer_end = writer.path.stat().st_size
    monkeypatch.setattr(os, "pwrite", half)
    fail_with(monkeypatch, "ftruncate", errno.EIO)
    with pytest.raises(StorageError, match="No space left on device"):
        writer.append(batches[1])
    monkeypatch.undo()
    assert writer.path.stat().st_size == writer_end + 500
    with pytest.raises(StorageError, match="cannot cut .* back to its last whole batch: .*; close this writer, then"):
        writer.append(batches[1])
    assert ids_in(folder) == batches[0].rollout_ids
    writer.close()
    assert ids_in(folder, include_open=False) == batches[0].rollout_ids


def test_a_batch_that_did_not_reach_the_device_is_not_acknowledged(folder: Path, batches, ids_in, monkeypatch) -> None:
    writer = SpoolWriter(folder, "a", fsync="batch")
    writer.append(batches[0])
    fail_with(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(StorageError, match="cannot fsync .*Input/output error; the 1 batches acknowledged before"):
        writer.append(batches[1])
    monkeypatch.undo()
    with pytest.raises(StorageError, match="close this writer, then recover"):
        writer.append(batches[1])
    writer.close()
    assert ids_in(folder) == batches[0].rollout_ids


def test_a_next_file_that_cannot_be_made_is_made_with_the_next_batch(
    folder: Path, batches, ids_in, monkeypatch
) -> None:
    writer = SpoolWriter(folder, "a")
    writer.append(batches[0])
    monkeypatch.setattr(
        "keptset.schemas.storage.spool.writer.try_lock", lambda file, path: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(StorageError, match=r"cannot make .*a-00000001\.open: full"):
        writer.rotate()
    monkeypatch.undo()
    assert ids_in(folder, include_open=False) == batches[0].rollout_ids
    writer.append(batches[1])
    writer.close()
    assert ids_in(folder) == batches[0].rollout_ids + batches[1].rollout_ids


def test_a_file_system_without_locks_is_refused_with_the_reason(folder: Path, monkeypatch) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(StorageError, match="cannot lock .*a spool needs a file system with flock"):
        SpoolWriter(folder, "a")


def test_something_else_that_shortens_the_open_file_is_noticed(folder: Path, batches) -> None:
    writer = SpoolWriter(folder, "a")
    writer.append(batches[0])
    end = writer.path.stat().st_size
    writer.append(batches[1])
    os.truncate(writer.path, end)
    with pytest.raises(StorageError, match="1 of its 2 batches are whole, so something else changed the file"):
        writer.close()
    assert not (folder / "a-00000000.arrow").exists()
    (recovered,) = recover(folder)
    assert recovered.batches == 1


NOT_ALLOWED = """
import os, sys
from keptset.schemas.errors import StorageError
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for use in (lambda: SpoolWriter(sys.argv[1], "b"), lambda: SpoolWriter(sys.argv[1] + "/deeper", "b"),
            lambda: list(SpoolReader(sys.argv[1]))):
    try:
        use()
    except StorageError as error:
        print(error)
"""


def test_a_folder_that_may_not_be_written_or_read_is_named(tmp_path: Path, batches, run_python) -> None:
    folder = tmp_path / "spool"
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
    for path in (tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o755)
    (folder / "a-00000000.arrow").chmod(0o000)
    folder.chmod(0o555)
    try:
        ended = run_python(NOT_ALLOWED, folder)
    finally:
        folder.chmod(0o755)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        f"cannot make {folder / 'b-00000000.open'}: Permission denied",
        f"cannot make spool folder {folder / 'deeper'}: Permission denied",
        f"cannot read {folder / 'a-00000000.arrow'}: Permission denied",
    ]


def test_a_batch_too_large_for_one_write_is_written_in_several(folder: Path, batch_of, monkeypatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:777], at))
    batch: RolloutBatch = batch_of(0, 3)
    with SpoolWriter(folder, "a") as writer:
        writer.append(batch)
        assert [np.array_equal(b.token_ids.values, batch.token_ids.values) for b in SpoolReader(folder)] == [True]
