"""What the checks compute, beside the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.audit.check import HypothesisTest
from keptset.trainer_bridge.audit.checks.draws import BINS, Draws
from keptset.trainer_bridge.audit.checks.surprisal import Surprisal
from keptset.trainer_bridge.audit.kolmogorov import distance, p_value
from keptset.trainer_bridge.audit.options import AuditOptions
from keptset.trainer_bridge.audit.pit import places_of_draws
from keptset.trainer_bridge.audit.uniforms import stream_starts, stream_uniforms
from keptset.trainer_bridge.audit.unit_audit import audited
from keptset.trainer_bridge.audit.verdict import decide

OPTIONS = AuditOptions()


@pytest.fixture(scope="module")
def batch(honest: Callable[..., RolloutBatch]) -> RolloutBatch:
    return honest(30)


def oracle_places(batch: RolloutBatch) -> list[float]:
    """u of every token with a choice, one by one."""
    found = []
    for row in batch.arrow.to_pylist():
        for position, token in enumerate(row["token_ids"]):
            ids, logp = row["kept_ids"][position], row["kept_logprobs"][position]
            if len(ids) > 1:
                v = reference.pit_uniform(row["rollout_id"], position)
                found.append(reference.pit(ids, logp, token, v))
    return found


def test_numbers_of_the_stream_are_those_of_the_oracle_bit_by_bit() -> None:
    names, positions = ["a", "rollout-17", "ü", ""], np.array([0, 1, 2, 1000, 2**31 - 1])
    starts = stream_starts(names)
    for name, start in zip(names, starts, strict=True):
        got = stream_uniforms(np.full(len(positions), start), positions)
        assert got.tolist() == [reference.pit_uniform(name, int(p)) for p in positions]


def test_places_in_the_distributions_are_those_of_the_oracle(batch: RolloutBatch) -> None:
    np.testing.assert_allclose(places_of_draws(batch), oracle_places(batch), atol=2e-6)


def test_ties_go_to_the_lower_id(honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch]) -> None:
    def level(rows: list) -> None:
        for row in rows:
            row["kept_logprobs"] = [[float(-np.log(len(ids)))] * len(ids) for ids in row["kept_ids"]]

    tied = edited(honest(6), level)
    np.testing.assert_allclose(places_of_draws(tied), oracle_places(tied), atol=2e-6)


def test_tokens_that_were_not_sampled_have_no_place(
    honest: Callable[..., RolloutBatch], edited: Callable[..., RolloutBatch]
) -> None:
    def force(rows: list) -> None:
        for row in rows:
            row["sampled"][2] = False
            for name in (
                "behavior_logprobs", "log_kept_mass", "kept_entropy", "kept_logprob_var", "policy_versions",
                "kept_ids", "kept_logprobs",
            ):  # fmt: skip
                row[name][2] = None

    whole = honest(8)
    forced = edited(whole, force)
    held = places_of_draws(whole).tolist()
    left = places_of_draws(forced)
    assert 0 < len(left) < len(held)
    assert set(left.tolist()) <= set(held)


def test_surprisal_is_the_oracles(batch: RolloutBatch) -> None:
    check = Surprisal(OPTIONS)
    check.add(audited(batch))
    (test,) = check.outcome().tests
    b, h, var = (getattr(batch, name).values for name in ("behavior_logprobs", "kept_entropy", "kept_logprob_var"))
    z = reference.surprisal_z(b, h, var)
    assert test.statistic == pytest.approx(z, rel=1e-6)
    assert z > 0 and reference.normal_p_value(z) < test.p_value < 1.2 * reference.normal_p_value(z), "the heavier tail"
    choices = int((var > 0).sum())
    assert test.count == choices
    assert test.effect == pytest.approx(abs(np.sum(-np.float64(b) - h)) / choices, rel=1e-6)


def test_draws_are_judged_as_by_the_oracle_up_to_a_bin(batch: RolloutBatch) -> None:
    check = Draws(OPTIONS)
    check.add(audited(batch))
    (test,) = check.outcome().tests
    d, p = reference.kolmogorov_smirnov(oracle_places(batch))
    assert d - 1 / BINS - 1e-6 <= test.statistic <= d + 1e-6
    assert test.p_value == pytest.approx(p, rel=0.02)


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=200))
def test_distance_from_bins_is_at_most_one_bin_short(u: list[float]) -> None:
    counts = np.bincount((np.array(u) * 4096).astype(int), minlength=4096)
    d, _ = reference.kolmogorov_smirnov(u)
    assert d - 1 / 4096 - 1e-12 <= distance(counts) <= d + 1e-12


@given(st.integers(1, 10**7), st.floats(0, 0.1))
def test_p_values_of_a_distance_are_the_oracles(n: int, d: float) -> None:
    x = d * (np.sqrt(n) + 0.12 + 0.11 / np.sqrt(n))
    k = np.arange(1, 101)
    series = 1.0 if x < 0.2 else float(2 * np.sum((-1.0) ** (k - 1) * np.exp(-2 * k**2 * x**2)))
    assert p_value(d, n) == pytest.approx(min(max(series, 0), 1), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1e-9, 2e-7, 3e-7, 4e-7, 9e-7, 1e-6, 0.5]), max_size=6))
def test_tests_are_rejected_as_holm_says(p_values: list[float]) -> None:
    tests = [
        HypothesisTest(name=str(n), statistic=0, p_value=p, effect=1, effect_name="", effect_bound=0.5, count=1)
        for n, p in enumerate(p_values)
    ]
    results = decide(tests, family_level=1e-6, filtered=False)
    assert [result.rejected for result in results] == reference.holm(p_values, 1e-6).tolist()


def test_a_small_effect_is_not_rejected_however_small_its_p_value() -> None:
    test = HypothesisTest(name="a", statistic=0, p_value=0, effect=0.4, effect_name="", effect_bound=0.5, count=1)
    assert not decide([test], family_level=1e-6, filtered=False)[0].rejected


def test_over_filtered_rollouts_draw_tests_are_informational_and_not_counted_among_the_tests() -> None:
    def test(name: str, p: float) -> HypothesisTest:
        return HypothesisTest(name=name, statistic=0, p_value=p, effect=1, effect_name="", effect_bound=0, count=1)

    results = decide([test("draws", 0), test("unit_mean", 8e-7)], family_level=1e-6, filtered=True)
    assert [(r.rejected, r.informational) for r in results] == [(False, True), (True, False)]
    assert [
        r.rejected for r in decide([test("draws", 0.5), test("unit_mean", 8e-7)], family_level=1e-6, filtered=False)
    ] == [False, False]
