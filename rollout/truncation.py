"""Processed logits to kept sets: temperature, then min_p, top_k and top_p.

    s = (z - max z) / T,   w = exp(s),   K = top_p(top_k(min_p(ids)))

T = 0 is greedy: K is the lowest id among the largest logits. All sums are float64, with one exponential and one sum
over the vocabulary per row. On wide rows this costs about twice what float32 would, and leaves no rounding to argue
about where a filter's bound is near; everything else is done on the few ids near the top. On the host wide rows are
shared among as many threads as matrix products take.

Legend: B rows, V vocabulary, K kept ids of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np

from keptset.rollout.cpu_threads import host_threads
from keptset.rollout.filters import FILTER_ORDER, Float64, Floats, keep
from keptset.rollout.kept_sets import LOWEST_SCALED, KeptSets
from keptset.rollout.kept_sets_builder import KeptSetsBuilder, full_moments
from keptset.schemas.errors import InvalidInput
from keptset.schemas.sampling_params import SamplingParams

AddRow = Callable[[KeptSetsBuilder], None]
_WIDE = 1 << 17
"""Ids of a row from which on rows are shared among threads: on narrower ones these wait for each other between
operations longer than they save."""

__all__ = ["FILTER_ORDER", "scaled_weights", "truncate", "why_unusable"]


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
        return _truncate_on_host(logits_BV if is_array else logits_BV.numpy(), params)
    if is_array:
        raise InvalidInput("on_device needs a Paddle tensor, got a NumPy array")
    from keptset.rollout.truncation_device import truncate_on_device

    return truncate_on_device(logits_BV, params)


def _truncate_on_host(logits_BV: Floats, params: Sequence[SamplingParams]) -> KeptSets:
    num, vocab_size = logits_BV.shape
    threads = max(1, min(host_threads(), num)) if vocab_size >= _WIDE else 1
    bounds = np.linspace(0, num, threads + 1).astype(int).tolist()

    def rows(share: int) -> list[AddRow]:
        scaled_V, weight_V = np.empty(vocab_size), np.empty(vocab_size)
        return [
            _row(row, logits_BV[row], params[row], scaled_V, weight_V)
            for row in range(bounds[share], bounds[share + 1])
        ]

    builder = KeptSetsBuilder(logits_BV)
    with ThreadPoolExecutor(threads) as pool:
        shares = pool.map(rows, range(threads)) if threads > 1 else map(rows, range(threads))
        for add in chain.from_iterable(shares):
            add(builder)
    return builder.build()


def _row(row: int, z_V: Floats, settings: SamplingParams, scaled_V: Float64, weight_V: Float64) -> AddRow:
    """What is to be put down about a row. The last two arguments are working memory."""
    top, low = float(z_V.max()), float(z_V.min())
    if (reason := why_unusable(row, top)) is not None:
        return lambda builder: builder.fail(reason)
    if settings.temperature == 0:
        greedy = int(np.argmax(z_V))
        return lambda builder: builder.add_point(greedy, top)
    scaled_weights(z_V, top, low, settings.temperature, scaled_V, weight_V)
    total, vocab_size = float(weight_V.sum()), len(z_V)
    finite = vocab_size if low > -np.inf else int(np.count_nonzero(z_V > -np.inf))
    kept_K = keep(z_V, weight_V, total, settings)
    if kept_K is None and finite < vocab_size:
        kept_K = np.flatnonzero(z_V > -np.inf)
    if kept_K is None or len(kept_K) == vocab_size:
        moments = full_moments(scaled_V, weight_V)
        return lambda builder: builder.add_moments(top, settings.temperature, *moments)
    scaled_K, weight_K = scaled_V[kept_K], weight_V[kept_K]
    mass = total if len(kept_K) < finite else None
    return lambda builder: builder.add(kept_K, scaled_K, weight_K, mass)


def scaled_weights(
    z_V: Floats, top: float, low: float, temperature: float, scaled_V: Float64, weight_V: Float64
) -> None:
    """Write s = (z - top) / T and w = exp(s) to the last two arguments; `low` is the lowest logit."""
    with np.errstate(over="ignore", under="ignore"):  # clamped, and 0 is the right weight
        np.copyto(scaled_V, z_V)  # widened first: faster than in the subtraction
        scaled_V -= top
        if temperature != 1:
            scaled_V /= temperature
        if (low - top) / temperature < LOWEST_SCALED:  # costs as much as the exponential
            np.maximum(scaled_V, LOWEST_SCALED, out=scaled_V)
        np.exp(scaled_V, out=weight_V)


def why_unusable(row: int, top: float) -> str | None:
    """Why nothing can be drawn from a row whose largest logit (NaN where it holds a NaN) is `top`; None: it can."""
    if np.isfinite(top):
        return None
    if top == -np.inf:
        return f"logits of row {row} hold no finite value: every token is banned; loosen the bans"
    what = "NaN" if np.isnan(top) else "+inf"
    return f"logits of row {row} hold {what}; look for an overflow in the model or damaged weights"


def _check(logits_BV: Any, params: Sequence[SamplingParams]) -> None:
    shape, dtype = tuple(logits_BV.shape), str(logits_BV.dtype).rpartition(".")[2]
    if len(shape) != 2 or shape[1] == 0:
        raise InvalidInput(f"logits must be [rows, vocabulary], got shape {list(shape)}")
    if dtype not in ("float32", "float64"):
        raise InvalidInput(f"logits are {dtype}; cast them to float32 before processors and filters")
    if shape[0] != len(params):
        raise InvalidInput(f"{shape[0]} rows of logits but settings for {len(params)}; give one SamplingParams a row")
