"""Softmax over a set of ids that is met in parts: chunks of the vocabulary, or the rows that other ranks hold.

A part knows its own largest logit `top` and sums relative to it; parts are brought to one top before they are added.

    S = sum_parts S_part exp((top_part - top) / T)        l = (z_y - top) / T - log S

Legend: X tokens, of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import LOWEST, Hand, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import HeadHand


@dataclass(frozen=True, kw_only=True)
class Partial:
    """What one part says about each token."""

    top_X: Tensor
    """Largest logit; -inf where the part holds none."""
    sum_X: Tensor
    """sum of exp(s) with s = (z - top) / T."""
    weighted_X: Tensor
    """sum of s exp(s), for the entropy."""

    @classmethod
    def nothing(cls, hand: Hand, num: int) -> Partial:
        """The part that holds no logit."""
        zeros = [hand.floats(np.zeros(num)) for _ in range(2)]
        return cls(top_X=hand.floats(np.full(num, -np.inf)), sum_X=zeros[0], weighted_X=zeros[1])


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What all parts together say."""

    top_X: Tensor
    """Largest logit, finite: LOWEST stands for -inf."""
    log_sum_X: Tensor
    logprobs_X: Tensor
    entropy_X: Tensor

    def part(self, begin: int, end: int) -> Whole:
        """The same for tokens [begin, end) alone."""
        return Whole(
            top_X=self.top_X[begin:end],
            log_sum_X=self.log_sum_X[begin:end],
            logprobs_X=self.logprobs_X[begin:end],
            entropy_X=self.entropy_X[begin:end],
        )


def rescaled(hand: Hand, part: Partial, top_X: Tensor, temperature_X: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums of a part relative to a top that is at least its own, and finite."""
    shift_X = (part.top_X - top_X) / temperature_X
    factor_X = hand.exp(shift_X)
    weighted_X = factor_X * (part.weighted_X + part.sum_X * shift_X)
    # A part without any logit adds nothing.
    return factor_X * part.sum_X, hand.where(shift_X < LOWEST, 0.0, weighted_X)


def finite(top_X: Tensor) -> Tensor:
    """The top with LOWEST for -inf, which must not be subtracted from itself."""
    return top_X.clip(min=LOWEST)


def merged(hand: Hand, one: Partial, other: Partial, temperature_X: Tensor) -> Partial:
    """Two parts as one."""
    top_X = hand.where(one.top_X > other.top_X, one.top_X, other.top_X)
    sum_one_X, weighted_one_X = rescaled(hand, one, finite(top_X), temperature_X)
    sum_other_X, weighted_other_X = rescaled(hand, other, finite(top_X), temperature_X)
    return Partial(top_X=top_X, sum_X=sum_one_X + sum_other_X, weighted_X=weighted_one_X + weighted_other_X)


def joined(hand: Hand, parts: list[Partial]) -> Partial:
    """Parts about different tokens, one after the other."""
    return Partial(
        top_X=hand.concatenate([part.top_X for part in parts]),
        sum_X=hand.concatenate([part.sum_X for part in parts]),
        weighted_X=hand.concatenate([part.weighted_X for part in parts]),
    )


def whole(
    hand: HeadHand, head: Head, part: Partial, logit_X: Tensor, owned_X: NDArray[np.bool_], temperature_X: Tensor
) -> Whole:
    """Join this rank's part with those of the others: one max and one sum across the group, or none without one.

    `logit_X` are the sampled tokens' own logits, where `owned_X` says that this rank has them.

    Errors: InvalidInput where the rows of all ranks are not as many as the vocabulary has.
    """
    shard, num = head.shard, len(owned_X)
    top_X = part.top_X if shard is None else hand.all_reduce(part.top_X * 1.0, "max", shard.group)
    top_X = finite(top_X)
    sum_X, weighted_X = (part.sum_X, part.weighted_X)
    s_X = (logit_X - top_X) / temperature_X
    if shard is not None:
        sum_X, weighted_X = rescaled(hand, part, top_X, temperature_X)
        s_X = hand.where(hand.floats(owned_X.astype(np.float64)) > 0.5, s_X, hand.floats(np.zeros(num)))
        rows = hand.floats(np.array([float(head.end - head.first)]))
        summed = hand.all_reduce(hand.concatenate([sum_X, weighted_X, s_X, rows]), "sum", shard.group)
        sum_X, weighted_X, s_X = summed[:num], summed[num : 2 * num], summed[2 * num : 3 * num]
        _check_rows(hand, summed[3 * num :], shard.vocab_size)
    log_sum_X = hand.log(sum_X)
    return Whole(top_X=top_X, log_sum_X=log_sum_X, logprobs_X=s_X - log_sum_X, entropy_X=log_sum_X - weighted_X / sum_X)


def _check_rows(hand: Hand, rows: Tensor, vocab_size: int) -> None:
    held = int(hand.to_host(rows)[0])
    if held != vocab_size:
        raise InvalidInput(
            f"the ranks of the group hold {held} rows of the head together, of a vocabulary of {vocab_size}: give each "
            f"id to exactly one rank, and padding rows to none"
        )
