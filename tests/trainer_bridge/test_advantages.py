"""Advantages within groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.advantages import group_advantages

# Millionths: the square of a smaller difference can be 0, and with it what the test divides by.
REWARDS = st.lists(st.tuples(st.integers(0, 3), st.integers(-5_000_000, 5_000_000).map(lambda n: n / 1e6)), min_size=1)


@given(REWARDS, st.sampled_from(["std", "none"]))
def test_each_group_is_centred_and_scaled_by_itself(pairs: list[tuple[int, float]], scale: Any) -> None:
    groups, rewards = [g for g, _ in pairs], np.array([r for _, r in pairs])
    advantages = group_advantages(rewards, groups, scale=scale)
    for group in set(groups):
        own = np.array(groups) == group
        expected = rewards[own] - rewards[own].mean()
        if scale == "std" and np.ptp(rewards[own]) > 0:
            expected = expected / rewards[own].std()
        np.testing.assert_allclose(advantages[own], expected, atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e300])
def test_equal_rewards_teach_exactly_nothing(reward: float, scale: Any) -> None:
    assert group_advantages([reward] * 7, ["g"] * 7, scale=scale).tolist() == [0.0] * 7


def test_groups_may_be_named_by_anything_and_lie_anywhere() -> None:
    assert group_advantages([1, 5, 3, 7], [("p", 1), "x", ("p", 1), "x"], scale="none").tolist() == [-1, -1, 1, 1]
    assert group_advantages([], []).tolist() == []


@pytest.mark.parametrize(
    ("rewards", "groups", "scale", "told"),
    [
        ([1.0], ["a", "a"], "std", "there are 2 responses"),
        ([1.0, np.nan], ["a", "a"], "std", "reward of response 1 is nan"),
        ([1.0, 2.0], ["a", None], "std", "no group"),
        ([1.0], ["a"], "max", "scale is 'max'"),
    ],
)
def test_what_has_no_advantage_is_refused(rewards: Any, groups: Any, scale: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        group_advantages(rewards, groups, scale=scale)
