"""Scores of sampled tokens from hidden states and the head: only the logits of the kept sets are computed.

    l = z'_y / T - logsumexp(z' / T over K),   z = h W^T + bias at the ids of K alone

Work and memory grow with the number of kept ids, not with the vocabulary: O(sum |K| * H) for hidden size H. Tokens
drawn from the whole vocabulary go over it in chunks. No tensor of positions times vocabulary exists at any time.

Legend: R positions, H hidden, V vocabulary, T sampled tokens, N kept ids over them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.scoring.from_logits import check_rows
from keptset.trainer_bridge.scoring.hand import Tensor
from keptset.trainer_bridge.scoring.head import Head, check_head
from keptset.trainer_bridge.scoring.head_gradient import HeadGradient
from keptset.trainer_bridge.scoring.hidden_pass import HiddenJob
from keptset.trainer_bridge.scoring.plan import plan_full_vocabulary, plan_scores, plan_share
from keptset.trainer_bridge.scoring.run import Job, Scores
from keptset.trainer_bridge.scoring.run_hidden import run_hidden
from keptset.trainer_bridge.violations import Locate, OnViolation, locate_by_index

MIN_SCRATCH_BYTES = 1 << 16
"""Less would not hold two rows of a common head."""


def score_from_hidden(
    hidden_RH: Tensor,
    head: Head,
    token_ids_T: ArrayLike,
    kept_offsets_T1: ArrayLike,
    kept_ids_N: ArrayLike,
    temperature_T: ArrayLike,
    *,
    rows_T: ArrayLike | None = None,
    full_T: ArrayLike | None = None,
    absent_T: ArrayLike | None = None,
    replay_N: Replay | None = None,
    patch: Patch | None = None,
    on_violation: OnViolation = "raise",
    entropy: bool = False,
    distribution: bool = False,
    full_share: float = 0.0,
    head_gradient: HeadGradient | None = None,
    scratch_bytes: int | None = None,
    locate: Locate = locate_by_index,
) -> Scores:
    """Score each token over its kept set.

    `hidden_RH` are the states that the head is applied to (after the final norm), in float32, float64, bfloat16 or
    float16, of NumPy (no gradient), torch or Paddle; `head` is of the same framework. Sums are in float32, in float64
    where the hidden states are. Everything else as in `score_from_logits`: `rows_T` names the row that predicts each
    token, `full_share` the share of tokens whose full-vocabulary score is measured too.

    `distribution` asks for the log-probabilities of all kept ids. The gradient of the head goes to autograd, dense and
    in the weight's dtype, or, where one is given, to `head_gradient`. `scratch_bytes` bounds the working memory beside
    inputs, results, returned gradients and a few numbers per kept id (None: 8 MiB on the host, 256 MiB on a device).

    Errors: those of `score_from_logits`; InvalidInput where head, bias, shard or buffers do not fit.

    >>> hidden, weight = np.array([[1.0, 2.0]]), np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
    >>> score_from_hidden(hidden, Head(weight_VH=weight), [1], [0, 2], [0, 1], [1.0]).logprobs_T.round(4).tolist()
    [-1.3133]
    """
    check_head(head, hidden_RH)
    plan = plan_scores(
        token_ids_T,
        kept_offsets_T1,
        kept_ids_N,
        temperature_T,
        vocab_size=head.vocab_size,
        full_T=full_T,
        absent_T=absent_T,
        replay_N=replay_N,
        patch=patch,
        on_violation=on_violation,
        locate=locate,
    )
    share = plan_share(plan, token_ids_T, temperature_T, share=full_share, patch=patch)
    return run_hidden(
        HiddenJob(
            job=Job(plan=plan, share=share, entropy=entropy),
            rows_T=check_rows(rows_T, plan.num_tokens, int(hidden_RH.shape[0])),
            kept_offsets_T1=np.asarray(kept_offsets_T1, np.int64),
            distribution=distribution,
            head_gradient=head_gradient,
            scratch_bytes=check_scratch(scratch_bytes),
        ),
        hidden_RH,
        head,
    )


def score_full_vocabulary_from_hidden(
    hidden_RH: Tensor,
    head: Head,
    token_ids_T: ArrayLike,
    temperature_T: ArrayLike,
    *,
    rows_T: ArrayLike | None = None,
    patch: Patch | None = None,
    entropy: bool = False,
    head_gradient: HeadGradient | None = None,
    scratch_bytes: int | None = None,
    locate: Locate = locate_by_index,
) -> Scores:
    """Score each token over the whole vocabulary, as a trainer does that knows of no kept set, in chunks of it.

    Against behaviour log-probabilities over kept sets this is biased by the kept mass; the result says `full`.

    Errors: InvalidInput where arrays do not fit; ScoringRefused where a temperature is unknown or 0; ViolationError
    (kind `range`) where an id lies outside [0, V).
    """
    check_head(head, hidden_RH)
    plan = plan_full_vocabulary(token_ids_T, temperature_T, vocab_size=head.vocab_size, patch=patch, locate=locate)
    work = HiddenJob(
        job=Job(plan=plan, share=None, entropy=entropy),
        rows_T=check_rows(rows_T, plan.num_tokens, int(hidden_RH.shape[0])),
        kept_offsets_T1=np.zeros(plan.num_tokens + 1, np.int64),
        distribution=False,
        head_gradient=head_gradient,
        scratch_bytes=check_scratch(scratch_bytes),
    )
    return replace(run_hidden(work, hidden_RH, head), over="full")


def check_scratch(scratch_bytes: int | None) -> int | None:
    """InvalidInput where the bound on working memory is too low to work at all."""
    if scratch_bytes is not None and scratch_bytes < MIN_SCRATCH_BYTES:
        raise InvalidInput(f"scratch_bytes is {scratch_bytes}; it must be at least {MIN_SCRATCH_BYTES}")
    return scratch_bytes
