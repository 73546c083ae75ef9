"""From how many responses each fault would explain, to which faults are named: mergeable counts, one decision.

A response whose b is off (`Affected`) is counted by how far, and by which faults fit: at all (they leave at most half
of the residual) or well (at most one part in STRONG), and nearly as well as the best one. Honest paths differ as well,
by .04 nats and more in bfloat16, by less where nothing is uncertain; and chance fits a short response now and then. So
what counts is the company, in affected tokens. Responses are judged in two groups: those *alike*, up to FAR times the
median affected response, and those *apart*, further out, where more than a path was at work.

In each group the fault is named that fits a quarter of it well, or, among enough responses, half of it at all; then the
next, of what is left. The second is the rule of SEMANTICS 6, pair by pair: the median residual is at least halved. What
a named fault fits at all joins it; a response with few affected tokens only if the fault fits it well or its record
contradicts itself, for halving one or two small residuals is easy.

What is left is a path or a fault that has no name, and size does not tell them apart. Over an honest path the ratios
exp(expected - b) have mean 1 within each group; `logprob_mismatch` stands on the test of that. Responses that
contradict themselves are left to what validation says of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge.audit.explanations import EXPLANATIONS
from keptset.trainer_bridge.audit.residuals import TOKEN_FLOOR

FAR = 10.0
"""Times the median affected response's residual: apart from the others."""
WELL_SHARE, AT_ALL_SHARE = 0.25, 0.5
"""Of a group's affected tokens, that a fault must fit to be named."""
WELL_TOKENS = 12
"""Affected tokens that a fault must fit well: with fewer, one of so many always does."""
AT_ALL_RESPONSES = 8
"""Responses that a fault must fit, if it fits them no better than at all."""
MISMATCH_FLOOR = 1e-3
"""Nats; unexplained responses nearer than this may be rounding, as of a b that was stored in float16."""
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


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How one affected response stands."""

    bin: int
    well: Mask
    """Faults that leave at most one part in STRONG of the residual, and little more than the best one does."""
    at_all: Mask
    """Faults that leave at most half."""
    errors: frozenset[FindingKind]
    """Structural kinds that its response shows as well."""
    few: bool
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
        return self.clean + self.number(fit for fit in self.fits if not fit.few)

    def number(self, fits: Iterable[Fit]) -> int:
        """Of responses."""
        return sum(self.fits[fit][0] for fit in fits)

    def tokens(self, fits: Iterable[Fit]) -> int:
        """Affected ones."""
        return sum(self.fits[fit][1] for fit in fits)

    def tally(self, fits: Iterable[Fit], into: Tally) -> Tally:
        """All of these, counted into one."""
        for fit in fits:
            into.add(fit, *self.fits[fit])
        return into


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which faults are named."""

    median_bin: int
    """Of all compared responses."""
    named: dict[FindingKind, Tally]
    unexplained: tuple[tuple[str, Tally], ...]
    """Groups of responses that no fault explains, off by more than MISMATCH_FLOOR: path or fault, the mean ratio must
    tell."""


def decide(counts: FitCounts) -> Decision:
    """The decision over all responses."""
    enough = [fit for fit in counts.fits if not fit.few]
    bins = counts.tally(enough, Tally()).bins
    far = bin_of(residual_of(_median(bins)) * FAR) if bins else 0
    named: dict[FindingKind, Tally] = {}
    groups = {
        "alike": [fit for fit in enough if fit.bin <= far],
        "apart": [fit for fit in enough if fit.bin > far],
        "few": [fit for fit in counts.fits if fit.few],
    }
    rest = {name: _name(fits, counts, named) for name, fits in groups.items() if name != "few"}
    rest["few"] = groups["few"]
    left = {name: _join(fits, counts, named) for name, fits in rest.items()}
    unexplained = []
    for name in ("alike", "apart"):
        asking = (fit for fit in left[name] if residual_of(fit.bin) > MISMATCH_FLOOR and not fit.errors)
        tally = counts.tally(asking, Tally())
        if tally.responses:
            unexplained.append((name, tally))
    return Decision(median_bin=_median({CLEAN: counts.clean, **bins}), named=named, unexplained=tuple(unexplained))


def _name(fits: list[Fit], counts: FitCounts, named: dict[FindingKind, Tally]) -> list[Fit]:
    """Name the faults of a group; returns what is left of it."""
    while fits:
        total = counts.tokens(fits)
        kind, hit = _best(fits, counts, well=True)
        if counts.tokens(hit) < max(WELL_TOKENS, WELL_SHARE * total):
            kind, hit = _best(fits, counts, well=False)
            if counts.tokens(hit) < AT_ALL_SHARE * total or counts.number(hit) < AT_ALL_RESPONSES:
                break
        counts.tally(hit, named.setdefault(kind, Tally()))
        gone = set(hit)
        fits = [fit for fit in fits if fit not in gone]
    return fits


def _join(fits: list[Fit], counts: FitCounts, named: dict[FindingKind, Tally]) -> list[Fit]:
    """What a named fault fits joins it; returns what is left."""
    left = []
    for fit in fits:
        fitting = fit.well if fit.few and not fit.errors else fit.at_all
        joined = [kind for kind in kinds_of(fitting) if kind in named]
        if joined:
            counts.tally([fit], named[joined[0]])
        else:
            left.append(fit)
    return left


def _best(fits: list[Fit], counts: FitCounts, *, well: bool) -> tuple[FindingKind, list[Fit]]:
    """The fault that fits most tokens, the earlier of two equal ones, and what it fits."""
    fitting = {kind: [fit for fit in fits if _has(fit, kind, well=well)] for kind in EXPLANATIONS}
    best = max(EXPLANATIONS, key=lambda kind: counts.tokens(fitting[kind]))
    return best, fitting[best]


def _has(fit: Fit, kind: FindingKind, *, well: bool) -> bool:
    return bool((fit.well if well else fit.at_all) >> EXPLANATIONS.index(kind) & 1)


def _median(bins: dict[int, int]) -> int:
    """Bin of the middle response."""
    half, seen = sum(bins.values()) / 2, 0
    for number in sorted(bins):
        seen += bins[number]
        if seen >= half and seen:
            return number
    return CLEAN
