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
    rows = np.flatnonzero(wanted)
    counts_R = np.asarray(wanted)[rows]
    if isinstance(logits_BV, np.ndarray) or logits_BV.place.is_cpu_place():
        logits_BV = logits_BV if isinstance(logits_BV, np.ndarray) else logits_BV.numpy()
        ids = [_first(logits_BV[row], count) for row, count in zip(rows, counts_R, strict=True)]
    else:
        ids = _first_on_device(logits_BV, rows, counts_R)
    offsets_B1, ids_N = offsets_of(wanted), np.concatenate(ids).astype(np.int32)
    logprobs_N = kept.logprobs_of(row_index(offsets_B1), ids_N)
    return TopLogprobs(offsets_B1=offsets_B1, ids_N=ids_N, logprobs_N=logprobs_N)


def _first_on_device(
    logits_BV: Any, rows_R: npt.NDArray[np.int64], counts_R: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """The same for a tensor elsewhere, with one copy to the host; of ids tied at the end any may be listed."""
    import paddle

    picked = paddle.index_select(logits_BV, paddle.to_tensor(rows_R, place=logits_BV.place))
    values, ids = paddle.topk(picked, int(counts_R.max()), axis=1)
    both = paddle.stack([values.astype("float64"), ids.astype("float64")]).numpy()
    order = np.lexsort((both[1], -both[0]), axis=-1)
    ordered = np.take_along_axis(both[1].astype(np.int64), order, axis=1)
    return [row[:count] for row, count in zip(ordered, counts_R, strict=True)]


def _first(z_V: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The first `count` ids in the order (logit descending, id ascending)."""
    bound = np.partition(z_V, len(z_V) - count)[len(z_V) - count]
    candidates = np.flatnonzero(z_V >= bound)
    order = np.lexsort((candidates, -z_V[candidates].astype(np.float64)))
    return candidates[order[:count]]
