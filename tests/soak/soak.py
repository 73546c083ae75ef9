"""Every reader against mutated inputs, and the spool against killed writers. `make soak` runs it at full size.

    soak.py [--inputs N] [--kills N] [--seed N] [--children N] [--work FOLDER] [--report FILE] [--reader NAME ...]

A run that was ended goes on where it was, save for readers whose code is another by now, or all of them where that of
this trial is. It ends with 1 if there was a fault; the inputs of faults lie in FOLDER/faults, each with the reason
beside it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fuzz import ENOUGH_FAULTS, Job, Tried, fuzz
from kills import KILLS_PER_FOLDER, Killed, Lost, kill_writers
from targets import READERS

REPOSITORY = Path(__file__).resolve().parents[2]
INPUTS, KILLS = 100_000, 200
ADAPTERS = {
    "vllm": {"vllm.py"},
    "sglang": {"sglang.py"},
    "fastdeploy": {"fastdeploy.py"},
    "slime": {"slime.py", "sglang.py"},
    "prime_rl": {"prime_rl.py"},
    "transformers": {"transformers.py", "dense_scores.py"},
}
"""Of `schemas/adapters`: what each of these readers runs beside what all of them do."""
SPOOL = "spool-open"
"""The reader whose code is that of the kills, too."""
_JOB = 500
"""Inputs of a job: what is done again at most when a run goes on."""


class Progress:
    """What was done so far, in a file."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.readers: dict[str, Tried] = {}
        self.jobs: dict[str, list[int]] = {}
        self.killed = Killed()
        self.lost: str | None = None
        self.seconds = 0.0
        self._seed, self._code = seed, {name: code_digest(name) for name in READERS}
        self._since = time.monotonic()
        if path.exists():
            self._load(json.loads(path.read_text(encoding="utf-8")))

    def _load(self, stored: dict[str, Any]) -> None:
        if stored["seed"] != self._seed:
            tell("seed is another than that of the run before: starting over")
            return
        other = {name for name, digest in self._code.items() if stored["code"].get(name) != digest}
        if other:
            tell(f"code is another than that of the run before: starting over with {', '.join(sorted(other))}")
        self.readers = {
            name: Tried(entry["inputs"], Counter(entry["outcomes"]), entry["faults"])
            for name, entry in stored["readers"].items()
            if name not in other
        }
        self.jobs = {name: starts for name, starts in stored["jobs"].items() if name not in other}
        self.seconds = stored["seconds"] if other != set(READERS) else 0.0
        if SPOOL not in other:
            self.lost = stored["lost"]
            self.killed = Killed(**{**stored["killed"], "at": Counter(stored["killed"]["at"])})

    def save(self) -> None:
        now = time.monotonic()
        self.seconds, self._since = self.seconds + now - self._since, now
        stored = {
            "seed": self._seed,
            "code": self._code,
            "readers": {name: vars(tried) for name, tried in self.readers.items()},
            "jobs": self.jobs,
            "killed": vars(self.killed),
            "lost": self.lost,
            "seconds": self.seconds,
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(stored), encoding="utf-8")
        temporary.replace(self.path)

    def add_job(self, job: Job, tried: Tried) -> None:
        self.readers.setdefault(job.reader, Tried()).add(tried)
        self.jobs.setdefault(job.reader, []).append(job.start)
        self.save()

    def add_kills(self, part: Killed) -> None:
        self.killed.add(part)
        self.save()

    def left(self, readers: Sequence[str], inputs: int) -> list[Job]:
        """Jobs that were not done, in turns, so that a run that is ended tried each reader about as often."""
        done = {name: set(self.jobs.get(name, [])) for name in readers}
        return [
            Job(name, start, min(start + _JOB, inputs))
            for start in range(0, inputs, _JOB)
            for name in readers
            if start not in done[name]
        ]


def code_digest(reader: str) -> str:
    """Of what a reader runs, and of what tries it."""
    schemas = REPOSITORY / "schemas"
    here = Path(__file__).parent
    code = {*schemas.rglob("*.py"), *here.glob("*.py")} - {*here.glob("test_*.py")}
    adapters = {path for path in code if path.parent == schemas / "adapters"}
    of_some = set().union(*ADAPTERS.values())
    code -= {path for path in adapters if reader not in ADAPTERS or path.name in of_some - ADAPTERS[reader]}
    state = hashlib.sha256()
    for path in sorted(code):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(progress: Progress, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was done, as docs/soak.json tells it."""
    whole = progress.killed.kills >= arguments.kills and all(
        progress.readers.get(name, Tried()).inputs >= arguments.inputs for name in arguments.reader
    )
    standard = (arguments.inputs, arguments.kills, arguments.seed, arguments.reader) == (INPUTS, KILLS, 0, [*READERS])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": "make soak" if standard else " ".join(["python", *sys.argv]),
        "complete": whole,
        "asked": {"inputs_per_reader": arguments.inputs, "kills": arguments.kills},
        "minutes": round(progress.seconds / 60, 1),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
        "readers": {
            name: {
                "inputs": tried.inputs,
                "code": code_digest(name),
                "faults": len(tried.faults),
                "outcomes": dict(sorted(tried.outcomes.items())),
            }
            for name in arguments.reader
            if (tried := progress.readers.get(name)) is not None
        },
        "kills": {**vars(progress.killed), "faults": int(progress.lost is not None)},
    }


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="per reader")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "soak")
    parser.add_argument("--report", type=Path, default=REPOSITORY / "docs" / "soak.json")
    parser.add_argument("--reader", action="append", choices=READERS, help="this one alone; may be repeated")
    found = parser.parse_args(arguments)
    found.reader = found.reader or [*READERS]
    return found


def main() -> int:
    arguments = parsed(None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments.work.mkdir(parents=True, exist_ok=True)
    progress = Progress(arguments.work / "progress.json", arguments.seed)
    try:
        run(progress, arguments)
    except KeyboardInterrupt:
        tell("ended before it was done; the same command goes on")
    finally:
        progress.save()
        arguments.report.write_text(json.dumps(report(progress, arguments), indent=2) + "\n", encoding="utf-8")
    faults = [fault for tried in progress.readers.values() for fault in tried.faults]
    for fault in [*faults, *([progress.lost] if progress.lost else [])]:
        tell(f"fault: {fault}")
    tell(
        f"{sum(tried.inputs for tried in progress.readers.values())} inputs, {progress.killed.kills} kills: "
        f"{len(faults) + bool(progress.lost)} faults"
    )
    return 1 if faults or progress.lost or not report(progress, arguments)["complete"] else 0


def run(progress: Progress, arguments: argparse.Namespace) -> None:
    try:
        first = progress.killed.kills // KILLS_PER_FOLDER * KILLS_PER_FOLDER
        kill_writers(arguments.kills, seed=arguments.seed, folder=arguments.work, first=first, done=progress.add_kills)
    except Lost as error:
        progress.lost = str(error)
    jobs = [
        job
        for job in progress.left(arguments.reader, arguments.inputs)
        if len(progress.readers.get(job.reader, Tried()).faults) < ENOUGH_FAULTS
    ]
    fuzz(
        jobs,
        seed=arguments.seed,
        children=arguments.children,
        faults=arguments.work / "faults",
        done=progress.add_job,
    )


if __name__ == "__main__":
    sys.exit(main())
