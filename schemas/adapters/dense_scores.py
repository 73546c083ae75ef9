"""Kept sets and what is recorded about them, read off dense processed scores, one step of a batch at a time.

    K = {i : s_i finite},   b = s_y - logsumexp(s over K),   m = logsumexp(s over K) - logsumexp(z / T)
    H = -sum p log p,       Var = sum p (log p + H)^2,       p = exp(s - logsumexp(s over K)) over K

Float64 throughout. Legend: T steps, B rows, C rows of one step that still go on, V vocabulary, N kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keptset.schemas.adapters.arrays import FloatArray, IntArray, as_numpy
from keptset.schemas.errors import InvalidInput
from keptset.schemas.ragged import offsets_of, span_index

_SAME_LOGITS = 1e-4
"""Relative difference up to which scores over K are the raw logits over T, so that nothing else changed them."""


@dataclass(frozen=True, kw_only=True)
class DenseSteps:
    """What T steps of B rows say. Entries behind a row's end mean nothing."""

    vocab_size: int
    sizes_TB: IntArray
    starts_TB: IntArray
    """Where each set begins in `ids_N`. A set that is the whole vocabulary is not stored."""
    ids_N: npt.NDArray[np.int32]
    b_TB: FloatArray
    entropy_TB: FloatArray
    variance_TB: FloatArray
    m_TB: FloatArray | None
    """NaN where the scores are not the raw logits over T; None without raw logits."""
    sound_TB: npt.NDArray[np.bool_]
    """False where scores were NaN or +inf, or none was finite."""

    def sets(self, row: int, length: int) -> tuple[IntArray, npt.NDArray[np.int32]] | None:
        """Offsets and ids of one row's first `length` tokens; None where each set is the whole vocabulary."""
        sizes, starts = self.sizes_TB[:length, row], self.starts_TB[:length, row]
        whole = sizes == self.vocab_size
        if length and whole.all():
            return None
        if not whole.any():
            return offsets_of(sizes), self.ids_N[span_index(starts, sizes)]
        vocabulary = np.arange(self.vocab_size, dtype=np.int32)  # seldom: filters that cut some tokens' sets only
        sets = [
            vocabulary if all_of_it else self.ids_N[start : start + size]
            for all_of_it, start, size in zip(whole.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        ]
        return offsets_of(sizes), np.concatenate(sets)


def read_steps(
    scores: Sequence[Any],
    raw_logits: Sequence[Any] | None,
    token_ids_BT: IntArray,
    lengths_B: IntArray,
    temperature: float | None,
    greedy: bool,
) -> DenseSteps:
    """Read T tensors [B, V] of processed scores, and T of raw logits if there are.

    Errors: InvalidInput where they do not have these shapes.
    """
    steps, rows = token_ids_BT.shape[1], len(token_ids_BT)
    if raw_logits is not None and len(raw_logits) != steps:
        raise InvalidInput(f"{len(raw_logits)} logits for {steps} steps; expected one tensor for each")
    vocab_size = _dense(scores[0], rows, None, "scores[0]").shape[1] if steps else 0
    numbers = np.full((5, steps, rows), np.nan)
    sizes_TB, starts_TB = np.zeros((steps, rows), np.int64), np.zeros((steps, rows), np.int64)
    sound_TB = np.zeros((steps, rows), bool)
    stored: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    total = 0
    for t in range(steps):
        going = np.flatnonzero(lengths_B > t)
        scores_CV = _dense(scores[t], rows, vocab_size, f"scores[{t}]")[going]
        finite_CV = np.isfinite(scores_CV)
        sizes_C = finite_CV.sum(axis=1)
        cut_C = (scores_CV == -np.inf).sum(axis=1)
        good = np.flatnonzero((sizes_C + cut_C == vocab_size) & (sizes_C > 0))
        going, tokens_C = going[good], token_ids_BT[going[good], t]
        sound_TB[t, going] = True
        scores_CV, finite_CV = scores_CV[good], finite_CV[good]
        if greedy:
            finite_CV = _only_largest(scores_CV, tokens_C)
        sizes_TB[t, going] = sizes_C = finite_CV.sum(axis=1)
        set_numbers, ids_N = _step(scores_CV, finite_CV, tokens_C)
        numbers[:4, t, going] = set_numbers
        if raw_logits is not None and temperature is not None and not greedy:
            raw_CV = _dense(raw_logits[t], rows, vocab_size, f"logits[{t}]")[going]
            numbers[4, t, going] = _log_kept_mass(scores_CV, finite_CV, raw_CV, temperature)
        part = sizes_C < vocab_size
        starts_TB[t, going[part]] = total + offsets_of(sizes_C[part])[:-1]
        stored.append(ids_N)
        total += len(ids_N)
    return DenseSteps(
        vocab_size=vocab_size,
        sizes_TB=sizes_TB,
        starts_TB=starts_TB,
        ids_N=np.concatenate(stored),
        b_TB=numbers[0],
        entropy_TB=numbers[1],
        variance_TB=numbers[2],
        m_TB=np.zeros((steps, rows)) if greedy else None if raw_logits is None or temperature is None else numbers[4],
        sound_TB=sound_TB,
    )


def _dense(step: Any, rows: int, vocab_size: int | None, name: str) -> npt.NDArray[np.floating]:
    dense = as_numpy(step)
    if dense is not None and dense.dtype.kind not in "fiu":
        raise InvalidInput(f"{name} holds {dense.dtype}; expected a tensor of numbers")
    if dense is None or dense.ndim != 2 or len(dense) != rows or vocab_size not in (None, dense.shape[1]):
        shape = type(step).__name__ if dense is None else str(dense.shape)
        raise InvalidInput(f"{name} is {shape}; expected a tensor [{rows}, {vocab_size or 'vocabulary'}]")
    return dense


def _only_largest(scores_CV: npt.NDArray[np.floating], tokens_C: IntArray) -> npt.NDArray[np.bool_]:
    """Greedy: the chosen token if its score is the largest, however many have it; else the largest one's lowest id."""
    rows = np.arange(len(tokens_C))
    largest_C = scores_CV.argmax(axis=1)
    inside_C = (tokens_C >= 0) & (tokens_C < scores_CV.shape[1])
    chosen_C = np.where(inside_C, tokens_C, largest_C)
    kept_C = np.where(scores_CV[rows, chosen_C] == scores_CV[rows, largest_C], chosen_C, largest_C)
    only_CV = np.zeros(scores_CV.shape, bool)
    only_CV[rows, kept_C] = True
    return only_CV


def _step(
    scores_CV: npt.NDArray[np.floating], kept_CV: npt.NDArray[np.bool_], tokens_C: IntArray
) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    """(b, H, Var, logsumexp over K) [4, C], and the ids of the sets that are not the whole vocabulary."""
    sizes_C = kept_CV.sum(axis=1)
    numbers = np.full((4, len(tokens_C)), np.nan)
    inside_C = (tokens_C >= 0) & (tokens_C < scores_CV.shape[1])
    sampled_C = scores_CV[np.arange(len(tokens_C)), np.where(inside_C, tokens_C, 0)].astype(np.float64)
    part = np.flatnonzero(sizes_C < scores_CV.shape[1])
    rows_N, ids_N = np.nonzero(kept_CV[part])
    _describe(scores_CV[part[rows_N], ids_N].astype(np.float64), sizes_C[part], numbers, part)
    for row in np.flatnonzero(sizes_C == scores_CV.shape[1]).tolist():  # one pass over V each
        _describe(scores_CV[row].astype(np.float64), sizes_C[row : row + 1], numbers, np.array([row]))
    with np.errstate(invalid="ignore"):
        numbers[0] = np.where(inside_C, sampled_C, -np.inf) - numbers[3]
    alone_C = (sizes_C == 1) & np.isfinite(numbers[0])
    numbers[0, alone_C] = 0.0
    return numbers, ids_N.astype(np.int32)


def _describe(s_N: FloatArray, sizes: IntArray, numbers: FloatArray, rows: IntArray) -> None:
    """Fill H, Var and logsumexp of `rows` from the scores of their sets, one after the other."""
    if not len(rows):
        return
    starts = offsets_of(sizes)[:-1]
    largest = np.maximum.reduceat(s_N, starts)
    total = largest + np.log(np.add.reduceat(np.exp(s_N - np.repeat(largest, sizes)), starts))
    logp_N = s_N - np.repeat(total, sizes)
    p_N = np.exp(logp_N)
    entropy = -np.add.reduceat(p_N * logp_N, starts)
    deviation_N = logp_N + np.repeat(entropy, sizes)
    numbers[1, rows], numbers[3, rows] = np.maximum(entropy, 0.0), total
    numbers[2, rows] = np.add.reduceat(p_N * deviation_N**2, starts)


def _log_kept_mass(
    scores_CV: npt.NDArray[np.floating],
    kept_CV: npt.NDArray[np.bool_],
    raw_CV: npt.NDArray[np.floating],
    temperature: float,
) -> FloatArray:
    """m [C]; NaN where scores and raw logits tell of something else between them than the temperature."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        s_CV = raw_CV.astype(np.float64) / temperature
        gap_CV = np.abs(s_CV - scores_CV) > _SAME_LOGITS * np.maximum(np.abs(s_CV), 1.0)
    other_C = (gap_CV & kept_CV).any(axis=1) | ~np.isfinite(s_CV).any(axis=1)
    m_C = _logsumexp(np.where(kept_CV, s_CV, -np.inf)) - _logsumexp(s_CV)
    return np.where(other_C, np.nan, np.minimum(m_C, 0.0))


def _logsumexp(s_CV: FloatArray) -> FloatArray:
    largest_C = s_CV.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        total: FloatArray = largest_C + np.log(np.exp(s_CV - largest_C[:, None]).sum(axis=1))
    return total
