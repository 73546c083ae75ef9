"""Tests of the draws over draws: honest ones give uniform p-values, dishonest ones are found.

Legend: T tokens, N kept ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.findings import FindingKind, Severity
from keptset.schemas.ragged import offsets_of, row_index
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit.checks.draws import Draws
from keptset.trainer_bridge.audit.checks.surprisal import Surprisal
from keptset.trainer_bridge.audit.mean_ratio import MeanRatio
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.surprisal_tail import JumpVariance
from keptset.trainer_bridge.audit.unit_audit import audited
from keptset.trainer_bridge.audit.verdict import decide, fold

OPTIONS = AuditOptions()
REDRAWS = 250


@pytest.fixture(scope="module")
def recorded(honest: Callable[..., RolloutBatch]) -> RolloutBatch:
    """450 tokens, of which some 300 had a choice."""
    return honest(15, tokens=30, seed=3)


def redrawn(batch: RolloutBatch, random: np.random.Generator, *, sharpened: float = 1.0) -> RolloutBatch:
    """The same responses with each token drawn anew from its recorded distribution, raised to a power.

    Under other names: with its name a token would keep the number that spreads it over its probability, and only over
    both chances its place is uniform.
    """
    sets, logprobs = batch.kept_ids, batch.kept_logprobs
    assert sets is not None and logprobs is not None
    offsets_T1 = np.asarray(sets.inner.offsets, np.int64)
    logp_N = logprobs.inner.values.astype(np.float64)
    w_N = np.exp(sharpened * logp_N)
    w_N /= np.add.reduceat(w_N, offsets_T1[:-1])[row_index(offsets_T1)]
    through_N = np.cumsum(w_N)
    before_T = np.concatenate([[0], through_N])[offsets_T1[:-1]]
    chosen_T = np.searchsorted(through_N, before_T + random.random(len(before_T)))
    chosen_T = np.minimum(np.maximum(chosen_T, offsets_T1[:-1]), offsets_T1[1:] - 1)
    arrow = batch.arrow
    for name, values, kind in (
        ("token_ids", sets.inner.values[chosen_T], pa.int32()),
        ("behavior_logprobs", logprobs.inner.values[chosen_T], pa.float32()),
    ):
        at = arrow.schema.get_field_index(name)
        column = pa.ListArray.from_arrays(
            pa.array(offsets_of(batch.token_ids.lengths), pa.int32()), pa.array(values, kind)
        )
        arrow = arrow.set_column(at, arrow.schema.field(at), column)
    names = pa.array([f"{name}-{random.integers(2**62)}" for name in batch.rollout_ids])
    arrow = arrow.set_column(0, arrow.schema.field(0), names)
    return RolloutBatch.from_arrow(arrow)


def counted(*batches: RolloutBatch) -> tuple[Surprisal, Draws]:
    checks = Surprisal(OPTIONS), Draws(OPTIONS)
    for batch in batches:
        seen = audited(batch)
        assert seen.sound_B.all()
        for check in checks:
            check.add(seen)
    return checks


def test_p_values_over_clean_redraws_are_uniform(recorded: RolloutBatch) -> None:
    random = np.random.default_rng(20)
    found = []
    for _ in range(REDRAWS):
        surprisal, draws = counted(redrawn(recorded, random))
        found.append([check.outcome().tests[0].p_value for check in (surprisal, draws)])
    for p_values in np.array(found).T:
        assert reference.kolmogorov_smirnov(p_values)[1] > 0.01
        assert p_values.min() > 1e-6


@pytest.mark.parametrize("sharpened", [1.3, 0.75])
def test_draws_that_are_too_sharp_or_too_flat_are_found_by_both_tests(recorded: RolloutBatch, sharpened: float) -> None:
    random = np.random.default_rng(21)
    checks = counted(*(redrawn(recorded, random, sharpened=sharpened) for _ in range(40)))
    outcomes = [check.outcome() for check in checks]
    results = decide([t for o in outcomes for t in o.tests], family_level=1e-6, filtered=False)
    assert [result.rejected for result in results] == [True, True]
    evidence = [e for o in outcomes for e in o.evidence]
    (finding,) = fold(evidence, results, 600, 1e-6)
    assert (finding.kind, finding.severity) == (FindingKind.DRAWS, Severity.ERROR)
    assert [symptom.kind for symptom in finding.symptoms] == [FindingKind.SURPRISAL]
    assert ("more" if sharpened > 1 else "less") in finding.symptoms[0].summary


def test_over_filtered_rollouts_they_are_information(recorded: RolloutBatch) -> None:
    random = np.random.default_rng(21)
    checks = counted(*(redrawn(recorded, random, sharpened=1.3) for _ in range(40)))
    outcomes = [check.outcome() for check in checks]
    results = decide([t for o in outcomes for t in o.tests], family_level=1e-6, filtered=True)
    findings = fold([e for o in outcomes for e in o.evidence], results, 600, 1e-6)
    assert {finding.severity for finding in findings} == {Severity.INFO}
    assert "expected where rollouts were filtered" in findings[0].summary


def test_greedy_tokens_recorded_as_draws_are_found_by_the_surprisal_of_the_files_alone(recorded: RolloutBatch) -> None:
    random = np.random.default_rng(22)
    surprisal, _ = counted(*(redrawn(recorded, random, sharpened=50.0) for _ in range(3)))
    (test,) = surprisal.outcome().tests
    assert test.p_value < 1e-9 and test.effect > 0.3
    (finding,) = surprisal.outcome().evidence
    assert finding.responses == 45


def test_what_merges_is_what_one_check_would_have_counted(recorded: RolloutBatch) -> None:
    random = np.random.default_rng(23)
    batches = [redrawn(recorded, random) for _ in range(4)]
    whole, first, second = counted(*batches), counted(*batches[:1]), counted(*batches[1:])
    for one, other, both in zip(first, second, whole, strict=True):
        one.merge(other)  # type: ignore[arg-type]
        assert one.outcome() == both.outcome()


def test_b_over_something_else_than_the_kept_set_does_not_count(honest: Callable[..., RolloutBatch]) -> None:
    surprisal, _ = counted(honest(15, tokens=30, logprob_domain="full"))
    assert surprisal.outcome().tests == ()
    assert "b is over the kept set" in surprisal.outcome().not_tested[0].reason


def test_without_whole_distributions_draws_are_not_counted(honest: Callable[..., RolloutBatch]) -> None:
    _, draws = counted(honest(15, tokens=30, distributions=False))
    assert draws.outcome().tests == ()
    assert "kept_logprobs" in draws.outcome().not_tested[0].reason


LEVELS = (1e-2, 1e-4, 1e-6)


def chances(count: int, rare: float) -> Iterator[tuple[int, float]]:
    """How many of so many draws are rare, and the chance of that, exactly."""
    for k in range(min(count, 400) + 1):
        log_ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        yield k, math.exp(log_ways + k * math.log(rare) + (count - k) * math.log1p(-rare))


@pytest.mark.parametrize("others", [1, 200])
@pytest.mark.parametrize(("count", "rare"), [(100, 0.001), (200, 0.001), (1000, 0.003), (5000, 3e-4), (1000, 0.1)])
def test_honest_draws_of_which_few_are_rare_are_no_more_often_surprising_than_the_level_says(
    count: int, rare: float, others: int
) -> None:
    """One id has 1 - rare, others share the rest alike: how often which z occurs is the binomial distribution's."""
    log_top, log_rare = math.log1p(-rare), math.log(rare / others)
    entropy = -(1 - rare) * log_top - rare * log_rare
    variance = (1 - rare) * log_top**2 + rare * log_rare**2 - entropy**2
    jumps = JumpVariance()
    jumps.add(np.full(count, entropy), np.full(count, variance))
    of_k = [
        (chance, jumps.p_value(-(count - k) * log_top - k * log_rare - count * entropy, count * variance))
        for k, chance in chances(count, rare)
    ]
    for level in LEVELS:
        assert sum(chance for chance, p in of_k if p <= level) <= 2.5 * level


@pytest.mark.parametrize(
    ("count", "rare", "ordinary"), [(3000, 1e-7, 10), (3500, 1e-8, 4), (1000, 1e-6, 20), (100, 1e-5, 10)]
)
def test_a_rare_draw_is_no_more_surprising_because_of_ordinary_tokens_beside_it(
    count: int, rare: float, ordinary: int
) -> None:
    beside = np.array([0.4, 0.3, 0.2, 0.1])
    of_id = [np.array([1 - rare, rare]), beside]
    entropies = [float(-np.sum(p * np.log(p))) for p in of_id]
    variances = [float(np.sum(p * np.log(p) ** 2) - h**2) for p, h in zip(of_id, entropies, strict=True)]
    jumps = JumpVariance()
    for h, v, n in zip(entropies, variances, (count, ordinary), strict=True):
        jumps.add(np.full(n, h), np.full(n, v))
    once = -math.log(rare) - (count - 1) * math.log1p(-rare) - count * entropies[0]  # the others at their mean
    p_once = jumps.p_value(once, count * variances[0] + ordinary * variances[1])
    assert p_once > count * rare / 3


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 2.0, 10.0])
@pytest.mark.parametrize(("count", "rare"), [(100, 0.01), (300, 0.01), (1000, 0.003), (3000, 0.003), (300, 0.001)])
def test_a_trainer_that_is_sharper_or_flatter_has_a_mean_ratio_of_1_however_few_draws_are_rare(
    count: int, rare: float, ratio: float
) -> None:
    """To half of the tokens' rare id the sampler gives `rare`, to that of the others thrice as much, and the trainer
    `ratio` times that; so the mean of w is exactly 1."""
    b = np.log([1 - rare, rare, 1 - 3 * rare, 3 * rare])
    d = np.log([1 - rare * ratio, rare * ratio, 1 - 3 * rare * ratio, 3 * rare * ratio]) - b
    found = dict.fromkeys(LEVELS, 0.0)
    for (k, chance), (k3, chance3) in product(chances(count // 2, rare), chances(count // 2, 3 * rare)):
        if chance * chance3 < 1e-9:
            continue
        sums = MeanRatio()
        drawn = np.repeat([0, 1, 2, 3], [count // 2 - k, k, count // 2 - k3, k3])
        sums.add(d[drawn], b[drawn])
        if sums.obstacle() is None:
            test = sums.test("mean")
            for level in LEVELS:
                found[level] += chance * chance3 * (test.p_value <= level and test.effect >= test.effect_bound)
    assert all(share <= 2.5 * level for level, share in found.items())


def test_what_rare_draws_may_still_bring_is_not_missing_from_the_mean() -> None:
    """In a third of the tokens the trainer gives the rare id a hundred times what the sampler does."""
    random = np.random.default_rng(7)
    for _ in range(20):
        rare = random.random(6000) < 1e-4
        b, now = np.where(rare, np.log(1e-4), np.log1p(-1e-4)), np.where(rare, np.log(1e-2), np.log1p(-1e-2))
        p = random.uniform(0.3, 0.7, 14000)
        new = p * np.exp(random.normal(0, 0.03, len(p)))
        first = random.random(len(p)) < p
        b = np.concatenate([b, np.log(np.where(first, p, 1 - p))])
        now = np.concatenate([now, np.log(np.where(first, new, 1 - new))])
        sums = MeanRatio()
        sums.add(now - b, b)
        if sums.obstacle() is None:
            test = sums.test("mean")
            assert test.p_value > 1e-4 or test.effect < test.effect_bound
