"""Writers killed at random moments, with SIGKILL, while readers read: what was acknowledged is there, once.

Every process is a fork of this one, so that a kill costs milliseconds. A writer says over a pipe which batches were
acknowledged. Numbers are what rollout_ids are made of: a writer's go up by one from batch to batch.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa
from file_targets import sample_batches

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter, recover

KILLS_PER_FOLDER = 10
WRITERS = ("a", "b", "c")
HANG_SECONDS, _TICK = 60.0, 0.25


class Lost(AssertionError):
    """A promise of the spool that did not hold."""


@dataclass
class Killed:
    """What was done."""

    kills: int = 0
    acknowledged: int = 0
    """Batches."""
    in_flight_kept: int = 0
    """Batches that were whole though their writer died before it could say so."""
    at: Counter[str] = field(default_factory=Counter)
    """What was being done when the kill came."""

    def add(self, other: Killed) -> None:
        self.kills += other.kills
        self.acknowledged += other.acknowledged
        self.in_flight_kept += other.in_flight_kept
        self.at += other.at


def kill_writers(
    kills: int, *, seed: int, folder: Path, first: int = 0, done: Callable[[Killed], None] = lambda _: None
) -> Killed:
    """Kills number `first` to `kills`; `done` is told of each folder. What was done is returned.

    Errors: Lost where a batch is missing, there twice, or a reader failed; the folder is left as it is then.
    """
    total = Killed()
    for number in range(first, kills, KILLS_PER_FOLDER):
        spool = folder / f"spool-{seed}-{number}"
        shutil.rmtree(spool, ignore_errors=True)
        round_ = _Round(spool, Random(f"{seed}/{number}"))
        part = round_.run(min(KILLS_PER_FOLDER, kills - number))
        total.add(part)
        done(part)
        shutil.rmtree(spool)
    return total


class _Round:
    """One folder, into which three writers write until they are killed, and go on."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random = folder, random
        self.template = sample_batches()[1].arrow
        self.next: dict[str, int] = dict.fromkeys(WRITERS, 0)
        self.killed = Killed()

    def run(self, kills: int) -> Killed:
        self.folder.mkdir(parents=True)
        follower = _fork(self._follow)
        try:
            while self.killed.kills < kills:
                count = min(self.random.choice((1, 1, 2, 3)), kills - self.killed.kills)
                self._kill_some(self.random.sample(WRITERS, count))
                self._check()
            recover(self.folder, fsync=False)
            self._check()
            (self.folder / "stop").touch()
            followed = follower.rest()
        except BaseException:
            follower.kill()
            raise
        finally:
            code = follower.wait()
        if code != 0:
            raise Lost(f"a reader that followed {self.folder} failed")
        if Counter(followed) != Counter(self._stored()):
            raise Lost(f"a reader that followed {self.folder} missed something, or had something twice")
        return self.killed

    def _kill_some(self, writers: list[str]) -> None:
        settings = {
            "rotate_bytes": self.random.choice((1, 20_000, 60_000, 2**30)),
            "fsync": self.random.choice(("never", "rotate", "rotate", "batch")),
        }
        running = {name: _fork(self._write, name, self.next[name], settings) for name in writers}
        recovery = _fork(self._recover) if self.random.random() < 0.3 else None
        try:
            if self.random.random() < 0.8:
                for process in running.values():
                    process.wait_for_a_line()
            time.sleep(self.random.uniform(0.0, self.random.choice((0.005, 0.03, 0.1))))
        finally:
            for process in (*running.values(), *([recovery] if recovery else [])):
                process.kill()
        for name, process in running.items():
            said = process.rest()
            self.killed.kills += 1
            self.killed.at["while starting" if not said else "while writing"] += 1
            self.killed.acknowledged += len(said)
            if said:
                self.next[name] = int(said[-1].split(":")[1]) + 1
            if process.wait() != -signal.SIGKILL:
                raise Lost(f"writer {name} of {self.folder} failed")
        if recovery is not None:
            recovery.rest()
            self.killed.at["while recovering"] += 1
            if recovery.wait() not in (0, -signal.SIGKILL):
                raise Lost(f"a recovery of {self.folder} failed")

    def _check(self) -> None:
        found: dict[str, list[int]] = {name: [] for name in WRITERS}
        for rollout_id in self._stored():
            name, number = rollout_id.split(":")
            found[name].append(int(number))
        for name, numbers in found.items():
            if sorted(numbers) != list(range(len(numbers))):
                raise Lost(f"writer {name} of {self.folder} stored {sorted(numbers)}")
            in_flight = len(numbers) - self.next[name]
            if in_flight not in (0, 1):
                raise Lost(
                    f"{self.next[name]} batches of {name} in {self.folder} were acknowledged, {len(numbers)} are there"
                )
            self.killed.in_flight_kept += in_flight
            self.next[name] = len(numbers)

    def _stored(self) -> list[str]:
        with SpoolReader(self.folder, duplicates="keep") as reader:
            return [name for batch in reader for name in batch.rollout_ids]

    def _write(self, name: str, number: int, settings: dict, say: Callable[[str], None]) -> None:
        index = self.template.schema.get_field_index("rollout_id")
        writer = SpoolWriter(self.folder, name, **settings)
        while True:
            ids = pa.array([f"{name}:{number}"])
            writer.append(
                RolloutBatch.from_arrow(self.template.set_column(index, self.template.schema.field(index), ids))
            )
            say(f"{name}:{number}")
            number += 1

    def _recover(self, say: Callable[[str], None]) -> None:
        while True:
            recover(self.folder, fsync=False)

    def _follow(self, say: Callable[[str], None]) -> None:
        stop = self.folder / "stop"
        reader = SpoolReader(self.folder, follow=True, stop=stop.exists, poll_seconds=0.002, duplicates="keep")
        for batch in reader:
            for rollout_id in batch.rollout_ids:
                say(rollout_id)


class _Process:
    """A fork of this process, and what it says line by line."""

    def __init__(self, pid: int, said: int) -> None:
        self.pid, self.said = pid, said
        self.heard = b""

    def wait_for_a_line(self) -> None:
        """Errors: Lost where none comes; ticks are counted, since this process may itself be stopped for a while."""
        ticks = 0
        while b"\n" not in self.heard:
            if select.select([self.said], [], [], _TICK)[0]:
                piece = os.read(self.said, 1 << 16)
                if not piece:
                    return
                self.heard += piece
            elif (ticks := ticks + 1) * _TICK > HANG_SECONDS:
                raise Lost("a writer acknowledged nothing and did not end")

    def rest(self) -> list[str]:
        """All whole lines up to its end."""
        while piece := os.read(self.said, 1 << 16):
            self.heard += piece
        os.close(self.said)
        return self.heard[: self.heard.rfind(b"\n") + 1].decode().splitlines()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _fork(work: Callable[..., None], *arguments: object) -> _Process:
    heard, said = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: a fork beside threads, which sleep here
        pid = os.fork()
    if pid:
        os.close(said)
        return _Process(pid, heard)
    code = 1
    try:
        os.close(heard)
        work(*arguments, lambda line: os.write(said, f"{line}\n".encode()))
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
