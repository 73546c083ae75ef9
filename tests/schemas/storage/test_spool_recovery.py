"""What a crash leaves is published up to the last whole batch; nothing acknowledged is lost, nothing comes twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from keptset.schemas.errors import StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover

IdsIn = Callable[..., list[str]]


@pytest.fixture
def stream(tmp_path: Path, batches) -> tuple[bytes, list[int]]:
    """An open file of three batches, and where each of them ends."""
    ends = []
    with SpoolWriter(tmp_path / "source", "a") as writer:
        for batch in batches[:3]:
            writer.append(batch)
            ends.append(writer.path.stat().st_size)
        return writer.path.read_bytes(), ends


def orphan(folder: Path, content: bytes, name: str = "a-00000000.open") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path


def test_an_orphan_cut_off_anywhere_is_published_up_to_its_last_whole_batch(
    folder: Path, stream, batches, ids_in
) -> None:
    content, ends = stream
    sizes = {
        0,
        1,
        7,
        8,
        9,
        *ends,
        *(end - 1 for end in ends),
        *(end + 1 for end in ends[:-1]),
        *range(0, ends[-1], 2999),
    }
    for size in sorted(sizes):
        path = orphan(folder, content[:size])
        whole = sum(end <= size for end in ends)
        expected = [name for batch in batches[:whole] for name in batch.rollout_ids]
        assert ids_in(folder) == expected
        (recovered,) = recover(folder)
        assert not path.exists()
        assert (recovered.batches, recovered.damage) == (whole, None)
        assert recovered.dropped_bytes == size - ([0, *ends][whole])
        assert recovered.published == (folder / "a-00000000.arrow" if whole else None)
        assert ids_in(folder, include_open=False) == expected
        assert recover(folder) == []
        (folder / "a-00000000.arrow").unlink(missing_ok=True)


def test_the_open_file_of_a_live_writer_is_left_alone(folder: Path, batches, ids_in: IdsIn) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[0])
        assert recover(folder) == []
        writer.append(batches[1])
        assert recover(folder) == []
    assert len(ids_in(folder)) == len(batches[0]) + len(batches[1])


def test_a_writer_publishes_first_what_a_crashed_one_of_its_name_left(folder: Path, stream, batches, ids_in) -> None:
    content, ends = stream
    orphan(folder, content[: ends[1] + 100], "a-00000004.open")
    orphan(folder, content[: ends[0]], "b-00000000.open")
    with SpoolWriter(folder, "a") as writer:
        (recovered,) = writer.recovered
        assert (recovered.writer, recovered.seq, recovered.batches, recovered.dropped_bytes) == ("a", 4, 2, 100)
        assert writer.position == (5, 0)
        writer.append(batches[3])
    assert (folder / "b-00000000.open").exists()
    assert ids_in(folder) == [name for n in (0, 1, 3, 0) for name in batches[n].rollout_ids]


def test_a_writer_that_died_between_publishing_and_removing_left_nothing_twice(folder: Path, stream, ids_in) -> None:
    content, ends = stream
    orphan(folder, content)
    (recovered,) = recover(folder)
    published = recovered.published.read_bytes()
    orphan(folder, content[: ends[0]])  # and less of it is left than was published
    assert len(ids_in(folder)) == len(set(ids_in(folder)))
    (again,) = recover(folder)
    assert (again.published, again.batches, again.dropped_bytes) == (recovered.published, 3, 0)
    assert recovered.published.read_bytes() == published
    assert not (folder / "a-00000000.open").exists()


def test_a_published_file_that_is_damaged_is_made_again_while_its_open_one_is_there(
    folder: Path, stream, ids_in
) -> None:
    content, _ = stream
    orphan(folder, content)
    recover(folder)
    expected = ids_in(folder)
    orphan(folder, content)
    (folder / "a-00000000.arrow").write_bytes(b"half a file")
    (recovered,) = recover(folder)
    assert recovered.batches == 3
    assert ids_in(folder) == expected


def test_a_temporary_file_of_a_crash_while_publishing_does_no_harm(folder: Path, stream, ids_in: IdsIn) -> None:
    content, _ = stream
    orphan(folder, content)
    (folder / ".a-00000000.arrow.tmp").write_bytes(b"half a file")
    expected = ids_in(folder)
    recover(folder)
    assert ids_in(folder) == expected
    assert [path.name for path in folder.iterdir()] == ["a-00000000.arrow"]


RECOVER_AND_DIE = """
import os, shutil, sys
from pathlib import Path
from keptset.schemas.storage.spool import recover

orphaned, links = Path(sys.argv[1]), sys.argv[2] == "True"

def refused(*names):
    raise OSError("no links here")

def recover_up_to(step, folder):
    def hook(event, arguments):
        nonlocal step
        if event in ("os.link", "os.rename", "os.remove") and str(folder) in str(arguments[0]):
            step -= 1
            if step < 0:
                os._exit(9)

    sys.addaudithook(hook)
    if not links:
        os.link = refused
    recover(folder)
    os._exit(0)

step, status = 0, -1
while status:
    folder = orphaned.with_name(f"killed-{step:02d}")
    shutil.copytree(orphaned, folder)
    child = os.fork()
    if not child:
        recover_up_to(step, folder)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    step += 1
"""


@pytest.mark.parametrize("links", [True, False])
def test_a_recovery_of_a_damaged_file_killed_at_any_step_loses_none_of_its_bytes(
    folder: Path, stream, batches, ids_in: IdsIn, run_python, links: bool
) -> None:
    content = bytearray(stream[0])
    content[stream[1][1] - 200] ^= 0xFF  # in the second of three
    orphan(folder, bytes(content))
    ended = run_python(RECOVER_AND_DIE, folder, links)
    assert (ended.returncode, ended.stderr) == (0, "")
    killed = sorted(folder.parent.glob("killed-*"))
    assert len(killed) > 4, "each change of a name is a step"
    for at in killed:
        found = recover(at)
        assert found or at == killed[-1]
        kept = at / "a-00000000.open.damaged"
        assert kept.read_bytes() == content
        assert ids_in(at) == batches[0].rollout_ids
        assert sorted(path.name for path in at.iterdir()) == ["a-00000000.arrow", kept.name]
        for recovered in found:
            assert (recovered.batches, recovered.set_aside) == (1, kept)
            assert recovered.dropped_bytes == len(content) - stream[1][0]
            assert "batch before byte" in recovered.damage


def test_an_open_file_with_other_batches_than_were_published_from_it_is_kept(folder: Path, stream, ids_in) -> None:
    content, ends = stream
    orphan(folder, content[: ends[1]])
    recover(folder)
    expected = ids_in(folder)
    orphan(folder, content)
    (recovered,) = recover(folder)
    assert (recovered.batches, recovered.set_aside) == (2, folder / "a-00000000.open.damaged")
    assert "holds 3 whole batches, and a-00000000.arrow was published with 2" in recovered.damage
    assert recovered.set_aside.read_bytes() == content
    assert ids_in(folder) == expected


def test_numbers_of_files_set_aside_are_not_given_again(folder: Path, stream) -> None:
    content, ends = stream
    damaged = bytearray(content[: ends[0]])
    damaged[damaged.rindex(b"note")] ^= 0xFF
    orphan(folder, bytes(damaged), "a-00000002.open")
    with SpoolWriter(folder, "a") as writer:
        assert writer.recovered[0].set_aside == folder / "a-00000002.open.damaged"
        assert writer.position == (3, 0)


def test_a_reader_in_the_middle_of_an_orphan_goes_on_when_it_was_recovered(folder: Path, stream, batches) -> None:
    content, ends = stream
    orphan(folder, content[: ends[1]])
    reader = SpoolReader(folder)
    assert len(list(reader)) == 2
    recover(folder)
    assert list(reader) == []
    with SpoolWriter(folder, "a") as writer:
        writer.append(batches[4])
        assert [batch.rollout_ids for batch in reader] == [batches[4].rollout_ids]


def test_a_folder_that_is_not_there_cannot_be_recovered(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot list spool folder"):
        recover(tmp_path / "nowhere")


WRITE_UNTIL_KILLED = """
import sys
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolWriter
import pyarrow as pa

folder, first, rotate_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with pa.ipc.open_stream(sys.argv[4]) as stream:
    template = stream.read_next_batch()
names = template.schema.get_field_index("rollout_id")
writer = SpoolWriter(folder, "victim", rotate_bytes=rotate_bytes, fsync="never")
number = first
while True:
    ids = pa.array([f"{number}"])
    writer.append(RolloutBatch.from_arrow(template.set_column(names, "rollout_id", ids)))
    print(number, flush=True)
    number += 1
"""


def test_a_killed_writer_loses_nothing_acknowledged_and_stores_nothing_twice(
    folder: Path, batch_of: Callable[..., RolloutBatch], tmp_path: Path, repository: Path, ids_in: IdsIn
) -> None:
    template = tmp_path / "template"
    batch = batch_of(0, 1).arrow
    with pa.OSFile(str(template), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    chance = random.Random(7)
    acknowledged = -1
    follower = SpoolReader(folder, duplicates="keep")
    followed: list[str] = []
    for attempt in range(5):
        rotate_bytes = 60_000 if attempt % 2 else 2**30
        first = acknowledged + 1
        if attempt:
            # The batch in flight when the last writer died may be whole: then it is there, once, and counts.
            first = max(map(int, ids_in(folder))) + 1
            assert first >= acknowledged + 1
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, folder, str(first), str(rotate_bytes), str(template)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(repository)},
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(first)
            time.sleep(chance.uniform(0.0, 0.08))
            process.kill()
            acknowledged = max([first, *(int(line) for line in process.stdout if line.endswith("\n"))])
        if attempt % 3 == 2:
            recover(folder)
        followed += [name for batch in follower for name in batch.rollout_ids]
        found = sorted(map(int, ids_in(folder)))
        assert found == list(range(found[-1] + 1)), "none lost, none twice"
        assert found[-1] in (acknowledged, acknowledged + 1)
    assert recover(folder) is not None
    assert sorted(map(int, ids_in(folder))) == found == sorted(map(int, followed))
    assert found[-1] > 10
