"""Checks of the numbers recorded per sampled token: nulls, b, m, H, Var(log p), versions.

b <= 0 and b = 0 where |K| = 1;   m <= 0 and exp(m) >= top_p where top_p is the only filter that can end the set;
H >= 0;   Var(log p) >= 0.

Legend: T tokens.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow.compute as pc

from keptset.schemas.columns import LogprobDomain
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import AnyArray, BoolArray
from keptset.schemas.validation.collector import Collector, always
from keptset.schemas.validation.responses import is_text
from keptset.schemas.validation.tokens_view import SetColumn, TokenView

LARGEST_LOGPROB = np.float32(1e-6)
"""A log-probability may exceed 0 by the rounding of its float32 normaliser."""
SMALLEST_LOGPROB = np.float32(-1000.0)
"""At or below this it is an engine's marker for missing (-9999, the lowest float32), not a measurement."""
MASS_TOLERANCE = 2e-6
"""Share of the whole mass by which the kept mass may miss top_p: 1e-6 for a member whose mass before it lies on the
bound (implementations may differ there), 1e-6 for float32 in m."""
SMALLEST_SPREAD = np.float32(-1e-4)
"""H and Var(log p) may fall below 0 by the rounding of float32 sums: as far as the recorded distribution may be off."""

_NULL_WHERE_NOT_SAMPLED = (
    "behavior_logprobs",
    "log_kept_mass",
    "kept_entropy",
    "kept_logprob_var",
    "policy_versions",
)


def check_numbers(view: TokenView, sets: SetColumn | None, collector: Collector) -> None:
    """Kinds `nulls`, `logprob`, `mass`, `distribution`, `version_order`. `sets`: the kept sets, if any."""
    _check_nulls(view, collector)
    _check_logprobs(view, sets, collector)
    _check_beside(view, collector)
    _check_masses(view, collector)
    _check_versions(view, collector)


def _check_nulls(view: TokenView, collector: Collector) -> None:
    """Nothing may stand where nothing was sampled; b must stand wherever something was, if its response has any.

    Elsewhere null means unknown, as engines that report a number for some tokens only need it.
    """
    sampled_T = view.sampled_T
    all_sampled = bool(sampled_T.all())
    for name in _NULL_WHERE_NOT_SAMPLED:
        column = view.column(name)
        if column is None or (column.valid_T is None and all_sampled):
            continue
        valid_T = np.ones(view.num_tokens, bool) if column.valid_T is None else column.valid_T
        surplus = np.flatnonzero(valid_T & ~sampled_T)
        collector.add(
            FindingKind.NULLS, *view.locate(surplus), always(f"{name} is not null though the token was not sampled")
        )
        if name == "behavior_logprobs":
            holes_T = sampled_T & ~valid_T
            if column.known_T is not None:
                holes_T &= column.known_T
            holes = np.flatnonzero(holes_T)
            collector.add(
                FindingKind.NULLS, *view.locate(holes), always(f"{name} is null though the token was sampled")
            )


def _recorded(view: TokenView, valid_T: BoolArray | None, wrong_T: BoolArray) -> BoolArray:
    """Wrong values of sampled tokens that were recorded at all (nulls read NaN)."""
    wrong_T = wrong_T & view.sampled_T
    return wrong_T if valid_T is None else wrong_T & valid_T


def _check_logprobs(view: TokenView, sets: SetColumn | None, collector: Collector) -> None:
    column = view.column("behavior_logprobs")
    if column is None:
        return
    b_T = column.values_T
    plausible_T = can_be_logprob(b_T)
    if not plausible_T.all():
        tokens = np.flatnonzero(_recorded(view, column.valid_T, ~plausible_T))
        collector.add(FindingKind.LOGPROB, *view.locate(tokens), partial(_logprob_detail, "b", b_T[tokens]))
    if sets is None:
        return
    moved_T = (np.diff(sets.offsets_T1) == 1) & (b_T != 0) & plausible_T
    if moved_T.any():
        moved_T &= view.spread(is_text(view.batch, "logprob_domain", LogprobDomain.KEPT.value))
        singles = np.flatnonzero(_recorded(view, column.valid_T, moved_T))
        collector.add(
            FindingKind.LOGPROB,
            *view.locate(singles),
            lambda i: f"b = {b_T[singles[i]]:.7g}, though the kept set has one member",
        )


def can_be_logprob(values_T: AnyArray) -> BoolArray:
    """Where a value can be the log-probability of a sampled token. False for NaN and the infinities."""
    possible_T: BoolArray = (values_T <= LARGEST_LOGPROB) & (values_T > SMALLEST_LOGPROB)
    return possible_T


def can_be_spread(values_T: AnyArray) -> BoolArray:
    """Where a value can be an entropy or a variance. False for NaN."""
    possible_T: BoolArray = (values_T >= SMALLEST_SPREAD) & (values_T < np.inf)
    return possible_T


def _logprob_detail(name: str, values: AnyArray, i: int) -> str:
    return f"{name} = {values[i]:.7g}, outside ({SMALLEST_LOGPROB:g}, {LARGEST_LOGPROB:g}]"


def _spread_detail(name: str, values: AnyArray, i: int) -> str:
    return f"{name} = {values[i]:.7g}, not finite or below {SMALLEST_SPREAD:g}"


def _check_beside(view: TokenView, collector: Collector) -> None:
    """Numbers about the distributions, whether these are recorded or not."""
    for column_name, name, possible, detail in (
        ("kept_entropy", "H", can_be_spread, _spread_detail),
        ("kept_logprob_var", "Var(log p)", can_be_spread, _spread_detail),
        ("full_logprobs", "full_logprobs", can_be_logprob, _logprob_detail),
    ):
        column = view.column(column_name)
        if column is None:
            continue
        possible_T = possible(column.values_T)
        if not possible_T.all():
            tokens = np.flatnonzero(_recorded(view, column.valid_T, ~possible_T))
            told = partial(detail, name, column.values_T[tokens])
            collector.add(FindingKind.DISTRIBUTION, *view.locate(tokens), told)


def _lowest_masses(view: TokenView) -> AnyArray:
    """Smallest m that top_p allows, [B]; -inf where another filter may have cut the set, or a setting is unknown."""
    top_p, top_k, min_p = (view.batch.column(name) for name in ("top_p", "top_k", "min_p"))
    bound_B = pc.fill_null(top_p, 0.0).to_numpy(zero_copy_only=False)
    alone_B = pc.fill_null(pc.and_(pc.equal(top_k, 0), pc.equal(min_p, 0.0)), False).to_numpy(zero_copy_only=False)
    with np.errstate(divide="ignore"):
        lowest: AnyArray = np.log(np.where(alone_B, np.maximum(bound_B - MASS_TOLERANCE, 0.0), 0.0))
    return lowest


def _check_masses(view: TokenView, collector: Collector) -> None:
    column = view.column("log_kept_mass")
    if column is None:
        return
    m_T, lowest_T = column.values_T, view.spread(_lowest_masses(view))
    right_T = (m_T <= LARGEST_LOGPROB) & (m_T >= lowest_T) & (m_T > -np.inf)
    if right_T.all():
        return
    tokens = np.flatnonzero(_recorded(view, column.valid_T, ~right_T))
    top_p_T = view.spread(pc.fill_null(view.batch.column("top_p"), 1.0).to_numpy(zero_copy_only=False))

    def detail(i: int) -> str:
        m = float(m_T[tokens[i]])
        if not np.isfinite(m) or m > LARGEST_LOGPROB:
            return f"m = {m:.7g}, not finite or above {LARGEST_LOGPROB:g}"
        top_p = float(top_p_T[tokens[i] if len(top_p_T) > 1 else 0])
        return f"m = {m:.7g}: kept mass {np.exp(m):.7g} is below top_p = {top_p}"

    collector.add(FindingKind.MASS, *view.locate(tokens), detail)


def _check_versions(view: TokenView, collector: Collector) -> None:
    column = view.column("policy_versions")
    if column is None or not len(column.values_T):
        return
    known = np.arange(view.num_tokens) if column.valid_T is None else np.flatnonzero(column.valid_T)
    versions = column.values_T if column.valid_T is None else column.values_T[known]
    falls = np.flatnonzero(versions[1:] < versions[:-1])
    if not len(falls):
        return
    before, after = known[falls], known[falls + 1]
    rows, positions = view.locate(after)
    within = view.locate(before)[0] == rows
    falls, rows, positions = falls[within], rows[within], positions[within]
    collector.add(
        FindingKind.VERSION_ORDER,
        rows,
        positions,
        lambda i: f"version {versions[falls[i] + 1]} after {versions[falls[i]]}",
    )
