"""A reader that follows gets what comes, as it comes, until it is told to stop or nothing has come for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keptset.schemas.errors import DamagedFile, InvalidInput, StorageError
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter

BatchOf = Callable[..., RolloutBatch]


class Clock:
    """Time that passes while something sleeps, and what happens at certain moments of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def at(self, moment: float, happens: Callable[[], object]) -> None:
        self.events.append((moment, happens))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.events if event[0] <= self.now]
        self.events = [event for event in self.events if event[0] > self.now]
        for _, happens in due:
            happens()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_comes_later_is_read_until_nothing_comes_for_the_timeout(
    folder: Path, batch_of: BatchOf, clock: Clock
) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batch_of(0, 1))
        clock.at(0.9, lambda: writer.append(batch_of(1, 1)))
        clock.at(1.8, lambda: (writer.rotate(), writer.append(batch_of(2, 1))))
        clock.at(9.0, lambda: writer.append(batch_of(3, 1)))
        reader = SpoolReader(folder, follow=True, timeout=1.0, poll_seconds=0.1)
        assert [batch.rollout_ids for batch in reader] == [["rollout-0"], ["rollout-1"], ["rollout-2"]]
        assert clock.now == pytest.approx(2.8, abs=0.11)
        clock.sleep(9.0)
        assert [batch.rollout_ids for batch in reader] == [["rollout-3"]]


def test_time_that_the_trainer_takes_is_not_time_in_which_nothing_came(
    folder: Path, batch_of: BatchOf, clock: Clock
) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batch_of(0, 1))
        reading: Iterator[RolloutBatch] = iter(SpoolReader(folder, follow=True, timeout=1.0, poll_seconds=0.1))
        next(reading)
        clock.sleep(50.0)
        clock.at(50.4, lambda: writer.append(batch_of(1, 1)))
        assert next(reading).rollout_ids == ["rollout-1"]


def test_what_is_there_when_a_reader_is_told_to_stop_still_comes(folder: Path, batch_of: BatchOf, clock: Clock) -> None:
    stop = threading.Event()
    with SpoolWriter(folder, "a") as writer:
        clock.at(0.5, lambda: (writer.append(batch_of(0, 1)), writer.append(batch_of(1, 1)), stop.set()))
        reader = SpoolReader(folder, follow=True, stop=stop.is_set)
        assert [batch.rollout_ids for batch in reader] == [["rollout-0"], ["rollout-1"]]
        assert clock.now < 0.7


def test_a_timeout_of_0_reads_what_is_there(folder: Path, batch_of: BatchOf, clock: Clock) -> None:
    with SpoolWriter(folder, "a") as writer:
        writer.append(batch_of(0, 1))
        assert len(list(SpoolReader(folder, follow=True, timeout=0))) == 1


def test_a_folder_is_waited_for_and_named_if_it_never_comes(folder: Path, batch_of: BatchOf, clock: Clock) -> None:
    def appears() -> None:
        with SpoolWriter(folder, "a") as writer:
            writer.append(batch_of(0, 1))

    with pytest.raises(StorageError, match="cannot list spool folder"):
        list(SpoolReader(folder, follow=True, timeout=1.0))
    clock.at(clock.now + 0.5, appears)
    assert len(list(SpoolReader(folder, follow=True, timeout=1.0))) == 1


def test_damage_is_set_aside_while_following_and_the_rest_goes_on(
    folder: Path, batch_of: BatchOf, clock: Clock
) -> None:
    with SpoolWriter(folder, "a", rotate_bytes=1) as writer:
        for number in range(3):
            writer.append(batch_of(number, 1))
        second = folder / "a-00000001.arrow"
        second.write_bytes(second.read_bytes()[:-1])
        clock.at(0.5, lambda: writer.append(batch_of(3, 1)))
        reader = SpoolReader(folder, follow=True, timeout=1.0, on_damaged="skip")
        assert [batch.rollout_ids for batch in reader] == [["rollout-0"], ["rollout-2"], ["rollout-3"]]
        assert [entry.name for entry in reader.set_aside] == ["a-00000001.arrow"]
        with pytest.raises(DamagedFile):
            list(SpoolReader(folder, follow=True, timeout=1.0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"poll_seconds": 0}, "poll_seconds is 0; it must be above 0"),
        ({"timeout": -1}, "timeout is -1; it must not be below 0"),
    ],
)
def test_waiting_that_cannot_be_is_refused(folder: Path, settings: dict[str, float], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        SpoolReader(folder, follow=True, **settings)


def test_many_writers_and_readers_on_one_folder_need_no_lock_between_them(folder: Path, batch_of: BatchOf) -> None:
    count, done = 12, threading.Event()

    def write(name: str, first: int) -> None:
        with SpoolWriter(folder, name, rotate_bytes=20_000, fsync="never") as writer:
            for number in range(first, first + count):
                writer.append(batch_of(number, 1))

    found: list[list[str]] = [[], [], []]

    def read(into: list[str]) -> None:
        for batch in SpoolReader(folder, follow=True, stop=done.is_set, poll_seconds=0.005, duplicates="keep"):
            into += batch.rollout_ids

    readers = [threading.Thread(target=read, args=(into,)) for into in found]
    writers = [threading.Thread(target=write, args=(f"w{n}", n * count)) for n in range(4)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    expected = sorted(f"rollout-{number}" for number in range(4 * count))
    assert [sorted(into) for into in found] == [expected] * 3
