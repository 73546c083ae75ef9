"""Processed logits to kept sets: temperature, then min_p, top_k and top_p.

    s = (z - max z) / T,   w = exp(s),   K = top_p(top_k(min_p(ids)))

T = 0 is greedy: K is the lowest id among the largest logits. Whatever decides about K and b is float64, which leaves no
rounding to argue about where a filter's bound is near: the few ids near the top where top_k comes first, else the whole
row. Per row there is one exponential and one sum over the vocabulary. One thread does it: two wait for each other
between so many short operations for as long as they save.

Legend: B rows, V vocabulary, K kept ids of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keptset.rollout.filters import FILTER_ORDER, SORT_AT_MOST, Float64, Floats, keep, top_superset
from keptset.rollout.kept_sets import LOWEST_SCALED, Int64, KeptSets
from keptset.rollout.kept_sets_builder import KeptSetsBuilder, block_sums, full_moments
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

_WIDE = 1 << 14
"""Ids of a row from which on exponentials in float64 are worth avoiding."""

__all__ = ["FILTER_ORDER", "scaled", "truncate", "why_unusable"]


def truncate(logits_BV: Any, params: Sequence[SamplingParams], *, on_device: bool | None = None) -> KeptSets:
    """Kept set of every row.

    `logits_BV`: processed logits, float32 or float64 [B, V], a NumPy array or a Paddle tensor. It is not changed, and
    the full rows of the result refer to it. `params`: settings of each row. A tensor on an accelerator is worked on
    where it is and only what is near the top comes to the host; `on_device` forces (True) or forbids (False) that
    way for any tensor. Both ways give the same sets.

    A row with NaN, +inf or no finite logit fails alone: see `KeptSets.errors`.
    Errors: InvalidInput for another shape or dtype, or a number of settings other than B.

    >>> kept = truncate(np.array([[1.0, 2.0, 2.0, 2.0, 3.0]]), [SamplingParams(top_k=3)])
    >>> kept.ids_N.tolist(), kept.log_kept_mass_B.round(4).tolist()
    ([1, 2, 4], [-0.2546])
    """
    is_array = isinstance(logits_BV, np.ndarray)
    _check(logits_BV, params)
    if on_device is None:
        on_device = not is_array and not logits_BV.place.is_cpu_place()
    if not on_device:
        return _truncate_on_host(logits_BV if is_array else _host_array(logits_BV), params)
    if is_array:
        raise InvalidInput("on_device needs a Paddle tensor, got a NumPy array")
    from keptset.rollout.truncation_device import truncate_on_device

    return truncate_on_device(logits_BV, params)


def _host_array(logits_BV: Any) -> Floats:
    """A Paddle tensor as an array: its own memory where it lies on the host in one piece, else a copy."""
    if not logits_BV.place.is_cpu_place() or not logits_BV.is_contiguous():
        return np.asarray(logits_BV.numpy())
    return np.asarray(np.from_dlpack(_HostMemory(logits_BV)))


class _HostMemory:
    """A tensor as NumPy takes it without a copy: Paddle's tensors speak the protocol in parts only.

    The array holds on to the memory, whatever becomes of the tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        from paddle.utils.dlpack import to_dlpack

        return to_dlpack(self._tensor.detach())

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # DLPack's number of the host


def _dtype_name(logits_BV: Any) -> str:
    return str(logits_BV.dtype).rpartition(".")[2]


def _truncate_on_host(logits_BV: Floats, params: Sequence[SamplingParams]) -> KeptSets:
    builder = KeptSetsBuilder(logits_BV)
    for z_V, settings in zip(logits_BV, params, strict=True):
        _add_row(builder, z_V, settings)
    return builder.build()


def _add_row(builder: KeptSetsBuilder, z_V: Floats, settings: SamplingParams) -> None:
    top, low, vocab_size = float(z_V.max()), float(z_V.min()), len(z_V)
    if (reason := why_unusable(builder.row, top)) is not None:
        return builder.fail(reason)
    if settings.temperature == 0:
        return builder.add_point(int(np.argmax(z_V)), top)
    finite = vocab_size if low > -np.inf else int(np.count_nonzero(z_V > -np.inf))
    ids_C = _near_top(z_V, settings)
    if ids_C is not None:
        z_C = z_V[ids_C]
        scaled_C = scaled(z_C, top, settings.temperature)
        weight_C = np.exp(scaled_C)
        total = float(weight_C.sum()) + _mass_beside(ids_C, z_V, top, settings.temperature)
        if (kept := keep(z_C, weight_C, total, settings)) is not None:
            ids_C, scaled_C, weight_C = ids_C[kept], scaled_C[kept], weight_C[kept]
        return builder.add(ids_C, scaled_C, weight_C, total if len(ids_C) < finite else None)
    scaled_V = scaled(z_V, top, settings.temperature)
    weight_V = np.exp(scaled_V)
    total = float(weight_V.sum())
    kept_K = keep(z_V, weight_V, total, settings)
    if kept_K is None and finite < vocab_size:
        kept_K = np.flatnonzero(z_V > -np.inf)
    if kept_K is None or len(kept_K) == vocab_size:
        return builder.add_moments(top, settings.temperature, *full_moments(scaled_V, weight_V))
    return builder.add(kept_K, scaled_V[kept_K], weight_V[kept_K], total if len(kept_K) < finite else None)


def _near_top(z_V: Floats, settings: SamplingParams) -> Int64 | None:
    """Few ids that hold all that is kept, where top_k is the first filter; None where there are no such."""
    if settings.top_k <= 0 or settings.min_p > 0:
        return None
    ids_C = top_superset(z_V, settings.top_k)
    return None if ids_C is None or len(ids_C) > SORT_AT_MOST else ids_C


def _mass_beside(ids_C: Int64, z_V: Floats, top: float, temperature: float) -> float:
    """Sum of w over the ids that are not among `ids_C`.

    On wide rows of float32, w is made in it and blocks are added up in float64. The sum enters m alone, which is
    recorded in float32, and spoils no more than its last digit or two.
    """
    weight_V = z_V.astype(z_V.dtype if len(z_V) >= _WIDE else np.float64)
    weight_V -= weight_V.dtype.type(top)
    if temperature != 1:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # top / 0 is among `ids_C`, the rest -inf
            weight_V /= weight_V.dtype.type(temperature)
    np.exp(weight_V, out=weight_V)
    weight_V[ids_C] = 0
    return float(block_sums(weight_V).sum(dtype=np.float64))


def scaled(z_C: Floats, top: float, temperature: float) -> Float64:
    """s = (z - top) / T, no less than LOWEST_SCALED."""
    with np.errstate(over="ignore"):  # clamped
        s_C = z_C.astype(np.float64)
        s_C -= top
        if temperature != 1:
            s_C /= temperature
        if len(s_C) and s_C.min() < LOWEST_SCALED:  # rare, and costs as much as an exponential
            np.maximum(s_C, LOWEST_SCALED, out=s_C)
    return s_C


def why_unusable(row: int, top: float) -> str | None:
    """Why nothing can be drawn from a row whose largest logit (NaN where it holds a NaN) is `top`; None: it can."""
    if np.isfinite(top):
        return None
    if top == -np.inf:
        return f"logits of row {row} hold no finite value: every token is banned; loosen the bans"
    what = "NaN" if np.isnan(top) else "+inf"
    return f"logits of row {row} hold {what}; look for an overflow in the model or damaged weights"


def _check(logits_BV: Any, params: Sequence[SamplingParams]) -> None:
    shape, dtype = tuple(logits_BV.shape), _dtype_name(logits_BV)
    if len(shape) != 2 or shape[1] == 0:
        raise InvalidInput(f"logits must be [rows, vocabulary], got shape {list(shape)}")
    if dtype not in ("float32", "float64"):
        raise InvalidInput(f"logits are {dtype}; cast them to float32 before processors and filters")
    if shape[0] != len(params):
        raise InvalidInput(f"{shape[0]} rows of logits but settings for {len(params)}; give one SamplingParams a row")
