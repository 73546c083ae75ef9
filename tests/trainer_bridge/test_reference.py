"""The oracle against facts that need no second oracle."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput, LogitsError, ScoringRefused, ViolationError
from keptset.schemas.findings import FindingKind
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge import reference

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=30)


@given(LOGITS, st.floats(0.1, 5))
def test_an_untruncated_kept_set_is_the_softmax(logits: list[float], temperature: float) -> None:
    kept = reference.truncate(logits, SamplingParams(temperature=temperature))
    p = np.exp(np.array(logits) / temperature)
    np.testing.assert_allclose(np.exp(kept.logprobs), p / p.sum(), rtol=1e-9)
    assert kept.log_kept_mass == 0.0
    assert kept.kept_ids.tolist() == list(range(len(logits)))


@given(LOGITS, st.integers(0, 8), st.floats(0.05, 1), st.floats(0, 0.9), st.floats(0.2, 3))
def test_kept_log_probability_plus_mass_is_the_full_one(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = reference.truncate(logits, params)
    for token, logprob in zip(kept.kept_ids.tolist(), kept.logprobs.tolist(), strict=True):
        full = reference.score(logits, None, token, temperature)
        assert logprob + kept.log_kept_mass == pytest.approx(full, abs=1e-9)
        assert reference.score(logits, kept.kept_ids, token, temperature) == pytest.approx(logprob, abs=1e-12)
    assert reference.trainer_kept_mass(logits, kept.kept_ids, temperature) == pytest.approx(
        kept.log_kept_mass, abs=1e-12
    )


@given(LOGITS, st.integers(1, 6), st.randoms())
def test_the_kept_set_moves_with_a_permutation_when_no_logits_tie(logits: list[float], top_k: int, random) -> None:
    distinct = np.array(sorted(set(logits)))
    order = list(range(len(distinct)))
    random.shuffle(order)
    kept = reference.truncate(distinct, SamplingParams(top_k=top_k))
    moved = reference.truncate(distinct[order], SamplingParams(top_k=top_k))
    assert sorted(order[i] for i in moved.kept_ids) == kept.kept_ids.tolist()


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
def test_logits_from_which_nothing_can_be_drawn_are_refused(bad: list[float]) -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0)):
        with pytest.raises(LogitsError, match="finite"):
            reference.truncate(bad, params)


def test_a_temperature_near_zero_neither_overflows_nor_gives_nan() -> None:
    kept = reference.truncate([3e38, 0.0, -3e38], SamplingParams(temperature=1e-300))
    assert kept.kept_ids.tolist() == [0, 1, 2]
    assert (kept.entropy, kept.logprob_var, kept.logprobs[0]) == (0.0, 0.0, 0.0)


def test_draws_invert_the_distribution_function_in_id_order() -> None:
    kept = reference.truncate(np.log([0.25, 0.5, 0.25]), SamplingParams())
    drawn = [reference.draw(kept, u) for u in (0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53)]
    assert drawn == [0, 0, 1, 1, 2, 2]


def test_a_member_of_probability_zero_is_never_drawn() -> None:
    kept = reference.truncate([-2000.0, 0.0, -2000.0], SamplingParams())
    assert {reference.draw(kept, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_bans_and_the_minimum_length_remove_tokens() -> None:
    params = SamplingParams(min_new_tokens=2, stop_token_ids=(1,))
    assert reference.process([0.0, 1.0, 2.0], [], [0], params, banned_ids=[2]).tolist() == [0.0, -np.inf, -np.inf]
    assert reference.process([0.0, 1.0, 2.0], [], [0, 0], params).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("prompt", "response", "params"),
    [
        ([3], [], SamplingParams()),
        ([], [-1], SamplingParams()),
        ([], [], SamplingParams(logit_bias={3: 1.0})),
        ([], [], SamplingParams(min_new_tokens=1, stop_token_ids=(9,))),
    ],
)
def test_ids_outside_the_vocabulary_are_named(prompt: list[int], response: list[int], params: SamplingParams) -> None:
    with pytest.raises(InvalidInput, match=r"outside \[0, 3\)"):
        reference.process([0.0, 1.0, 2.0], prompt, response, params)


@pytest.mark.parametrize(
    ("kept", "token", "kind"),
    [
        ([], 0, FindingKind.EMPTY_SET),
        ([0, 7], 0, FindingKind.RANGE),
        ([1, 0], 0, FindingKind.SORTED),
        ([0, 0], 0, FindingKind.SORTED),
        ([1, 2], 0, FindingKind.MEMBER),
    ],
)
def test_a_broken_kept_set_is_never_scored(kept: list[int], token: int, kind: FindingKind) -> None:
    with pytest.raises(ViolationError) as caught:
        reference.score([0.0, 1.0, 2.0], kept, token, 1.0)
    assert caught.value.findings[0].kind is kind


@pytest.mark.parametrize(
    ("temperature", "error"),
    [(None, ScoringRefused), (math.nan, ScoringRefused), (0.0, ScoringRefused), (-1.0, InvalidInput)],
)
def test_a_temperature_that_cannot_be_used_is_refused(temperature: float | None, error: type[Exception]) -> None:
    with pytest.raises(error, match="temperature"):
        reference.score([0.0, 1.0], [0, 1], 0, temperature)


def test_the_score_gradient_is_that_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    z, kept = rng.normal(0, 2, 12), [1, 4, 5, 9]
    step = 1e-6
    numeric = [
        (reference.score(z + step * e, kept, 4, 0.7) - reference.score(z - step * e, kept, 4, 0.7)) / (2 * step)
        for e in np.eye(12)
    ]
    np.testing.assert_allclose(reference.score_gradient(z, kept, 4, 0.7), numeric, atol=1e-8)
    assert reference.score_gradient(z, [4], 4, 0.7).tolist() == [0.0] * 12


def position(**changes: object) -> reference.Position:
    settings: dict[str, object] = {
        "logits_V": [2.0, 1.0, 0.5, -0.5, 0.0],
        "prompt_ids": [1],
        "response_ids": [0],
        "params": SamplingParams(temperature=0.7, repetition_penalty=1.3),
        "token": 1,
        "kept_ids": [0, 1, 2],
        "log_kept_mass": -0.2,
        "neighbour_sets": ([0, 1], [2, 3]),
        "swapped_sets": ([1, 3],),
        "other_versions": ([2.0, 0.0, 0.5, -0.5, 0.0],),
    }
    return reference.Position(**(settings | changes))


def test_each_fault_is_explained_by_itself_and_by_no_other() -> None:
    at = position()
    explained = reference.explanations(at)
    assert set(explained) >= {FindingKind.FULL_VOCABULARY, FindingKind.WRONG_VERSION, FindingKind.MASK_SHIFTED}
    assert len(explained[FindingKind.MASK_SHIFTED]) == 1, "only the neighbour that holds the token can be tried"
    for fault, values in explained.items():
        wrong_b = values[0]
        residuals = {kind: [min(abs(wrong_b - v) for v in vs)] for kind, vs in explained.items() if vs}
        assert reference.better_explanation([wrong_b - reference.honest(at)], residuals) is fault


def test_an_explanation_must_halve_the_median_residual() -> None:
    kind = FindingKind.RAW_LOGITS
    assert reference.better_explanation([1.0, 1.0], {kind: [0.5, 0.4]}) is kind
    assert reference.better_explanation([1.0, 1.0], {kind: [0.6, 0.6]}) is None
    assert reference.better_explanation([0.0], {kind: [0.0]}) is None
    assert reference.better_explanation([1.0], {}) is None


def test_greedy_positions_and_absent_processors_offer_no_explanation() -> None:
    greedy = position(params=SamplingParams(temperature=0), kept_ids=[1], log_kept_mass=0.0)
    assert reference.explanations(greedy) == {}
    plain = reference.explanations(position(params=SamplingParams(temperature=0.7)))
    assert plain[FindingKind.PROCESSORS_MISSING] == ()


def test_places_of_honest_draws_are_uniform_and_of_argmax_draws_are_not() -> None:
    rng = np.random.default_rng(1)
    kept = reference.truncate(rng.normal(0, 1, 20), SamplingParams(top_p=0.9))
    v = [reference.pit_uniform("r", i) for i in range(2000)]
    honest = [reference.draw(kept, u) for u in rng.random(2000)]
    u = [reference.pit(kept.kept_ids, kept.logprobs, y, w) for y, w in zip(honest, v, strict=True)]
    assert reference.kolmogorov_smirnov(u)[1] > 1e-3
    best = int(kept.kept_ids[np.argmax(kept.logprobs)])
    greedy = [reference.pit(kept.kept_ids, kept.logprobs, best, w) for w in v]
    assert reference.kolmogorov_smirnov(greedy)[1] < 1e-12


def test_the_hash_for_places_is_a_function_of_rollout_and_position_alone() -> None:
    assert reference.pit_uniform("a", 3) == reference.pit_uniform("a", 3)
    values = {reference.pit_uniform(r, i) for r in "ab" for i in range(50)}
    assert len(values) == 100
    assert all(0 <= v < 1 for v in values)


def test_the_kolmogorov_smirnov_tail_matches_known_quantiles() -> None:
    # Asymptotic critical values: sqrt(n) D = 1.3581 at 5 %, 1.6276 at 1 %.
    n = 10_000
    for critical, level in ((1.3581, 0.05), (1.6276, 0.01)):
        d = critical / (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
        u = np.clip(np.arange(n) / n + d, 0, 1)
        got_d, p = reference.kolmogorov_smirnov(u)
        assert (got_d, p) == (pytest.approx(d, abs=1e-12), pytest.approx(level, abs=2e-4))
    assert reference.kolmogorov_smirnov((np.arange(n) + 0.5) / n)[1] == 1.0


def test_surprisal_without_choices_is_no_number() -> None:
    assert math.isnan(reference.surprisal_z([0.0], [0.0], [0.0]))
    assert reference.normal_p_value(1.959963984540054) == pytest.approx(0.05)


def test_holm_rejects_step_by_step() -> None:
    # Sorted: 0.01 <= 0.05 / 4, 0.015 <= 0.05 / 3, 0.03 > 0.05 / 2 stops. Without steps 0.015 would stay.
    assert reference.holm([0.015, 0.04, 0.03, 0.01], 0.05).tolist() == [True, False, False, True]
    assert reference.holm([0.6, 0.001], 0.05).tolist() == [False, True]
    assert reference.holm([], 0.05).tolist() == []
