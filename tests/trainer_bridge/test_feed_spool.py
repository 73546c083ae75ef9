"""A trainer that follows a spool gets every acknowledged batch once, soon, and again only what it did not deal with."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.errors import DamagedFile, InvalidInput, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.feed.spool import SpoolWriter, follow


def a_batch(name: str) -> RolloutBatch:
    builder = BatchBuilder(Identity(vocab_size=10))
    builder.add(Response(rollout_id=name, prompt_id="p", token_ids=np.array([1, 2]), finish_reason="stop"))
    return builder.build()


def test_a_trainer_gets_batches_while_they_are_written_and_ends_with_the_rollouts(tmp_path: Path) -> None:
    folder, done, first_read = tmp_path / "spool", threading.Event(), threading.Event()

    def rollouts() -> None:
        with SpoolWriter(folder, "actor", rotate_bytes=1) as writer:
            writer.append(a_batch("0"))
            assert first_read.wait(10), "an acknowledged batch is read before the writer closes its file"
            for number in range(1, 6):
                writer.append(a_batch(str(number)))
        done.set()

    thread = threading.Thread(target=rollouts)
    thread.start()
    seen = []
    for batch, position in follow(folder, finished=done.is_set, poll_seconds=0.01):
        first_read.set()
        seen += batch.rollout_ids
        assert set(position) == {"actor"}
    thread.join()
    assert seen == ["0", "1", "2", "3", "4", "5"]


def test_a_restarted_trainer_gets_what_it_did_not_deal_with(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, "a") as one, SpoolWriter(tmp_path, "b") as other:
        for number in range(3):
            one.append(a_batch(f"a{number}"))
            other.append(a_batch(f"b{number}"))
    dealt_with, saved = [], None
    for batch, position in follow(tmp_path, finished=lambda: True):
        if batch.rollout_ids == ["b1"]:
            break  # it dies here: b1 was handed out, and its position was not saved
        dealt_with += batch.rollout_ids
        saved = position
    assert dealt_with == ["a0", "a1", "a2", "b0"]
    rest = [name for batch, _ in follow(tmp_path, position=saved, finished=lambda: True) for name in batch.rollout_ids]
    assert rest == ["b1", "b2"]


def test_a_restarted_trainer_that_kept_what_it_saw_gets_no_response_twice(tmp_path: Path) -> None:
    folder, seen = tmp_path / "spool", tmp_path / "trainer.seen"
    with SpoolWriter(folder, "a") as writer:
        writer.append(a_batch("0"))
    ((_, position),) = follow(folder, seen=seen, finished=lambda: True)
    with SpoolWriter(folder, "b") as writer:
        writer.append(a_batch("0"))
        writer.append(a_batch("1"))
    for kept, expected in ((None, ["0", "1"]), (seen, ["1"])):
        again = follow(folder, position=position, seen=kept, finished=lambda: True)
        assert [name for batch, _ in again for name in batch.rollout_ids] == expected


def test_what_came_just_before_the_end_is_not_missed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "a")
    calls = []

    def finished() -> bool:
        calls.append(len(calls))
        if len(calls) == 2:
            writer.append(a_batch("last"))
            writer.close()
        return len(calls) == 2

    assert [batch.rollout_ids for batch, _ in follow(tmp_path, finished=finished, poll_seconds=0.01)] == [["last"]]


def test_a_folder_that_does_not_exist_yet_is_waited_for_until_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    turns = iter([False, False, True])
    with pytest.raises(StorageError, match="cannot list spool folder"):
        list(follow(folder, finished=lambda: next(turns), poll_seconds=0.01))

    def appears() -> bool:
        if not folder.exists():
            with SpoolWriter(folder, "a") as writer:
                writer.append(a_batch("0"))
            return False
        return True

    assert len(list(follow(folder, finished=appears, poll_seconds=0.01))) == 1


def test_waiting_costs_little(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, "a"):
        began, worked = time.monotonic(), time.process_time()
        end = began + 0.5
        assert list(follow(tmp_path, finished=lambda: time.monotonic() > end, poll_seconds=0.05)) == []
        assert time.process_time() - worked < 0.25


def test_damage_reaches_the_trainer(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, "a") as writer:
        writer.append(a_batch("0"))
    published = tmp_path / "a-00000000.arrow"
    published.write_bytes(published.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=r"a-00000000\.arrow"):
        list(follow(tmp_path, finished=lambda: True))


def test_a_poll_without_a_pause_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="poll_seconds is 0; it must be above 0"):
        next(follow(tmp_path, poll_seconds=0))
