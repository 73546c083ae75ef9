"""Mutated inputs for every reader, tried in child processes: an abort, a hang, a foreign exception or a violation let
through is a fault, and its input is saved.

Children are kept and only made again after one died. An input is known by reader, seed and number; the parent makes it
again from these to save it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_child import random_for
from targets import target

HERE = Path(__file__).resolve().parent
HANG_SECONDS = 20.0
"""Longest time for one input, in which the child was not stopped from outside; usual are milliseconds."""
_TICK = 0.25
ENOUGH_FAULTS = 10
"""Of one reader; the rest would be the same ones again."""


@dataclass
class Tried:
    """What became of one reader's inputs."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Tried) -> None:
        self.inputs += other.inputs
        self.outcomes += other.outcomes
        self.faults += other.faults


@dataclass(frozen=True)
class Job:
    """Inputs start to stop of a reader."""

    reader: str
    start: int
    stop: int


def fuzz(
    jobs: Sequence[Job],
    *,
    seed: int,
    children: int,
    faults: Path,
    hang_seconds: float = HANG_SECONDS,
    done: Callable[[Job, Tried], None] = lambda *_: None,
) -> dict[str, Tried]:
    """Work through the jobs, and say what became of each reader's inputs; those with a fault go to the folder `faults`.

    `done` is told of each job, one at a time.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    total: dict[str, Tried] = {job.reader: Tried() for job in jobs}
    lock = threading.Lock()
    errors: list[BaseException] = []
    running: list[Child] = []

    def work() -> None:
        with contextlib.ExitStack() as closing:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="keptset-fuzz-", dir=_memory())))
            child = closing.enter_context(contextlib.closing(Child(folder, seed, faults, hang_seconds)))
            running.append(child)
            try:
                while not errors:
                    job = waiting.get_nowait()
                    if len(total[job.reader].faults) >= ENOUGH_FAULTS:
                        continue
                    tried = child.work(job)
                    with lock:
                        total[job.reader].add(tried)
                        done(job, tried)
            except (queue.Empty, Ended):
                return
            except BaseException as error:  # noqa: BLE001 - handed on to the thread that waits
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(children)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        errors.append(error)
        for child in running:
            child.end()
        raise
    if errors:
        raise errors[0]
    return total


class Ended(Exception):
    """This run was ended; what a child was at does not count."""


def _memory() -> str | None:
    """A folder in memory, where the system has one: inputs live for a millisecond."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Child:
    """One child process at a time, made again where one died."""

    def __init__(self, folder: Path, seed: int, faults: Path, hang_seconds: float) -> None:
        self.folder, self.seed, self.faults, self.hang_seconds = folder, seed, faults, hang_seconds
        self.hung = self.ended = False
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        (folder / "progress").write_bytes(bytes(8))

    def work(self, job: Job) -> Tried:
        """Have a job done, by as many children as it takes."""
        tried = Tried()
        start = job.start
        while start < job.stop and len(tried.faults) < ENOUGH_FAULTS:
            if self.process is None:
                self._start()
            self._write_progress(start)
            assert self.process is not None and self.process.stdin is not None
            self.process.stdin.write(f"{job.reader} {start} {job.stop}\n")
            self.process.stdin.flush()
            for entry in self._entries():
                if "outcomes" in entry:
                    tried.outcomes.update(entry["outcomes"])
                    start = job.stop
                else:
                    tried.faults.append(self._save(job.reader, entry["number"], entry["fault"]))
            if self.ended:
                raise Ended
            if start < job.stop:  # the child is dead
                number = self._progress()
                tried.faults.append(self._save(job.reader, number, self._cause()))
                start = number + 1
        tried.inputs = start - job.start
        return tried

    def end(self) -> None:
        """Give up what is being done. May be called by another thread."""
        self.ended = True
        process = self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process = None

    def _start(self) -> None:
        for place in self.folder.iterdir():
            if place.is_dir():
                shutil.rmtree(place)
        self.errors = (self.folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fuzz_child.py"), str(self.folder), str(self.seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # what ends this run at a terminal is no fault of a reader
        )
        self.lines = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(self.process, self.lines), daemon=True).start()

    def _entries(self) -> Iterator[dict]:
        """What the child says of a job, up to its end or the child's."""
        assert self.process is not None
        number, quiet = -1, 0.0
        while True:
            try:
                line = self.lines.get(timeout=_TICK)
            except queue.Empty:
                # Time in which this process or the child was stopped does not count: ticks do.
                quiet = quiet + _TICK if number == self._progress() and not _is_stopped(self.process.pid) else 0.0
                number = self._progress()
                if quiet >= self.hang_seconds:
                    self.hung = True
                    self.process.send_signal(signal.SIGKILL)
                continue
            if not line:
                return
            entry = json.loads(line)
            yield entry
            if "outcomes" in entry:
                return

    def _cause(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        self.errors.seek(0)
        told = self.errors.read()[-4000:]
        self.errors.close()
        self.process = None
        cause = f"no end after {self.hang_seconds} s" if self.hung else f"the process ended with {code}"
        self.hung = False
        return f"{told}\n{cause}"

    def _save(self, reader: str, number: int, fault: str) -> str:
        """Keep the input and why; returns where."""
        self.faults.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            maker = target(reader, Path(folder))
            path = self.faults / f"{reader}-{self.seed}-{number}{maker.suffix}"
            path.write_bytes(maker.make(random_for(self.seed, reader, number)))
        path.with_name(path.name + ".txt").write_text(fault, encoding="utf-8")
        return f"{path}: {fault.strip().splitlines()[-1][:300]}"

    def _progress(self) -> int:
        return int(struct.unpack("<q", (self.folder / "progress").read_bytes())[0])

    def _write_progress(self, number: int) -> None:
        with (self.folder / "progress").open("r+b") as file:
            file.write(struct.pack("<q", number))


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False
