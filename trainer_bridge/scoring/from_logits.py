"""Scores of sampled tokens from a trainer's logits and bare arrays: over the kept sets, or by name over the vocabulary.

    l = z'_y / T - logsumexp(z' / T over K)

The logits may be a NumPy array (no gradient) or a Paddle tensor (with gradients, on its own device). Only the kept
logits are read, and only their gradients are written.

Legend: R rows of the logits (positions), V vocabulary, T sampled tokens, N kept ids over them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.replay import Patch, Replay
from keptset.trainer_bridge.scoring.hand import Ints, Tensor, logits_hand
from keptset.trainer_bridge.scoring.plan import plan_full_vocabulary, plan_scores, plan_share
from keptset.trainer_bridge.scoring.run import Job, Scores, run
from keptset.trainer_bridge.violations import Locate, OnViolation, locate_by_index


def score_from_logits(
    logits_RV: Tensor,
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
    full_share: float = 0.0,
    locate: Locate = locate_by_index,
) -> Scores:
    """Score each token over its kept set.

    `rows_T` names the row of the logits that predicts each token (None: row t); rows are distinct. `full_T` marks
    tokens drawn from the whole vocabulary, `absent_T` those without a record. `replay_N` and `patch` carry the
    value-changing processors. `full_share` is the share of tokens whose full-vocabulary score is measured as well
    (spread evenly; greedy and excluded ones are not measured). Everything but the logits is NumPy. A token with one
    kept id scores exactly 0, with gradient exactly 0.

    Errors: InvalidInput where arrays do not fit; ScoringRefused where a record says too little (see `plan_scores`);
    ViolationError where a token's record breaks an invariant and `on_violation` is `raise`.

    >>> logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    >>> score_from_logits(logits, [1], [0, 2], [0, 1], [1.0]).logprobs_T.round(4).tolist()
    [-1.3133]
    """
    logits_hand(logits_RV)
    num_rows, vocab_size = (int(n) for n in logits_RV.shape)
    plan = plan_scores(
        token_ids_T,
        kept_offsets_T1,
        kept_ids_N,
        temperature_T,
        vocab_size=vocab_size,
        full_T=full_T,
        absent_T=absent_T,
        replay_N=replay_N,
        patch=patch,
        on_violation=on_violation,
        locate=locate,
    )
    share = plan_share(plan, token_ids_T, temperature_T, share=full_share, patch=patch)
    job = Job(plan=plan, share=share, entropy=entropy)
    return run(job, logits_RV, check_rows(rows_T, plan.num_tokens, num_rows))


def score_full_vocabulary(
    logits_RV: Tensor,
    token_ids_T: ArrayLike,
    temperature_T: ArrayLike,
    *,
    rows_T: ArrayLike | None = None,
    patch: Patch | None = None,
    locate: Locate = locate_by_index,
) -> Scores:
    """Score each token over the whole vocabulary, as a trainer does that knows of no kept set.

    Against behaviour log-probabilities over kept sets this is biased by the kept mass; the result says `full`.

    Errors: InvalidInput where arrays do not fit; ScoringRefused where a temperature is unknown or 0; ViolationError
    (kind `range`) where an id lies outside [0, V).
    """
    logits_hand(logits_RV)
    num_rows, vocab_size = (int(n) for n in logits_RV.shape)
    plan = plan_full_vocabulary(token_ids_T, temperature_T, vocab_size=vocab_size, patch=patch, locate=locate)
    job = Job(plan=plan, share=None, entropy=False)
    return replace(run(job, logits_RV, check_rows(rows_T, plan.num_tokens, num_rows)), over="full")


def check_rows(rows_T: ArrayLike | None, num_tokens: int, num_rows: int) -> Ints:
    """Rows of the logits that predict the tokens: distinct, and there. InvalidInput otherwise."""
    if rows_T is None:
        if num_tokens != num_rows:
            raise InvalidInput(f"logits have {num_rows} rows for {num_tokens} tokens; say by rows_T which predict them")
        return np.arange(num_tokens)
    rows: NDArray[np.int64] = np.asarray(rows_T, np.int64)
    if rows.shape != (num_tokens,):
        raise InvalidInput(f"rows_T has shape {rows.shape}; it takes one row for each of the {num_tokens} tokens")
    if num_tokens and not (rows.min() >= 0 and rows.max() < num_rows):
        raise InvalidInput(f"rows_T runs from {rows.min()} to {rows.max()}; the logits have rows [0, {num_rows})")
    if (np.diff(rows) <= 0).any() and len(np.unique(rows)) < num_tokens:
        raise InvalidInput("rows_T names a row twice; each position predicts one token")
    return rows
