"""How many processes or threads make sense here."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path

_CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores this process may run on, within its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _share() or cores)


@lru_cache(maxsize=1)
def _share() -> int | None:
    """Cores of the container, as they were when it was asked first; None without a limit."""
    try:
        quota, period = _CPU_SHARE.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return None
