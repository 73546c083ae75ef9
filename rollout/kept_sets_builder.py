"""Collects kept sets row by row and derives the numbers recorded with each.

    log p = s - log(sum of w over K),   m = log(sum of w over K) - log(sum of w)
    H = -sum p log p,   Var = sum p (log p + H)^2, over K

s = (z - max z) / T and w = exp(s), float64. K always holds the largest logit, so its mass is at least 1 and where
|K| = 1 every number is exactly 0.

Legend: K kept ids of one row, V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.rollout.kept_sets import BLOCK, Float64, FullRows, Int64, KeptSets
from keptset.schemas.ragged import offsets_of


class KeptSetsBuilder:
    """Takes the rows of a batch in order, each by one call of `fail`, `add`, `add_point` or `add_moments`.

    `logits_BV` is what full rows will refer to.
    """

    def __init__(self, logits_BV: Any) -> None:
        self._logits_BV = logits_BV
        self.vocab_size = int(logits_BV.shape[1])
        """V."""
        self._ids: list[Int64] = []
        self._logprobs: list[Float64] = []
        self._sizes: list[int] = []
        self._numbers: list[tuple[float, float, float]] = []
        self._full: list[tuple[int, float, float]] = []
        self._block_mass: list[Float64] = []
        self._errors: dict[int, str] = {}

    @property
    def row(self) -> int:
        """The row that comes next."""
        return len(self._sizes)

    def fail(self, reason: str) -> None:
        """A row from which nothing can be drawn."""
        self._errors[self.row] = reason
        self._put(0, np.nan, np.nan, np.nan)

    def add(self, ids_K: Int64, scaled_K: Float64, weight_K: Float64, total: float | None) -> None:
        """A kept set, ids ascending, with its s and w.

        `total` is the mass of all finite logits; None where all of them are kept.
        """
        mass = float(weight_K.sum())
        logprob_K = scaled_K - np.log(mass)
        p_K = weight_K / mass
        entropy = 0.0 - float((p_K * logprob_K).sum())
        variance = float((p_K * (logprob_K + entropy) ** 2).sum())
        self._ids.append(ids_K)
        self._logprobs.append(logprob_K)
        self._put(len(ids_K), 0.0 if total is None else min(0.0, float(np.log(mass / total))), entropy, variance)

    def add_point(self, token_id: int, top: float) -> None:
        """A greedy row: one id, whatever the other logits are."""
        if self.vocab_size == 1:
            self.add_moments(top, 1.0, np.ones(1), 0.0, 0.0)
            return
        self._ids.append(np.array([token_id], np.int64))
        self._logprobs.append(np.zeros(1))
        self._put(1, 0.0, 0.0, 0.0)

    def add_moments(
        self, top: float, temperature: float, block_mass_C: Float64, mean: float, mean_square: float
    ) -> None:
        """A row that keeps the whole vocabulary, from its `full_moments`."""
        self._full.append((self.row, top, temperature))
        self._block_mass.append(block_mass_C)
        self._put(0, 0.0, float(np.log(block_mass_C.sum())) - mean, max(0.0, mean_square - mean**2))

    def build(self) -> KeptSets:
        """All rows so far."""
        numbers_B3 = np.array(self._numbers, np.float64).reshape(-1, 3)
        full_F3 = np.array(self._full, np.float64).reshape(-1, 3)
        row_F = full_F3[:, 0].astype(np.int64)
        is_full_B = np.zeros(self.row, np.bool_)
        is_full_B[row_F] = True
        blocks = -(-self.vocab_size // BLOCK)
        return KeptSets(
            offsets_B1=offsets_of(self._sizes),
            ids_N=_joined(self._ids, np.int32),
            logprobs_N=_joined(self._logprobs, np.float64),
            log_kept_mass_B=numbers_B3[:, 0],
            entropy_B=numbers_B3[:, 1],
            logprob_var_B=numbers_B3[:, 2],
            is_full_B=is_full_B,
            full=FullRows(
                logits_BV=self._logits_BV,
                row_F=row_F,
                top_F=full_F3[:, 1],
                temperature_F=full_F3[:, 2],
                block_mass_FC=np.array(self._block_mass, np.float64).reshape(-1, blocks),
            ),
            errors=self._errors,
        )

    def _put(self, size: int, log_kept_mass: float, entropy: float, logprob_var: float) -> None:
        self._sizes.append(size)
        self._numbers.append((log_kept_mass, entropy, logprob_var))


def full_moments(scaled_V: Float64, weight_V: Float64) -> tuple[Float64, float, float]:
    """Sums of w over blocks of ids [C], and the means of s and of its square over the whole vocabulary."""
    block_mass_C: Float64 = block_sums(weight_V).astype(np.float64, copy=False)
    total = float(block_mass_C.sum())
    moment_V = weight_V * scaled_V
    mean = float(moment_V.sum()) / total
    moment_V *= scaled_V
    return block_mass_C, mean, float(moment_V.sum()) / total


def block_sums(weight_V: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Sum over each block of ids, in the dtype of the weights; the last block may be short."""
    whole = len(weight_V) // BLOCK * BLOCK
    sums: npt.NDArray[np.floating] = weight_V[:whole].reshape(-1, BLOCK).sum(axis=1)
    return sums if whole == len(weight_V) else np.append(sums, weight_V[whole:].sum())


def _joined(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype)
