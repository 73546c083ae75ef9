"""One sampling setting's rollouts become one row of the demo's table.

Legend: T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from keptset.rollout.models import Decoder
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams
from keptset.scripts.ratio_table import Floor, RatioSummary, SettingResult
from keptset.scripts.rescore import Rescored, rescore, rescore_through_cache

FLOOR_RESPONSES = 8
"""Responses on which the floors are measured: enough for some hundred tokens, cheap beside the scoring itself."""
FLOOR_POSITIONS = 512
"""Positions in a pass for the batch floor; the scores themselves use another number, and the rows another order."""


def measure(
    name: str,
    params: SamplingParams,
    decoder: Decoder,
    batch: RolloutBatch,
    progress: Callable[[int], None] = lambda tokens: None,
) -> SettingResult:
    """Score one setting's responses over the vocabulary and over their kept sets, and measure both floors."""
    passes = rescore(decoder, batch, progress=progress)
    kept, full = (np.concatenate([getattr(part, way) for part in passes]) for way in ("kept_T", "full_T"))
    tokens = [part.tokens for part in passes]
    b, m, sizes = (
        np.concatenate([getattr(part, column) for part in tokens]).astype(np.float64)
        for column in ("behavior_logprobs_T", "log_kept_mass_T", "kept_sizes_T")
    )
    choice, mass = sizes > 1, np.exp(m)
    sample = batch.slice(0, min(FLOOR_RESPONSES, len(batch)))
    (one_pass,) = rescore(decoder, sample, full_share=0, positions_per_pass=2**31)
    return SettingResult(
        name=name,
        sampling=describe(params),
        tokens=len(b),
        choice_tokens=int(choice.sum()),
        kept_mass_mean=_mean(mass),
        kept_size_mean=_mean(sizes),
        kept_size_median=float(np.median(sizes)),
        kept_size_p99=float(np.quantile(sizes, 0.99)),
        kept_size_one_share=_mean(sizes == 1),
        full_vocabulary_ratio=RatioSummary.of(full - b, choice),
        kept_set_ratio=RatioSummary.of(kept - b, choice),
        choice_mass_gap=_mean((np.exp(full - b) - mass)[choice]),
        path_floor=_path_floor(decoder, sample, one_pass),
        batch_floor=_batch_floor(decoder, sample, one_pass),
    )


def describe(params: SamplingParams) -> str:
    """Every filter that is on.

    >>> describe(SamplingParams(temperature=0.7, top_k=512)), describe(SamplingParams())
    ('T 0.7, top_k 512', 'T 1')
    """
    shown = [f"T {params.temperature:g}"]
    shown += [f"min_p {params.min_p:g}"] * (params.min_p > 0)
    shown += [f"top_k {params.top_k}"] * (params.top_k > 0)
    shown += [f"top_p {params.top_p:g}"] * (params.top_p < 1)
    return ", ".join(shown)


def _path_floor(decoder: Decoder, sample: RolloutBatch, one_pass: Rescored) -> Floor:
    """The same weights in one pass and token by token through the cache."""
    return _floor(one_pass, rescore_through_cache(decoder, sample).kept_T)


def _batch_floor(decoder: Decoder, sample: RolloutBatch, one_pass: Rescored) -> Floor:
    """The same weights and rows, in reverse order and in passes of another size."""
    rows = np.arange(len(sample))[::-1]
    passes = rescore(decoder, sample.take(rows), full_share=0, positions_per_pass=FLOOR_POSITIONS)
    reversed_kept = np.concatenate([part.kept_T for part in passes])
    counts = np.bincount(one_pass.tokens.row_T, minlength=len(sample))
    by_row = np.split(reversed_kept, np.cumsum(counts[rows])[:-1])
    return _floor(one_pass, np.concatenate(by_row[::-1]))


def _floor(one_pass: Rescored, other_T: npt.NDArray[np.float64]) -> Floor:
    choice = one_pass.tokens.kept_sizes_T > 1
    return Floor.of((one_pass.kept_T - other_T)[choice])


def _mean(values: npt.NDArray[np.floating | np.integer | np.bool_]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
