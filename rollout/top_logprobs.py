"""The most probable ids of rows that ask for them, with log-probabilities over the kept set: -inf outside it.

Legend: B rows, V vocabulary, N listed ids over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.kept_sets import KeptSets
from keptset.schemas.ragged import offsets_of, row_index


@dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """Row i lists ids_N[offsets_B1[i] : offsets_B1[i + 1]], most probable first; a row that asked for none is empty."""

    offsets_B1: npt.NDArray[np.int64]
    ids_N: npt.NDArray[np.int32]
    logprobs_N: npt.NDArray[np.float64]

    def without_empty(self, stays_B: npt.NDArray[np.bool_]) -> TopLogprobs:
        """The same less some rows, all of them empty."""
        offsets_B1 = offsets_of(np.diff(self.offsets_B1)[stays_B])
        assert offsets_B1[-1] == len(self.ids_N), "a row that lists ids cannot be left out"
        return TopLogprobs(offsets_B1=offsets_B1, ids_N=self.ids_N, logprobs_N=self.logprobs_N)


def top_logprobs(logits_BV: Any, kept: KeptSets, counts: Sequence[int]) -> TopLogprobs | None:
    """The `counts[i]` most probable ids of row i, ties by lower id; None where no row asks for any.

    `logits_BV` are the processed logits `kept` was made from, a NumPy array or a Paddle tensor. Failed rows list none.
    """
    wanted = [0 if row in kept.errors else min(count, int(logits_BV.shape[1])) for row, count in enumerate(counts)]
    if not any(wanted):
        return None
    ids = [_first(_row(logits_BV, row), count) for row, count in enumerate(wanted) if count]
    offsets_B1, ids_N = offsets_of(wanted), np.concatenate(ids).astype(np.int32)
    logprobs_N = kept.logprobs_of(row_index(offsets_B1), ids_N)
    return TopLogprobs(offsets_B1=offsets_B1, ids_N=ids_N, logprobs_N=logprobs_N)


def _row(logits_BV: Any, row: int) -> npt.NDArray[np.floating]:
    row_V = logits_BV[row]
    return row_V if isinstance(row_V, np.ndarray) else np.asarray(row_V.numpy())


def _first(z_V: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The first `count` ids in the order (logit descending, id ascending)."""
    bound = np.partition(z_V, len(z_V) - count)[len(z_V) - count]
    candidates = np.flatnonzero(z_V >= bound)
    order = np.lexsort((candidates, -z_V[candidates].astype(np.float64)))
    return candidates[order[:count]]
