"""log-softmax over the whole vocabulary from hidden states, in chunks of the head with a running logsumexp.

    z = h W_chunk^T + bias      d = ([k = y] - p_k) g / T      dh += d W_chunk      dW_chunk += d^T h

A chunk of the head meets block after block of tokens, so that its gradient is added up once. Logits exist for one
chunk and one block at a time, and are made anew for the gradient.

Legend: F tokens scored so, B tokens of a block, C ids of a chunk, R positions, V rows of the head here, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keptset.schemas.ragged import gather_spans, row_index
from keptset.trainer_bridge.scoring.hand import LOWEST, Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import HeadHand
from keptset.trainer_bridge.scoring.kept_softmax import replayed
from keptset.trainer_bridge.scoring.partial_softmax import Partial, Whole, finite, joined, merged
from keptset.trainer_bridge.scoring.plan import Plan

MIN_BLOCK = 16
"""Tokens that share a chunk of the head at least: with fewer, reading it costs more than the product."""


@dataclass(frozen=True, kw_only=True)
class FullTokens:
    """The tokens of a plan that are scored over the vocabulary, and where their hidden states are."""

    plan: Plan
    rows_F: Ints

    @classmethod
    def of(cls, plan: Plan, rows_T: Ints) -> FullTokens:
        return cls(plan=plan, rows_F=rows_T[plan.full_F])

    def __len__(self) -> int:
        return len(self.rows_F)


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """How chunks and blocks are cut so that what exists at once fits into the bound."""

    chunk: int
    block: int

    @classmethod
    def within(cls, scratch_bytes: int, hidden_size: int, item_bytes: int) -> _Tiles:
        """A quarter goes to a chunk of the head and a quarter to its gradient, the rest to a block: its hidden states,
        and four arrays as large as its logits."""
        quarter = scratch_bytes // (4 * item_bytes)
        chunk = max(1, quarter // hidden_size)
        block = 2 * quarter // (hidden_size + 4 * chunk)
        if block < MIN_BLOCK:
            block = max(1, min(MIN_BLOCK, quarter // hidden_size))
            chunk = max(1, min(chunk, quarter // (4 * block)))
        return cls(chunk=chunk, block=block)


def _spans(num: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, num)) for begin in range(0, num, step))


class VocabularyChunks:
    """Forward and backward over one head for one set of tokens."""

    def __init__(
        self, hand: HeadHand, hidden_RH: Tensor, head: Head, tokens: FullTokens, scratch_bytes: int, *, entropy: bool
    ) -> None:
        self._hand, self._hidden_RH, self._head, self._tokens = hand, hidden_RH, head, tokens
        self._entropy = entropy
        self._tiles = _Tiles.within(scratch_bytes, int(hidden_RH.shape[1]), hand.item_bytes)
        self._ids_F = tokens.plan.token_ids_F - head.first

    def _chunks(self) -> Iterator[slice]:
        return _spans(int(self._head.weight_VH.shape[0]), self._tiles.chunk)

    def _blocks(self, which_F: Ints) -> list[Ints]:
        return [which_F[span] for span in _spans(len(which_F), self._tiles.block)]

    def partial(self) -> tuple[Partial, Tensor]:
        """What this rank's rows say about each token, and the tokens' own logits where they are here (0 elsewhere)."""
        hand = self._hand
        blocks = self._blocks(np.arange(len(self._tokens)))
        running = [Partial.nothing(hand, len(block)) for block in blocks]
        own = [hand.floats(np.zeros(len(block))) for block in blocks]
        for chunk in self._chunks():
            weight_CH = hand.rows_from(self._head.weight_VH, chunk.start, chunk.stop)
            for at, block in enumerate(blocks):
                z_BC, _, _ = self._logits(weight_CH, chunk, block)
                part, temperature_B = self._partial_of(z_BC, block)
                running[at] = merged(hand, running[at], part, temperature_B)
                inside, flat = self._own(chunk, block)
                if len(inside):
                    own[at] = hand.put(own[at], hand.ints(inside), hand.take(z_BC.reshape([-1]), hand.ints(flat)))
        return joined(hand, running), hand.concatenate(own)

    def add_gradients(
        self,
        done: Whole,
        gradient_F: Tensor,
        which_F: Ints,
        hidden_gradient_RH: Tensor | None,
        weight_gradient_VH: Tensor | None,
        bias_gradient_V: Tensor | None,
    ) -> None:
        """Add what the scores of the tokens `which_F` pass on; None where a gradient is not asked for."""
        hand = self._hand
        for chunk in self._chunks():
            weight_CH = hand.rows_from(self._head.weight_VH, chunk.start, chunk.stop)
            for block in self._blocks(which_F):
                z_BC, hidden_BH, slope = self._logits(weight_CH, chunk, block)
                d_BC = self._gradient_of(z_BC, slope, chunk, block, done, gradient_F)
                if hidden_gradient_RH is not None:
                    rows_B = hand.ints(self._tokens.rows_F[block])
                    hand.add_rows(hidden_gradient_RH, rows_B, None, hand.product(d_BC, weight_CH))
                if weight_gradient_VH is not None:
                    hand.add_slice(weight_gradient_VH, chunk.start, hand.product(d_BC, hidden_BH, transpose_left=True))
                if bias_gradient_V is not None:
                    hand.add_slice(bias_gradient_V, chunk.start, d_BC.sum(0))

    def _logits(
        self, weight_CH: Tensor, chunk: slice, block: Ints
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Replayed logits, the hidden states behind them, and where and with which slope replay acted."""
        hand = self._hand
        hidden_BH = hand.rows_at(self._hidden_RH, hand.ints(self._tokens.rows_F[block]))
        z_BC = hand.product(hidden_BH, weight_CH, transpose_right=True)
        if self._head.bias_V is not None:
            z_BC = z_BC + hand.rows_from(self._head.bias_V, chunk.start, chunk.stop)
        patch = self._tokens.plan.patch
        if patch is None:
            return z_BC, hidden_BH, None
        offsets_B1, index_Q = gather_spans(patch.offsets_T1, self._tokens.plan.full_F[block])
        ids_Q = patch.ids_N[index_Q] - self._head.first
        inside = np.flatnonzero((ids_Q >= chunk.start) & (ids_Q < chunk.stop))
        if not len(inside):
            return z_BC, hidden_BH, None
        width = chunk.stop - chunk.start
        at_Q = hand.ints(row_index(offsets_B1)[inside] * width + ids_Q[inside] - chunk.start)
        new_Q, slope_Q = replayed(hand, hand.take(z_BC.reshape([-1]), at_Q), patch.replay_N.take(index_Q[inside]))
        return hand.put(z_BC, at_Q, new_Q), hidden_BH, (at_Q, slope_Q)

    def _partial_of(self, z_BC: Tensor, block: Ints) -> tuple[Partial, Tensor]:
        hand = self._hand
        temperature_B1 = hand.floats(self._tokens.plan.temperature_F[block, None])
        top_B1 = hand.row_max(z_BC)
        s_BC = (z_BC - finite(top_B1)) / temperature_B1
        exp_BC = hand.exp(s_BC)
        sum_B = hand.row_sum(exp_BC).reshape([-1])
        weighted_B = sum_B * 0.0
        if self._entropy:
            weighted_BC = hand.where(s_BC < LOWEST, 0.0, exp_BC * s_BC)  # 0 * -inf counts as 0
            weighted_B = hand.row_sum(weighted_BC).reshape([-1])
        part = Partial(top_X=top_B1.reshape([-1]), sum_X=sum_B, weighted_X=weighted_B)
        return part, temperature_B1.reshape([-1])

    def _gradient_of(
        self,
        z_BC: Tensor,
        slope: tuple[Tensor, Tensor] | None,
        chunk: slice,
        block: Ints,
        done: Whole,
        gradient_F: Tensor,
    ) -> Tensor:
        """Gradient of the logits of one chunk and block."""
        hand = self._hand
        block_B = hand.ints(block)
        temperature_B1 = hand.floats(self._tokens.plan.temperature_F[block, None])
        scaled_B1 = hand.take(gradient_F, block_B).reshape([-1, 1]) / temperature_B1
        top_B1, log_sum_B1 = (hand.take(of, block_B).reshape([-1, 1]) for of in (done.top_X, done.log_sum_X))
        d_BC = hand.exp((z_BC - top_B1) / temperature_B1 - log_sum_B1) * -scaled_B1
        inside, flat = self._own(chunk, block)
        if len(inside):
            at = hand.ints(flat)
            own = hand.take(d_BC.reshape([-1]), at) + hand.take(scaled_B1.reshape([-1]), hand.ints(inside))
            d_BC = hand.put(d_BC, at, own)
        if slope is not None:
            at_Q, slope_Q = slope
            d_BC = hand.put(d_BC, at_Q, hand.take(d_BC.reshape([-1]), at_Q) * slope_Q)
        return d_BC

    def _own(self, chunk: slice, block: Ints) -> tuple[Ints, Ints]:
        """Which tokens of the block have their own id in the chunk, and where in its logits."""
        ids_B = self._ids_F[block]
        inside = np.flatnonzero((ids_B >= chunk.start) & (ids_B < chunk.stop))
        return inside, inside * (chunk.stop - chunk.start) + ids_B[inside] - chunk.start
