"""What scoring from hidden states needs of a framework beyond `Hand`. The hand is made for the hidden states.

Legend: R positions, H hidden, X rows of a table (hidden states, a head, a gradient), C the few rows in work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from keptset.trainer_bridge.scoring.hand import Hand, Tensor, framework_of

Backward = Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]
"""Gradients of the results (None: none arrived) to gradients of the sources (None: none is due)."""


class HeadHand(Hand, Protocol):
    """Tables may be of any floating dtype; what is read is widened to the working dtype, a few rows at once."""

    @property
    def cache_bytes(self) -> int:
        """Working memory that stays in a core's cache, or on a device is worth its launches."""

    @property
    def scratch_bytes(self) -> int:
        """Working memory at most, where the caller sets no bound."""

    @property
    def item_bytes(self) -> int:
        """Of a number in the working dtype."""

    @property
    def working_dtype(self) -> type[np.float32] | type[np.float64]:
        """The dtype of sums, as NumPy calls it."""

    @property
    def threads(self) -> int:
        """Of work on the host."""

    def host_arrays(self, *tables: Tensor) -> tuple[NDArray[np.floating], ...] | None:
        """The tables' own memory, to be read; None on a device, in a dtype that NumPy lacks (bfloat16), or where the
        framework itself is as fast."""

    def host_memory(self, table: Tensor) -> NDArray[np.floating] | None:
        """The table's own memory, to be written; None as in `host_arrays`."""

    def adopt(self, values: NDArray[np.floating]) -> Tensor:
        """A tensor of an array that no one else holds; may share its memory."""

    def rows_at(self, table_XH: Tensor, index_C: Tensor) -> Tensor:
        """Rows of a table, a copy in the working dtype. Without gradient."""

    def rows_from(self, table_XH: Tensor, begin: int, end: int) -> Tensor:
        """Rows [begin, end), in the working dtype; may be a view. Without gradient."""

    def dots(self, left_CH: Tensor, right_CH: Tensor) -> Tensor:
        """Sum of products of each pair of rows, [C]. May overwrite `left_CH`."""

    def product(
        self, left: Tensor, right: Tensor, *, transpose_left: bool = False, transpose_right: bool = False
    ) -> Tensor:
        """Matrix product."""

    def zeros(self, shape: list[int]) -> Tensor:
        """In the working dtype, where the hidden states are."""

    def add_rows(self, table_XH: Tensor, index_C: Tensor, scale_C: Tensor | None, rows_CH: Tensor) -> None:
        """table[index] += scale * rows, in place; equal indices add up. May overwrite `rows_CH`."""

    def add_slice(self, table_XH: Tensor, begin: int, rows_CH: Tensor) -> None:
        """table[begin : begin + C] += rows, in place."""

    def like(self, values: Tensor, source: Tensor) -> Tensor:
        """`values` in the dtype of `source`."""

    def all_reduce(self, values: Tensor, how: Literal["max", "sum"], group: Any) -> Tensor:
        """Combined over the ranks of a group; may write in place."""

    def records_gradients(self) -> bool:
        """Whether a graph is being recorded."""

    def wants_gradient(self, source: Tensor | None) -> bool:
        """Whether a graph is being recorded, and the tensor asks for a gradient."""

    def attach_all(
        self, values: tuple[Tensor, ...], sources: tuple[Tensor | None, ...], backward: Backward
    ) -> tuple[Tensor, ...]:
        """`values` as functions of `sources`, of which at least one wants a gradient."""


def head_hand_for(hidden_RH: Tensor) -> HeadHand:
    """The hand for hidden states. InvalidInput where no framework speaks for them."""
    framework = framework_of(hidden_RH)
    hand: HeadHand
    if framework == "numpy":
        from keptset.trainer_bridge.scoring.numpy_head_hand import NumpyHeadHand

        hand = NumpyHeadHand(hidden_RH)
    elif framework == "paddle":
        from keptset.trainer_bridge.scoring.paddle_head_hand import PaddleHeadHand

        hand = PaddleHeadHand(hidden_RH)
    else:
        from keptset.trainer_bridge.scoring.torch_head_hand import TorchHeadHand

        hand = TorchHeadHand(hidden_RH)
    return hand
