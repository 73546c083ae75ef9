"""A response as a record to be shown whole: its tokens, with all that was recorded about each, and scores if any.

Token text is left to whoever has a tokenizer.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.ragged import NestedRagged, Ragged
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.audit.report import ShownResponse, ShownToken
from keptset.trainer_bridge.audit.settings import setting_names

MAX_MEMBERS = 10
"""Of each kept set."""


def shown_response(
    batch: RolloutBatch, row: int, *, reason: str, scores: NDArray[np.float64] | None = None
) -> ShownResponse:
    """One response of a sound batch; `scores` are l of its sampled tokens over their kept sets, in order."""
    one = batch.slice(row, 1)
    length = int(one.token_ids.lengths[0])
    sampled = [bool(flag) for flag in one.sampled.values]
    score_of = iter([] if scores is None else scores.tolist())
    b, mass, entropy = (_numbers(c, length) for c in (one.behavior_logprobs, one.log_kept_mass, one.kept_entropy))
    versions = _numbers(one.policy_versions, length)
    members, logprobs = _sets(one.kept_ids, length), _sets(one.kept_logprobs, length)
    tokens = []
    for position, token_id in enumerate(one.token_ids.values.tolist()):
        score = next(score_of, None) if sampled[position] else None
        version = versions[position]
        kept, logp = members[position], logprobs[position]
        tokens.append(
            ShownToken(
                token_id=token_id,
                text=None,
                sampled=sampled[position],
                behavior_logprob=b[position],
                log_kept_mass=mass[position],
                entropy=entropy[position],
                score=None if score is None or not math.isfinite(score) else score,
                version=None if version is None or version < 0 else int(version),
                kept_size=None if kept is None else len(kept),
                kept=_members(kept, logp),
            )
        )
    return ShownResponse(
        rollout_id=one.rollout_ids[0],
        prompt_id=str(one.column("prompt_id")[0].as_py()),
        setting=setting_names(one)[0],
        finish_reason=str(one.column("finish_reason")[0].as_py()),
        prompt_text=None,
        prompt_token_ids=() if one.prompt_token_ids is None else tuple(one.prompt_token_ids.values.tolist()),
        reason=reason,
        tokens=tuple(tokens),
    )


def _numbers(column: Ragged | None, length: int) -> list[float | None]:
    values = [] if column is None else column.values.tolist()
    if len(values) != length:
        return [None] * length
    return [value if math.isfinite(value) else None for value in values]


def _sets(column: NestedRagged | None, length: int) -> list[NDArray[np.generic] | None]:
    if column is None or len(column.inner) != length:
        return [None] * length
    valid = column.inner.row_valid
    return [column.inner[t] if valid is None or valid[t] else None for t in range(length)]


def _members(
    ids: NDArray[np.generic] | None, logprobs: NDArray[np.generic] | None
) -> tuple[tuple[int, str | None, float | None], ...]:
    if ids is None:
        return ()
    if logprobs is None or len(logprobs) != len(ids):
        return tuple((token_id, None, None) for token_id in ids[:MAX_MEMBERS].tolist())
    order = np.argsort(-logprobs.astype(np.float64), kind="stable")[:MAX_MEMBERS]
    return tuple((i, None, p) for i, p in zip(ids[order].tolist(), logprobs[order].tolist(), strict=True))
