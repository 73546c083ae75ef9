"""A batch as the checks of an audit see it: all rows, those that ratios are made of, and those that are sound.

Legend: B responses, C counted responses, T sampled tokens of the counted ones, S sampled tokens of the sound ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.findings import Finding, FindingKind
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.trainer_bridge.audit.floors import FloorSums
from keptset.trainer_bridge.audit.recorded import Recorded
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
    """For each better explanation the b that its fault would have recorded, in the form that fits the response best;
    NaN where it does not apply to a token, and where b is as expected and nothing asks for an explanation."""
    hints: Mapping[FindingKind, NDArray[np.int64]]
    """Which form that is: the shift of a shifted mask, the version of other weights, the row of a swapped one."""
    expected_T: Floats | None = None
    """What b should be, over its own domain and under the weights that drew the token: -inf where the token lies
    outside its recorded set, NaN where it cannot be known. None: nowhere."""
    places_T: Floats | None = None
    """Place of the token in the model's distribution over its recorded set, in probability order: uniform in [0, 1) for
    honest draws. NaN where one id was kept, where the weights that drew it are not at hand, and in responses whose b
    disagrees with them. None: nowhere."""
    versions_told: bool = True
    """False where a model was given without its version, so that it may not have drawn tokens of several versions."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Responses that could not be scored, by reason."""
    floors: FloorSums | None = None
    """Measured on a small sample of this batch."""


@dataclass(frozen=True, kw_only=True)
class AuditedBatch:
    """One batch on its way through the checks.

    Two circles of rows. `counted`, for ratios and explanations: a row whose b or whose sets contradict themselves is
    among them, since only a score can tell which fault of the recorder that is. `sound`, for the statistics of the
    files alone: what is known to be wrong says nothing about the sampler.
    """

    unit: int
    """Number of the unit of work; with `first_row` it orders examples."""
    number: int
    """Of the batch in its unit."""
    first_row: int = 0
    """Rows of the unit before this batch. How a file is cut into batches does not show in it."""
    stream: str = ""
    """Who recorded it, in this order: a spool writer, or a file."""
    batch: RolloutBatch
    """As it was read."""
    structure: tuple[Finding, ...]
    """What validation says of it, repeated ids and seeds apart: those are looked for over the whole run."""
    rows_by_kind: Mapping[FindingKind, NDArray[np.integer]] = field(default_factory=dict)
    """Rows in which validation saw each kind, ascending."""
    sound_B: NDArray[np.bool_]
    """Without a finding at severity `error`."""
    counted_B: NDArray[np.bool_]
    """With a sampled token; neither the copy of another row nor a further row of a shared seed; and without an error,
    but for `distribution`, `member` and `logprob` with a finite b: what a fault of the recorder looks like from
    outside. So a token may lie outside its set."""
    scores: TokenScores | None = None
    """Of the counted tokens."""

    @cached_property
    def counted(self) -> RolloutBatch:
        """The rows that ratios are made of, C of them."""
        return self.batch if self.counted_B.all() else self.batch.filter(self.counted_B)

    @cached_property
    def tokens(self) -> SampledTokens:
        """Their sampled tokens [T]."""
        return sampled_tokens(self.counted)

    @cached_property
    def sound(self) -> RolloutBatch:
        """The counted rows without any error."""
        both_B = self.counted_B & self.sound_B
        if both_B.sum() == self.counted_B.sum():
            return self.counted
        return self.batch.filter(both_B)

    @cached_property
    def sound_tokens(self) -> SampledTokens:
        """Their sampled tokens [S]."""
        return self.tokens if self.sound is self.counted else sampled_tokens(self.sound)

    @cached_property
    def recorded(self) -> Recorded:
        """What the files tell of those [S]."""
        return Recorded(self.sound, self.sound_tokens)
