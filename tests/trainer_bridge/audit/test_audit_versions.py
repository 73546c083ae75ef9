"""Policy versions in an audit: ages of tokens however units are cut and added up, and rows that stay few."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolWriter
from keptset.trainer_bridge.audit import AuditOptions, AuditReport, audit
from keptset.trainer_bridge.audit.checks.versions import Versions
from keptset.trainer_bridge.audit.exact_sum import ExactSum
from keptset.trainer_bridge.audit.unit_audit import audited
from keptset.trainer_bridge.audit.version_table import MAX_ROWS, VersionTable
from keptset.trainer_bridge.sampled_tokens import UNKNOWN_VERSION

Ints = NDArray[np.int64]
TOKENS = 6
BOUND = 3


def table(versions: Ints) -> VersionTable[ExactSum]:
    made = VersionTable(ExactSum)
    made.see(versions)
    for counts, where in made.groups(versions):
        counts.add(versions[where].astype(np.float64))
    return made


def rows_of(versions: Ints) -> list[tuple[int, int, ExactSum]]:
    """By the definition: the least k, tried one after the other."""
    known = versions[versions >= 0]
    k = next(k for k in range(32) if len(set((known >> k).tolist())) <= MAX_ROWS)
    rows = []
    for row in sorted(set((known >> k).tolist())):
        here = known[known >> k == row]
        rows.append((int(here.min()), int(here.max()), ExactSum(len(here), int(here.sum()) << 32)))
    unknown = len(versions) - len(known)
    return [*([(-1, -1, ExactSum(unknown, -unknown << 32))] if unknown else []), *rows]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), bits=st.integers(1, 31), parts=st.integers(1, 9), some_unknown=st.booleans())
def test_rows_of_versions_are_the_same_however_they_are_cut_and_merged(
    seed: int, bits: int, parts: int, some_unknown: bool
) -> None:
    random = np.random.default_rng(seed)
    versions = random.integers(0, 2**bits, 1500) >> random.integers(0, bits, 1500)
    versions[random.random(1500) < 0.1 * some_unknown] = UNKNOWN_VERSION
    tables = [table(part) for part in np.split(versions, np.sort(random.integers(0, 1500, parts - 1)))]
    while len(tables) > 1:
        one, other = (tables.pop(int(random.integers(len(tables)))) for _ in range(2))
        one.merge(pickle.loads(pickle.dumps(other)))
        tables.append(one)
    expected = rows_of(versions)
    assert list(tables[0].rows()) == list(table(versions).rows()) == expected
    assert len(expected) <= MAX_ROWS + 1
    for first, last, counts in expected:
        assert tables[0].get(first) == tables[0].get(last) == counts


@pytest.fixture(scope="module")
def recorded(honest: Callable[..., RolloutBatch]) -> Callable[[Ints], RolloutBatch]:
    """`recorded(version_BT)`: responses of TOKENS tokens drawn by these versions, ascending in each; -1 unknown."""
    batch = honest(60, tokens=TOKENS)

    def of(version_BT: Ints) -> RolloutBatch:
        rows = [[None if v < 0 else v for v in row] for row in version_BT.tolist()]
        arrow = batch.arrow.slice(0, len(rows))
        at = arrow.schema.get_field_index("policy_versions")
        column = pa.array(rows, arrow.schema.field(at).type)
        return RolloutBatch.from_arrow(arrow.set_column(at, arrow.schema.field(at), column))

    return of


@dataclass
class Told:
    tokens: int = 0
    responses: int = 0
    largest: int = 0
    shown: tuple[tuple[str, int, str], ...] = ()
    lags: dict[int | None, float | None] | None = None


def by_hand(version_BT: Ints, bound: int) -> Told:
    """Token by token, after the definition."""
    newest, told = -1, Told()
    lags: dict[int | None, list[int]] = {}
    for row, versions in enumerate(version_BT.tolist()):
        newest = max(newest, *versions)
        lag = [newest - version for version in versions]
        for version, behind in zip(versions, lag, strict=True):
            lags.setdefault(None if version < 0 else version, []).append(behind)
        late = [behind for version, behind in zip(versions, lag, strict=True) if version >= 0 and behind > bound]
        told.tokens += len(late)
        told.largest = max(told.largest, *late, 0)
        if late:
            told.responses += 1
            oldest = newest - max(late)
            detail = f"version {oldest}, recorded when version {newest} had drawn"
            told.shown = (*told.shown, (f"rollout-{row}", versions.index(oldest), detail))[:3]
    told.lags = {v: None if v is None else sum(of) / len(of) for v, of in lags.items()}
    return told


def units(batch: RolloutBatch, cuts: Sequence[int], options: AuditOptions) -> Iterator[Versions]:
    for unit, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(batch)], strict=True)):
        check = Versions(options)
        half = (begin + end) // 2
        for number, (first, last) in enumerate(((begin, half), (half, end))):
            if last > first:
                piece = batch.slice(first, last - first)
                check.add(audited(piece, unit=unit, number=number, first_row=first - begin, stream="a"))
        yield check


@dataclass
class _Tables:
    """Of a report, what the check replaces."""

    versions: tuple[Any, ...] = ()


def told_by(check: Versions) -> Told:
    report: Any = _Tables()
    told = Told(lags={row.version: row.mean_lag for row in check.contribute(report).versions})
    for evidence in check.outcome().evidence:
        told.tokens, told.responses = evidence.count, evidence.responses
        told.largest = int(evidence.summary.rsplit(" ", 1)[1])
        told.shown = tuple((e.rollout_id, e.position or 0, e.detail) for e in evidence.examples)
    return told


@pytest.mark.parametrize("seed", range(12))
def test_ages_are_those_by_hand_however_units_are_cut_and_added_up(
    recorded: Callable[[Ints], RolloutBatch], seed: int
) -> None:
    random = np.random.default_rng(seed)
    drift = np.arange(60) * random.choice([-1, 0, 1]) // 4 + 20
    version_BT = np.sort(drift[:, None] + random.integers(0, 1 + seed % 7, (60, TOKENS)), axis=1)
    version_BT[random.random(60) < 0.1, :2] = -1
    batch, options = recorded(version_BT), AuditOptions(max_version_lag=BOUND)
    cuts = np.sort(random.choice(np.arange(1, 60), 5, replace=False)).tolist()
    expected = by_hand(version_BT, BOUND)
    settled, whole, late = Versions(options), Versions(options), Versions(options)
    for check in units(batch, cuts, options):
        settled.merge(check)
        settled.settle()
    parts = list(units(batch, cuts, options))
    for part in parts[3:]:
        late.merge(part)
    for part in parts[:3]:
        whole.merge(part)
    whole.merge(late)
    assert told_by(settled) == told_by(whole) == expected
    assert not settled._open


def test_what_lags_was_late_in_some_of_these(recorded: Callable[[Ints], RolloutBatch]) -> None:
    """Or the test before would compare nothing with nothing."""
    falling = np.repeat(np.arange(60, 0, -1)[:, None], TOKENS, axis=1)
    assert by_hand(falling, BOUND).responses == 60 - 1 - BOUND
    parts = list(units(recorded(falling), [20, 40], AuditOptions(max_version_lag=BOUND)))
    assert max(len(stream.shown) for part in parts for stream in part._open.values()) <= 3 * (BOUND + 2)


@pytest.fixture(scope="module")
def counter(honest: Callable[..., RolloutBatch], tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """Of a recorder that writes a step counter for the version: each of 2,400 tokens has its own."""
    folder = tmp_path_factory.mktemp("counter")
    batch = honest(60, tokens=40)
    at = batch.arrow.schema.get_field_index("policy_versions")
    field = batch.arrow.schema.field(at)
    column = pa.array(np.arange(2400).reshape(60, 40).tolist(), field.type)
    with SpoolWriter(folder / "spool", "writer") as writer:
        writer.append(RolloutBatch.from_arrow(batch.arrow.set_column(at, field, column)))
    return audit([folder / "spool"], AuditOptions(workers=1, max_version_lag=0))


def test_a_step_counter_for_a_version_makes_no_more_rows_than_the_cap(counter: AuditReport) -> None:
    rows = [(row.version, row.last_version, row.tokens) for row in counter.versions]
    assert rows == [(first, first + 15, 16) for first in range(0, 2400, 16)]
    # A response of versions v to v + 39 is recorded when v + 39 has drawn: lags 0 to 39, whatever the rows.
    (finding,) = [finding for finding in counter.findings if finding.kind.value == "staleness"]
    assert (finding.count, finding.responses) == (60 * 39, 60)
    mean = sum(row.tokens * (row.mean_lag or 0) for row in counter.versions) / 2400
    assert mean == pytest.approx(19.5)


def test_what_an_audit_holds_does_not_grow_with_the_versions(recorded: Callable[[Ints], RolloutBatch]) -> None:
    options, sizes = AuditOptions(max_version_lag=BOUND), []
    total = Versions(options)
    for unit in range(40):
        first = unit * 60 * TOKENS
        check = Versions(options)
        check.add(audited(recorded(first + np.arange(60 * TOKENS).reshape(60, TOKENS)), unit=unit, stream="a"))
        total.merge(check)
        total.settle()
        sizes.append(len(pickle.dumps(total)))
    assert max(sizes[20:]) < 1.3 * max(sizes[:10])
