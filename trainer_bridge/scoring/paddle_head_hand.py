"""Paddle: scoring from hidden states. Measured on CPU: `index_add_` and products with a row or column of ones beat
segment sums, sums over an axis and broadcasts by two to four times."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray

from keptset.trainer_bridge.scoring.hand import Tensor
from keptset.trainer_bridge.scoring.head_hand import Backward
from keptset.trainer_bridge.scoring.host_pairs import host_threads
from keptset.trainer_bridge.scoring.paddle_hand import PaddleHand


class PaddleHeadHand(PaddleHand):
    """See `HeadHand`."""

    def __init__(self, hidden_RH: Tensor) -> None:
        super().__init__(hidden_RH)
        self._on_host = bool(self._place.is_cpu_place())
        self.cache_bytes = 4 << 20 if self._on_host else 64 << 20
        self.scratch_bytes = 8 << 20 if self._on_host else 256 << 20
        self.item_bytes = 8 if self._dtype == paddle.float64 else 4
        self.working_dtype = np.float64 if self._dtype == paddle.float64 else np.float32
        self._hidden_size = int(hidden_RH.shape[-1])

    @property
    def threads(self) -> int:
        return host_threads()

    @cached_property
    def _ones_1H(self) -> Tensor:
        return self.zeros([1, self._hidden_size]) + 1.0

    def host_arrays(self, *tables: Tensor) -> tuple[NDArray[np.floating], ...] | None:
        # Of a view, Paddle 2.6 hands out the memory without its strides.
        if not self._on_host or not all(_is_readable(table) for table in tables):
            return None
        return tuple(np.asarray(np.from_dlpack(_HostMemory(table.detach()))) for table in tables)

    def host_memory(self, table: Tensor) -> NDArray[np.floating] | None:
        arrays = self.host_arrays(table)
        return None if arrays is None else np.asarray(_Writable(arrays[0]))

    def adopt(self, values: NDArray[np.floating]) -> Tensor:
        return paddle.utils.dlpack.from_dlpack(values.__dlpack__())

    def rows_at(self, table_XH: Tensor, index_C: Tensor) -> Tensor:
        # Of the ways to read rows, the only one with a CPU kernel for every dtype.
        return paddle.nn.functional.embedding(index_C, table_XH.detach()).astype(self._dtype)

    def rows_from(self, table_XH: Tensor, begin: int, end: int) -> Tensor:
        return table_XH.detach()[begin:end].astype(self._dtype)

    def dots(self, left_CH: Tensor, right_CH: Tensor) -> Tensor:
        return paddle.sum(left_CH.multiply_(right_CH), axis=1)  # a device's product might round to TF32

    def product(
        self, left: Tensor, right: Tensor, *, transpose_left: bool = False, transpose_right: bool = False
    ) -> Tensor:
        return paddle.matmul(left, right, transpose_x=transpose_left, transpose_y=transpose_right)

    def zeros(self, shape: list[int]) -> Tensor:
        # paddle.zeros would put them on the default device; a copy of an expanded tensor takes four times as long.
        return paddle.to_tensor([0.0], dtype=self._dtype, place=self._place).reshape([1] * len(shape)).tile(shape)

    def add_rows(self, table_XH: Tensor, index_C: Tensor, scale_C: Tensor | None, rows_CH: Tensor) -> None:
        if scale_C is not None and rows_CH.ndim == 1:
            rows_CH = rows_CH * scale_C
        elif scale_C is not None and self._on_host:
            rows_CH = paddle.matmul(scale_C.reshape([-1, 1]), self._ones_1H).multiply_(rows_CH)
        elif scale_C is not None:
            rows_CH = rows_CH * scale_C.reshape([-1, 1])
        paddle.index_add_(table_XH, index_C, 0, rows_CH)

    def add_slice(self, table_XH: Tensor, begin: int, rows_CH: Tensor) -> None:
        end = begin + rows_CH.shape[0]
        table_XH[begin:end] = table_XH[begin:end] + rows_CH

    def like(self, values: Tensor, source: Tensor) -> Tensor:
        return values.astype(source.dtype)

    def all_reduce(self, values: Tensor, how: Literal["max", "sum"], group: Any) -> Tensor:
        operation = paddle.distributed.ReduceOp.MAX if how == "max" else paddle.distributed.ReduceOp.SUM
        paddle.distributed.all_reduce(values, op=operation, group=group)
        return values

    def records_gradients(self) -> bool:
        return bool(paddle.is_grad_enabled())

    def wants_gradient(self, source: Tensor | None) -> bool:
        return source is not None and not source.stop_gradient and self.records_gradients()

    def attach_all(
        self, values: tuple[Tensor, ...], sources: tuple[Tensor | None, ...], backward: Backward
    ) -> tuple[Tensor, ...]:
        given = tuple(source is not None for source in sources)

        def of_given(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(g for g, there in zip(backward(gradients), given, strict=True) if there)

        return tuple(_WithGradients.apply(*[s for s in sources if s is not None], values=lambda: values, run=of_given))


def _is_readable(table: Tensor) -> bool:
    return bool(table.place.is_cpu_place()) and table.dtype != paddle.bfloat16 and bool(table.is_contiguous())


class _HostMemory:
    """A tensor on the host as NumPy takes it without a copy: Paddle's tensors speak the protocol in parts only."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return paddle.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # DLPack's number of the host


class _Writable:
    """An array that NumPy got to read: what it gets by DLPack counts as read-only, whoever owns it."""

    def __init__(self, array: NDArray[np.floating]) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self._owner = array


class _WithGradients(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *sources: Tensor, values: Any, run: Backward) -> Any:
        ctx.run_backward = run
        return values()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return ctx.run_backward(gradients)
