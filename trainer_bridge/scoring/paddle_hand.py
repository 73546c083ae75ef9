"""Paddle: gradients by one PyLayer around the shared backward, on whatever device the logits are.

Works with Paddle 2.6.2 and 3. Its CPU build lacks some kernels for half precision; logits of such a dtype are widened
as a whole there, and only there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor

_HALF = (paddle.float16, paddle.bfloat16)
_HOST_BLOCK = 1 << 18
"""1 MiB of float32: stays in a core's cache (two to three times as fast as blocks of 16 MiB)."""
_DEVICE_BLOCK = 1 << 24
"""64 MiB of float32: few launches, and small beside a device's memory."""
_SUM_BLOCK = 256
"""Numbers added one after the other in a row sum; the sums of the blocks are added in turn."""


class PaddleHand:
    """See `Hand`. Works in float32, or float64 where the logits are float64."""

    def __init__(self, logits_RV: Tensor) -> None:
        if logits_RV.dtype not in (*_HALF, paddle.float32, paddle.float64):
            raise InvalidInput(f"tensor has dtype {logits_RV.dtype}; it must be floating point")
        self._source_RV = logits_RV
        self._place, self._source_dtype, self._shape = logits_RV.place, logits_RV.dtype, logits_RV.shape
        self._dtype = paddle.float64 if logits_RV.dtype == paddle.float64 else paddle.float32
        self.block_elements = _HOST_BLOCK if self._place.is_cpu_place() else _DEVICE_BLOCK

    @cached_property
    def _logits_RV(self) -> Tensor:
        """The logits outside any graph, in a dtype that this build can gather from."""
        if self._place.is_cpu_place() and self._source_dtype in _HALF:
            return self._source_RV.detach().astype(self._dtype)
        return self._source_RV.detach()

    def without_logits(self) -> PaddleHand:
        slim = copy.copy(self)
        slim._source_RV = None
        slim.__dict__.pop("_logits_RV", None)
        return slim

    def exact(self) -> AbstractContextManager[object]:
        return _exact()

    def ints(self, values: Ints) -> Tensor:
        return paddle.to_tensor(np.ascontiguousarray(values, np.int64), place=self._place)

    def floats(self, values: NDArray[np.floating]) -> Tensor:
        wide = np.float64 if self._dtype == paddle.float64 else np.float32
        return paddle.to_tensor(np.ascontiguousarray(values, wide), place=self._place)

    def gather(self, flat_M: Ints) -> Tensor:
        return paddle.gather(self._logits_RV.reshape([-1]), self.ints(flat_M)).astype(self._dtype)

    def rows(self, rows: Ints) -> Tensor:
        return paddle.gather(self._logits_RV, self.ints(rows), axis=0).astype(self._dtype)

    def to_host(self, values: Tensor) -> NDArray[np.float64]:
        host: NDArray[np.float64] = values.detach().numpy().astype(np.float64)
        return host

    def take(self, values: Tensor, index: Tensor) -> Tensor:
        return paddle.gather(values, index)

    def put(self, values: Tensor, index: Tensor, new: Tensor) -> Tensor:
        shape = values.shape
        return paddle.scatter_(values.reshape([-1]), index, new, overwrite=True).reshape(shape)

    def segment_max(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        return paddle.geometric.segment_max(values_M, segment_M)

    def segment_sum(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        # Summed one after the other: in float32 a set of 150,000 ids would lose 2e-4.
        wide_M = values_M.astype(paddle.float64)
        return paddle.geometric.segment_sum(wide_M, segment_M).astype(values_M.dtype)

    def row_max(self, values_RV: Tensor) -> Tensor:
        return paddle.max(values_RV, axis=1, keepdim=True)

    def row_sum(self, values_RV: Tensor) -> Tensor:
        # Paddle adds a wide float32 row one number after the other, which loses 1e-4 of it; short sums do not.
        width = values_RV.shape[1]
        if width < 2 * _SUM_BLOCK:
            return paddle.sum(values_RV, axis=1, keepdim=True)
        whole = width // _SUM_BLOCK * _SUM_BLOCK
        parts_RC = values_RV[:, :whole].reshape([values_RV.shape[0], -1, _SUM_BLOCK]).sum(axis=2)
        sum_R1 = paddle.sum(parts_RC, axis=1, keepdim=True)
        if whole == width:  # Paddle 2.6 cannot sum an empty slice
            return sum_R1
        return sum_R1 + values_RV[:, whole:].sum(axis=1, keepdim=True)

    def exp(self, values: Tensor) -> Tensor:
        return paddle.exp(values)

    def log(self, values: Tensor) -> Tensor:
        return paddle.log(values)

    def abs(self, values: Tensor) -> Tensor:
        return values.abs()

    def is_zero(self, values: Tensor) -> Tensor:
        # Paddle 2.6 calls floats equal that lie within 1e-8, and gradients of a large batch are smaller than that.
        return paddle.logical_not(values.astype("bool"))

    def where(self, condition: Tensor, left: Tensor | float, right: Tensor) -> Tensor:
        return paddle.where(
            condition, left if isinstance(left, paddle.Tensor) else paddle.full_like(right, left), right
        )

    def concatenate(self, parts: list[Tensor]) -> Tensor:
        return paddle.concat(parts)

    def new_gradient(self) -> Tensor:
        # paddle.zeros would put them on the default device.
        return self.floats(np.zeros((1, 1))).tile(self._shape)

    def put_rows(self, gradient_RV: Tensor, rows: Ints, new: Tensor) -> Tensor:
        return paddle.scatter_(gradient_RV, self.ints(rows), new, overwrite=True)

    def finish_gradient(self, gradient_RV: Tensor) -> Tensor:
        return gradient_RV.astype(self._source_dtype)

    def attach(self, value_T: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        if self._source_RV.stop_gradient:
            return value_T
        return _WithGradient.apply(self._source_RV, lambda: value_T, backward)


@contextmanager
def _exact() -> Iterator[None]:
    # Mixed precision would narrow the sums, and the graph of what happens inside is replaced by `attach`.
    with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
        yield


class _WithGradient(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, value: Callable[[], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
        ctx.run_backward = backward
        return value()

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> Tensor:
        return ctx.run_backward(gradient_T)
