"""One unit of work: its batches, judged row by row, counted by every check.

Legend: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import DamagedFile, SchemaError, StorageError
from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation import SEVERITIES, inspect
from keptset.schemas.validation.numbers import SMALLEST_LOGPROB
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.options import AuditOptions, BatchScorer
from keptset.trainer_bridge.audit.partial import Partial
from keptset.trainer_bridge.audit.pieces import pieces
from keptset.trainer_bridge.audit.planning import Unit
from keptset.trainer_bridge.audit.reading.files import read

TOLERATED = (FindingKind.DISTRIBUTION, FindingKind.MEMBER, FindingKind.LOGPROB)
"""What a fault of the recorder looks like from outside: rows with these errors alone are scored."""


def audit_unit(unit: Unit, options: AuditOptions) -> Partial:
    """Everything that a unit of work adds to an audit.

    A file that turns out to be damaged counts up to there, and is named.
    """
    partial = Partial.start(options)
    try:
        for batch in audited_batches(unit, options):
            partial.add(batch)
    except (DamagedFile, SchemaError, StorageError) as error:
        partial.damaged[unit.file.shown] = str(error)
    return partial


def audited_batches(unit: Unit, options: AuditOptions) -> Iterator[AuditedBatch]:
    """The batches of a unit as the checks see them. Errors: as `read`."""
    scorer = scorer_of(options)
    first_row = 0
    for number, batch in enumerate(pieces(batches_of(unit, options))):
        begin, end = np.searchsorted(unit.uncounted, [first_row, first_row + len(batch)])
        yield audited(
            batch,
            unit=unit.number,
            number=number,
            first_row=first_row,
            stream=unit.file.stream,
            uncounted=unit.uncounted[begin:end] - first_row,
            scorer=scorer,
        )
        first_row += len(batch)


def batches_of(unit: Unit, options: AuditOptions) -> Iterator[RolloutBatch]:
    """The rows of a unit that are looked at, as they come from its file. Errors: as `read`."""
    batches = read(unit.file, unit.first, unit.last, start=unit.start, unguarded=options.unguarded)
    if unit.chosen is None:
        yield from batches
        return
    first_row = 0
    for batch in batches:
        begin, end = np.searchsorted(unit.chosen, [first_row, first_row + len(batch)])
        if end > begin:
            yield batch.take(unit.chosen[begin:end] - first_row)
        first_row += len(batch)


def audited(
    batch: RolloutBatch,
    *,
    unit: int = 0,
    number: int = 0,
    first_row: int = 0,
    stream: str = "",
    uncounted: NDArray[np.int64] | None = None,
    scorer: BatchScorer | None = None,
) -> AuditedBatch:
    """A batch, judged. `uncounted` are its rows that repeat others. Errors: SchemaError where it is not valid Arrow."""
    seen = inspect(batch, repeats=False)
    sound_B = np.ones(len(batch), bool)
    counted_B = _draws_something(batch)
    for kind, rows in seen.rows.items():
        if SEVERITIES.get(kind, Severity.ERROR) is Severity.ERROR:
            sound_B[rows] = False
            if kind not in TOLERATED:
                counted_B[rows] = False
    if uncounted is not None:
        counted_B[uncounted] = False
    counted_B &= _finite_logprobs(batch, seen.rows, counted_B)
    made = AuditedBatch(
        unit=unit,
        number=number,
        first_row=first_row,
        stream=stream,
        batch=batch,
        structure=seen.findings,
        rows_by_kind=seen.rows,
        sound_B=sound_B,
        counted_B=counted_B,
    )
    if scorer is None:
        return made
    return replace(made, scores=scorer.score(made.counted))


def _draws_something(batch: RolloutBatch) -> NDArray[np.bool_]:
    sampled = batch.sampled
    if sampled.values.all():
        return sampled.lengths > 0
    through = np.concatenate([[0], np.cumsum(sampled.values)])
    draws_B: NDArray[np.bool_] = through[sampled.offsets[1:]] > through[sampled.offsets[:-1]]
    return draws_B


def _finite_logprobs(
    batch: RolloutBatch, rows: Mapping[FindingKind, NDArray[np.integer]], candidates_B: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """False for rows whose b is no number, or an engine's marker for missing."""
    usable_B = np.ones(len(batch), bool)
    for row in np.asarray(rows.get(FindingKind.LOGPROB, ())).tolist():
        if candidates_B[row]:
            one = batch.slice(row, 1)
            b, sampled = one.behavior_logprobs, one.sampled
            assert b is not None, "a row without b has no finding about it"
            values = b.values[sampled.values]
            usable_B[row] = bool(np.isfinite(values).all() and (values > SMALLEST_LOGPROB).all())
    return usable_B


def scorer_of(options: AuditOptions) -> BatchScorer | None:
    """What scores, made once in each process; None where nothing does."""
    return None if options.scorer is None else _scorer(options.scorer)


@lru_cache(maxsize=1)
def _scorer(make: Callable[[], BatchScorer]) -> BatchScorer:
    return make()
