"""One pass over hidden states and a head: forward over pairs and vocabulary chunks, one backward for all sources.

Legend: R positions, T tokens, N kept ids over them, A active tokens (a listed set of two or more), M kept ids over
those, F tokens over the vocabulary, S tokens measured over it; X = A, F, S one after the other. H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_gradient import GradientRows, HeadGradient
from keptset.trainer_bridge.scoring.head_hand import HeadHand
from keptset.trainer_bridge.scoring.kept_members import KeptMembers
from keptset.trainer_bridge.scoring.kept_pairs import Pairs, add_weight_gradient, hidden_gradient, nonzero_pairs
from keptset.trainer_bridge.scoring.partial_softmax import Partial, Whole, joined, whole
from keptset.trainer_bridge.scoring.run import Job
from keptset.trainer_bridge.scoring.vocabulary_chunks import FullTokens, VocabularyChunks


@dataclass(frozen=True, kw_only=True)
class HiddenJob:
    """What is to be computed from hidden states."""

    job: Job
    rows_T: Ints
    """Row of the hidden states that predicts each token; distinct."""
    kept_offsets_T1: Ints
    distribution: bool
    """Whether the log-probabilities of all kept ids are wanted."""
    head_gradient: HeadGradient | None
    scratch_bytes: int | None

    @property
    def index_M(self) -> Ints:
        """Where among the N kept ids those of the active tokens stand."""
        plan = self.job.plan
        start_A = self.kept_offsets_T1[plan.active_A]
        return np.arange(plan.starts_A1[-1]) + np.repeat(start_A - plan.starts_A1[:-1], np.diff(plan.starts_A1))


class HiddenPass:
    """One forward pass and what its backward needs: hidden states, head, and a few numbers per kept id."""

    def __init__(self, hand: HeadHand, work: HiddenJob, hidden_RH: Tensor, head: Head, asks: tuple[bool, ...]) -> None:
        """`asks`: whether the hidden states, the weight and the bias ask for a gradient."""
        self._hand, self._work, self._hidden_RH, self._head = hand, work, hidden_RH, head
        self._asks = asks
        self._scratch = hand.scratch_bytes if work.scratch_bytes is None else work.scratch_bytes
        plan = work.job.plan
        self._kept = KeptMembers(hand, head, plan, work.rows_T) if len(plan.active_A) else None
        self._full = self._chunks(FullTokens.of(plan, work.rows_T)) if len(plan.full_F) else None
        self._whole_F: Whole | None = None

    def _chunks(self, tokens: FullTokens) -> VocabularyChunks:
        entropy = self._work.job.entropy
        return VocabularyChunks(self._hand, self._hidden_RH, self._head, tokens, self._scratch, entropy=entropy)

    def forward(self) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
        """(scores, and the distribution if wanted), entropy, scores over the vocabulary."""
        with self._hand.exact():
            return self._scores()

    def _scores(self) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
        hand, work, job, head = self._hand, self._work, self._work.job, self._head
        plan, share = job.plan, job.share
        bad_T = plan.violations.bad_T
        logprobs_T = hand.floats(np.where(bad_T, np.nan, 0.0))
        entropy_T = hand.floats(np.where(bad_T, np.nan, 0.0)) if job.entropy else None
        full_T = None if share is None else hand.floats(np.full(plan.num_tokens, np.nan))
        parts: list[tuple[Partial, Tensor]] = []
        if self._kept is not None:
            parts.append(self._kept.partial(self._hidden_RH, head, self._scratch, entropy=job.entropy))
        if self._full is not None:
            parts.append(self._full.partial())
        if share is not None and len(share.full_F):
            parts.append(self._chunks(FullTokens.of(share, work.rows_T)).partial())
        distribution = self._distribution(None)
        if parts:
            all_X = self._whole(parts)
            a, f = len(plan.active_A), len(plan.active_A) + len(plan.full_F)
            at = hand.ints(np.concatenate([plan.active_A, plan.full_F]))
            if f:
                logprobs_T = hand.put(logprobs_T, at, all_X.logprobs_X[:f])
                entropy_T = None if entropy_T is None else hand.put(entropy_T, at, all_X.entropy_X[:f])
            if self._kept is not None:
                distribution = self._distribution(self._kept.finish(all_X.top_X[:a], all_X.log_sum_X[:a]))
            self._whole_F = all_X.part(a, f)
            if share is not None and len(share.full_F):
                full_T = hand.put(full_T, hand.ints(share.full_F), all_X.logprobs_X[f:])
        return (logprobs_T, *distribution), entropy_T, full_T

    def _whole(self, parts: list[tuple[Partial, Tensor]]) -> Whole:
        hand, head, plan, share = self._hand, self._head, self._work.job.plan, self._work.job.share
        plans = [plan] if share is None else [plan, share]
        owned = [np.zeros(0, bool) if self._kept is None else self._kept.owned_A]
        owned += [(p.token_ids_F >= head.first) & (p.token_ids_F < head.end) for p in plans]
        temperature = np.concatenate([plan.temperature_A, *(p.temperature_F for p in plans)])
        return whole(
            hand,
            head,
            joined(hand, [part for part, _ in parts]),
            hand.concatenate([own for _, own in parts]),
            np.concatenate(owned),
            hand.floats(temperature),
        )

    def _distribution(self, logprobs_L: Tensor | None) -> tuple[Tensor, ...]:
        """log p of all kept ids if it is wanted: 0 where one was kept, NaN where the token is excluded."""
        if not self._work.distribution:
            return ()
        bad_T, sizes_T = self._work.job.plan.violations.bad_T, np.diff(self._work.kept_offsets_T1)
        values_N = self._hand.floats(np.repeat(np.where(bad_T, np.nan, 0.0), sizes_T))
        if logprobs_L is None or self._kept is None:
            return (values_N,)
        logprobs_M = self._kept.on_all(logprobs_L)
        if self._head.shard is not None:
            logprobs_M = self._hand.all_reduce(logprobs_M * 1.0, "sum", self._head.shard.group)
        return (self._hand.put(values_N, self._hand.ints(self._work.index_M), logprobs_M),)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of scores (and distribution) to those of hidden states, weight and bias."""
        hand, head = self._hand, self._head
        with hand.exact():
            pairs, gradient_M, which_F, gradient_F = self._on_logits(gradients)
            asks_hidden, asks_weight, asks_bias = self._asks
            gradient_RH = None
            if asks_hidden:
                gradient_RH = hidden_gradient(hand, self._hidden_RH, head, pairs, gradient_M, self._scratch)
            sink = self._work.head_gradient
            rows = GradientRows(ids_U=None, weight_UH=None, bias_U=None, fresh=True)
            if sink is None:
                rows = GradientRows(
                    ids_U=None,
                    weight_UH=_zeros_like(hand, head.weight_VH) if asks_weight else None,
                    bias_U=_zeros_like(hand, head.bias_V) if asks_bias else None,
                    fresh=True,
                )
            elif len(pairs.ids_M) or len(which_F):
                rows = sink.rows(hand, head, None if len(which_F) else pairs.ids_M)
            if len(pairs.ids_M):
                self._add_to_head(pairs, gradient_M, rows)
            if len(which_F) and self._full is not None and self._whole_F is not None:
                self._full.add_gradients(self._whole_F, gradient_F, which_F, gradient_RH, rows.weight_UH, rows.bias_U)
            if gradient_RH is not None:
                if head.shard is not None and head.shard.sum_hidden_gradient:
                    gradient_RH = hand.all_reduce(gradient_RH, "sum", head.shard.group)
                gradient_RH = hand.like(gradient_RH, self._hidden_RH)
            return (
                gradient_RH,
                hand.like(rows.weight_UH, head.weight_VH) if sink is None and asks_weight else None,
                hand.like(rows.bias_U, head.bias_V) if sink is None and asks_bias else None,
            )

    def _on_logits(self, gradients: tuple[Tensor | None, ...]) -> tuple[Pairs, Tensor, Ints, Tensor]:
        """Pairs whose logits get a gradient, and it; tokens over the vocabulary whose scores get one, and it.

        What gets none is left out, whatever it holds: 0 * nan counts as 0.
        """
        hand, work, plan = self._hand, self._work, self._work.job.plan
        gradient_T = gradients[0]
        if gradient_T is None:
            gradient_T = hand.floats(np.zeros(plan.num_tokens))
        gradient_N = gradients[1] if work.distribution else None
        pairs, gradient_M = Pairs(rows_M=np.zeros(0, np.int64), ids_M=np.zeros(0, np.int64)), None
        if self._kept is not None and len(self._kept.pairs.ids_M):
            gradient_M = None if gradient_N is None else hand.take(gradient_N, hand.ints(work.index_M))
            gradient_M = self._kept.gradient(hand.take(gradient_T, hand.ints(plan.active_A)), gradient_M)
            pairs, gradient_M = nonzero_pairs(hand, self._kept.pairs, gradient_M)
        which_F, gradient_F = np.zeros(0, np.int64), None
        if self._full is not None:
            gradient_F = hand.take(gradient_T, hand.ints(plan.full_F))
            which_F = np.flatnonzero(hand.to_host(gradient_F) != 0)
        return pairs, gradient_M, which_F, gradient_F

    def _add_to_head(self, pairs: Pairs, gradient_M: Tensor, rows: GradientRows) -> None:
        hand = self._hand
        places_M = rows.places(pairs.ids_M)
        if rows.weight_UH is not None:
            into_UH, fresh, scratch = rows.weight_UH, rows.fresh, self._scratch
            add_weight_gradient(hand, self._hidden_RH, pairs, places_M, gradient_M, into_UH, scratch, fresh=fresh)
        if rows.bias_U is not None:
            hand.add_rows(rows.bias_U, hand.ints(places_M), None, gradient_M)


def _zeros_like(hand: HeadHand, values: Tensor) -> Tensor:
    return hand.zeros([int(n) for n in values.shape])
