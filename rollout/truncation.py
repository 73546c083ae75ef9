"""Processed logits to kept sets: temperature, then min_p, top_k and top_p.

    s = (z - max z) / T,   w = exp(s),   K = top_p(top_k(min_p(ids)))

T = 0 is greedy: K is the lowest id among the largest logits. All sums are float64, with one exponential and one sum
over the vocabulary per row. On wide rows this costs about twice what float32 would, and leaves no rounding to argue
about where a filter's bound is near; everything else is done on the few ids near the top. One thread does it:
two wait for each other between so many short operations for as long as they save.

Legend: B rows, V vocabulary, K kept ids of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keptset.rollout.filters import FILTER_ORDER, Float64, Floats, keep
from keptset.rollout.kept_sets import LOWEST_SCALED, KeptSets
from keptset.rollout.kept_sets_builder import KeptSetsBuilder, full_moments
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

_CHUNK = 1 << 16
"""Weights that are made in one go, or those of one row: half a MiB stays in a core's own cache."""

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
    return np.asarray(_Memory(logits_BV))


class _Memory:
    """What NumPy makes an array of without a copy; the array keeps this, and this the tensor."""

    def __init__(self, logits_BV: Any) -> None:
        dtype = np.dtype(_dtype_name(logits_BV))
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(logits_BV.shape),
            "typestr": dtype.str,
            "data": (logits_BV.data_ptr(), True),
        }
        self._owner = logits_BV


def _dtype_name(logits_BV: Any) -> str:
    return str(logits_BV.dtype).rpartition(".")[2]


def _truncate_on_host(logits_BV: Floats, params: Sequence[SamplingParams]) -> KeptSets:
    num, vocab_size = logits_BV.shape
    temperature_B = np.array([settings.temperature or 1.0 for settings in params])
    builder = KeptSetsBuilder(logits_BV)
    step = max(1, _CHUNK // vocab_size)
    for begin in range(0, num, step):
        rows = slice(begin, begin + step)
        for row, weighed in enumerate(_weigh(logits_BV[rows], temperature_B[rows]), begin):
            _add_row(builder, logits_BV[row], params[row], *weighed)
    return builder.build()


def _weigh(z_RV: Floats, temperature_R: Float64) -> Iterator[tuple[float, float, Float64, float]]:
    """Largest and lowest logit, w = exp((z - top) / T) and its sum, of each row."""
    top_R, low_R = z_RV.max(axis=1), z_RV.min(axis=1)
    weight_RV = z_RV.astype(np.float64)
    with np.errstate(all="ignore"):  # 0 is the right weight; rows that hold no usable number are told later
        weight_RV -= top_R[:, None]
        if (temperature_R != 1).any():
            weight_RV /= temperature_R[:, None]
        np.exp(weight_RV, out=weight_RV)
        total_R = weight_RV.sum(axis=1)
    return zip(top_R.tolist(), low_R.tolist(), weight_RV, total_R.tolist(), strict=True)


def _add_row(
    builder: KeptSetsBuilder,
    z_V: Floats,
    settings: SamplingParams,
    top: float,
    low: float,
    weight_V: Float64,
    total: float,
) -> None:
    if (reason := why_unusable(builder.row, top)) is not None:
        return builder.fail(reason)
    if settings.temperature == 0:
        return builder.add_point(int(np.argmax(z_V)), top)
    vocab_size = len(z_V)
    finite = vocab_size if low > -np.inf else int(np.count_nonzero(z_V > -np.inf))
    kept_K = keep(z_V, weight_V, total, settings)
    if kept_K is None and finite < vocab_size:
        kept_K = np.flatnonzero(z_V > -np.inf)
    if kept_K is None or len(kept_K) == vocab_size:
        moments = full_moments(scaled(z_V, top, settings.temperature), weight_V)
        return builder.add_moments(top, settings.temperature, *moments)
    scaled_K = scaled(z_V[kept_K], top, settings.temperature)
    return builder.add(kept_K, scaled_K, weight_V[kept_K], total if len(kept_K) < finite else None)


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
