"""Truncation where the logits are: a threshold per row on their device, then one copy of what reaches it.

A row's threshold t is the largest that bisection finds such that what has s = (z - max z) / T >= t

    is all that min_p keeps,   or holds at least top_k ids,   or holds a mass >= top_p * (sum of w)

so that it holds everything the first filter keeps. The filters themselves then run on these few, on the host, by the
same code as for host arrays. Everything is float64 on the device too; the operations follow the tensor's device.

Legend: B rows, V vocabulary, C blocks of the vocabulary or candidates of one row, N candidates of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import paddle

from keptset.rollout.filters import Float64, keep
from keptset.rollout.kept_sets import BLOCK, LOWEST_SCALED, KeptSets
from keptset.rollout.kept_sets_builder import KeptSetsBuilder, full_moments
from keptset.rollout.truncation import scaled, why_unusable
from keptset.schemas.sampling_params import SamplingParams

BISECTIONS = 20
"""Halvings in search of a threshold. Any number gives the same sets; more bring fewer candidates."""
PROBE = -64.0
"""First s that is tried: below it lies no mass worth naming, so the halvings are not spent on an empty range."""
MIN_P_MARGIN = 1e-9
"""How far below log(min_p) candidates begin, so that rounding on the device drops none that the filter keeps."""
NO_WEIGHT = -1000.0
"""Below this exp is 0, but some devices give their smallest number instead, which squares of s must not bring back."""
ELEMENTS_AT_ONCE = 1 << 24
"""Rows are worked on in groups of about this many logits, which bounds the memory taken on the device."""
_STATISTICS = 6


def truncate_on_device(logits_BV: paddle.Tensor, params: Sequence[SamplingParams]) -> KeptSets:
    """`truncation.truncate` for a tensor on any device, its arguments already checked."""
    builder = KeptSetsBuilder(logits_BV)
    rows, vocab_size = logits_BV.shape
    step = max(1, ELEMENTS_AT_ONCE // vocab_size)
    groups = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    if not groups:
        return builder.build()
    packed = [_pack(logits_BV[start:stop], params[start:stop]) for start, stop in groups]
    host = np.split(paddle.concat(packed).numpy(), np.cumsum([len(part) for part in packed])[:-1])
    for (start, stop), part in zip(groups, host, strict=True):
        for settings, (statistics, block_mass_C, ids_C, z_C) in zip(
            params[start:stop], _unpack(part, stop - start, vocab_size), strict=True
        ):
            _add(builder, settings, statistics, block_mass_C, ids_C, z_C)
    return builder.build()


def _add(
    builder: KeptSetsBuilder,
    settings: SamplingParams,
    statistics: Float64,
    block_mass_C: Float64,
    ids_C: Float64,
    z_C: Float64,
) -> None:
    """One row from what came to the host. No candidates: the whole vocabulary is kept."""
    top, finite, total, _, mean, mean_square = statistics.tolist()
    if (reason := why_unusable(builder.row, top)) is not None:
        builder.fail(reason)
    elif settings.temperature == 0:
        builder.add_point(int(ids_C[0]), top)
    elif not len(ids_C):
        builder.add_moments(top, settings.temperature, block_mass_C, mean, mean_square)
    else:
        scaled_C = scaled(z_C, top, settings.temperature)
        weight_C = np.exp(scaled_C)
        kept = keep(z_C, weight_C, total, settings)
        if kept is not None:
            ids_C, scaled_C, weight_C = ids_C[kept], scaled_C[kept], weight_C[kept]
        if len(ids_C) == builder.vocab_size:
            builder.add_moments(top, settings.temperature, *full_moments(scaled_C, weight_C))
        else:
            builder.add(ids_C.astype(np.int64), scaled_C, weight_C, total if len(ids_C) < finite else None)


def _pack(logits_BV: paddle.Tensor, params: Sequence[SamplingParams]) -> paddle.Tensor:
    """Per row: max, finite logits, sum of w, candidates, means of s and s squared, block masses; then all candidates'
    ids and logits. One float64 vector, which holds ids exactly."""
    vocab_size = logits_BV.shape[1]

    def per_row(values: list[float]) -> paddle.Tensor:
        return paddle.to_tensor(np.array(values, np.float64), place=logits_BV.place)

    finite_BV = paddle.isfinite(logits_BV)
    finite_B = finite_BV.astype("int64").sum(axis=1)
    has_nan_B = paddle.isnan(logits_BV).any(axis=1)
    z_BV = logits_BV.astype("float64")
    top_B = paddle.where(has_nan_B, per_row([math.nan] * len(params)), z_BV.max(axis=1))
    scaled_BV = (z_BV - top_B.unsqueeze(1)) / per_row([p.temperature or 1.0 for p in params]).unsqueeze(1)
    scaled_BV = scaled_BV.clip(min=LOWEST_SCALED)
    weight_BV = scaled_BV.exp()
    total_B = weight_BV.sum(axis=1)

    threshold_B = per_row([_fixed_threshold(p) for p in params])
    keeps_all_B = per_row([float(not _acts(p, vocab_size)) for p in params]).astype("bool")
    never_B = per_row([math.inf] * len(params))
    threshold_B = paddle.where(keeps_all_B & (finite_B == vocab_size), never_B, threshold_B)
    if any(_searches(p) for p in params):
        lowest_B = paddle.where(finite_BV, scaled_BV, paddle.zeros_like(scaled_BV)).min(axis=1)
        count_B = paddle.minimum(per_row([float(p.top_k) for p in params]), finite_B.astype("float64"))
        mass_B = per_row([p.top_p if _searches(p) and p.top_k == 0 else 0.0 for p in params]) * total_B
        found_B = _bisect(scaled_BV, weight_BV, lowest_B, count_B, mass_B)
        searches_B = per_row([float(_searches(p)) for p in params]).astype("bool")
        threshold_B = paddle.where(searches_B, paddle.maximum(threshold_B, found_B), threshold_B)
    threshold_B = paddle.where(paddle.isfinite(top_B), threshold_B, never_B)

    reaches_BV = (scaled_BV >= threshold_B.unsqueeze(1)) & finite_BV
    candidates_B = reaches_BV.astype("int64").sum(axis=1)
    weighed_BV = scaled_BV.clip(min=NO_WEIGHT)
    moment_BV = weight_BV * weighed_BV
    mean_B, mean_square_B = moment_BV.sum(axis=1) / total_B, (moment_BV * weighed_BV).sum(axis=1) / total_B
    columns = [top_B, finite_B, total_B, candidates_B, mean_B, mean_square_B]
    numbers_BX = paddle.concat(
        [paddle.stack([column.astype("float64") for column in columns], axis=1), _block_sums(weight_BV)], axis=1
    )
    index_N2 = paddle.nonzero(reaches_BV)
    if index_N2.shape[0] == 0:
        return numbers_BX.flatten()
    return paddle.concat(
        [numbers_BX.flatten(), index_N2[:, 1].astype("float64"), paddle.gather_nd(z_BV, index_N2)],
    )


def _unpack(packed: Float64, rows: int, vocab_size: int) -> list[tuple[Float64, Float64, Float64, Float64]]:
    """Statistics, block masses, candidates' ids and their logits, row by row."""
    width = _STATISTICS + -(-vocab_size // BLOCK)
    numbers_BX = packed[: rows * width].reshape(rows, width)
    ids_N, z_N = packed[rows * width :].reshape(2, -1)
    ends = np.cumsum(numbers_BX[:, 3].astype(np.int64))[:-1]
    return list(
        zip(
            numbers_BX[:, :_STATISTICS],
            numbers_BX[:, _STATISTICS:],
            np.split(ids_N, ends),
            np.split(z_N, ends),
            strict=True,
        )
    )


def _bisect(
    scaled_BV: paddle.Tensor,
    weight_BV: paddle.Tensor,
    lowest_B: paddle.Tensor,
    count_B: paddle.Tensor,
    mass_B: paddle.Tensor,
) -> paddle.Tensor:
    """A threshold per row, close to the largest, that at least `count_B` ids reach and that `mass_B` lies above.

    `lowest_B`, which every finite s reaches, is the answer where nothing better is found.
    """
    low_B, high_B = lowest_B, paddle.zeros_like(lowest_B)
    middle_B = lowest_B.clip(min=PROBE)
    for _ in range(BISECTIONS):
        reaches_BV = (scaled_BV >= middle_B.unsqueeze(1)).astype("float64")
        enough_B = (reaches_BV.sum(axis=1) >= count_B) & ((weight_BV * reaches_BV).sum(axis=1) >= mass_B)
        low_B, high_B = paddle.where(enough_B, middle_B, low_B), paddle.where(enough_B, high_B, middle_B)
        middle_B = (low_B + high_B) / 2
    return low_B


def _acts(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any setting can make the kept set smaller than the finite logits of a vocabulary of this size."""
    return params.truncates and (
        params.temperature == 0 or params.min_p > 0 or params.top_p < 1 or params.top_k < vocab_size
    )


def _searches(params: SamplingParams) -> bool:
    """Whether the threshold is found by bisection: a number of ids, or a mass of the whole row, is asked for."""
    return params.temperature > 0 and (params.top_k > 0 or (params.top_p < 1 and params.min_p == 0))


def _fixed_threshold(params: SamplingParams) -> float:
    """The s that greedy and min_p ask for, else the lowest."""
    if params.temperature == 0:
        return 0.0
    return math.log(params.min_p) - MIN_P_MARGIN if params.min_p > 0 else LOWEST_SCALED


def _block_sums(weight_BV: paddle.Tensor) -> paddle.Tensor:
    rows, vocab_size = weight_BV.shape
    whole = vocab_size // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(weight_BV[:, :whole].reshape([rows, -1, BLOCK]).sum(axis=2))
    if whole < vocab_size:
        parts.append(weight_BV[:, whole:].sum(axis=1, keepdim=True))
    return paddle.concat(parts, axis=1)
