"""NumPy: no gradient, float64 throughout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor

Array = NDArray[np.float64]


class NumpyHand:
    """See `Hand`. Logits of any floating dtype; everything gathered from them is widened to float64."""

    block_elements = 1 << 17
    """1 MiB of float64: stays in a core's cache."""

    def __init__(self, logits_RV: NDArray[np.floating]) -> None:
        if not np.issubdtype(logits_RV.dtype, np.floating):
            raise InvalidInput(f"array has dtype {logits_RV.dtype}; it must be floating point")
        self._logits_RV = logits_RV

    def without_logits(self) -> NumpyHand:
        return self

    def exact(self) -> AbstractContextManager[object]:
        # NaN and infinite logits are let through to the result, where the caller's policy meets them.
        return np.errstate(invalid="ignore", over="ignore", divide="ignore")

    def ints(self, values: Ints) -> Ints:
        return values

    def floats(self, values: NDArray[np.floating]) -> Array:
        return values.astype(np.float64, copy=False)

    def gather(self, flat_M: Ints) -> Array:
        rows_M, ids_M = np.divmod(flat_M, self._logits_RV.shape[1])
        return self._logits_RV[rows_M, ids_M].astype(np.float64)

    def rows(self, rows: Ints) -> Array:
        return self._logits_RV[rows].astype(np.float64)

    def to_host(self, values: Array) -> Array:
        return values

    def take(self, values: Array, index: Ints) -> Array:
        return values[index]

    def put(self, values: Array, index: Ints, new: Array) -> Array:
        values.reshape(-1)[index] = new
        return values

    def segment_max(self, values_M: Array, starts_A1: Ints, segment_M: Ints) -> Array:
        return np.maximum.reduceat(values_M, starts_A1[:-1])

    def segment_sum(self, values_M: Array, starts_A1: Ints, segment_M: Ints) -> Array:
        return np.add.reduceat(values_M, starts_A1[:-1])

    def row_max(self, values_RV: Array) -> Array:
        return np.asarray(values_RV.max(axis=1, keepdims=True))

    def row_sum(self, values_RV: Array) -> Array:
        return np.asarray(values_RV.sum(axis=1, keepdims=True))

    def exp(self, values: Array) -> Array:
        return np.exp(values)

    def log(self, values: Array) -> Array:
        return np.log(values)

    def abs(self, values: Array) -> Array:
        return np.abs(values)

    def is_zero(self, values: Array) -> NDArray[np.bool_]:
        zero: NDArray[np.bool_] = values == 0
        return zero

    def where(self, condition: Tensor, left: Array | float, right: Array) -> Array:
        return np.where(condition, left, right)

    def concatenate(self, parts: list[Array]) -> Array:
        return np.concatenate(parts)

    def new_gradient(self) -> Array:
        return np.zeros(self._logits_RV.shape)

    def put_rows(self, gradient_RV: Array, rows: Ints, new: Array) -> Array:
        gradient_RV[rows] = new
        return gradient_RV

    def finish_gradient(self, gradient_RV: Array) -> NDArray[np.floating]:
        return gradient_RV.astype(self._logits_RV.dtype)

    def attach(self, value_T: Array, backward: Callable[[Tensor], Tensor]) -> Array:
        return value_T
