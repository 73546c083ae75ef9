"""Dense processed scores against the float64 oracle."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.adapters.dense_scores import read_steps
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams
from keptset.trainer_bridge.reference import truncate

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@given(st.integers(0, 2**32 - 1), PARAMS)
def test_every_number_is_the_oracles(seed: int, params: SamplingParams) -> None:
    random = np.random.default_rng(seed)
    steps, rows, vocab_size = 3, 4, 9
    raw_TBV = (random.normal(size=(steps, rows, vocab_size)) * 3).astype(np.float32)
    kept = [[truncate(row, params) for row in step] for step in raw_TBV]
    scores_TBV = np.full(raw_TBV.shape, -np.inf, np.float32)
    for t in range(steps):
        for b in range(rows):
            ids = kept[t][b].kept_ids
            scores_TBV[t, b, ids] = raw_TBV[t, b, ids] / np.float32(params.temperature)
    tokens_BT = np.array([[random.choice(kept[t][b].kept_ids) for t in range(steps)] for b in range(rows)])
    lengths_B = np.array([3, 2, 0, 3])
    found = read_steps(list(scores_TBV), list(raw_TBV), tokens_BT, lengths_B, params.temperature, greedy=False)
    for b, length in enumerate(lengths_B.tolist()):
        sets = found.sets(b, length)
        if sets is None:
            assert all(len(kept[t][b].kept_ids) == vocab_size for t in range(length))
        for t in range(length):
            oracle = kept[t][b]
            if sets is not None:
                assert sets[1][sets[0][t] : sets[0][t + 1]].tolist() == oracle.kept_ids.tolist()
            b_oracle = oracle.logprobs[oracle.kept_ids.tolist().index(tokens_BT[b, t])]
            expected = [b_oracle, oracle.log_kept_mass, oracle.entropy, oracle.logprob_var]
            assert found.m_TB is not None
            numbers = [x[t, b] for x in (found.b_TB, found.m_TB, found.entropy_TB, found.variance_TB)]
            np.testing.assert_allclose(numbers, expected, atol=2e-6, rtol=1e-6)


def one(scores: Any, token: int, *, raw: Any = None, greedy: bool = False, temperature: float | None = 1.0) -> Any:
    raw_steps = None if raw is None else [np.array([raw], np.float32)]
    step = [np.array([scores], np.float32)]
    return read_steps(step, raw_steps, np.array([[token]]), np.array([1]), temperature, greedy)


def test_greedy_keeps_the_token_alone_if_no_score_is_larger() -> None:
    for token, kept in ((1, 1), (2, 2), (0, 1)):
        found = one([0.0, 3.0, 3.0], token, greedy=True)
        assert found.sets(0, 1)[1].tolist() == [kept]
        assert found.m_TB[0, 0] == 0
    assert one([0.0, 3.0, 3.0], 1, greedy=True).b_TB[0, 0] == 0


def test_a_token_outside_its_set_has_logprob_minus_infinity() -> None:
    assert one([0.0, -np.inf, 1.0], 1).b_TB[0, 0] == -np.inf
    assert one([0.0, -np.inf, 1.0], 7).b_TB[0, 0] == -np.inf


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
def test_scores_from_which_nothing_can_be_drawn_are_marked(bad: list[float]) -> None:
    assert not one(bad, 0).sound_TB[0, 0]
    assert one([0.0, 1.0], 0).sound_TB[0, 0]


def test_the_kept_mass_is_unknown_where_something_else_changed_the_logits() -> None:
    raw = [1.0, 2.0, 3.0]
    assert one([-np.inf, 2.0, 3.0], 2, raw=raw).m_TB[0, 0] == pytest.approx(
        np.log1p(-np.exp(1 - 3.4076059644)), abs=1e-6
    )
    assert np.isnan(one([-np.inf, 2.5, 3.0], 2, raw=raw).m_TB[0, 0])
    assert one([-np.inf, 2.0, 3.0], 2, raw=raw, temperature=None).m_TB is None
    assert one([-np.inf, 2.0, 3.0], 2).m_TB is None


def test_sets_that_are_the_vocabulary_at_some_tokens_only_are_written_out_there() -> None:
    scores = [np.array([[0.0, 1.0, 2.0]]), np.array([[-np.inf, 1.0, 2.0]])]
    found = read_steps(scores, None, np.array([[0, 1]]), np.array([2]), 1.0, greedy=False)
    offsets, ids = found.sets(0, 2)
    assert (offsets.tolist(), ids.tolist()) == ([0, 3, 5], [0, 1, 2, 1, 2])
    assert found.sets(0, 1) is None


@pytest.mark.parametrize("step", [np.zeros((2, 3)), np.zeros(3), [0.0], np.zeros((1, 4))])
def test_scores_of_another_shape_are_refused(step: Any) -> None:
    with pytest.raises(InvalidInput, match=r"scores\[1\] is .*; expected a tensor \[1, 3\]"):
        read_steps([np.zeros((1, 3)), step], None, np.zeros((1, 2), int), np.array([2]), 1.0, greedy=False)
