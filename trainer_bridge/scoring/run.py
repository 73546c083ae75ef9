"""Run a plan on logits: kept sets and vocabulary rows into one result, tied to one gradient.

Legend: R rows of the logits (positions), V vocabulary, T tokens, A active tokens, F tokens over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.full_softmax import full_gradient, full_softmax
from keptset.trainer_bridge.scoring.hand import Hand, Ints, Tensor, hand_for, logits_hand
from keptset.trainer_bridge.scoring.kept_softmax import kept_gradient, kept_softmax
from keptset.trainer_bridge.scoring.plan import Plan
from keptset.trainer_bridge.violations import Violations

MAX_ELEMENTS = 1 << 26
"""Logits that exist at once where they are made in chunks: 256 MiB of float32."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The trainer's log-probabilities of the sampled tokens, in the framework and on the device of the logits."""

    logprobs_T: Tensor
    """l, differentiable where the framework is; NaN where a violation excluded the token."""
    over: str
    """`kept`: each token over its recorded set. `full`: over the vocabulary, asked for by name."""
    entropy_T: Tensor | None
    """Entropy of the trainer's distribution over the kept set, without gradient; NaN where the token is excluded, None
    unless asked for."""
    full_logprobs_T: Tensor | None
    """l over the whole vocabulary, without gradient; NaN where it was not measured, None unless asked for."""
    violations: Violations
    """Which tokens are excluded, and why."""
    kept_logprobs_N: Tensor | None = None
    """Log-probabilities of all kept ids, in the order of the record: each set's whole distribution, differentiable
    where the framework is. 0 where one id was kept, NaN where the token is excluded; None unless asked for."""

    @property
    def log_kept_mass_T(self) -> Tensor | None:
        """The trainer's own log mass on the kept set, where `full_logprobs_T` was measured: l_full - l."""
        if self.full_logprobs_T is None:
            return None
        logprobs_T = self.logprobs_T.detach() if hasattr(self.logprobs_T, "detach") else self.logprobs_T
        return self.full_logprobs_T - logprobs_T


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan, with what is to be measured beside it."""

    plan: Plan
    share: Plan | None
    """Tokens whose score over the vocabulary is measured too; None: nothing is."""
    entropy: bool

    @property
    def needs_logits_T(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        needs_T = self.plan.needs_logits_T
        return needs_T if self.share is None else needs_T | self.share.needs_logits_T

    def part(self, begin: int, end: int) -> Job:
        """The same for tokens [begin, end) alone, renumbered from 0."""
        share = None if self.share is None else self.share.part(begin, end)
        return Job(plan=self.plan.part(begin, end), share=share, entropy=self.entropy)


def run(job: Job, logits_RV: Tensor, rows_T: Ints) -> Scores:
    """Scores from logits whose row `rows_T[t]` predicts token t (any number where it needs none)."""
    hand = logits_hand(logits_RV)
    plan, vocab_size = job.plan, int(logits_RV.shape[1])
    with hand.exact():
        kept = kept_softmax(hand, plan, rows_T, vocab_size, entropy=job.entropy) if len(plan.active_A) else None
        full = full_softmax(hand, plan, rows_T, vocab_size, entropy=job.entropy) if len(plan.full_F) else None
        active_A, full_F = hand.ints(plan.active_A), hand.ints(plan.full_F)
        logprobs_T = _zeros_or_nan(hand, plan)
        entropy_T = _zeros_or_nan(hand, plan) if job.entropy else None
        if kept is not None:
            logprobs_T = hand.put(logprobs_T, active_A, kept.logprobs_A)
            entropy_T = None if entropy_T is None else hand.put(entropy_T, active_A, kept.entropy_A)
        if full is not None:
            logprobs_T = hand.put(logprobs_T, full_F, full.logprobs_F)
            entropy_T = None if entropy_T is None else hand.put(entropy_T, full_F, full.entropy_F)
        full_logprobs_T = _measured(hand, job, rows_T, vocab_size)

    behind = hand if full is not None else hand.without_logits()

    def backward(gradient_T: Tensor) -> Tensor:
        with behind.exact():
            gradient_RV = behind.new_gradient()
            if kept is not None:
                gradient_RV = kept_gradient(behind, kept, behind.take(gradient_T, active_A), gradient_RV)
            if full is not None:
                gradient_F = behind.take(gradient_T, full_F)
                gradient_RV = full_gradient(behind, plan, rows_T, vocab_size, full, gradient_F, gradient_RV)
            return behind.finish_gradient(gradient_RV)

    return Scores(
        logprobs_T=hand.attach(logprobs_T, backward),
        over="kept",
        entropy_T=entropy_T,
        full_logprobs_T=full_logprobs_T,
        violations=plan.violations,
    )


def run_in_chunks(
    job: Job, logits_of: Callable[[Ints], Tensor], rows_T: Ints, *, vocab_size: int, max_elements: int = MAX_ELEMENTS
) -> Scores:
    """Scores from logits that are made piece by piece, at most `max_elements` of them (but one row) at once.

    `logits_of` takes positions, those entries of `rows_T` that are needed (tokens with one kept id need none), and
    returns their logits [len(positions), V]. Gradients flow through it, chunk by chunk.

    Errors: InvalidInput where it returns another shape.
    """
    needs_T = job.needs_logits_T
    if len(needs_T) and not needs_T.any():
        needs_T[0] = True  # some logits must tell framework and device
    per_chunk = max(1, max_elements // vocab_size)
    ends = [*np.flatnonzero(needs_T)[per_chunk::per_chunk].tolist(), len(needs_T)]
    parts: list[Scores] = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        inside_T = needs_T[begin:end]
        positions = rows_T[begin:end][inside_T]
        logits_RV = logits_of(positions)
        if list(logits_RV.shape) != [len(positions), vocab_size]:
            raise InvalidInput(
                f"logits_of returned shape {list(logits_RV.shape)}; {len(positions)} positions and a vocabulary of "
                f"{vocab_size} were asked for"
            )
        parts.append(run(job.part(begin, end), logits_RV, np.cumsum(inside_T) - 1))
    hand = hand_for(logits_RV)
    return Scores(
        logprobs_T=hand.concatenate([part.logprobs_T for part in parts]),
        over="kept",
        entropy_T=hand.concatenate([part.entropy_T for part in parts]) if job.entropy else None,
        full_logprobs_T=None if job.share is None else hand.concatenate([part.full_logprobs_T for part in parts]),
        violations=job.plan.violations,
    )


def _zeros_or_nan(hand: Hand, plan: Plan) -> Tensor:
    """0 where one id was kept, NaN where the token is excluded; every other entry is overwritten."""
    return hand.floats(np.where(plan.violations.bad_T, np.nan, 0.0))


def _measured(hand: Hand, job: Job, rows_T: Ints, vocab_size: int) -> Tensor | None:
    if job.share is None:
        return None
    nothing_T = hand.floats(np.full(job.plan.num_tokens, np.nan))
    if not len(job.share.full_F):
        return nothing_T
    done = full_softmax(hand, job.share, rows_T, vocab_size, entropy=False)
    return hand.put(nothing_T, hand.ints(job.share.full_F), done.logprobs_F)
