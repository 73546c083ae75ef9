"""New weights on their way to actors: as arrays that the object store holds once and every actor of a node reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.schemas.adapters.arrays import as_numpy
from keptset.schemas.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """What one update of a pool's weights took."""

    version: int
    seconds: float
    """From the call until every actor that was there had the weights."""
    store_seconds: float
    """Of these, until the object store had them; 0 where they were there before."""
    load_seconds: tuple[float, ...]
    """What each actor took to load them."""
    nbytes: int | None
    """Bytes of the weights; None where only a reference was given."""


def as_arrays(weights: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Tensors of any library as NumPy arrays, by the same names. bfloat16 becomes its bits in uint16, as Paddle has it.

    Errors: InvalidInput naming what is no tensor.
    """
    return {name: _as_array(name, value) for name, value in weights.items()}


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and getattr(value, "dtype", None) is torch.bfloat16:
        value = value.detach().view(torch.int16)
        bits = as_numpy(value)
        assert bits is not None
        return bits.view(np.uint16)
    if hasattr(value, "place") and "bfloat16" in str(getattr(value, "dtype", "")):
        return np.asarray(value.numpy())
    array = as_numpy(value)
    if array is None:
        raise InvalidInput(f"weight {name!r} is {type(value).__name__}; it must be a tensor or a NumPy array")
    return array
