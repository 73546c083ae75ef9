"""Version lag of sampled tokens, and what is done beyond a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.alignment import to_packed
from keptset.trainer_bridge.staleness import staleness_weights, staleness_weights_of, version_lag

VERSIONS = [7, 5, 6, 3, 5]
ROWS = [0, 0, 1, 1, 2]


def test_within_the_bound_every_token_weighs_one() -> None:
    weighed = staleness_weights(VERSIONS, ROWS, 7, max_lag=4)
    assert weighed.weights_T.tolist() == [1.0] * 5
    assert weighed.lag_T.tolist() == [0, 2, 1, 4, 2]
    assert weighed.report.tokens_beyond == 0


def test_a_token_beyond_the_bound_is_dropped_and_counted() -> None:
    weighed = staleness_weights(VERSIONS, ROWS, 7, max_lag=1)
    assert weighed.weights_T.tolist() == [1, 0, 1, 0, 0]
    report = weighed.report
    assert (report.tokens_beyond, report.responses_beyond) == (3, 3)
    assert (report.tokens_dropped, report.tokens_down_weighted) == (3, 0)
    assert report.tokens_by_lag == {0: 1, 1: 1, 2: 2, 4: 1}
    assert report.mean_lag == pytest.approx(9 / 5)
    assert report.max_lag_seen == 4


def test_a_token_beyond_the_bound_may_weigh_less_the_older_it_is() -> None:
    weighed = staleness_weights(VERSIONS, ROWS, 7, max_lag=1, beyond="down_weight", decay=0.5)
    assert weighed.weights_T.tolist() == [1, 0.5, 1, 0.125, 0.5]
    assert (weighed.report.tokens_down_weighted, weighed.report.tokens_dropped) == (3, 0)


def test_counting_alone_changes_no_weight() -> None:
    weighed = staleness_weights(VERSIONS, ROWS, 7, max_lag=1, beyond="keep")
    assert weighed.weights_T.tolist() == [1.0] * 5
    assert weighed.report.tokens_beyond == 3


@pytest.mark.parametrize(
    ("beyond", "expected"), [("drop", [0, 0, 0, 0, 1]), ("down_weight", [0.5, 0.5, 0.125, 0.125, 1])]
)
def test_per_response_the_oldest_token_decides(beyond: Any, expected: list[float]) -> None:
    weighed = staleness_weights([7, 5, 6, 3, 6], ROWS, 7, max_lag=1, beyond=beyond, per="response")
    assert weighed.weights_T.tolist() == expected
    assert (weighed.report.tokens_beyond, weighed.report.responses_beyond) == (4, 2)
    assert weighed.report.tokens_by_lag == {0: 1, 1: 2, 2: 1, 4: 1}, "lags are counted as they are"


def test_an_unknown_version_stops_the_call_unless_told_otherwise() -> None:
    with pytest.raises(InvalidInput, match=r"token 1 of the call token None is unknown \(1 tokens\)"):
        staleness_weights([7, -1], [0, 0], 7, max_lag=0)
    kept = staleness_weights([7, -1], [0, 0], 7, max_lag=0, unknown="keep")
    assert kept.weights_T.tolist() == [1, 1]
    dropped = staleness_weights([7, -1], [0, 0], 7, max_lag=0, unknown="drop")
    assert dropped.weights_T.tolist() == [1, 0]
    whole = staleness_weights([7, -1, 7], [0, 0, 1], 7, max_lag=0, unknown="drop", per="response")
    assert whole.weights_T.tolist() == [0, 0, 1]
    assert (whole.report.unknown_tokens, whole.report.tokens_dropped, whole.report.tokens_beyond) == (1, 2, 0)


def test_a_token_of_the_future_is_refused() -> None:
    with pytest.raises(InvalidInput, match="drawn at version 8, after the current version 7"):
        version_lag([7, 8], 7)


def test_a_batch_names_the_token_by_its_rollout(world: Any) -> None:
    tokens = to_packed(world.batch).tokens
    weighed = staleness_weights_of(tokens, 11, max_lag=5)
    assert weighed.lag_T.tolist() == (11 - tokens.row_T).tolist()
    assert (weighed.weights_T == (tokens.row_T >= 6)).all()
    unknown = replace(tokens, policy_versions_T=np.full(tokens.num_tokens, -1))
    with pytest.raises(InvalidInput, match="rollout-0 token"):
        staleness_weights_of(unknown, 11, max_lag=5)
    with pytest.raises(InvalidInput, match="rollout-11 token"):
        staleness_weights_of(tokens, 10, max_lag=5)


def test_without_any_version_there_is_no_data() -> None:
    report = staleness_weights([-1], [0], 7, max_lag=0, unknown="keep").report
    assert report.mean_lag is None
    assert report.max_lag_seen is None
    assert report.flat("train/") == {
        "train/staleness/unknown_tokens": 1.0,
        "train/staleness/tokens_beyond": 0.0,
        "train/staleness/responses_beyond": 0.0,
        "train/staleness/tokens_dropped": 0.0,
        "train/staleness/tokens_down_weighted": 0.0,
    }
    assert staleness_weights([], [], 7, max_lag=0, per="response").report.max_lag_seen is None


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 9), st.sampled_from(["drop", "down_weight"])
)
def test_weights_never_grow_with_age(versions: list[int], max_lag: int, beyond: Any) -> None:
    weighed = staleness_weights(versions, range(len(versions)), 9, max_lag=max_lag, beyond=beyond)
    order = np.argsort(weighed.lag_T)
    assert (np.diff(weighed.weights_T[order]) <= 0).all()
    assert (weighed.weights_T[weighed.lag_T <= max_lag] == 1).all()
    assert (weighed.weights_T[weighed.lag_T > max_lag] < 1).all()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_lag": -1}, "max_lag is -1"),
        ({"max_lag": 0, "beyond": "forget"}, "beyond is 'forget'"),
        ({"max_lag": 0, "per": "batch"}, "per is 'batch'"),
        ({"max_lag": 0, "unknown": "guess"}, "unknown is 'guess'"),
        ({"max_lag": 0, "decay": 1.0}, "decay is 1.0"),
        ({"max_lag": 0, "decay": 0.0}, "decay is 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        staleness_weights([1], [0], 1, **settings)


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"row_T has shape \(2,\); there are 1 policy versions"):
        staleness_weights([1], [0, 0], 1, max_lag=0)
