"""KL and entropy over whole kept distributions: against plain sums, with exact gradients down to the hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keptset.schemas.errors import InvalidInput, ScoringRefused
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.corrections import Mask, correct
from keptset.trainer_bridge.exact_kl_and_entropy import exact_entropy_loss, exact_kl_loss
from keptset.trainer_bridge.ratios import LogRatios, log_ratios_of
from keptset.trainer_bridge.scoring import Head, Scores, score_aligned_from_hidden

HIDDEN = 7
TERMS = {
    "policy_reference": lambda p, q: np.sum(p * np.log(p / q)),
    "reference_policy": lambda p, q: np.sum(q * np.log(q / p)),
    "entropy": lambda p, q: np.sum(p * np.log(p)),
}
"""What a term adds at one token, from the two distributions over its set."""


@pytest.fixture
def packed(simulate: Any, rng: np.random.Generator) -> Any:
    settings = [SamplingParams(top_k=4), SamplingParams(top_k=6, temperature=0.7), SamplingParams(temperature=0)]
    return to_packed(simulate(rng, settings * 2).batch)


@pytest.fixture
def hidden(packed: Any, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(packed.num_positions, HIDDEN))


@pytest.fixture
def weight(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(40, HIDDEN))


def scored(packed: Any, hidden: Any, weight: Any) -> Scores:
    return score_aligned_from_hidden(packed, hidden, Head(weight_VH=weight), distribution=True, full_share=0)


def term(name: str, packed: Any, policy: Scores, reference: Scores, ratios: LogRatios, **settings: Any) -> Any:
    if name == "entropy":
        return exact_entropy_loss(policy, packed.tokens, ratios, **settings)
    return exact_kl_loss(policy, reference, packed.tokens, ratios, direction=name, **settings)  # type: ignore[arg-type]


def by_hand(name: str, packed: Any, hidden: np.ndarray, other: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The term at every sampled token."""
    tokens = packed.tokens

    def distribution(states: np.ndarray, token: int) -> np.ndarray:
        kept = tokens.kept_ids_N[tokens.kept_offsets_T1[token] : tokens.kept_offsets_T1[token + 1]]
        if len(kept) == 1:
            return np.ones(1)
        z = weight[kept] @ states[packed.logit_index_T[token]] / tokens.temperature_T[token]
        return np.exp(z - z.max()) / np.exp(z - z.max()).sum()

    return np.array([TERMS[name](distribution(hidden, t), distribution(other, t)) for t in range(tokens.num_tokens)])


@pytest.mark.parametrize("name", TERMS)
def test_the_value_is_the_plain_sum(
    packed: Any, hidden: np.ndarray, weight: np.ndarray, framework: Any, name: str
) -> None:
    other = hidden + 0.3
    policy = scored(packed, framework.tensor(hidden), framework.tensor(weight))
    reference = scored(packed, other, weight)
    done = term(name, packed, policy, reference, log_ratios_of(policy, packed.tokens))
    expected = by_hand(name, packed, hidden, other, weight)[packed.tokens.trainable_T].mean()
    assert float(framework.host(done.value)) == pytest.approx(expected, rel=1e-9)
    assert (done.report.over, done.report.level) == ("kept", "token")
    assert done.report.name == ("exact_entropy_kept" if name == "entropy" else f"exact_kl_{name}_kept")


@pytest.mark.parametrize("name", TERMS)
def test_the_gradient_of_the_hidden_states_is_exact(
    packed: Any, hidden: np.ndarray, weight: np.ndarray, framework: Any, name: str
) -> None:
    other, leaf = hidden + 0.3, framework.tensor(hidden)
    policy = scored(packed, leaf, framework.tensor(weight))
    done = term(name, packed, policy, scored(packed, other, weight), log_ratios_of(policy, packed.tokens))
    gradient = framework.gradient(done.value, leaf)

    def value(states: np.ndarray) -> float:
        return float(by_hand(name, packed, states, other, weight)[packed.tokens.trainable_T].mean())

    step = 1e-6
    for row in packed.logit_index_T[:4]:
        for column in range(HIDDEN):
            nudge = np.zeros_like(hidden)
            nudge[row, column] = step
            slope = (value(hidden + nudge) - value(hidden - nudge)) / (2 * step)
            assert gradient[row, column] == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("name", TERMS)
def test_the_gradient_by_log_probabilities_is_the_derivative_of_the_value(
    packed: Any, hidden: np.ndarray, weight: np.ndarray, name: str
) -> None:
    policy, reference = scored(packed, hidden, weight), scored(packed, hidden + 0.3, weight)
    ratios = log_ratios_of(policy, packed.tokens)

    def value(logprobs: np.ndarray) -> float:
        return float(term(name, packed, replace(policy, kept_logprobs_N=logprobs), reference, ratios).value)

    step, log_p = 1e-6, policy.kept_logprobs_N
    slopes = [(value(log_p + e) - value(log_p - e)) / (2 * step) for e in np.eye(len(log_p)) * step]
    done = term(name, packed, policy, reference, ratios)
    np.testing.assert_allclose(done.gradient_N, slopes, atol=1e-8)


def test_tokens_weigh_and_count_as_in_a_loss(packed: Any, hidden: np.ndarray, weight: np.ndarray) -> None:
    policy = scored(packed, hidden, weight)
    ratios = log_ratios_of(policy, packed.tokens)
    weights = correct(ratios, Mask(level="token", upper=1.5))
    done = exact_entropy_loss(policy, packed.tokens, ratios, weights=weights, reduce="sum")
    expected = by_hand("entropy", packed, hidden, hidden, weight)
    assert float(done.value) == pytest.approx(float(np.sum(weights.weights_T * expected)))
    out_T = weights.weights_T == 0
    assert out_T[packed.tokens.trainable_T].any()
    assert (done.gradient_N[np.repeat(out_T, packed.tokens.kept_sizes_T)] == 0).all()
    assert (done.gradient_T == 0).all()


def test_where_nothing_is_kept_out_of_two_the_term_is_the_whole_entropy(packed: Any, hidden: np.ndarray) -> None:
    policy = scored(packed, hidden, np.zeros((40, HIDDEN)))
    done = exact_entropy_loss(policy, packed.tokens, log_ratios_of(policy, packed.tokens))
    sizes = packed.tokens.kept_sizes_T[packed.tokens.trainable_T]
    assert float(done.value) == pytest.approx(-np.log(sizes).mean()), "equal logits: log |K|"


def test_a_reference_without_probability_makes_the_kl_infinite_and_is_refused(
    packed: Any, hidden: np.ndarray, weight: np.ndarray
) -> None:
    policy = scored(packed, hidden, weight)
    ratios = log_ratios_of(policy, packed.tokens)
    tokens = packed.tokens
    first = int(np.flatnonzero(tokens.trainable_T & (tokens.kept_sizes_T > 1))[0])
    logprobs = policy.kept_logprobs_N.copy()
    logprobs[tokens.kept_offsets_T1[first]] = -np.inf
    without = replace(policy, kept_logprobs_N=logprobs)
    with pytest.raises(InvalidInput, match=f"infinite in response {tokens.row_T[first]}"):
        exact_kl_loss(policy, without, tokens, ratios)
    assert np.isfinite(float(exact_kl_loss(without, policy, tokens, ratios).value)), "0 log 0 is 0"


def test_what_does_not_fit_is_refused_by_name(
    simulate: Any, rng: np.random.Generator, packed: Any, hidden: np.ndarray, weight: np.ndarray
) -> None:
    policy = scored(packed, hidden, weight)
    ratios = log_ratios_of(policy, packed.tokens)
    with pytest.raises(InvalidInput, match="score with distribution=True"):
        exact_entropy_loss(replace(policy, kept_logprobs_N=None), packed.tokens, ratios)
    with pytest.raises(InvalidInput, match="they are of others"):
        exact_entropy_loss(replace(policy, kept_logprobs_N=policy.kept_logprobs_N[1:]), packed.tokens, ratios)
    with pytest.raises(InvalidInput, match="direction is 'both'"):
        exact_kl_loss(policy, policy, packed.tokens, ratios, direction="both")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="the ratios have"):
        exact_entropy_loss(policy, packed.tokens.take(np.arange(2)), ratios)
    whole = to_packed(simulate(rng, [SamplingParams()]).batch)
    scores = scored(whole, rng.normal(size=(whole.num_positions, HIDDEN)), weight)
    with pytest.raises(ScoringRefused, match="rollout-0 was drawn from the whole vocabulary"):
        exact_entropy_loss(scores, whole.tokens, log_ratios_of(scores, whole.tokens))
