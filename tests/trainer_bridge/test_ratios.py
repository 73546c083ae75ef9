"""Ratios by level: identities, exclusion, and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keptset.schemas.errors import InvalidInput, ScoringRefused, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.trainer_bridge import reference
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.ratios import importance_ratios, log_ratios, log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary
from keptset.trainer_bridge.violations import Violations

LEVELS = ("token", "sequence", "geometric")
DELTAS = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-3, 3))


@pytest.fixture
def tensor(anywhere: Any) -> Any:
    """Makes an array of the framework under test."""
    return lambda array: anywhere.tensor(array, "float64")


def host(values: Any) -> np.ndarray:
    return values.numpy() if hasattr(values, "numpy") else values


@given(DELTAS, st.integers(1, 5))
def test_every_level_agrees_with_the_oracle(delta: np.ndarray, responses: int) -> None:
    rows = np.sort(np.arange(len(delta)) % responses)
    b = np.linspace(-2, 0, len(delta))
    d = log_ratios(b + delta, b, rows)
    for level in LEVELS:
        ratios = d.at(level)
        expected = np.concatenate([reference.log_ratio(delta[rows == row], level) for row in np.unique(rows)])
        np.testing.assert_allclose(ratios.log_ratios_C, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(ratios.ratios_C, np.exp(expected), rtol=1e-12)
        assert (ratios.level, ratios.ratio_over, ratios.over) == (level, "trainable", "kept")


@given(DELTAS)
def test_levels_of_a_response_determine_each_other(delta: np.ndarray) -> None:
    d = log_ratios(delta, np.zeros_like(delta), np.zeros(len(delta), int))
    token, sequence, geometric = (d.at(level) for level in LEVELS)
    assert sequence.log_ratios_C[0] == pytest.approx(token.log_ratios_C.sum(), abs=1e-9)
    assert geometric.log_ratios_C[0] * len(delta) == pytest.approx(sequence.log_ratios_C[0], abs=1e-9)
    assert sequence.num_tokens_C.tolist() == [len(delta)]


def test_equal_log_probabilities_give_ratio_one_at_every_level(world: Any, tensor: Any) -> None:
    packed = to_packed(world.batch)
    scores = score_aligned(packed, tensor(world.packed_logits()))
    for level in LEVELS:
        ratios = importance_ratios(scores, packed.tokens, level=level)
        np.testing.assert_allclose(host(ratios.ratios_C), 1.0, rtol=0, atol=1e-5)


def test_full_vocabulary_ratios_are_the_kept_mass_and_say_so(world: Any) -> None:
    warm = world.batch.filter(world.batch.column("temperature").to_numpy() > 0)
    packed = to_packed(warm)
    logits = np.concatenate([z for z, p in zip(world.logits, world.params, strict=True) if p.temperature > 0])
    scores = score_aligned_full_vocabulary(packed, logits)
    ratios = importance_ratios(scores, packed.tokens, level="token", ratio_over="sampled")
    np.testing.assert_allclose(ratios.log_ratios_C, packed.tokens.log_kept_mass_T, rtol=0, atol=1e-6)
    assert (ratios.over, ratios.ratio_over) == ("full", "sampled")


def test_only_the_named_tokens_enter(tensor: Any) -> None:
    trainable = [True, False, True, False]
    arrays = (tensor([0.1, 0.2, 0.4, 0.8]), np.zeros(4), [0, 0, 0, 1])
    named = log_ratios(*arrays, trainable_T=trainable).at("sequence")
    np.testing.assert_allclose(host(named.log_ratios_C), [0.5], atol=1e-12)
    assert named.index_C.tolist() == [0], "a response without a trainable token has no ratio"
    every = log_ratios(*arrays, trainable_T=trainable, ratio_over="sampled").at("sequence")
    np.testing.assert_allclose(host(every.log_ratios_C), [0.7, 0.8], atol=1e-12)
    assert every.ratio_over == "sampled"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["trainer", "behaviour"])
def test_a_log_ratio_that_is_no_number_stops_the_call(bad: float, side: str, tensor: Any) -> None:
    values = np.array([-1.0, bad])
    logprobs, b = (values, np.zeros(2)) if side == "trainer" else (np.zeros(2), values)
    with pytest.raises(ViolationError, match="no finite number") as caught:
        log_ratios(tensor(logprobs), b, [0, 0], locate=lambda t: ("roll", t))
    assert "roll" in str(caught.value)
    assert [f.kind for f in caught.value.findings] == ([] if side == "trainer" else [FindingKind.LOGPROB])


@pytest.mark.parametrize(("level", "index"), [("token", [0, 2, 3]), ("sequence", [1]), ("geometric", [1])])
def test_excluding_drops_the_token_or_its_whole_response(level: Any, index: list[int], tensor: Any) -> None:
    d = log_ratios(tensor([0.1, -np.inf, 0.3, 0.4]), np.zeros(4), [0, 0, 1, 1], on_violation="exclude")
    ratios = d.at(level)
    assert ratios.index_C.tolist() == index
    assert ratios.excluded_tokens == {"non_finite": 1}
    assert ratios.excluded_responses == ({} if level == "token" else {"non_finite": 1})
    assert np.isfinite(host(ratios.ratios_C)).all()


def test_nothing_left_is_no_error(tensor: Any) -> None:
    d = log_ratios(tensor([np.nan]), [0.0], [0], on_violation="exclude")
    for level in LEVELS:
        assert host(d.at(level).ratios_C).shape == (0,)


def test_a_token_that_does_not_enter_can_neither_poison_nor_stop() -> None:
    d = log_ratios(np.array([-1.0, 0.0]), [-1.0, -np.inf], [0, 0], trainable_T=[True, False])
    assert d.at("sequence").ratios_C.tolist() == [1.0]
    assert d.at("token").ratios_C.tolist() == [1.0]
    assert d.violations.counts() == {}
    excluded = Violations.none(2).mark(np.array([False, True]), "member")
    scored = log_ratios(np.array([-1.0, np.nan]), [-1.0, -1.0], [0, 0], trainable_T=[True, False], violations=excluded)
    assert scored.at("sequence").ratios_C.tolist() == [1.0]
    assert scored.violations.counts() == {}


def test_what_scoring_excluded_is_counted_under_its_own_kind(tensor: Any) -> None:
    excluded = Violations.none(3).mark(np.array([True, False, False]), "member")
    arrays = (tensor([np.nan, 0.5, 0.25]), np.zeros(3), [0, 0, 1])
    d = log_ratios(*arrays, violations=excluded, on_violation="exclude")
    assert d.at("sequence").excluded_responses == {"member": 1}
    assert d.violations.counts() == {"member": 1}
    assert host(d.at("sequence").log_ratios_C).tolist() == [0.25]
    with pytest.raises(ViolationError) as caught:
        log_ratios(*arrays, violations=excluded)
    assert caught.value.findings[0].kind is FindingKind.MEMBER


def test_a_response_with_two_kinds_counts_under_both() -> None:
    excluded = Violations.none(3).mark(np.array([True, False, False]), "member")
    d = log_ratios(np.array([np.nan, np.inf, 0.0]), np.zeros(3), [0, 0, 1], violations=excluded, on_violation="exclude")
    assert d.at("geometric").excluded_responses == {"member": 1, "non_finite": 1}
    assert d.at("token").index_C.tolist() == [2]


def test_gradients_of_every_level_are_those_of_its_formula(trainer: Any) -> None:
    values, rows = np.array([0.1, -0.2, 0.3, 0.05]), np.array([0, 0, 0, 1])
    expected = {
        "token": np.exp(values),
        "sequence": np.exp([0.2, 0.2, 0.2, 0.05]),
        "geometric": np.exp([0.2 / 3] * 3 + [0.05]) / [3, 3, 3, 1],
    }
    for level, gradient in expected.items():
        logprobs = trainer.tensor(values, "float64", gradient=True)
        log_ratios(logprobs, np.zeros(4), rows).at(level).ratios_C.sum().backward()
        np.testing.assert_allclose(logprobs.grad.numpy(), gradient, rtol=1e-12)


def test_an_excluded_token_has_gradient_exactly_zero(trainer: Any) -> None:
    logprobs = trainer.tensor([0.5, float("nan"), 0.25], gradient=True)
    log_ratios(logprobs, np.zeros(3), [0, 0, 1], on_violation="exclude").at("token").ratios_C.sum().backward()
    assert logprobs.grad.numpy()[1] == 0.0
    assert np.isfinite(logprobs.grad.numpy()).all()


def test_a_ratio_beyond_the_largest_number_is_infinite_and_no_warning() -> None:
    assert log_ratios(np.array([800.0]), [0.0], [0]).at("token").ratios_C.tolist() == [np.inf]


def test_behaviour_over_another_domain_is_refused(world: Any) -> None:
    packed = to_packed(world.batch)
    scores = score_aligned(packed, world.packed_logits())
    foreign = replace(packed.tokens, logprob_domain_B=("raw",) * world.batch.num_responses)
    with pytest.raises(ScoringRefused, match="domain raw"):
        log_ratios_of(scores, foreign)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio_over": "all"}, "'trainable' or 'sampled'"),
        ({"on_violation": "skip"}, "'raise' or 'exclude'"),
        ({"row_T": [1, 0]}, "must ascend"),
        ({"row_T": [0]}, "row_T has shape"),
        ({"behavior_logprobs_T": [0.0]}, "behavior_logprobs_T has shape"),
        ({"trainable_T": [True]}, "trainable_T has shape"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"behavior_logprobs_T": np.zeros(2), "row_T": [0, 0]}
    with pytest.raises(InvalidInput, match=message):
        log_ratios(np.zeros(2), **defaults | arguments)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'token', 'sequence' or 'geometric'"):
        log_ratios(np.zeros(1), [0.0], [0]).at("word")  # type: ignore[arg-type]
