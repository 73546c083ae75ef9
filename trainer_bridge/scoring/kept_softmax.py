"""log-softmax over listed ids, ragged, with its gradient.

    s = (z - max z) / T,   l = s_y - log sum exp s,   dl/dz_k = ([k = y] - p_k) / T

z are the trainer's logits at the kept ids after replay. Subtracting the maximum first loses nothing to the division.

Legend: A tokens with two or more kept ids, M kept ids over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keptset.schemas.ragged import row_index
from keptset.trainer_bridge.replay import Replay
from keptset.trainer_bridge.scoring.hand import LOWEST, Hand, Ints, Tensor
from keptset.trainer_bridge.scoring.plan import Plan


@dataclass(frozen=True, kw_only=True)
class KeptSoftmax:
    """Scores of the active tokens, and what their gradient needs (M numbers, never a logit)."""

    logprobs_A: Tensor
    probabilities_M: Tensor
    entropy_A: Tensor | None
    flat_M: Ints
    """Where the kept logits stand in [R * V]."""
    segment_M: Tensor
    member_A: Tensor
    temperature_A: Tensor
    slope_M: Tensor | None
    """d z' / d z of the replay; None where nothing was replayed."""


def replayed(hand: Hand, z_M: Tensor, replay: Replay) -> tuple[Tensor, Tensor]:
    """z' and d z' / d z of each logit."""
    divisor_M, shift_M = hand.floats(replay.divisor_N), hand.floats(replay.shift_N)
    positive_M = z_M > 0
    return (
        hand.where(positive_M, z_M / divisor_M, z_M * divisor_M) + shift_M,
        hand.where(positive_M, 1 / divisor_M, divisor_M),
    )


def kept_softmax(hand: Hand, plan: Plan, rows_T: Ints, vocab_size: int, *, entropy: bool) -> KeptSoftmax:
    """Scores over the kept sets of the plan's active tokens; `rows_T` gives the logits' row of each token."""
    segment = row_index(plan.starts_A1)
    flat_M = rows_T[plan.active_A][segment] * vocab_size + plan.ids_M
    segment_M = hand.ints(segment)
    temperature_A = hand.floats(plan.temperature_A)
    member_A = hand.ints(plan.member_A)

    z_M, slope_M = hand.gather(flat_M), None
    if plan.replay_M is not None:
        z_M, slope_M = replayed(hand, z_M, plan.replay_M)
    top_A = hand.segment_max(z_M, plan.starts_A1, segment_M)
    s_M = (z_M - hand.take(top_A, segment_M)) / hand.take(temperature_A, segment_M)
    exp_M = hand.exp(s_M)
    sum_A = hand.segment_sum(exp_M, plan.starts_A1, segment_M)
    log_sum_A = hand.log(sum_A)
    probabilities_M = exp_M / hand.take(sum_A, segment_M)
    entropy_A = None
    if entropy:
        weighted_M = hand.where(s_M < LOWEST, 0.0, probabilities_M * s_M)  # 0 * -inf counts as 0
        entropy_A = log_sum_A - hand.segment_sum(weighted_M, plan.starts_A1, segment_M)
    return KeptSoftmax(
        logprobs_A=hand.take(s_M, member_A) - log_sum_A,
        probabilities_M=probabilities_M,
        entropy_A=entropy_A,
        flat_M=flat_M,
        segment_M=segment_M,
        member_A=member_A,
        temperature_A=temperature_A,
        slope_M=slope_M,
    )


def kept_gradient(hand: Hand, done: KeptSoftmax, gradient_A: Tensor, gradient_RV: Tensor) -> Tensor:
    """Add the gradient of the active tokens into zeros [R, V]: M numbers are written, the rest stays exactly 0."""
    scaled_A = gradient_A / done.temperature_A
    scaled_M = hand.take(scaled_A, done.segment_M)
    d_M = -scaled_M * done.probabilities_M
    d_M = hand.put(d_M, done.member_A, hand.take(d_M, done.member_A) + scaled_A)
    if done.slope_M is not None:
        d_M = d_M * done.slope_M
    # A token that takes no part has gradient 0, even where its own probabilities are no numbers: 0 * nan counts as 0.
    d_M = hand.where(hand.is_zero(scaled_M), 0.0, d_M)
    return hand.put(gradient_RV, hand.ints(np.asarray(done.flat_M)), d_M)
