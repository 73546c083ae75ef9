"""Settings that make Paddle's CPU kernels use the machine. Call `configure` first, in every process that computes.

Paddle's matrix products come from a bundled Intel MKL that reads its environment at the first product: by default it
takes one thread, and on AMD its slowest code path. Float32 products on 2 cores of an AMD EPYC (Zen 5), Paddle 3.3.1
(2.6.2 is alike), in GFLOP/s:

    shape                      as is   MKL_DEBUG_CPU_TYPE=5   =7    =7, two threads
    [16,576] x [576,1536]         41                    109   258               469
    [2048,576] x [576,1536]       45                    112   250               346

Freed memory goes back to the system at once by default, so that every large result is paged in anew: with blocks kept,
the sum of two [2048,576] takes 0.09 ms instead of 1.8, and the product above a quarter less. oneDNN (FLAGS_use_mkldnn)
changed nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from keptset.schemas.errors import InvalidInput

THREADS = "MKL_NUM_THREADS"
CODE_PATH = "MKL_DEBUG_CPU_TYPE"

# What `configure` chose, as "name=value ...": child processes inherit it too, and so tell it from what a user set.
# Without it, each Ray worker that a driver starts would take the driver's threads for an order of the user's.
CHOSEN = "KEPTSET_CPU_SETTINGS"

# MKL's own numbers of its kernels. Intel processors choose well by themselves, and there the setting would do harm.
_AVX2, _AVX512 = "5", "7"
_AVX512_FLAGS = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}

# A container's share of the processor: microseconds of quota and of the period it is for, or "max".
_CPU_SHARE = Path("/sys/fs/cgroup/cpu.max")

# Parameters of glibc's mallopt, and the size below which freed memory stays with the process.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 1 << 30
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@dataclass(frozen=True, kw_only=True)
class CpuSettings:
    """What `configure` did."""

    environment: Mapping[str, str]
    """Values now in force."""
    from_user: tuple[str, ...]
    """Names whose value was there before and was left alone."""
    keeps_memory: bool
    """Whether freed memory now stays with the process."""


def configure(threads: int | None = None, environ: MutableMapping[str, str] = os.environ) -> CpuSettings:
    """Choose threads, code path and memory policy for Paddle on CPU. Values that a user has set win.

    `threads`: for this process; None is all cores it may use. Several processes on one machine should share its cores
    among them: two MKL processes of two threads each on two cores run many times slower than two of one.
    OMP_NUM_THREADS is neither read nor set: MKL puts its own variable first, Ray and Paddle set the other to 1 unasked.

    Errors: InvalidInput for threads < 1.
    """
    if threads is not None and threads < 1:
        raise InvalidInput(f"threads is {threads}; it must be >= 1, or None for all usable cores")
    wanted = {THREADS: str(threads or usable_cores())}
    code_path = _code_path(_cpu_info())
    if code_path:
        wanted[CODE_PATH] = code_path
    chosen = environ.get(CHOSEN, "").split()
    from_user = tuple(name for name in wanted if name in environ and f"{name}={environ[name]}" not in chosen)
    ours = {name: value for name, value in wanted.items() if name not in from_user}
    environ.update(ours)
    environ[CHOSEN] = " ".join(f"{name}={value}" for name, value in ours.items())
    return CpuSettings(
        environment={name: environ[name] for name in wanted},
        from_user=from_user,
        keeps_memory=_keep_freed_memory(environ),
    )


def usable_cores() -> int:
    """Cores this process may run on, within its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_SHARE.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return cores


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _code_path(cpu_info: str) -> str:
    """MKL's kernels for this processor, empty where it chooses well by itself.

    >>> _code_path("vendor_id : AuthenticAMD\\nflags : fpu avx avx2")
    '5'
    >>> _code_path("vendor_id : GenuineIntel\\nflags : fpu avx avx2")
    ''
    """
    fields = dict(line.split(":", 1) for line in cpu_info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(named.get("flags", "").split())
    if named.get("vendor_id") != "AuthenticAMD" or "avx2" not in flags:
        return ""
    return _AVX512 if flags >= _AVX512_FLAGS else _AVX2


def _keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Let glibc keep freed blocks; False where the user chose otherwise or the C library is another."""
    if any(name in environ for name in _MALLOC_VARIABLES) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(
        mallopt(parameter, _KEEP_BYTES) == 1 for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    )
