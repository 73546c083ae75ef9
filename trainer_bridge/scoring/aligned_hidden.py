"""Scores of an aligned batch from its hidden states: its layout finds them, its record says what to score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.alignment import Aligned
from keptset.trainer_bridge.scoring.aligned import DEFAULT_FULL_SHARE, full_vocabulary_job_of, job_of
from keptset.trainer_bridge.scoring.from_hidden import check_scratch
from keptset.trainer_bridge.scoring.hand import Tensor
from keptset.trainer_bridge.scoring.head import Head, check_head
from keptset.trainer_bridge.scoring.head_gradient import HeadGradient
from keptset.trainer_bridge.scoring.hidden_pass import HiddenJob
from keptset.trainer_bridge.scoring.run import Job, Scores
from keptset.trainer_bridge.scoring.run_hidden import run_hidden
from keptset.trainer_bridge.violations import OnViolation


def score_aligned_from_hidden(
    aligned: Aligned,
    hidden: Tensor,
    head: Head,
    *,
    on_violation: OnViolation = "raise",
    entropy: bool = False,
    distribution: bool = False,
    full_share: float = DEFAULT_FULL_SHARE,
    head_gradient: HeadGradient | None = None,
    scratch_bytes: int | None = None,
) -> Scores:
    """Score every sampled token over its kept set, without ever making its logits.

    `hidden` are the states of the layout that the head is applied to, [B, L, H] or [B * L, H] (padded), [P, H] or
    [1, P, H] (packed), as the model gives them: after the final norm, not shifted. Each response's temperature and
    processors come from its record. The share of the tokens that is measured over the whole vocabulary costs that share
    of a pass over it: 1 % of the tokens is more work than all kept sets together where these are small.

    Errors: those of `score_from_hidden`, and of replay; ScoringRefused where behaviour log-probabilities are not over
    the kept sets.
    """
    tokens = aligned.tokens
    tokens.check_domain()
    hidden_RH = _rows(aligned, hidden, head)
    job = job_of(tokens, head.vocab_size, on_violation=on_violation, entropy=entropy, full_share=full_share)
    return _run(aligned, hidden_RH, head, job, distribution, head_gradient, scratch_bytes)


def score_aligned_full_vocabulary_from_hidden(
    aligned: Aligned,
    hidden: Tensor,
    head: Head,
    *,
    entropy: bool = False,
    head_gradient: HeadGradient | None = None,
    scratch_bytes: int | None = None,
) -> Scores:
    """Score every sampled token over the whole vocabulary, in chunks of it: the uncorrected way; the result says so.

    Takes and raises as `score_aligned_from_hidden`, but needs no kept sets; refuses temperature 0.
    """
    hidden_RH = _rows(aligned, hidden, head)
    job = full_vocabulary_job_of(aligned.tokens, head.vocab_size, entropy=entropy)
    return replace(_run(aligned, hidden_RH, head, job, False, head_gradient, scratch_bytes), over="full")


def _rows(aligned: Aligned, hidden: Tensor, head: Head) -> Tensor:
    """The hidden states as [R, H], held against layout and head."""
    shape = [int(n) for n in hidden.shape]
    if len(shape) not in (2, 3) or int(np.prod(shape[:-1])) != aligned.num_positions:
        raise InvalidInput(
            f"hidden states have shape {shape}; this layout has {aligned.num_positions} positions: pass them as the "
            f"model gives them, not shifted and not cut"
        )
    hidden_RH = hidden.reshape([aligned.num_positions, shape[-1]])
    check_head(head, hidden_RH)
    return hidden_RH


def _run(
    aligned: Aligned,
    hidden_RH: Tensor,
    head: Head,
    job: Job,
    distribution: bool,
    head_gradient: HeadGradient | None,
    scratch_bytes: int | None,
) -> Scores:
    work = HiddenJob(
        job=job,
        rows_T=aligned.logit_index_T,
        kept_offsets_T1=aligned.tokens.kept_offsets_T1,
        distribution=distribution,
        head_gradient=head_gradient,
        scratch_bytes=check_scratch(scratch_bytes),
    )
    return run_hidden(work, hidden_RH, head)
