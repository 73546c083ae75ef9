"""log-softmax over listed ids whose logits come from hidden states, with the gradient of those logits.

    log p_m = (z_m - top) / T - log sum exp,   l = log p_y,   d_m = (G_m - p_m sum G) / T

G_m is what arrives at log p_m: through the score at the sampled id, through the distribution at all. A rank of a
vocabulary-parallel head works on the ids whose rows it holds, and learns of the others through `partial_softmax` alone.

Legend: T tokens, A active tokens (a listed set of two or more), M kept ids over them, L those of them that are here,
P active tokens that have one here, O those whose own id is here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.ragged import row_index
from keptset.trainer_bridge.scoring.hand import LOWEST, Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import HeadHand
from keptset.trainer_bridge.scoring.kept_pairs import Pairs, pair_logits
from keptset.trainer_bridge.scoring.kept_softmax import replayed
from keptset.trainer_bridge.scoring.partial_softmax import Partial, finite
from keptset.trainer_bridge.scoring.plan import Plan


class KeptMembers:
    """The kept ids of a plan that are here: first `partial`, then `finish`, then `gradient`, any number of times."""

    def __init__(self, hand: HeadHand, head: Head, plan: Plan, rows_T: Ints) -> None:
        self._hand = hand
        segment_M = row_index(plan.starts_A1)
        ids_M = plan.ids_M.astype(np.int64) - head.first
        everything = np.arange(len(ids_M))
        here_M = (ids_M >= 0) & (ids_M < head.end - head.first)
        self._here_L: Ints = everything if head.shard is None else np.flatnonzero(here_M)
        self._all_here = len(self._here_L) == len(ids_M)
        segment_L = segment_M[self._here_L]
        self.pairs = Pairs(rows_M=rows_T[plan.active_A][segment_L], ids_M=ids_M[self._here_L])
        self.owned_A: NDArray[np.bool_] = here_M[plan.member_A]
        if self._all_here:
            self._present_P, self._starts_P1 = np.arange(len(plan.active_A)), plan.starts_A1
        else:
            self._present_P, starts_P = np.unique(segment_L, return_index=True)
            self._starts_P1 = np.append(starts_P, len(segment_L))
        self._starts_A1, self._segment_M = plan.starts_A1, hand.ints(segment_M)
        self._segment_L = self._segment_M if self._all_here else hand.ints(segment_L)
        self._owned_O = hand.ints(np.flatnonzero(self.owned_A))
        self._own_O = hand.ints(np.searchsorted(self._here_L, plan.member_A[self.owned_A]))
        self._temperature_A = hand.floats(plan.temperature_A)
        replay = plan.replay_M
        self._replay_L = None if replay is None else replay.take(self._here_L)
        self._slope_L: Tensor | None = None
        self._z_L: Tensor = None
        self._probabilities_L: Tensor = None

    def partial(self, hidden_RH: Tensor, head: Head, scratch_bytes: int, *, entropy: bool) -> tuple[Partial, Tensor]:
        """What the ids here say about each active token, and the tokens' own logits where they are here (else 0).

        Without `entropy`, the sum that only the entropy needs is left at 0."""
        hand, num = self._hand, len(self.owned_A)
        own_A = hand.floats(np.zeros(num))
        if not len(self._here_L):
            return Partial.nothing(hand, num), own_A
        z_L = pair_logits(hand, hidden_RH, head, self.pairs, scratch_bytes)
        if self._replay_L is not None:
            z_L, self._slope_L = replayed(hand, z_L, self._replay_L)
        self._z_L = z_L
        present_P = hand.ints(self._present_P)
        segment_P = self._segment_L if len(self._present_P) == num else hand.ints(row_index(self._starts_P1))
        top_P = hand.segment_max(z_L, self._starts_P1, segment_P)
        s_L = (z_L - hand.take(finite(top_P), segment_P)) / hand.take(self._temperature_A, self._segment_L)
        exp_L = hand.exp(s_L)
        sum_P = hand.segment_sum(exp_L, self._starts_P1, segment_P)
        weighted_P = sum_P * 0.0
        if entropy:
            weighted_L = hand.where(s_L < LOWEST, 0.0, exp_L * s_L)  # 0 * -inf counts as 0
            weighted_P = hand.segment_sum(weighted_L, self._starts_P1, segment_P)
        part = Partial(top_X=top_P, sum_X=sum_P, weighted_X=weighted_P)
        if len(self._present_P) < num:
            empty = Partial.nothing(hand, num)
            part = Partial(
                top_X=hand.put(empty.top_X, present_P, part.top_X),
                sum_X=hand.put(empty.sum_X, present_P, part.sum_X),
                weighted_X=hand.put(empty.weighted_X, present_P, part.weighted_X),
            )
        if self.owned_A.any():
            own_A = hand.put(own_A, self._owned_O, hand.take(z_L, self._own_O))
        return part, own_A

    def finish(self, top_A: Tensor, log_sum_A: Tensor) -> Tensor:
        """log p of the ids here, [L], once top and logsumexp over the whole sets are known."""
        hand = self._hand
        if not len(self._here_L):
            self._probabilities_L = hand.floats(np.zeros(0))
            return self._probabilities_L
        s_L = (self._z_L - hand.take(top_A, self._segment_L)) / hand.take(self._temperature_A, self._segment_L)
        logprobs_L = s_L - hand.take(log_sum_A, self._segment_L)
        self._probabilities_L, self._z_L = hand.exp(logprobs_L), None
        return logprobs_L

    def on_all(self, values_L: Tensor) -> Tensor:
        """Values of the ids here among all M, 0 for the others."""
        if self._all_here:
            return values_L
        nothing_M = self._hand.floats(np.zeros(self._starts_A1[-1]))
        return self._hand.put(nothing_M, self._hand.ints(self._here_L), values_L) if len(self._here_L) else nothing_M

    def gradient(self, gradient_A: Tensor, gradient_M: Tensor | None) -> Tensor:
        """Gradient of the logits here, [L], from those of scores and distribution (None: nothing arrives)."""
        hand = self._hand
        total_A, part_A = gradient_A, gradient_A
        if gradient_M is not None:
            total_A = gradient_A + hand.segment_sum(gradient_M, self._starts_A1, self._segment_M)
            part_A = hand.abs(gradient_A) + hand.segment_sum(hand.abs(gradient_M), self._starts_A1, self._segment_M)
        total_L = hand.take(total_A / self._temperature_A, self._segment_L)
        d_L = -total_L * self._probabilities_L
        if gradient_M is not None:
            here_L = gradient_M if self._all_here else hand.take(gradient_M, hand.ints(self._here_L))
            d_L = d_L + here_L / hand.take(self._temperature_A, self._segment_L)
        if self.owned_A.any():
            scaled_O = hand.take(gradient_A / self._temperature_A, self._owned_O)
            d_L = hand.put(d_L, self._own_O, hand.take(d_L, self._own_O) + scaled_O)
        if self._slope_L is not None:
            d_L = d_L * self._slope_L
        # A token that takes no part has gradient 0, even where its probabilities are no numbers: 0 * nan counts as 0.
        return hand.where(hand.is_zero(hand.take(part_A, self._segment_L)), 0.0, d_L)
