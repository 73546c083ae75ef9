"""A batch as the checks of an audit see it: all rows, those that are sound, and those that count in statistics.

Legend: B responses, C counted responses, T sampled tokens of the counted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import Finding, FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.sampled_tokens import SampledTokens, sampled_tokens

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What a model, or a trainer's own record, says of the counted tokens [T]; all in nats.

    NaN where a token was not scored: a version whose weights are not at hand, a response that is too long.
    """

    kept_T: Floats
    """l over the recorded kept set."""
    full_T: Floats | None
    """l over the whole vocabulary; its difference from `kept_T` is the trainer's log kept mass."""
    same_version_T: NDArray[np.bool_]
    """The weights are those that drew the token, its key-value cache included: b should equal l up to the floors."""
    explained: Mapping[FindingKind, Floats]
    """For each fault of SEMANTICS 6 the b that it would have recorded, the nearest of its forms; NaN where it does not
    apply to a token. Empty where only log-probabilities are at hand."""
    hints: Mapping[FindingKind, NDArray[np.int64]]
    """Which form fits: the shift of a shifted mask, the version of other weights, the row of a swapped one."""


@dataclass(frozen=True, kw_only=True)
class AuditedBatch:
    """One batch on its way through the checks."""

    unit: int
    """Number of the unit of work; with `number` it orders examples."""
    number: int
    """Of the batch in its unit."""
    batch: RolloutBatch
    """As it was read."""
    structure: tuple[Finding, ...]
    """What validation says of it."""
    sound_B: NDArray[np.bool_]
    """Without a finding at severity `error`."""
    counted_B: NDArray[np.bool_]
    """Sound, and neither the copy of another row nor a further row of a shared seed."""
    scores: TokenScores | None = None

    @cached_property
    def counted(self) -> RolloutBatch:
        """The rows that statistics are made of, C of them."""
        return self.batch if self.counted_B.all() else self.batch.filter(self.counted_B)

    @cached_property
    def tokens(self) -> SampledTokens:
        """Their sampled tokens."""
        return sampled_tokens(self.counted)
