"""The statistical tests of an audit: their p-values over clean sets of responses, and what it takes to find a fault.

Sets are redrawn from recorded kept distributions, so any number of them is at hand, and each goes through validation
and the audit's own checks.

Legend: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.scripts.audit_redraws import TRAINER_COLUMN, Bend, Redraw, greedy, sharper, with_trainer
from keptset.scripts.bench_audit_power_rollouts import MAX_NEW_TOKENS, Progress
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch, TokenScores
from keptset.trainer_bridge.audit.check import Check, HypothesisTest
from keptset.trainer_bridge.audit.checks.draws import Draws
from keptset.trainer_bridge.audit.checks.support_drift import SupportDrift
from keptset.trainer_bridge.audit.checks.surprisal import Surprisal
from keptset.trainer_bridge.audit.checks.unit_mean import UnitMean
from keptset.trainer_bridge.audit.options import FAMILY_LEVEL, AuditOptions
from keptset.trainer_bridge.audit.recorded_logprobs import RecordedScorer
from keptset.trainer_bridge.audit.unit_audit import audited
from keptset.trainer_bridge.audit.verdict import decide

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Masses = tuple[Floats, Floats]
"""Log kept masses of the same tokens, under the weights that drew them and under others."""

RESPONSES = 40
"""In a clean set, and drawn at once where few tokens are missing."""
MANY = 320
"""Drawn at once where many are."""
NOISE = 0.2
"""By so much, times N, do the logits of the trainer of a clean set differ; N standard normal."""
INCIDENCES = (0.02, 0.1, 0.3, 1.0)
GRID = (500, 1_000, 2_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
"""Tokens after which the tests are asked."""
ENOUGH = 0.95
CERTAIN = 1e-15
"""A p-value from which on more tokens are not drawn: the fault counts as found with more of them, too."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """p-values of one test over clean sets."""

    test: str
    sets: int
    tokens: int
    """Of a set, in the mean."""
    refused: int
    """Sets over which the test could not be made."""
    distance: float
    """D of Kolmogorov and Smirnov from uniform."""
    p_value: float
    """Of that."""
    smallest: float
    below_1_percent: float
    """Share of p-values below 0.01."""


def sizes(batch: RolloutBatch, sets: int, progress: Progress, seed: int = 0) -> list[Size]:
    """Clean sets of RESPONSES responses each, over the batch in turn."""
    random = np.random.default_rng([seed, 1])
    blocks = _blocks(batch, RESPONSES)
    trainers = [block.noisy_trainer(NOISE, random) for block in blocks]
    honest_B = np.zeros(RESPONSES, bool)
    found: dict[str, list[float]] = {"draws": [], "surprisal": [], "unit mean": []}
    tokens = 0
    for number in range(sets):
        at = number % len(blocks)
        drawn = blocks[at].draw(random, honest_B[: len(blocks[at].batch)])
        drawn = with_trainer(drawn, trainers[at][blocks[at].position_in_sets(drawn)])
        for test in _tests(_counted([_seen(drawn)])):
            found[test.name].append(test.p_value)
        tokens += drawn.num_tokens
        progress("clean sets", (number + 1) / sets)
    return [_size(name, sets, tokens // sets, np.array(p_values)) for name, p_values in found.items()]


def _size(name: str, sets: int, tokens: int, p_values: Floats) -> Size:
    distance, p_value = reference.kolmogorov_smirnov(p_values) if len(p_values) else (1.0, 0.0)
    return Size(
        test=name,
        sets=sets,
        tokens=tokens,
        refused=sets - len(p_values),
        distance=distance,
        p_value=p_value,
        smallest=float(p_values.min(initial=1.0)),
        below_1_percent=float(np.mean(p_values < 0.01)) if len(p_values) else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class RunFault:
    """A fault that no single response shows."""

    name: str
    tests: Mapping[str, FindingKind]
    """Tests that can see it, and the kind each of them stands for."""
    bend: Bend | None = None
    """What its sampler draws from."""
    whole_vocabulary: bool = False
    """Its trainer normalises over the vocabulary."""
    drift: bool = False
    """Its trainer has other weights."""


DRAW_TESTS = {"draws": FindingKind.DRAWS, "surprisal": FindingKind.SURPRISAL}
RUN_FAULTS = (
    RunFault(name="the temperature is 0.9 of the recorded one", tests=DRAW_TESTS, bend=sharper(1 / 0.9)),
    RunFault(name="the temperature is 0.7 of the recorded one", tests=DRAW_TESTS, bend=sharper(1 / 0.7)),
    RunFault(name="greedy, recorded as drawn", tests=DRAW_TESTS, bend=greedy),
    RunFault(
        name="the trainer scores the whole vocabulary",
        tests={"unit mean": FindingKind.UNIT_MEAN},
        whole_vocabulary=True,
    ),
    RunFault(
        name="the head of the trainer's weights has moved",
        tests={"support drift, other weights": FindingKind.SUPPORT_DRIFT},
        drift=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Power:
    """How often one test finds one fault, by tokens."""

    fault: str
    test: str
    kind: str
    incidence: float
    repeats: int
    found: Mapping[str, float]
    """Tokens -> share of repeats in which the test was rejected and its effect large enough."""
    enough: int | None
    """The least number of tokens of the grid from which on it is found in 95 % of them; None: more than there are."""


def power(
    fault: RunFault,
    incidence: float,
    batch: RolloutBatch,
    masses: Masses | None,
    *,
    repeats: int,
    grid: Sequence[int] = GRID,
    seed: int = 0,
) -> list[Power]:
    """The fault in this share of the responses. `masses` are those of the batch [T]; only drift needs them."""
    random = np.random.default_rng([seed, 2])
    few, many = _pool(batch, RESPONSES, masses), _pool(batch, MANY, masses)
    hits = {test: np.zeros(len(grid)) for test in fault.tests}
    for _ in range(repeats):
        checks, tokens = _checks(), 0
        certain: set[str] = set()
        for step, wanted in enumerate(grid):
            while tokens < wanted and len(certain) < len(fault.tests):
                pool = many if wanted - tokens >= MANY * MAX_NEW_TOKENS else few
                block, masses_T = pool[int(random.integers(len(pool)))]
                faulty_B = random.random(len(block.batch)) < incidence
                drawn = block.draw(random, faulty_B, fault.bend)
                seen = _seen_with(fault, drawn, faulty_B, masses_T)
                for check in checks:
                    check.add(seen)
                tokens += drawn.num_tokens
            results = {r.name: r for r in decide(_tests(checks), family_level=FAMILY_LEVEL, filtered=False)}
            for test in fault.tests:
                result = results.get(test)
                if test in certain or (result is not None and result.rejected):
                    hits[test][step] += 1
                if result is not None and result.rejected and result.p_value < CERTAIN:
                    certain.add(test)
    return [_power(fault, test, incidence, repeats, grid, hits[test] / repeats) for test in fault.tests]


def _power(fault: RunFault, test: str, incidence: float, repeats: int, grid: Sequence[int], share_G: Floats) -> Power:
    below = np.flatnonzero(share_G < ENOUGH)
    first = int(below[-1]) + 1 if len(below) else 0
    return Power(
        fault=fault.name,
        test=test,
        kind=fault.tests[test].value,
        incidence=incidence,
        repeats=repeats,
        found=dict(zip(map(str, grid), share_G.tolist(), strict=True)),
        enough=grid[first] if first < len(grid) else None,
    )


def _seen(drawn: RolloutBatch) -> AuditedBatch:
    seen = audited(drawn, scorer=RecordedScorer(column=TRAINER_COLUMN))
    assert seen.sound_B.all(), "what is drawn from a recorded distribution is sound"
    return seen


def _seen_with(fault: RunFault, drawn: RolloutBatch, faulty_B: Bools, masses: Masses | None) -> AuditedBatch:
    b, m = drawn.behavior_logprobs, drawn.log_kept_mass
    assert b is not None and m is not None
    faulty_T = np.repeat(faulty_B, drawn.token_ids.lengths)
    b_T = b.values.astype(np.float64)
    if fault.whole_vocabulary:
        return _seen(with_trainer(drawn, np.where(faulty_T, b_T + m.values, b_T)))
    if fault.drift:
        assert masses is not None, "drift needs both versions' masses"
        return audited(drawn, scorer=_Masses(mass_T=np.where(faulty_T, masses[1], masses[0]), same_T=~faulty_T))
    return audited(drawn)


@dataclass(frozen=True)
class _Masses:
    """Scores of a trainer of which nothing is known but its mass on the sets."""

    mass_T: Floats
    same_T: Bools

    def score(self, batch: RolloutBatch) -> TokenScores:
        nothing_T = np.zeros(len(self.mass_T))
        return TokenScores(
            kept_T=nothing_T, full_T=self.mass_T, same_version_T=self.same_T, explained={}, hints={}, expected_T=None
        )


def _checks() -> list[Check]:
    options = AuditOptions()
    return [Surprisal(options), Draws(options), UnitMean(options), SupportDrift(options)]


def _counted(batches: Sequence[AuditedBatch]) -> list[Check]:
    checks = _checks()
    for batch in batches:
        for check in checks:
            check.add(batch)
    return checks


def _tests(checks: Sequence[Check]) -> list[HypothesisTest]:
    return [test for check in checks for test in check.outcome().tests]


def _blocks(batch: RolloutBatch, rows: int) -> list[Redraw]:
    starts = range(0, max(len(batch) - rows + 1, 1), rows)
    return [Redraw(batch=batch.slice(start, rows).compact()) for start in starts]


def _pool(batch: RolloutBatch, rows: int, masses: Masses | None) -> list[tuple[Redraw, Masses | None]]:
    """Blocks, each with its tokens' masses."""
    blocks = _blocks(batch, rows)
    if masses is None:
        return [(block, None) for block in blocks]
    ends = np.cumsum([block.batch.num_tokens for block in blocks])
    parts = [np.split(of_version[: ends[-1]], ends[:-1]) for of_version in masses]
    return [(block, (one, other)) for block, one, other in zip(blocks, *parts, strict=True)]
