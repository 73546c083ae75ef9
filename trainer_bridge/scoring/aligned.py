"""Scores of an aligned batch: its layout finds the logits, its record the ids, temperature and processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.alignment import Aligned
from keptset.trainer_bridge.replay import Replayer
from keptset.trainer_bridge.sampled_tokens import SampledTokens
from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.plan import plan_full_vocabulary, plan_scores, plan_share
from keptset.trainer_bridge.scoring.run import MAX_ELEMENTS, Job, Scores, run, run_in_chunks
from keptset.trainer_bridge.violations import OnViolation

LogitsOf = Callable[[Ints], Tensor]
"""Flat positions of the layout to their logits [len(positions), V]."""
DEFAULT_FULL_SHARE = 0.01
"""Share of the tokens on which the trainer's kept mass is measured beside the recorded one."""


def score_aligned(
    aligned: Aligned,
    logits: Tensor | LogitsOf,
    *,
    on_violation: OnViolation = "raise",
    entropy: bool = False,
    full_share: float = DEFAULT_FULL_SHARE,
    max_elements: int = MAX_ELEMENTS,
) -> Scores:
    """Score every sampled token over its kept set.

    `logits` are those of the layout, [B, L, V] or [B * L, V] (padded), [P, V] or [1, P, V] (packed), of a context slice
    those of its own positions, as the model gives them: unshifted, before temperature and processors. Or a function
    from flat positions to their logits, called for pieces of at most `max_elements`, so that logits of the whole batch
    never exist.

    Errors: those of `score_from_logits`, and of replay; ScoringRefused where behaviour log-probabilities are not over
    the kept sets.
    """
    aligned.tokens.check_domain()
    vocab_size = _vocab_size(aligned, logits)
    job = job_of(aligned.tokens, vocab_size, on_violation=on_violation, entropy=entropy, full_share=full_share)
    return _run(aligned, logits, job, vocab_size, max_elements)


def score_aligned_full_vocabulary(
    aligned: Aligned, logits: Tensor | LogitsOf, *, entropy: bool = False, max_elements: int = MAX_ELEMENTS
) -> Scores:
    """Score every sampled token over the whole vocabulary: the uncorrected way, and the only one where no kept set was
    recorded. The result says `full`; its ratios carry the kept mass as a bias.

    Takes `logits` and raises as `score_aligned`, but needs no kept sets; refuses temperature 0.
    """
    vocab_size = _vocab_size(aligned, logits)
    job = full_vocabulary_job_of(aligned.tokens, vocab_size, entropy=entropy)
    return replace(_run(aligned, logits, job, vocab_size, max_elements), over="full")


def job_of(
    tokens: SampledTokens, vocab_size: int, *, on_violation: OnViolation, entropy: bool, full_share: float
) -> Job:
    """What is to be computed over the kept sets of a batch's tokens, replay included."""
    _check_full_width(tokens, vocab_size)
    replayer = Replayer(tokens)
    plan = plan_scores(
        tokens.token_ids_T,
        tokens.kept_offsets_T1,
        tokens.kept_ids_N,
        tokens.temperature_T,
        vocab_size=vocab_size,
        full_T=tokens.full_T,
        absent_T=tokens.absent_T,
        replay_N=replayer.kept(),
        patch=replayer.full(np.flatnonzero(tokens.full_T)),
        on_violation=on_violation,
        locate=tokens.locate,
    )
    share = plan_share(plan, tokens.token_ids_T, tokens.temperature_T, share=full_share)
    if share is not None:
        share = replace(share, patch=replayer.full(share.full_F))
    return Job(plan=plan, share=share, entropy=entropy)


def full_vocabulary_job_of(tokens: SampledTokens, vocab_size: int, *, entropy: bool) -> Job:
    """What is to be computed over the vocabulary, replay included."""
    _check_full_width(tokens, vocab_size)
    plan = plan_full_vocabulary(
        tokens.token_ids_T,
        tokens.temperature_T,
        vocab_size=vocab_size,
        patch=Replayer(tokens).full(np.arange(tokens.num_tokens)),
        locate=tokens.locate,
    )
    return Job(plan=plan, share=None, entropy=entropy)


def _check_full_width(tokens: SampledTokens, vocab_size: int) -> None:
    if tokens.full_T.any() and tokens.vocab_size not in (None, vocab_size):
        raise InvalidInput(
            f"logits have {vocab_size} columns, but tokens were drawn from a whole vocabulary of {tokens.vocab_size}"
        )


def _vocab_size(aligned: Aligned, logits: Tensor) -> int:
    """V of the logits, after their shape was held against the layout."""
    tokens = aligned.tokens
    if _function(logits) is not None:
        if tokens.vocab_size is None:
            raise InvalidInput("the batch does not tell its vocabulary size, so logits cannot be made in chunks")
        return tokens.vocab_size
    shape = [int(n) for n in logits.shape]
    if len(shape) not in (2, 3) or int(np.prod(shape[:-1])) != aligned.num_positions:
        raise InvalidInput(
            f"logits have shape {shape}; this layout has {aligned.num_positions} positions: pass them as the "
            f"model gives them, not shifted and not cut"
        )
    return shape[-1]


def _run(aligned: Aligned, logits: Tensor, job: Job, vocab_size: int, max_elements: int) -> Scores:
    logits_of = _function(logits)
    if logits_of is not None:
        return run_in_chunks(job, logits_of, aligned.logit_index_T, vocab_size=vocab_size, max_elements=max_elements)
    return run(job, logits.reshape([aligned.num_positions, vocab_size]), aligned.logit_index_T)


def _function(logits: Tensor) -> LogitsOf | None:
    return logits if callable(logits) and not hasattr(logits, "shape") else None
