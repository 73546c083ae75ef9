"""PyTorch: scoring from hidden states."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from keptset.trainer_bridge.scoring.hand import Tensor
from keptset.trainer_bridge.scoring.head_hand import Backward
from keptset.trainer_bridge.scoring.torch_hand import TorchHand, on_host


class TorchHeadHand(TorchHand):
    """See `HeadHand`."""

    def __init__(self, hidden_RH: Tensor) -> None:
        super().__init__(hidden_RH)
        here = on_host(hidden_RH)
        self.cache_bytes = 4 << 20 if here else 64 << 20
        self.scratch_bytes = 8 << 20 if here else 256 << 20
        self.item_bytes = 8 if self._dtype == torch.float64 else 4
        self.working_dtype = np.float64 if self._dtype == torch.float64 else np.float32
        self.threads = torch.get_num_threads()

    def host_arrays(self, *tables: Tensor) -> tuple[NDArray[np.floating], ...] | None:
        return None  # its own reads use all threads, and are as fast

    def host_memory(self, table: Tensor) -> NDArray[np.floating] | None:
        return None

    def adopt(self, values: NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(values)

    def rows_at(self, table_XH: Tensor, index_C: Tensor) -> Tensor:
        return table_XH.detach().index_select(0, index_C).to(self._dtype)

    def rows_from(self, table_XH: Tensor, begin: int, end: int) -> Tensor:
        return table_XH.detach()[begin:end].to(self._dtype)

    def dots(self, left_CH: Tensor, right_CH: Tensor) -> Tensor:
        return left_CH.mul_(right_CH).sum(dim=1)

    def product(
        self, left: Tensor, right: Tensor, *, transpose_left: bool = False, transpose_right: bool = False
    ) -> Tensor:
        return (left.T if transpose_left else left) @ (right.T if transpose_right else right)

    def zeros(self, shape: list[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def add_rows(self, table_XH: Tensor, index_C: Tensor, scale_C: Tensor | None, rows_CH: Tensor) -> None:
        if scale_C is not None:
            rows_CH = rows_CH.mul_(scale_C.reshape(-1, *[1] * (rows_CH.dim() - 1)))
        table_XH.index_add_(0, index_C, rows_CH)

    def add_slice(self, table_XH: Tensor, begin: int, rows_CH: Tensor) -> None:
        table_XH[begin : begin + len(rows_CH)].add_(rows_CH)

    def like(self, values: Tensor, source: Tensor) -> Tensor:
        return values.to(source.dtype)

    def all_reduce(self, values: Tensor, how: Literal["max", "sum"], group: Any) -> Tensor:
        operation = torch.distributed.ReduceOp.MAX if how == "max" else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(values, op=operation, group=group)
        return values

    def records_gradients(self) -> bool:
        return bool(torch.is_grad_enabled())

    def wants_gradient(self, source: Tensor | None) -> bool:
        return source is not None and source.requires_grad and self.records_gradients()

    def attach_all(
        self, values: tuple[Tensor, ...], sources: tuple[Tensor | None, ...], backward: Backward
    ) -> tuple[Tensor, ...]:
        return tuple(_WithGradients.apply(lambda: values, backward, *sources))


class _WithGradients(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: Any, backward: Backward, *sources: Tensor | None) -> Any:
        # Saved though `backward` holds them too: autograd then refuses sources that were overwritten in between.
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        ctx.run_backward = backward
        return values()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018
        return None, None, *ctx.run_backward(gradients)
