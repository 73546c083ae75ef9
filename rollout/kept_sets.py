"""KeptSets: what one truncation step kept, per row, ready to draw from and to record.

A row that keeps the whole vocabulary stores no ids: its kept set is [0, V), and storing it would copy the logits
several times over. Such rows keep their block masses instead, from which any member can be drawn and scored:

    b = (z - max z) / T - log(sum exp((z - max z) / T))

Legend: B rows, N flat kept ids, F full rows, C blocks of the vocabulary, V vocabulary, M queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.schemas.errors import InvalidInput
from keptset.schemas.ragged import offsets_of, span_index

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Ints = npt.NDArray[np.integer]

BLOCK = 512
"""Ids whose mass is summed together in a full row: a draw reads V / 512 sums and 512 logits."""
LOWEST_SCALED = -1e150
"""Floor of (z - max z) / T. Its exponential is 0 either way; unlike -inf its square times 0 is 0."""


@dataclass(frozen=True, kw_only=True)
class FullRows:
    """Rows whose kept set is the whole vocabulary. Valid while the logits they came from are left as they are."""

    logits_BV: Any
    """NumPy array or Paddle tensor the rows were computed from; a reference, not a copy."""
    row_F: Int64
    """Rows of `logits_BV`."""
    top_F: Float64
    """Largest logit."""
    temperature_F: Float64
    block_mass_FC: Float64
    """Sum of exp((z - max z) / T) over each block of ids."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.logits_BV.shape[1])

    def scaled(self, full_M: Int64, ids_M: Ints) -> Float64:
        """(z - max z) / T of ids in full rows. Both arguments may have any shape that broadcasts."""
        z_M = _gather(self.logits_BV, self.row_F[full_M], ids_M)
        with np.errstate(over="ignore"):  # clamped below
            s_M = (z_M - self.top_F[full_M]) / self.temperature_F[full_M]
        return np.maximum(s_M, LOWEST_SCALED, out=s_M)

    def logprobs(self, full_M: Int64, ids_M: Ints) -> Float64:
        """Log-probabilities of ids in full rows. Both arguments may have any shape that broadcasts."""
        scaled_M: Float64 = self.scaled(full_M, ids_M) - np.log(self.block_mass_FC.sum(axis=1))[full_M]
        return scaled_M

    def take(self, full_F: Int64) -> FullRows:
        """Some of these rows, in the given order."""
        return FullRows(
            logits_BV=self.logits_BV,
            row_F=self.row_F[full_F],
            top_F=self.top_F[full_F],
            temperature_F=self.temperature_F[full_F],
            block_mass_FC=self.block_mass_FC[full_F],
        )


@dataclass(frozen=True, kw_only=True)
class KeptSets:
    """Kept sets of a batch of rows and the numbers recorded with them. Host arrays."""

    offsets_B1: Int64
    """Row i's members are [offsets[i], offsets[i + 1]) of the flat arrays; none for full and for failed rows."""
    ids_N: npt.NDArray[np.int32]
    """Kept ids, strictly ascending within a row."""
    logprobs_N: Float64
    """Log-probabilities normalised over the row's kept set."""
    log_kept_mass_B: Float64
    """m <= 0, exactly 0 where every finite logit is kept; NaN for failed rows."""
    entropy_B: Float64
    """H of the kept distribution; NaN for failed rows."""
    logprob_var_B: Float64
    """Var(log p) under the kept distribution; NaN for failed rows."""
    is_full_B: npt.NDArray[np.bool_]
    """Whether the kept set is [0, V)."""
    full: FullRows
    """The full rows, in the order of the batch."""
    errors: dict[int, str]
    """Failed rows, and why: NaN, +inf, or no finite logit. Their sets are empty."""

    def __len__(self) -> int:
        return len(self.is_full_B)

    @property
    def sizes_B(self) -> Int64:
        """|K| of each row; 0 for failed rows."""
        return np.where(self.is_full_B, self.full.vocab_size, np.diff(self.offsets_B1))

    @property
    def full_index_B(self) -> Int64:
        """Position of each row among the full rows; meaningless where the row is not full."""
        return np.cumsum(self.is_full_B) - 1

    def members(self, row: int) -> tuple[npt.NDArray[np.int32], Float64]:
        """Ids [K] and log-probabilities [K] of one row; a full row's are made on the spot."""
        if self.is_full_B[row]:
            ids = np.arange(self.full.vocab_size, dtype=np.int32)
            return ids, self.full.logprobs(self.full_index_B[[row]], ids)
        span = slice(self.offsets_B1[row], self.offsets_B1[row + 1])
        return self.ids_N[span], self.logprobs_N[span]

    def logprobs_of(self, rows_M: npt.ArrayLike, ids_M: npt.ArrayLike) -> Float64:
        """Log-probability over K of id `ids_M[i]` in row `rows_M[i]`, float64 [M]; -inf outside K.

        InvalidInput where a row or an id does not exist, NaN for failed rows.
        """
        rows_M, ids_M = np.asarray(rows_M, np.int64), np.asarray(ids_M, np.int64)
        vocab_size = self.full.vocab_size
        if not (_within(rows_M, len(self)) and _within(ids_M, vocab_size)):
            raise InvalidInput(f"rows must lie in [0, {len(self)}) and ids in [0, {vocab_size})")
        logprobs_M = np.full(rows_M.shape, -np.inf)
        logprobs_M[np.isnan(self.log_kept_mass_B[rows_M])] = np.nan
        if len(self.ids_N):
            key_N = np.repeat(np.arange(len(self)), np.diff(self.offsets_B1)) * vocab_size + self.ids_N
            key_M = rows_M * vocab_size + ids_M
            at_M = np.minimum(np.searchsorted(key_N, key_M), len(key_N) - 1)
            stored = key_N[at_M] == key_M
            logprobs_M[stored] = self.logprobs_N[at_M[stored]]
        full = self.is_full_B[rows_M]
        if full.any():
            logprobs_M[full] = self.full.logprobs(self.full_index_B[rows_M[full]], ids_M[full])
        return logprobs_M

    def take(self, rows: npt.ArrayLike) -> KeptSets:
        """Some rows, by boolean mask [B] or by index, in the given order; indices may repeat."""
        chosen = np.asarray(rows)
        index = np.arange(len(self))[chosen if chosen.size else chosen.astype(np.int64)]
        sizes = np.diff(self.offsets_B1)[index]
        at_N = span_index(self.offsets_B1[:-1][index], sizes)
        is_full = self.is_full_B[index]
        return KeptSets(
            offsets_B1=offsets_of(sizes),
            ids_N=self.ids_N[at_N],
            logprobs_N=self.logprobs_N[at_N],
            log_kept_mass_B=self.log_kept_mass_B[index],
            entropy_B=self.entropy_B[index],
            logprob_var_B=self.logprob_var_B[index],
            is_full_B=is_full,
            full=self.full.take(self.full_index_B[index[is_full]]),
            errors={new: self.errors[old] for new, old in enumerate(index.tolist()) if old in self.errors},
        )


def _within(values: Int64, bound: int) -> bool:
    return not values.size or bool(values.min() >= 0 and values.max() < bound)


def _gather(logits_BV: Any, rows: Int64, ids: Ints) -> Float64:
    """Float64 host copy of single logits."""
    if isinstance(logits_BV, np.ndarray):
        return logits_BV[rows, ids].astype(np.float64)
    import paddle

    flat = np.asarray(rows * logits_BV.shape[1] + ids)
    index = paddle.to_tensor(flat.ravel(), dtype="int64", place=logits_BV.place)
    picked: Float64 = paddle.gather(logits_BV.flatten(), index).numpy().astype(np.float64).reshape(flat.shape)
    return picked
