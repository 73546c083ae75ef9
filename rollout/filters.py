"""min_p, top_k and top_p on one row: which candidates stay, without sorting more of the row than decides it.

    min_p   w >= min_p, where w = exp((z - max z) / T) and so max w = 1
    top_k   the k first in the order (z descending, id ascending)
    top_p   while the mass before a candidate, in that order, is < top_p * W; W: mass of what is left

Every filter returns positions, ascending, into the candidates it was given; candidates lie in ascending id order, so
ties go to the lower position. Order comes from the logits z, masses from the weights w (float64).

Legend: C candidates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keptset.schemas.sampling_params import SamplingParams

FILTER_ORDER = "temperature,min_p,top_k,top_p"
"""Order in which the settings act, as recorded with every batch."""

Float64 = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating]
Positions = npt.NDArray[np.int64]

TIE_SLACK = 1e-12
"""Masses closer than this, relative, count as equal, so that rounding in exp and sums does not decide an exact tie."""
SORT_AT_MOST = 2048
"""Candidates that are sorted at once; more are first narrowed by their bits."""
_TOP = 512
"""First guess at how many of the largest logits hold the mass that top_p asks for. A second, larger one did not pay."""
_BITS = 10
"""Bits of the weight looked at per narrowing step."""
_OCTAVES = 64
"""Weights below 2**-64 share a bin of the first step: together they hold less than any bound's rounding."""
_MANTISSA = 52
_FIRST_KEY = (1023 - _OCTAVES) << _BITS
"""Leading bits of 2**-64 as a float64."""


def keep(z_C: Floats, w_C: Float64, total: float, params: SamplingParams) -> Positions | None:
    """Positions that min_p, top_k and top_p leave, ascending; None: all.

    The candidates may be only the top part of a row, as long as it holds all that the first filter keeps. `total` is
    the mass of the whole row, which top_p refers to where it is the first. -inf logits have w = 0 and never stay,
    unless None is returned.
    """
    kept: Positions | None = None
    if params.min_p > 0:
        kept = np.flatnonzero(w_C >= params.min_p * (1 - TIE_SLACK))
    if 0 < params.top_k < (len(z_C) if kept is None else len(kept)):
        if kept is None and params.top_p < 1 and len(z_C) <= SORT_AT_MOST:  # one sort for both
            first = _in_order(z_C)[: params.top_k]
            mass_through = np.cumsum(w_C[first])  # -inf logits come last, and add nothing to it
            return np.sort(first[: _count_below(mass_through, params.top_p * mass_through[-1] * (1 - TIE_SLACK))])
        kept = keep_top_k(z_C, params.top_k) if kept is None else kept[keep_top_k(z_C[kept], params.top_k)]
        if not w_C[kept].all():
            kept = kept[z_C[kept] > -np.inf]
    if params.top_p < 1:
        if params.min_p > 0 or params.top_k > 0:
            total = float((w_C if kept is None else w_C[kept]).sum())
        bound = params.top_p * total * (1 - TIE_SLACK)
        kept = keep_top_p(z_C, w_C, bound) if kept is None else kept[keep_top_p(z_C[kept], w_C[kept], bound)]
    return kept


def keep_top_k(z_C: Floats, k: int) -> Positions:
    """Positions of the k first, ascending; k < C."""
    near = top_superset(z_C, k)
    if near is not None and len(near) < len(z_C):
        return near[keep_top_k(z_C[near], k)] if k < len(near) else near
    threshold = np.partition(z_C, len(z_C) - k)[len(z_C) - k]
    stays = z_C > threshold
    tied = np.flatnonzero(z_C == threshold)
    stays[tied[: k - np.count_nonzero(stays)]] = True
    return np.flatnonzero(stays)


def keep_top_p(z_C: Floats, w_C: Float64, bound: float) -> Positions:
    """Positions whose mass before them is < bound, ascending; at least one."""
    if len(z_C) <= SORT_AT_MOST:
        return _keep_by_sorting(z_C, w_C, bound)
    near = top_superset(z_C, _TOP)
    if near is not None and len(near) <= SORT_AT_MOST and w_C[near].sum() >= bound:
        return near[_keep_by_sorting(z_C[near], w_C[near], bound)]
    return _keep_by_bits(z_C, w_C, bound)


def top_superset(z_C: Floats, k: int) -> Positions | None:
    """Positions of the k largest and, in a typical row, few others; None where k is too large a part for that.

    Candidates are dealt into at least 4 k classes. The k-th largest of the class maxima is exceeded or equalled by at
    least k candidates, one in each of k classes, so every one of the k largest reaches it.
    """
    members = min(64, len(z_C) // (4 * k))
    if members < 4:
        return None
    classes = len(z_C) // members
    top = z_C[: members * classes].reshape(members, classes).max(axis=0)
    threshold = np.partition(top, classes - k)[classes - k]
    return np.flatnonzero(z_C >= threshold)


def _keep_by_sorting(z_C: Floats, w_C: Float64, bound: float) -> Positions:
    order = _in_order(z_C)
    return np.sort(order[: _count_below(np.cumsum(w_C[order]), bound)])


def _in_order(z_C: Floats) -> Positions:
    return np.argsort(-z_C, kind="stable")


def _count_below(mass_through: Float64, bound: float) -> int:
    """How many candidates have a mass < bound before them, from the mass through each; at least one."""
    return 1 + int(np.searchsorted(mass_through[:-1], bound))


def _keep_by_bits(z_C: Floats, w_C: Float64, bound: float) -> Positions:
    """Radix selection: the bits of a positive float64 grow with it, so leading bits bin the weights in order.

    Bins above the one in which the mass reaches the bound stay whole, bins below go; that one is narrowed again, and
    sorted once it is small or cannot be split.
    """
    stays = np.zeros(len(z_C), np.bool_)
    shift = _MANTISSA - _BITS
    zone: Positions | None = None
    key_C = np.maximum((w_C.view(np.int64) >> shift) - _FIRST_KEY, 0)
    weight_C = w_C
    while True:
        mass_through = np.cumsum(np.bincount(key_C, weights=weight_C)[::-1])
        crossing = min(int(np.searchsorted(mass_through, bound)), len(mass_through) - 1)
        if crossing:
            bound -= mass_through[crossing - 1]
        split = len(mass_through) - 1 - crossing
        above, at = key_C > split, np.flatnonzero(key_C == split)
        if zone is None:
            stays, zone = above, at
        else:
            stays[zone[above]] = True
            zone = zone[at]
        shift -= _BITS
        if len(zone) <= SORT_AT_MOST or shift < 0:
            break
        weight_C = w_C[zone]
        key_C = (weight_C.view(np.int64) >> shift) & ((1 << _BITS) - 1)
    stays[zone[_keep_by_sorting(z_C[zone], w_C[zone], bound)]] = True
    return np.flatnonzero(stays)
