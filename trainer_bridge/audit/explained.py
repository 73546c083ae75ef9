"""From how many responses each fault would explain, to which faults are named: mergeable counts, one decision.

A response whose b is off (`Affected`) is counted by how far, and by which faults fit: at all (they leave at most half
of the residual) or well (at most one part in STRONG), and nearly as well as the best one. Honest paths differ as well,
by .04 nats and more in bfloat16, and chance fits a short response now and then. So what counts is the company:

*Apart.* Responses far beyond the median response of the run (FAR times its residual, or any where that is below the
floor). The path is the same for all, so something else was at work. The fault that fits most of them well is named,
then the one that fits most of the rest, and so on; one that fits a response only at all joins a fault named already.
What is left and lies still further out is `logprob_mismatch`.

*Alike.* If the median response itself is off, all up to there are judged together: a fault is named that fits at least
half of them. That is the rule of SEMANTICS 6, pair by pair: the median residual is at least halved. If none does, path
or fault cannot be told from the size; but over an honest path the ratios exp(expected - b) have mean 1, so
`logprob_mismatch` stands on the test of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS
from keptset.trainer_bridge.audit.residuals import TOKEN_FLOOR

FAR = 10.0
"""Times the median response's residual: apart from the others. Over one path, response medians differ by less."""
MISMATCH_FAR = 20.0
"""The same where no fault fits, and nothing but the distance speaks."""
MISMATCH_FLOOR = 1e-3
"""Nats; unexplained responses nearer than this may be rounding, as of a b that was stored in float16."""
MISMATCH_TOKENS = 8
"""Affected tokens of an unexplained response below which it may be a few tokens of an unlucky path."""
MIN_FIT = 0.5
"""Share of responses alike that a fault must fit."""
_STEPS = 8
"""Bins per factor of 2."""
_LAST = 40 * _STEPS
CLEAN = -1
"""Bin of a response that asks for no explanation."""

Mask = int
"""Bit i: EXPLANATIONS[i]."""


def bin_of(residual: float) -> int:
    """Bin of a residual at or above the floor."""
    return min(_LAST, max(0, math.floor(_STEPS * math.log2(residual / TOKEN_FLOOR))))


def residual_of(number: int) -> float:
    """A residual in the middle of the bin."""
    return 0.0 if number == CLEAN else TOKEN_FLOOR * 2 ** ((number + 0.5) / _STEPS)


def kinds_of(mask: Mask) -> list[FindingKind]:
    """The faults that a mask names."""
    return [kind for i, kind in enumerate(EXPLANATIONS) if mask >> i & 1]


@dataclass(frozen=True)
class Fit:
    """How one affected response stands."""

    bin: int
    well: Mask
    """Faults that leave at most one part in STRONG of the residual, and little more than the best one does."""
    at_all: Mask
    """Faults that leave at most half."""
    many: bool
    """MISMATCH_TOKENS of its tokens or more are affected."""
    errors: frozenset[FindingKind]
    """Structural kinds that its response shows as well."""
    few: bool = False
    """Too few tokens to decide anything: it only joins what others decide."""


@dataclass
class Tally:
    """What fits of a kind have in common."""

    responses: int = 0
    tokens: int = 0
    together: dict[frozenset[FindingKind], int] = field(default_factory=dict)
    """Responses by what else they show."""
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, fit: Fit, responses: int, tokens: int) -> None:
        self.responses += responses
        self.tokens += tokens
        self.bins[fit.bin] = self.bins.get(fit.bin, 0) + responses
        self.together[fit.errors] = self.together.get(fit.errors, 0) + responses

    @property
    def residual(self) -> float:
        """Median residual of its responses, to a tenth."""
        return residual_of(_median(self.bins))


@dataclass
class FitCounts:
    """Mergeable counts of how responses stand; their number is bounded by bins and faults."""

    clean: int = 0
    """Responses that were compared and ask for no explanation."""
    fits: dict[Fit, tuple[int, int]] = field(default_factory=dict)
    """Responses and affected tokens."""

    def add(self, fit: Fit, tokens: int, responses: int = 1) -> None:
        have = self.fits.get(fit, (0, 0))
        self.fits[fit] = (have[0] + responses, have[1] + tokens)

    def merge(self, other: FitCounts) -> None:
        self.clean += other.clean
        for fit, (responses, tokens) in other.fits.items():
            self.add(fit, tokens, responses)

    @property
    def responses(self) -> int:
        """That were compared."""
        return self.clean + sum(responses for fit, (responses, _) in self.fits.items() if not fit.few)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which faults are named."""

    median_bin: int
    """Of all compared responses."""
    named: dict[FindingKind, Tally]
    unexplained: Tally | None
    """Responses apart that no fault explains."""
    alike: Tally | None
    """Responses alike, off by more than the floor, that no fault explains: path or fault, the unit mean must tell."""


def decide(counts: FitCounts) -> Decision:
    """The decision over all responses."""
    bins: dict[int, int] = {CLEAN: counts.clean}
    enough = [fit for fit in counts.fits if not fit.few]
    for fit in enough:
        responses, _ = counts.fits[fit]
        bins[fit.bin] = bins.get(fit.bin, 0) + responses
    median_bin = _median(bins)
    far = 0 if median_bin == CLEAN else bin_of(residual_of(median_bin) * FAR)
    alike = [fit for fit in enough if median_bin != CLEAN and fit.bin <= far]
    apart = [fit for fit in enough if median_bin == CLEAN or fit.bin > far]
    named: dict[FindingKind, Tally] = {}
    alike = _name_alike(alike, counts, named)
    rest = _name_apart(apart, counts, named)
    _join([fit for fit in counts.fits if fit.few], counts, named)
    further = max(MISMATCH_FLOOR, MISMATCH_FAR * residual_of(median_bin))
    unexplained = Tally()
    for fit in rest:
        if fit.many and residual_of(fit.bin) > further:
            unexplained.add(fit, *counts.fits[fit])
    left = Tally()
    for fit in alike:
        left.add(fit, *counts.fits[fit])
    return Decision(
        median_bin=median_bin,
        named=named,
        unexplained=unexplained if unexplained.responses else None,
        alike=left if left.responses else None,
    )


def _name_alike(fits: list[Fit], counts: FitCounts, named: dict[FindingKind, Tally]) -> list[Fit]:
    """Name what fits at least half of these, then at least half of the rest well; returns what is left."""
    first = True
    while fits:
        kind = _best(fits, counts, well=not first)
        hit = [] if kind is None else [fit for fit in fits if _has(fit, kind, well=not first)]
        if kind is None or _number(hit, counts) < MIN_FIT * _number(fits, counts):
            break
        for fit in hit:
            named.setdefault(kind, Tally()).add(fit, *counts.fits[fit])
        fits = [fit for fit in fits if fit not in set(hit)]
        first = False
    return fits


def _name_apart(fits: list[Fit], counts: FitCounts, named: dict[FindingKind, Tally]) -> list[Fit]:
    """Name what fits most of these well, then most of the rest; returns what is left."""
    while fits:
        kind = _best(fits, counts, well=True)
        if kind is None:
            break
        hit = [fit for fit in fits if _has(fit, kind, well=True)]
        for fit in hit:
            named.setdefault(kind, Tally()).add(fit, *counts.fits[fit])
        fits = [fit for fit in fits if fit not in set(hit)]
    return _join(fits, counts, named)


def _join(fits: list[Fit], counts: FitCounts, named: dict[FindingKind, Tally]) -> list[Fit]:
    """What fits at all joins a fault that is named; returns what is left."""
    left = []
    for fit in fits:
        joined = [kind for kind in kinds_of(fit.at_all) if kind in named]
        if joined:
            named[joined[0]].add(fit, *counts.fits[fit])
        else:
            left.append(fit)
    return left


def _best(fits: list[Fit], counts: FitCounts, *, well: bool) -> FindingKind | None:
    """The fault that fits most responses, the earlier of two equal ones; None where none fits any."""
    numbers = [(_number((f for f in fits if _has(f, kind, well=well)), counts), kind) for kind in EXPLANATIONS]
    most = max(number for number, _ in numbers)
    return next(kind for number, kind in numbers if number == most) if most else None


def _has(fit: Fit, kind: FindingKind, *, well: bool) -> bool:
    return bool((fit.well if well else fit.at_all) >> EXPLANATIONS.index(kind) & 1)


def _number(fits: Iterable[Fit], counts: FitCounts) -> int:
    return sum(counts.fits[fit][0] for fit in fits)


def _median(bins: dict[int, int]) -> int:
    """Bin of the middle response."""
    half, seen = sum(bins.values()) / 2, 0
    for number in sorted(bins):
        seen += bins[number]
        if seen >= half and seen:
            return number
    return CLEAN
