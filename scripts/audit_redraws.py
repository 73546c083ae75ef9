"""Sets of responses drawn anew from recorded kept distributions: as an honest sampler would, or with a fault of a run.

The recorded contexts, sets and distributions stay; tokens, b and rollout_ids are new. A context that is drawn from
anew no longer follows from the tokens before it, which no test of the draws looks at.

Legend: B responses, T tokens over them, N kept ids over those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.ragged import row_index
from keptset.schemas.rollout_batch import RolloutBatch

Floats = NDArray[np.float64]
TRAINER_COLUMN = "x_trainer_logprobs"

Bend = Callable[[Floats, NDArray[np.int64]], Floats]
"""Log-probabilities [N] of a faulty sampler, up to a constant per token, from recorded ones and offsets [T + 1]."""


def sharper(power: float) -> Bend:
    """Probabilities raised to a power: a temperature that is too low, where it is above 1."""
    return lambda logp_N, offsets_T1: power * logp_N


def greedy(logp_N: Floats, offsets_T1: NDArray[np.int64]) -> Floats:
    """The most probable token, the first of equal ones."""
    best_T = np.maximum.reduceat(logp_N, offsets_T1[:-1])
    bent_N = np.where(logp_N == best_T[row_index(offsets_T1)], 0.0, -np.inf)
    seen_N = np.cumsum(bent_N == 0)
    before_T = (seen_N - (bent_N == 0))[offsets_T1[:-1]]
    return np.where(seen_N - before_T[row_index(offsets_T1)] > 1, -np.inf, bent_N)


@dataclass(frozen=True, kw_only=True)
class Redraw:
    """Sound responses with their whole distributions, to draw from."""

    batch: RolloutBatch

    @cached_property
    def offsets_T1(self) -> NDArray[np.int64]:
        sets = self.batch.kept_ids
        assert sets is not None, "every set was recorded"
        return np.asarray(sets.inner.offsets, np.int64)

    @cached_property
    def logp_N(self) -> Floats:
        logprobs = self.batch.kept_logprobs
        assert logprobs is not None, "every distribution was recorded"
        return logprobs.inner.values.astype(np.float64)

    def draw(self, random: np.random.Generator, faulty_B: NDArray[np.bool_], bend: Bend | None = None) -> RolloutBatch:
        """Every token drawn anew; in faulty responses from the bent distributions."""
        logp_N, offsets_T1 = self.logp_N, self.offsets_T1
        if bend is not None and faulty_B.any():
            faulty_T = np.repeat(faulty_B, self.batch.token_ids.lengths)
            logp_N = np.where(faulty_T[row_index(offsets_T1)], bend(logp_N, offsets_T1), logp_N)
        chosen_T = _chosen(logp_N, offsets_T1, random)
        return self._with_tokens(chosen_T, random)

    def _with_tokens(self, chosen_T: NDArray[np.int64], random: np.random.Generator) -> RolloutBatch:
        sets = self.batch.kept_ids
        assert sets is not None
        arrow, starts = self.batch.arrow, pa.array(self.batch.token_ids.offsets, pa.int32())
        b_T = self.logp_N[chosen_T].astype(np.float32)
        names = [
            f"{name}-{number:016x}"
            for name, number in zip(
                self.batch.rollout_ids, random.integers(2**62, size=len(self.batch)).tolist(), strict=True
            )
        ]
        columns = {
            "rollout_id": pa.array(names),
            "token_ids": pa.ListArray.from_arrays(starts, pa.array(sets.inner.values[chosen_T], pa.int32())),
            "behavior_logprobs": pa.ListArray.from_arrays(starts, pa.array(b_T)),
        }
        for name, column in columns.items():
            at = arrow.schema.get_field_index(name)
            arrow = arrow.set_column(at, arrow.schema.field(at), column)
        return RolloutBatch.from_arrow(arrow)

    def position_in_sets(self, batch: RolloutBatch) -> NDArray[np.int64]:
        """Index into N of each token of a batch that was drawn here."""
        sets = self.batch.kept_ids
        assert sets is not None
        tokens_N = batch.token_ids.values[row_index(self.offsets_T1)]
        found: NDArray[np.int64] = np.flatnonzero(sets.inner.values == tokens_N)
        return found

    def noisy_trainer(self, size: float, random: np.random.Generator) -> Floats:
        """Log-probabilities [N] over the same sets of a trainer whose logits differ by `size` N, N standard normal."""
        logits_N = self.logp_N + size * random.standard_normal(len(self.logp_N))
        total_T = np.log(np.add.reduceat(np.exp(logits_N), self.offsets_T1[:-1]))
        return logits_N - total_T[row_index(self.offsets_T1)]


def with_trainer(batch: RolloutBatch, l_T: Floats) -> RolloutBatch:
    """The batch with a trainer's log-probabilities in a column of their own."""
    starts = pa.array(batch.token_ids.offsets, pa.int32())
    column = pa.ListArray.from_arrays(starts, pa.array(l_T, pa.float64()))
    return RolloutBatch.from_arrow(batch.arrow.append_column(TRAINER_COLUMN, column))


def _chosen(logp_N: Floats, offsets_T1: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """One index into N for each token, by inverse distribution function."""
    w_N = np.exp(logp_N)
    total_T = np.add.reduceat(w_N, offsets_T1[:-1])
    through_N = np.cumsum(w_N / total_T[row_index(offsets_T1)])
    before_T = np.concatenate([[0.0], through_N])[offsets_T1[:-1]]
    end_T = through_N[offsets_T1[1:] - 1]
    chosen_T = np.searchsorted(through_N, before_T + random.random(len(before_T)) * (end_T - before_T), side="right")
    return np.clip(chosen_T, offsets_T1[:-1], offsets_T1[1:] - 1)
