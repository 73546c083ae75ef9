"""Check of recorded kept distributions against themselves and against what was recorded beside them.

sum p = 1,  log p_y = b,  -sum p log p = H   with p the recorded kept distribution of a token

Legend: T tokens, N kept ids, C tokens of a block, M ids of a block.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from keptset.schemas.columns import LogprobDomain
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import AnyArray, BoolArray
from keptset.schemas.validation.collector import Collector, Indices
from keptset.schemas.validation.kept_sets import blocks, check_set_nulls, compare_lengths
from keptset.schemas.validation.numbers import can_be_spread
from keptset.schemas.validation.responses import is_text
from keptset.schemas.validation.tokens_view import SetColumn, TokenView

DISTRIBUTION_TOLERANCE = 1e-4
"""Engines normalise in float32: over a large vocabulary that is off by up to about 1e-5. Relative to H where H > 1."""


def check_distributions(view: TokenView, collector: Collector) -> None:
    """Kind `distribution`, and `nulls` and `lengths` of kept_logprobs beside kept_ids."""
    recorded_B = ~view.batch.column("kept_logprobs").is_null().to_numpy(zero_copy_only=False)
    recorded_B &= ~view.batch.column("kept_ids").is_null().to_numpy(zero_copy_only=False)
    if not recorded_B.any():
        return
    part = _only(view, np.flatnonzero(recorded_B))
    ids, logprobs = part.sets("kept_ids"), part.sets("kept_logprobs")
    if ids is None or logprobs is None:
        return
    check_set_nulls(part, logprobs, "kept_logprobs", collector)
    unequal = compare_lengths(part, ("kept_ids", ids), ("kept_logprobs", logprobs), collector)
    misplaced = _misplaced(ids, logprobs)
    if len(unequal) or len(misplaced):
        rows = np.searchsorted(part.offsets_B1, np.concatenate([unequal, misplaced]), side="right") - 1
        part = _only(part, np.setdiff1d(np.arange(len(part.rows_B)), rows))
        ids, logprobs = part.sets("kept_ids"), part.sets("kept_logprobs")
    if ids is None or logprobs is None or not len(ids.values_N):
        return
    _check_values(part, ids, logprobs, collector)


def _only(view: TokenView, rows: Indices) -> TokenView:
    if len(rows) == len(view.rows_B):
        return view
    return TokenView(view.batch.take(rows), view.rows_B[rows])


def _misplaced(ids: SetColumn, logprobs: SetColumn) -> Indices:
    """Tokens where only one of the two is null."""
    if ids.valid_T is None and logprobs.valid_T is None:
        return np.zeros(0, np.int64)
    ours, theirs = (np.True_ if column.valid_T is None else column.valid_T for column in (ids, logprobs))
    return np.flatnonzero(ours != theirs)


def _check_values(view: TokenView, ids: SetColumn, logprobs: SetColumn, collector: Collector) -> None:
    b, entropy = view.column("behavior_logprobs"), view.column("kept_entropy")
    kept_domain_T = np.broadcast_to(
        view.spread(is_text(view.batch, "logprob_domain", LogprobDomain.KEPT.value)), view.num_tokens
    )
    for start, stop in blocks(ids.offsets_T1):
        here = slice(start, stop)
        totals_C, entropies_C, own_C = _derive(ids, logprobs, view.token_ids_T, start, stop)
        off_C = view.sampled_T[here] & ~(np.abs(totals_C - 1) <= DISTRIBUTION_TOLERANCE)
        off = np.flatnonzero(off_C)
        collector.add(FindingKind.DISTRIBUTION, *view.locate(start + off), partial(_sum_detail, totals_C[off]))
        sound_C = view.sampled_T[here] & ~off_C
        for symbol, column, derived_C, where_C in (
            ("b", b, own_C, sound_C & kept_domain_T[here]),
            ("H", entropy, entropies_C, sound_C),
        ):
            if column is None:
                continue
            recorded_C = column.values_T[here]
            known_C = where_C if column.valid_T is None else where_C & column.valid_T[here]
            at = _differing(recorded_C, derived_C, known_C & ~_told_before(symbol, recorded_C))
            collector.add(
                FindingKind.DISTRIBUTION,
                *view.locate(start + at),
                partial(_value_detail, symbol, recorded_C[at], derived_C[at]),
            )


def _told_before(symbol: str, recorded_C: AnyArray) -> BoolArray:
    """Where a number cannot be what it is called, whatever it stands beside: a finding of the number alone."""
    told_C: BoolArray = np.isnan(recorded_C) if symbol == "b" else ~can_be_spread(recorded_C)
    return told_C


def _differing(recorded_C: AnyArray, derived_C: AnyArray, where_C: BoolArray) -> Indices:
    """Where a recorded number is not the one that follows from the recorded distribution, if one does."""
    allowed_C = DISTRIBUTION_TOLERANCE * np.maximum(1.0, np.abs(derived_C))
    with np.errstate(invalid="ignore"):
        equal_C = np.abs(recorded_C - derived_C) <= allowed_C  # False where either is NaN
    return np.flatnonzero(where_C & ~equal_C & ~np.isnan(derived_C))


def _sum_detail(totals: AnyArray, i: int) -> str:
    return f"the kept probabilities sum to {totals[i]:.7g}"


def _value_detail(symbol: str, recorded: AnyArray, derived: AnyArray, i: int) -> str:
    return f"{symbol} = {recorded[i]:.7g}, the kept distribution gives {derived[i]:.7g}"


def _derive(
    ids: SetColumn, logprobs: SetColumn, tokens_T: AnyArray, start: int, stop: int
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Sum of p, entropy, and log p of the sampled token (NaN where that is not exactly one member), each [C].

    A member of probability 0 makes the sum NaN: what was never possible is no member. An empty set counts as sound
    here: it has a finding of its own.
    """
    offsets_C1 = ids.offsets_T1[start : stop + 1].astype(np.int64)
    ids_M, logp_M = (column.values_N[offsets_C1[0] : offsets_C1[-1]] for column in (ids, logprobs))
    offsets_C1 -= offsets_C1[0]
    lengths_C = np.diff(offsets_C1)
    count = stop - start
    totals, entropies, own = np.ones(count), np.full(count, np.nan), np.full(count, np.nan)
    nonempty = np.flatnonzero(lengths_C)
    if not len(nonempty):
        return totals, entropies, own
    starts, stops = offsets_C1[nonempty], offsets_C1[nonempty + 1]
    with np.errstate(over="ignore", invalid="ignore"):
        p_M = np.exp(logp_M)
        entropies[nonempty] = -np.add.reduceat((p_M * logp_M).astype(np.float64), starts)  # NaN where some p = 0
        totals[nonempty] = np.add.reduceat(p_M.astype(np.float64), starts)
    totals[nonempty[np.isnan(entropies[nonempty])]] = np.nan
    hits = np.flatnonzero(np.repeat(tokens_T[start:stop], lengths_C) == ids_M)
    if len(hits) == len(nonempty) and ((hits >= starts) & (hits < stops)).all():  # one in each set
        own[nonempty] = logp_M[hits]
        return totals, entropies, own
    owners = np.searchsorted(offsets_C1, hits, side="right") - 1
    own[owners] = logp_M[hits]
    own[owners[1:][owners[1:] == owners[:-1]]] = np.nan  # twice in a set that is not sorted: which one is meant?
    return totals, entropies, own
