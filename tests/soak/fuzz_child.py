"""Tries inputs on one reader after the other, until one ends this process. Run by `fuzz.py`.

    fuzz_child.py WORK_FOLDER SEED < jobs

Each line of standard input is a job, `reader start stop`; each line of standard output is JSON: an input with a fault,
or what became of a job. WORK_FOLDER/progress holds the number of the input being tried.
"""

from __future__ import annotations

import json
import mmap
import resource
import struct
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from targets import target
from trial import REFUSALS, Fault, Target

MEMORY_BYTES = 6 * 2**30
"""Of addresses. A length that lies may ask for more than there is; it must not get it."""


def random_for(seed: int, reader: str, number: int) -> Random:
    """What the input of this number is made from."""
    return Random(f"{seed}/{reader}/{number}")


def run(reader: Target, seed: int, start: int, stop: int, progress: mmap.mmap) -> dict[str, int]:
    outcomes: Counter[str] = Counter()
    for number in range(start, stop):
        struct.pack_into("<q", progress, 0, number)
        data = reader.make(random_for(seed, reader.name, number))
        try:
            outcomes[reader.take(data)] += 1
        except REFUSALS as error:
            outcomes[type(error).__name__] += 1
        except Fault as fault:
            tell({"fault": str(fault), "number": number})
        except Exception:  # noqa: BLE001 - whatever else comes out of a reader is what is looked for
            tell({"fault": traceback.format_exc(limit=-6), "number": number})
    return dict(outcomes)


def tell(entry: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(entry) + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    readers: dict[str, Target] = {}
    with (folder / "progress").open("r+b") as file, mmap.mmap(file.fileno(), 8) as progress:
        for line in sys.stdin:
            name, start, stop = line.split()
            if name not in readers:
                readers[name] = target(name, folder / name)
            tell({"outcomes": run(readers[name], seed, int(start), int(stop), progress)})


if __name__ == "__main__":
    main()
