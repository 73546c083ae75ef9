"""What files alone tell of the sampled tokens of sound responses, flat, made once for all checks.

Legend: B sound responses, S their sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.columns import LogprobDomain
from keptset.schemas.ragged import Ragged
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.sampled_tokens import SampledTokens

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """Numbers per sampled token [S]; NaN where one is not recorded."""

    batch: RolloutBatch
    tokens: SampledTokens

    @cached_property
    def excess_S(self) -> Floats:
        """-b - H in nats; its expectation is 0."""
        b_S = self.tokens.behavior_logprobs_T.astype(np.float64)
        return -b_S - self.entropy_S

    @cached_property
    def entropy_S(self) -> Floats:
        """H."""
        return self._column(self.batch.kept_entropy)

    @cached_property
    def variance_S(self) -> Floats:
        """Var(log p)."""
        return self._column(self.batch.kept_logprob_var)

    @cached_property
    def surprisal_known_S(self) -> Mask:
        """Where both are recorded, b is over the kept set, and Var is one."""
        kept_B = np.array([domain == LogprobDomain.KEPT.value for domain in self.tokens.logprob_domain_B], bool)
        with np.errstate(invalid="ignore"):
            known_S = np.isfinite(self.excess_S) & np.isfinite(self.variance_S) & (self.variance_S >= 0)
        return known_S if kept_B.all() else known_S & kept_B[self.tokens.row_T]

    def _column(self, ragged: Ragged | None) -> Floats:
        """A column of all tokens at the sampled ones."""
        tokens = self.tokens
        if ragged is None:
            return np.full(tokens.num_tokens, np.nan)
        values = np.asarray(ragged.values, np.float64)
        if ragged.row_valid is None:
            starts_B = np.asarray(self.batch.token_ids.offsets[:-1], np.int64)
            return values if len(values) == tokens.num_tokens else values[starts_B[tokens.row_T] + tokens.position_T]
        spread = np.full(self.batch.num_tokens, np.nan)
        spread[np.repeat(ragged.row_valid, self.batch.token_ids.lengths)] = values
        starts_B = np.asarray(self.batch.token_ids.offsets[:-1], np.int64)
        at_tokens: Floats = spread[starts_B[tokens.row_T] + tokens.position_T]
        return at_tokens
