"""Log ratios of an audited batch: which tokens have one, and over what.

    d_kept = l over K - b        d_full = l over the vocabulary - b

Only where b is over the kept set, as it says of itself; else the difference is no ratio of two policies.

Legend: T sampled tokens of the counted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keptset.schemas.columns import LogprobDomain
from keptset.trainer_bridge.audit.audited_batch import AuditedBatch
from keptset.trainer_bridge.audit.residuals import Floats
from keptset.trainer_bridge.sampled_tokens import Bools


@dataclass(frozen=True, kw_only=True)
class LogRatios:
    """Log ratios [T] in nats; NaN where there is none."""

    kept_T: Floats
    full_T: Floats
    choice_T: Bools
    """|K| > 1."""
    sound_T: Bools
    """Of responses without any error."""


def log_ratios(batch: AuditedBatch) -> LogRatios | None:
    """None where nothing was scored."""
    scores, tokens = batch.scores, batch.tokens
    if scores is None:
        return None
    over_kept_B = np.array([domain == LogprobDomain.KEPT.value for domain in tokens.logprob_domain_B], bool)
    b_T = np.where(over_kept_B[tokens.row_T], tokens.behavior_logprobs_T.astype(np.float64), np.nan)
    nothing_T = np.full(tokens.num_tokens, np.nan)
    return LogRatios(
        kept_T=_finite(scores.kept_T - b_T),
        full_T=nothing_T if scores.full_T is None else _finite(scores.full_T - b_T),
        choice_T=tokens.kept_sizes_T > 1,
        sound_T=batch.sound_B[batch.counted_B][tokens.row_T],
    )


def _finite(values_T: Floats) -> Floats:
    return np.where(np.isfinite(values_T), values_T, np.nan)
