"""How far recorded b lies from what it should be, and which responses ask for an explanation.

    r_t = |b_t - expected_t|        infinite where the token lies outside its recorded set

A token is compared if it could have differed: one id to choose from, with b = 0, says nothing. A response asks for an
explanation if enough of its compared tokens are off by more than float32 paths are; median r over those tokens is then
its residual, and what an explanation has to beat. Penalties, for one, change only tokens whose sets hold seen ids: the
median over all tokens would not see them.

With fewer such tokens a response decides nothing, and an explanation is tried all the same: it may join a fault that is
named elsewhere. A fault that reaches few tokens of a response is there as it is in the others.

Legend: T sampled tokens of a batch, B responses, A affected tokens of one response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.sampled_tokens import Bools, Ints, SampledTokens

Floats = NDArray[np.float64]

TOKEN_FLOOR = 1e-4
"""Nats. Paths over the same float32 weights differ by some 1e-6 in the mean; rarely does a token reach this."""
MIN_AFFECTED = 3
"""Affected tokens below which a response is not judged: with fewer, something or other always fits."""
OUTSIDE = 1.0
"""Nats that stand for an infinite r in a median, so that half of it still asks something of an explanation."""
MIN_SHARE = 0.1
"""Of the compared tokens; fewer are the tail of honest differences."""
STRONG = 8
"""An explanation that leaves one part in this many of the residual is no chance. Any must leave at most half of it."""


@dataclass(frozen=True, kw_only=True)
class Affected:
    """One response whose b asks for an explanation."""

    row: int
    """Of the batch."""
    tokens: Ints
    """All its tokens, as indices into T."""
    at_A: Ints
    """Its affected tokens, as indices into `tokens`."""
    residual: float
    """Median r over them, with OUTSIDE for an infinite one."""
    few: bool
    """So few that it decides nothing."""


def residuals(tokens: SampledTokens, expected_T: Floats) -> tuple[Floats, Bools]:
    """r [T], NaN where it is not known, and which tokens are compared."""
    b_T = tokens.behavior_logprobs_T.astype(np.float64)
    residual_T = np.abs(b_T - expected_T)
    chosen_T = (tokens.kept_sizes_T != 1) | (residual_T > 0)
    return residual_T, ~np.isnan(residual_T) & chosen_T


def affected_responses(tokens: SampledTokens, residual_T: Floats, compared_T: Bools) -> list[Affected]:
    """Those that ask for an explanation, in the order of the batch."""
    num_rows = tokens.batch.num_responses
    off_T = compared_T & (residual_T > TOKEN_FLOOR)
    number_B, compared_B = (np.bincount(tokens.row_T[of_T], minlength=num_rows) for of_T in (off_T, compared_T))
    enough_B = (number_B >= MIN_AFFECTED) & (number_B >= MIN_SHARE * compared_B)
    rows = np.flatnonzero(number_B > 0)
    bounds = np.searchsorted(tokens.row_T, [rows, rows + 1])
    found = []
    for row, begin, end in zip(rows.tolist(), *bounds.tolist(), strict=True):
        at = np.flatnonzero(off_T[begin:end])
        off = residual_T[begin:end][at]
        found.append(
            Affected(
                row=row,
                tokens=np.arange(begin, end),
                at_A=at,
                residual=float(np.median(np.where(np.isinf(off), OUTSIDE, off))),
                few=not enough_B[row],
            )
        )
    return found


def misfit(affected: Affected, b_T: Floats, explained_T: Floats) -> float:
    """Median |b - explained b| over the affected tokens to which the explanation applies; NaN where it applies to
    fewer than `MIN_AFFECTED` of more, or to less than half of them.

    An explanation must not disturb what fitted before, either: where it lies off by more over all tokens than over the
    affected ones, that counts.
    """
    off_T = np.abs(b_T[affected.tokens] - explained_T)
    applies_A = ~np.isnan(off_T[affected.at_A])
    if applies_A.sum() < max(min(MIN_AFFECTED, len(applies_A)), len(applies_A) / 2):
        return float("nan")
    everywhere = off_T[~np.isnan(off_T)]
    return float(max(np.median(off_T[affected.at_A][applies_A]), np.median(everywhere)))
