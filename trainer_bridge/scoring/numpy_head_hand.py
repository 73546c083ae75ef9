"""NumPy: scoring from hidden states, without gradient; for other frameworks too, in their tensors' own memory."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor
from keptset.trainer_bridge.scoring.head_hand import Backward
from keptset.trainer_bridge.scoring.host_pairs import host_threads
from keptset.trainer_bridge.scoring.numpy_hand import Array, NumpyHand


class NumpyHeadHand(NumpyHand):
    """See `HeadHand`."""

    cache_bytes = 4 << 20
    scratch_bytes = 8 << 20

    def __init__(
        self, hidden_RH: NDArray[np.floating], working_dtype: type[np.float32] | type[np.float64] = np.float64
    ) -> None:
        """`working_dtype`: of sums over the hidden size and of gradients; what there is of a kept id is in float64."""
        super().__init__(hidden_RH)
        self.working_dtype = working_dtype

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.working_dtype).itemsize

    @property
    def threads(self) -> int:
        return host_threads()

    def host_arrays(self, *tables: NDArray[np.floating]) -> tuple[NDArray[np.floating], ...]:
        return tables

    def host_memory(self, table: NDArray[np.floating]) -> NDArray[np.floating]:
        return table

    def adopt(self, values: NDArray[np.floating]) -> NDArray[np.floating]:
        return values

    def rows_at(self, table_XH: NDArray[np.floating], index_C: Ints) -> Array:
        return table_XH[index_C].astype(np.float64)

    def rows_from(self, table_XH: NDArray[np.floating], begin: int, end: int) -> Array:
        return table_XH[begin:end].astype(np.float64, copy=False)

    def dots(self, left_CH: Array, right_CH: Array) -> Array:
        return np.asarray(np.einsum("ch,ch->c", left_CH, right_CH))

    def product(
        self, left: Array, right: Array, *, transpose_left: bool = False, transpose_right: bool = False
    ) -> Array:
        return np.asarray((left.T if transpose_left else left) @ (right.T if transpose_right else right))

    def zeros(self, shape: list[int]) -> NDArray[np.floating]:
        return np.zeros(shape, self.working_dtype)

    def add_rows(self, table_XH: Array, index_C: Ints, scale_C: Array | None, rows_CH: Array) -> None:
        np.add.at(table_XH, index_C, rows_CH if scale_C is None else (rows_CH.T * scale_C).T)

    def add_slice(self, table_XH: Array, begin: int, rows_CH: Array) -> None:
        table_XH[begin : begin + len(rows_CH)] += rows_CH

    def like(self, values: Array, source: NDArray[np.floating]) -> NDArray[np.floating]:
        return values.astype(source.dtype, copy=False)

    def all_reduce(self, values: Array, how: Literal["max", "sum"], group: Any) -> Array:
        raise InvalidInput("NumPy has no process groups; a vocabulary-parallel head takes torch or Paddle tensors")

    def records_gradients(self) -> bool:
        return False

    def wants_gradient(self, source: Tensor | None) -> bool:
        return False

    def attach_all(
        self, values: tuple[Array, ...], sources: tuple[Tensor | None, ...], backward: Backward
    ) -> tuple[Array, ...]:
        return values
