"""PyTorch: gradients by one autograd function around the shared backward, on whatever device the logits are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Ints, Tensor

_HOST_BLOCK = 1 << 18
"""1 MiB of float32: stays in a core's cache."""
_DEVICE_BLOCK = 1 << 24
"""64 MiB of float32: few launches, and small beside a device's memory."""


class TorchHand:
    """See `Hand`. Works in float32, or float64 where the logits are float64."""

    def __init__(self, logits_RV: Tensor) -> None:
        if not logits_RV.is_floating_point():
            raise InvalidInput(f"tensor has dtype {logits_RV.dtype}; it must be floating point")
        self._logits_RV = logits_RV
        self._device, self._source_dtype, self._shape = logits_RV.device, logits_RV.dtype, logits_RV.shape
        self._dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        self.block_elements = _HOST_BLOCK if on_host(logits_RV) else _DEVICE_BLOCK

    def without_logits(self) -> TorchHand:
        slim = copy.copy(self)
        slim._logits_RV = None
        return slim

    def exact(self) -> AbstractContextManager[object]:
        return _exact(self._device)

    def ints(self, values: Ints) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def floats(self, values: NDArray[np.floating]) -> Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device)

    def gather(self, flat_M: Ints) -> Tensor:
        return torch.take(self._logits_RV.detach(), self.ints(flat_M)).to(self._dtype)

    def rows(self, rows: Ints) -> Tensor:
        # index_select copies, also where no cast follows.
        return self._logits_RV.detach().index_select(0, self.ints(rows)).to(self._dtype)

    def to_host(self, values: Tensor) -> NDArray[np.float64]:
        host: NDArray[np.float64] = values.detach().double().numpy(force=True)
        return host

    def take(self, values: Tensor, index: Tensor) -> Tensor:
        return values.index_select(0, index)

    def put(self, values: Tensor, index: Tensor, new: Tensor) -> Tensor:
        return values.reshape(-1).index_copy_(0, index, new).reshape(values.shape)

    def segment_max(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        return values_M.new_empty(len(starts_A1) - 1).scatter_reduce(0, segment_M, values_M, "amax", include_self=False)

    def segment_sum(self, values_M: Tensor, starts_A1: Ints, segment_M: Tensor) -> Tensor:
        # Summed one after the other: in float32 a set of 150,000 ids would lose 2e-4.
        sums_A = values_M.new_zeros(len(starts_A1) - 1, dtype=torch.float64)
        return sums_A.index_add(0, segment_M, values_M.double()).to(values_M.dtype)

    def row_max(self, values_RV: Tensor) -> Tensor:
        return values_RV.amax(dim=1, keepdim=True)

    def row_sum(self, values_RV: Tensor) -> Tensor:
        return values_RV.sum(dim=1, keepdim=True)

    def exp(self, values: Tensor) -> Tensor:
        return torch.exp(values)

    def log(self, values: Tensor) -> Tensor:
        return torch.log(values)

    def abs(self, values: Tensor) -> Tensor:
        return values.abs()

    def is_zero(self, values: Tensor) -> Tensor:
        return values == 0

    def where(self, condition: Tensor, left: Tensor | float, right: Tensor) -> Tensor:
        return torch.where(condition, left, right)

    def concatenate(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def new_gradient(self) -> Tensor:
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def put_rows(self, gradient_RV: Tensor, rows: Ints, new: Tensor) -> Tensor:
        return gradient_RV.index_copy_(0, self.ints(rows), new)

    def finish_gradient(self, gradient_RV: Tensor) -> Tensor:
        return gradient_RV.to(self._source_dtype)

    def attach(self, value_T: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        if not self._logits_RV.requires_grad:
            return value_T
        return _WithGradient.apply(self._logits_RV, lambda: value_T, backward)


def on_host(values: Tensor) -> bool:
    """Whether a tensor lies in the memory of the host."""
    return bool(values.is_cpu)


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    # Mixed precision would narrow the sums, and the graph of what happens inside is replaced by `attach`.
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class _WithGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, value: Callable[[], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
        ctx.run_backward = backward
        return value()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient_T: Tensor) -> Any:
        return ctx.run_backward(gradient_T), None, None
