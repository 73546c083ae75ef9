"""Advantages of responses to the same prompt, from their rewards.

A = reward - mean over the group, divided by the group's standard deviation where that is asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput


def group_advantages(
    rewards_B: ArrayLike, groups_B: Sequence[object], *, scale: Literal["std", "none"] = "std"
) -> NDArray[np.float64]:
    """Advantages [B] of responses within their groups, by the population's standard deviation.

    `groups_B` names each response's group (`group_id`, or any values that are equal within a group). A group whose
    rewards are all the same has advantages of exactly 0.

    Errors: InvalidInput where lengths differ, a reward is not finite, or a group is None.

    >>> group_advantages([1.0, 0.0, 5.0, 5.0], ["a", "a", "b", "b"]).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    rewards: NDArray[np.float64] = np.asarray(rewards_B, np.float64)
    if rewards.shape != (len(groups_B),):
        raise InvalidInput(f"rewards_B has shape {rewards.shape}; there are {len(groups_B)} responses with a group")
    if scale not in ("std", "none"):
        raise InvalidInput(f"scale is {scale!r}; it must be 'std' or 'none'")
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise InvalidInput(f"the reward of response {bad[0]} is {rewards[bad[0]]}; it must be finite")
    numbers: dict[object, int] = {}
    group_B = np.array([numbers.setdefault(group, len(numbers)) for group in groups_B], np.int64)
    if None in numbers:
        raise InvalidInput("a response has no group (None); give one to each, say its prompt_id")
    size_G = np.bincount(group_B)
    low_G, high_G = np.full(len(size_G), np.inf), np.full(len(size_G), -np.inf)
    np.minimum.at(low_G, group_B, rewards)
    np.maximum.at(high_G, group_B, rewards)
    centred = rewards - (np.bincount(group_B, rewards) / size_G)[group_B]
    centred[(low_G == high_G)[group_B]] = 0.0  # the mean of equal numbers may be off by a rounding
    if scale == "none":
        return centred
    std_G = np.sqrt(np.bincount(group_B, centred**2) / size_G)
    return np.divide(centred, std_G[group_B], out=np.zeros_like(centred), where=std_G[group_B] > 0)
