"""Timing for benchmarks: ways run in turn, so that a busy machine slows them alike, and the median of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from keptset.scripts.table import open_console


def interleaved(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each way over `rounds`, after one run that does not count.

    >>> interleaved({"nothing": lambda: None}, rounds=3)["nothing"] < 1
    True
    """
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_numbers(title: str, numbers: Mapping[str, float]) -> None:
    """Two columns: what, how much."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in numbers.items():
        table.add_row(name, f"{value:.4g}")
    open_console().print(table)
