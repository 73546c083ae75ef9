"""Checks of whole responses: required values, prompts, supports, identifiers, seeds.

Legend: B responses.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keptset.schemas.columns import COLUMNS, Support
from keptset.schemas.findings import FindingKind
from keptset.schemas.ragged import AnyArray, BoolArray, Ragged
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation.collector import Collector, Indices, always


def outside(ids: AnyArray, vocab_size: int | None) -> BoolArray | None:
    """Which int32 ids lie outside [0, V) (V unknown: are negative); None where all lie inside.

    Read as unsigned, a negative id is a huge one: one maximum settles the usual case.
    """
    bound = 2**31 if vocab_size is None else min(vocab_size, 2**31)
    if not len(ids) or ids.view(np.uint32).max() < bound:
        return None
    outside: BoolArray = (ids < 0) | (ids >= bound)
    return outside


def range_detail(token: int, vocab_size: int | None, name: str) -> str:
    """Words for an id that lies outside."""
    return f"{name} holds {token}, outside [0, {'V' if vocab_size is None else vocab_size})"


def check_responses(batch: RolloutBatch, collector: Collector) -> None:
    """Everything that is about one response as a whole. Reports, changes nothing."""
    _check_required(batch, collector)
    _check_supports(batch, collector)
    _check_prompts(batch, collector)
    _check_biases(batch, collector)


def _check_required(batch: RolloutBatch, collector: Collector) -> None:
    for column in COLUMNS:
        array = batch.column(column.name)
        if column.required and array.null_count:
            rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            collector.add(FindingKind.NULLS, rows, None, always(f"{column.name} is null; it is required"))


def is_text(batch: RolloutBatch, name: str, text: str) -> BoolArray:
    """Rows [B] where a string column has this value; False where it is null."""
    equal = pc.fill_null(pc.equal(batch.column(name), pa.scalar(text)), False)
    rows: BoolArray = equal.to_numpy(zero_copy_only=False).astype(bool, copy=False)
    return rows


def _draws_something(batch: RolloutBatch) -> BoolArray:
    """Rows with at least one sampled token."""
    draws_B = np.zeros(len(batch), bool)
    draws_B[np.searchsorted(batch.sampled.offsets, np.flatnonzero(batch.sampled.values), side="right") - 1] = True
    return draws_B


def _check_supports(batch: RolloutBatch, collector: Collector) -> None:
    kept_B = is_text(batch, "support", Support.KEPT.value)
    told_B = ~batch.column("support").is_null().to_numpy(zero_copy_only=False)
    for name in ("kept_ids", "kept_logprobs"):
        present_B = ~batch.column(name).is_null().to_numpy(zero_copy_only=False)
        surplus = np.flatnonzero(present_B & ~kept_B & told_B)
        collector.add(FindingKind.NULLS, surplus, None, always(f"{name} is not null though support is not kept"))
        if name == "kept_ids":
            missing = np.flatnonzero(~present_B & kept_B & _draws_something(batch))
            collector.add(FindingKind.NULLS, missing, None, always("kept_ids is null though support is kept"))
    absent = np.flatnonzero(is_text(batch, "support", Support.ABSENT.value))
    collector.add(FindingKind.SUPPORT_ABSENT, absent, None, always("support is absent"))


def _check_prompts(batch: RolloutBatch, collector: Collector) -> None:
    prompts, sampled = batch.prompt_token_ids, batch.sampled
    first_sampled_B = np.zeros(len(batch), bool)
    nonempty = np.flatnonzero(sampled.lengths)
    first_sampled_B[nonempty] = sampled.values[sampled.offsets[nonempty]]
    without = np.flatnonzero(first_sampled_B & (True if prompts is None else prompts.lengths == 0))
    collector.add(
        FindingKind.PROMPT,
        without,
        np.zeros(len(without), np.int64),
        always("token 0 was sampled, and prompt_token_ids is null or empty"),
    )
    if prompts is None:
        return
    if prompts.valid is not None:
        rows = np.searchsorted(prompts.offsets, np.flatnonzero(~prompts.valid), side="right") - 1
        collector.add(FindingKind.NULLS, rows, None, always("an entry of prompt_token_ids is null"))
    wrong = outside(prompts.values, batch.identity.vocab_size)
    if wrong is not None:
        items = np.flatnonzero(wrong if prompts.valid is None else wrong & prompts.valid)
        rows = np.searchsorted(prompts.offsets, items, side="right") - 1
        collector.add(
            FindingKind.RANGE,
            rows,
            None,
            lambda i: range_detail(int(prompts.values[items[i]]), batch.identity.vocab_size, "prompt_token_ids"),
        )


def _check_biases(batch: RolloutBatch, collector: Collector) -> None:
    biases = batch.column("logit_bias")
    if biases.null_count == len(biases):
        return
    keys = Ragged.from_map_keys(biases)
    wrong = outside(keys.values, batch.identity.vocab_size)
    if wrong is not None:
        items = np.flatnonzero(wrong)
        collector.add(
            FindingKind.RANGE,
            np.searchsorted(keys.offsets, items, side="right") - 1,
            None,
            lambda i: range_detail(int(keys.values[items[i]]), batch.identity.vocab_size, "logit_bias"),
        )


def check_repeats(batch: RolloutBatch, collector: Collector) -> None:
    """`conflict`, `duplicate` and `seed_reused`. A repeated response shares its seed with itself: told once."""
    codes_B = _codes(batch.column("rollout_id"))
    first_B, repeats = _repeats(codes_B)
    if len(repeats):
        same = _same_content(batch.arrow, repeats, first_B[repeats])
        for kind, rows in ((FindingKind.DUPLICATE, repeats[same]), (FindingKind.CONFLICT, repeats[~same])):
            collector.add(kind, rows, None, partial(_repeat_detail, rows, first_B))
    seeds = batch.column("seed")
    eligible_B = seeds.is_valid().to_numpy(zero_copy_only=False).copy()
    eligible_B[repeats] = False
    rows = np.flatnonzero(eligible_B)
    values = seeds.take(pa.array(rows)).to_numpy(zero_copy_only=False)
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(counts[codes] > 1)
    collector.add(
        FindingKind.SEED_REUSED,
        rows[shared],
        None,
        lambda i: f"seed {values[shared[i]]} is that of {counts[codes[shared[i]]]} rows",
    )


def _repeat_detail(rows: Indices, first_B: Indices, i: int) -> str:
    return f"row {rows[i]} repeats the rollout_id of row {first_B[rows[i]]}"


def _codes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Equal strings get equal numbers; each null one of its own."""
    codes: npt.NDArray[np.int64] = pc.fill_null(column.dictionary_encode().indices, -1).to_numpy().astype(np.int64)
    null = codes < 0
    codes[null] = -1 - np.arange(int(null.sum()))
    return codes


def _repeats(codes_B: npt.NDArray[np.int64]) -> tuple[Indices, Indices]:
    """First row with the same code, [B], and the rows that are not the first of theirs."""
    _, first, inverse = np.unique(codes_B, return_index=True, return_inverse=True)
    first_B = first[inverse]
    return first_B, np.flatnonzero(first_B != np.arange(len(codes_B)))


def _same_content(arrow: pa.RecordBatch, rows: Indices, firsts: Indices) -> BoolArray:
    """Whether each of `rows` holds what its counterpart in `firsts` holds."""
    ours, theirs = arrow.take(pa.array(rows)), arrow.take(pa.array(firsts))
    if ours.equals(theirs):
        return np.ones(len(rows), bool)
    return np.array([_equal(ours.slice(i, 1), theirs.slice(i, 1)) for i in range(len(rows))], bool)


def _equal(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    """Equal values, where NaN equals NaN (for Arrow it does not)."""
    return bool(one.equals(other)) or one.serialize().equals(other.serialize())
