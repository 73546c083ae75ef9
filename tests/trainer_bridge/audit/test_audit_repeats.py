"""Rows that repeat others, found in pieces, against the same done by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit import AuditOptions
from keptset.trainer_bridge.audit.planning import Plan, plan
from keptset.trainer_bridge.audit.reading import repeats
from keptset.trainer_bridge.audit.reading.key_table import KeyTable

ROWS, PART = 120, 12
Row = dict[str, Any]
KINDS = (FindingKind.CONFLICT, FindingKind.DUPLICATE, FindingKind.SEED_REUSED)


def spoilt(rows: list[Row], random: np.random.Generator) -> None:
    """Copies of earlier rows anywhere, some of them changed, and shared seeds, some of them among copies."""
    for at in range(1, len(rows)):
        if random.random() < 0.4:
            rows[at] = dict(rows[int(random.integers(at))])
            if random.random() < 0.3:
                rows[at]["finish_reason"] = "abort"
        if random.random() < 0.4:
            rows[at]["seed"] = int(random.integers(2000, 2012))
            rows[at]["rollout_id"] += "" if random.random() < 0.5 else f"-{at}"
    rows[5]["seed"] = rows[6]["rollout_id"] = None


def by_hand(rows: list[Row]) -> tuple[dict[FindingKind, list[tuple[int, str]]], list[int]]:
    """Row and detail of each repeat by kind, and the rows that do not count."""
    first_of: dict[str, int] = {}
    found: dict[FindingKind, list[tuple[int, str]]] = {kind: [] for kind in KINDS}
    copies = []
    for at, row in enumerate(rows):
        first = at if row["rollout_id"] is None else first_of.setdefault(row["rollout_id"], at)
        if first != at:
            copies.append(at)
            same = json.dumps(row, sort_keys=True) == json.dumps(rows[first], sort_keys=True)
            kind = FindingKind.DUPLICATE if same else FindingKind.CONFLICT
            found[kind].append((at, f"{place(at)}; the first is {place(first)}"))
    left = [at for at in range(len(rows)) if at not in copies and rows[at]["seed"] is not None]
    seeds = Counter(rows[at]["seed"] for at in left)
    seen: set[int] = set()
    uncounted = set(copies)
    for at in left:
        seed = rows[at]["seed"]
        if seeds[seed] > 1:
            found[FindingKind.SEED_REUSED].append((at, f"{place(at)}; its seed is that of {seeds[seed]} rows"))
            uncounted |= {at} if seed in seen else set()
            seen.add(seed)
    return found, sorted(uncounted)


def place(row: int) -> str:
    return f"writer-{row // PART:08d}.arrow part 0 row {row % PART}"


@pytest.mark.parametrize("seed", range(3))
def test_repeats_are_those_by_hand_however_few_are_held_at_once(
    honest: Callable[..., RolloutBatch],
    edited: Callable[..., RolloutBatch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    batch = edited(honest(ROWS, tokens=4), lambda rows: spoilt(rows, np.random.default_rng(seed)))
    with SpoolWriter(tmp_path / "spool", "writer") as writer:
        for begin in range(0, ROWS, PART):
            writer.append(batch.slice(begin, PART))
            writer.rotate()
    rows = batch.arrow.to_pylist()
    found, uncounted = by_hand(rows)
    assert all(len(places) > 3 for places in found.values())
    at_once = plan([tmp_path / "spool"], AuditOptions())
    monkeypatch.setattr(repeats, "FIRSTS_AT_ONCE", 4)
    monkeypatch.setattr(KeyTable.__init__, "__defaults__", (240,))
    for planned in (at_once, plan([tmp_path / "spool"], AuditOptions())):
        told(planned, rows, found)
        assert [row + PART * unit.number for unit in planned.units for row in unit.uncounted.tolist()] == uncounted


def told(planned: Plan, rows: list[Row], found: dict[FindingKind, list[tuple[int, str]]]) -> None:
    assert {evidence.kind: evidence.count for evidence in planned.repeats} == {k: len(at) for k, at in found.items()}
    for evidence in planned.repeats:
        for example, (at, detail) in zip(evidence.examples, found[evidence.kind], strict=False):
            assert example.rollout_id == rows[at]["rollout_id"]
            folder = planned.inputs[0].shown.removesuffix("writer-00000000.arrow")
            assert example.detail.replace(folder, "") == detail
