"""log-softmax over the whole vocabulary, in blocks of rows, with its gradient.

The same equation as over a kept set. A block holds about as many logits as the hand asks for, so working memory does
not grow with the number of tokens; a row is never split, for its logits already lie side by side.

Legend: F tokens scored so, R rows of one block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keptset.schemas.ragged import gather_spans, row_index
from keptset.trainer_bridge.scoring.hand import LOWEST, Hand, Ints, Tensor
from keptset.trainer_bridge.scoring.kept_softmax import replayed
from keptset.trainer_bridge.scoring.plan import Plan


@dataclass(frozen=True, kw_only=True)
class FullSoftmax:
    """Scores over the vocabulary, and what their gradient needs besides the logits themselves."""

    logprobs_F: Tensor
    top_F1: Tensor
    log_sum_F1: Tensor
    entropy_F: Tensor | None


def _blocks(hand: Hand, num: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, hand.block_elements // vocab_size)
    return (slice(begin, min(begin + step, num)) for begin in range(0, num, step))


def full_softmax(hand: Hand, plan: Plan, rows_T: Ints, vocab_size: int, *, entropy: bool) -> FullSoftmax:
    """Scores over the vocabulary of the plan's full tokens."""
    logprobs, tops, log_sums, entropies = [], [], [], []
    for block in _blocks(hand, len(plan.full_F), vocab_size):
        z_RV, _ = _block_logits(hand, plan, rows_T, vocab_size, block)
        temperature_R1 = hand.floats(plan.temperature_F[block, None])
        top_R1 = hand.row_max(z_RV)
        s_RV = (z_RV - top_R1) / temperature_R1
        exp_RV = hand.exp(s_RV)
        sum_R1 = hand.row_sum(exp_RV)
        log_sum_R1 = hand.log(sum_R1)
        token_R = np.arange(len(z_RV)) * vocab_size + plan.token_ids_F[block]
        logprobs.append(hand.take(s_RV.reshape([-1]), hand.ints(token_R)) - log_sum_R1.reshape([-1]))
        tops.append(top_R1)
        log_sums.append(log_sum_R1)
        if entropy:
            weighted_RV = hand.where(s_RV < LOWEST, 0.0, exp_RV / sum_R1 * s_RV)  # 0 * -inf counts as 0
            entropies.append((log_sum_R1 - hand.row_sum(weighted_RV)).reshape([-1]))
    return FullSoftmax(
        logprobs_F=hand.concatenate(logprobs),
        top_F1=hand.concatenate(tops),
        log_sum_F1=hand.concatenate(log_sums),
        entropy_F=hand.concatenate(entropies) if entropy else None,
    )


def full_gradient(
    hand: Hand,
    plan: Plan,
    rows_T: Ints,
    vocab_size: int,
    done: FullSoftmax,
    gradient_F: Tensor,
    gradient_RV: Tensor,
) -> Tensor:
    """Write the gradient of the full tokens into their rows of zeros [R, V]."""
    for block in _blocks(hand, len(plan.full_F), vocab_size):
        z_RV, slope = _block_logits(hand, plan, rows_T, vocab_size, block)
        temperature_R1 = hand.floats(plan.temperature_F[block, None])
        scaled_R1 = gradient_F[block].reshape([-1, 1]) / temperature_R1
        p_RV = hand.exp((z_RV - done.top_F1[block]) / temperature_R1 - done.log_sum_F1[block])
        d_RV = -scaled_R1 * p_RV
        token_R = hand.ints(np.arange(len(z_RV)) * vocab_size + plan.token_ids_F[block])
        d_RV = hand.put(d_RV, token_R, hand.take(d_RV.reshape([-1]), token_R) + scaled_R1.reshape([-1]))
        if slope is not None:
            at_Q, slope_Q = slope
            d_RV = hand.put(d_RV, at_Q, hand.take(d_RV.reshape([-1]), at_Q) * slope_Q)
        d_RV = hand.where(hand.is_zero(scaled_R1), 0.0, d_RV)  # 0 * nan counts as 0
        gradient_RV = hand.put_rows(gradient_RV, rows_T[plan.full_F[block]], d_RV)
    return gradient_RV


def _block_logits(
    hand: Hand, plan: Plan, rows_T: Ints, vocab_size: int, block: slice
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Replayed logits of one block, and where and with which slope replay acted."""
    tokens = plan.full_F[block]
    z_RV = hand.rows(rows_T[tokens])
    if plan.patch is None:
        return z_RV, None
    offsets_R1, index_Q = gather_spans(plan.patch.offsets_T1, tokens)
    if not len(index_Q):
        return z_RV, None
    at_Q = hand.ints(row_index(offsets_R1) * vocab_size + plan.patch.ids_N[index_Q])
    new_Q, slope_Q = replayed(hand, hand.take(z_RV.reshape([-1]), at_Q), plan.patch.replay_N.take(index_Q))
    return hand.put(z_RV, at_Q, new_Q), (at_Q, slope_Q)
