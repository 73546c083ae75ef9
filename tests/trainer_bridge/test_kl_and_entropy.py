"""KL and entropy terms: their expected value and gradient, summed exactly over a small set of ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.corrections import Truncate, correct
from keptset.trainer_bridge.decoupled import log_ratios_between
from keptset.trainer_bridge.kl_and_entropy import entropy_loss, kl_loss
from keptset.trainer_bridge.ratios import log_ratios, log_ratios_of
from keptset.trainer_bridge.scoring import score_aligned, score_aligned_full_vocabulary, score_from_logits

POLICY = np.array([0.3, -1.2, 0.9, 0.1])
REFERENCE = np.array([0.0, 0.5, 0.2, -0.7])
SAMPLER = np.array([0.6, 0.1, -0.2, 0.4])


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.sum(np.exp(z)))


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(np.exp(p) * (p - q)))


def derivative(function: Callable[[np.ndarray], float], z: np.ndarray) -> np.ndarray:
    step = 1e-6
    return np.array([(function(z + e) - function(z - e)) / (2 * step) for e in np.eye(len(z)) * step])


def every_outcome(weights: np.ndarray, slopes: np.ndarray, z: np.ndarray) -> np.ndarray:
    """sum over y of weight(y) slope(y) grad log softmax(z)_y."""
    p = np.exp(log_softmax(z))
    return np.sum((weights * slopes)[:, None] * (np.eye(len(z)) - p), axis=0)


def outcomes(other: np.ndarray) -> Any:
    """One token for each id that may be drawn."""
    return log_ratios(log_softmax(POLICY), log_softmax(other), np.arange(4))


GRADIENT_OF = {
    "k1": lambda z: kl(log_softmax(z), log_softmax(REFERENCE)),
    "k2": lambda z: kl(log_softmax(z), log_softmax(REFERENCE)),
    "k3": lambda z: kl(log_softmax(REFERENCE), log_softmax(z)),
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_is_on_average_the_one_that_is_documented(estimator: Any) -> None:
    done = kl_loss(outcomes(REFERENCE), estimator=estimator, reduce="sum")
    p = np.exp(log_softmax(POLICY))
    np.testing.assert_allclose(
        every_outcome(p, done.gradient_T, POLICY), derivative(GRADIENT_OF[estimator], POLICY), atol=1e-8
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_value_is_on_average_the_kl(estimator: Any) -> None:
    d = log_softmax(POLICY) - log_softmax(REFERENCE)
    values = [float(kl_loss(log_ratios(d[i : i + 1], [0.0], [0]), estimator=estimator).value) for i in range(4)]
    expected = kl(log_softmax(POLICY), log_softmax(REFERENCE))
    assert np.sum(np.exp(log_softmax(POLICY)) * values) == pytest.approx(expected)


def test_weights_make_up_for_another_sampler() -> None:
    weights = correct(outcomes(SAMPLER), weights="token")
    done = kl_loss(outcomes(REFERENCE), estimator="k2", weights=weights, reduce="sum")
    drawn = np.exp(log_softmax(SAMPLER))
    np.testing.assert_allclose(
        every_outcome(drawn, done.gradient_T, POLICY), derivative(GRADIENT_OF["k2"], POLICY), atol=1e-8
    )


def test_the_gradient_of_the_entropy_is_exact_on_average() -> None:
    scores = score_from_logits(
        np.tile(POLICY, (4, 1)), np.arange(4), np.arange(5) * 4, np.tile(np.arange(4), 4), np.ones(4), entropy=True
    )
    done = entropy_loss(scores, outcomes(POLICY), reduce="sum")

    def entropy(z: np.ndarray) -> float:
        return float(-np.sum(np.exp(log_softmax(z)) * log_softmax(z)))

    assert float(done.value) == pytest.approx(-4 * entropy(POLICY))
    expected = derivative(lambda z: -entropy(z), POLICY)
    np.testing.assert_allclose(every_outcome(np.exp(log_softmax(POLICY)), done.gradient_T, POLICY), expected, atol=1e-8)


def test_where_all_ids_are_equally_likely_no_draw_says_anything_about_the_entropy() -> None:
    scores = score_from_logits(np.zeros((1, 4)), [2], [0, 4], np.arange(4), [1.0], entropy=True)
    done = entropy_loss(scores, log_ratios(scores.logprobs_T, [-1.0], [0]))
    assert done.gradient_T[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_policy_equal_to_its_reference_has_no_kl_and_no_gradient(world: Any, framework: Any, estimator: Any) -> None:
    packed = to_packed(world.batch)
    logits = framework.tensor(world.packed_logits())
    policy, other = score_aligned(packed, logits), score_aligned(packed, world.packed_logits())
    done = kl_loss(log_ratios_between(policy, other, packed.tokens), estimator=estimator)
    assert float(framework.host(done.value)) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(framework.gradient(done.value, logits), 0, atol=1e-12)


@pytest.mark.parametrize("term", ["kl", "entropy"])
def test_over_kept_sets_no_gradient_reaches_what_lies_outside(
    simulate: Any, rng: np.random.Generator, framework: Any, term: str
) -> None:
    world = simulate(rng, [SamplingParams(top_k=4)] * 3)
    packed = to_packed(world.batch)
    logits = framework.tensor(world.packed_logits() * 1.1)
    policy = score_aligned(packed, logits, entropy=True)
    if term == "kl":
        done = kl_loss(log_ratios_between(policy, score_aligned(packed, world.packed_logits()), packed.tokens))
    else:
        done = entropy_loss(policy, log_ratios_of(policy, packed.tokens))
    assert (done.report.over, done.report.name) == ("kept", "kl_k3_kept" if term == "kl" else "entropy_kept")
    gradient = framework.gradient(done.value, logits)
    inside = np.zeros(gradient.shape, bool)
    inside[np.repeat(packed.logit_index_T, 4), packed.tokens.kept_ids_N] = True
    assert np.abs(gradient[inside]).max() > 0
    assert (gradient[~inside] == 0).all()


def test_over_the_vocabulary_a_term_says_full(simulate: Any, rng: np.random.Generator) -> None:
    world = simulate(rng, [SamplingParams(top_k=4)] * 3)
    packed = to_packed(world.batch)
    policy = score_aligned_full_vocabulary(packed, world.packed_logits() * 1.1, entropy=True)
    other = score_aligned_full_vocabulary(packed, world.packed_logits())
    done = entropy_loss(policy, log_ratios_of(policy, packed.tokens))
    logits = world.packed_logits()[packed.logit_index_T[packed.tokens.trainable_T]] * 1.1
    entropies = [-np.sum(np.exp(log_softmax(z)) * log_softmax(z)) for z in logits]
    assert float(done.value) == pytest.approx(-np.mean(entropies))
    assert (done.report.over, done.report.name) == ("full", "entropy_full")
    kl = kl_loss(log_ratios_between(policy, other, packed.tokens))
    assert kl.report.over == "full"
    assert "train/kl_k3_full_token/value" in kl.report.flat("train/"), "a logger shows what it is over, too"


def test_terms_reduce_weigh_and_exclude_as_losses_do() -> None:
    d = log_ratios(np.array([0.5, np.nan, -0.5, 1.0]), np.zeros(4), [0, 0, 0, 1], on_violation="exclude")
    weights = correct(d, Truncate(level="token", upper=1.0))
    done = kl_loss(d, estimator="k2", weights=weights, reduce="response_mean")
    assert float(done.value) == pytest.approx((0.125 * (1 + math.exp(-0.5)) / 2 + 0.5) / 2)
    assert done.report.excluded_tokens == {"non_finite": 1}
    assert done.gradient_T[1] == 0


def test_k3_of_a_token_the_policy_has_given_up_is_refused() -> None:
    given_up = log_ratios(np.array([0.0, -100.0]), [0.0, 0.0], [0, 1])
    with pytest.raises(InvalidInput, match=r"k3 overflows in response 1: .* exp\(-100.0\).*use k1 or k2"):
        kl_loss(given_up)
    assert float(kl_loss(given_up, estimator="k2").value) == 2500


def test_what_does_not_fit_is_refused_by_name() -> None:
    d = outcomes(REFERENCE)
    with pytest.raises(InvalidInput, match="estimator is 'k4'"):
        kl_loss(d, estimator="k4")  # type: ignore[arg-type]
    logits = POLICY[None]
    with pytest.raises(InvalidInput, match="score with entropy=True"):
        entropy_loss(score_from_logits(logits, [0], [0, 4], np.arange(4), [1.0]), d)
    with pytest.raises(InvalidInput, match="scores are of 1 tokens; the ratios have 4"):
        entropy_loss(score_from_logits(logits, [0], [0, 4], np.arange(4), [1.0], entropy=True), d)
