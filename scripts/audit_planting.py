"""Every kind of finding as a fault to plant into honest recorded responses: one kind at a time, each response wholly.

Faults of a whole run, which no single response has (draws, mean ratios, drift), are planted by `audit_redraws`.

Legend: B responses, T tokens over all of them; every token is a sampled one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from keptset.schemas.findings import FindingKind
from keptset.schemas.rollout_batch import RolloutBatch

Floats = NDArray[np.float64]
Row = dict[str, Any]
Rows = Sequence[int]

NEWEST, LAG = 8, 5
"""Versions of what is stale: the newest one, and how far behind it stale tokens are."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the model that drew the responses says of their tokens [T]."""

    kept_T: Floats
    """l over the recorded sets."""
    explained: Mapping[FindingKind, Floats]
    """b under each fault of b; NaN where there is no such fault."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A way to plant one kind."""

    kind: FindingKind
    told: str
    """What is planted, in one line."""
    apply: Callable[[RolloutBatch, Rows, Scored | None], RolloutBatch]
    """The batch with some of its rows spoilt. Needs scores where `scored` says so."""
    scored: bool = False
    """Only an audit with the model can see it."""
    versions: tuple[int, ...] = (0,)
    """Versions of the weights that such an audit is given."""
    max_version_lag: int | None = None
    """What the audit is asked for."""
    needs_processors: bool = False
    """It shows only in responses that were sampled with penalties or biases."""


def edited(batch: RolloutBatch, rows: Rows, change: Callable[[Row], None]) -> RolloutBatch:
    """The batch with `change` done to these rows as Python objects."""
    spoilt = batch.arrow.take(pa.array(rows, pa.int64())).to_pylist()
    for row in spoilt:
        change(row)
    return _with_rows(batch, rows, spoilt)


def _with_rows(batch: RolloutBatch, rows: Rows, spoilt: Sequence[Row]) -> RolloutBatch:
    """The batch with other rows in the places of these."""
    new = pa.RecordBatch.from_pylist(list(spoilt), schema=batch.arrow.schema)
    both = pa.Table.from_batches([batch.arrow, new]).combine_chunks()
    order = np.arange(len(batch))
    order[np.asarray(rows, np.int64)] = len(batch) + np.arange(len(rows))
    return RolloutBatch.from_arrow(both.take(pa.array(order)).combine_chunks())


def with_b(batch: RolloutBatch, rows: Rows, b_T: Floats) -> RolloutBatch:
    """The batch with b replaced in these rows, by entries of `b_T`, which has one for each token of the batch."""
    mine_B = np.zeros(len(batch), bool)
    mine_B[np.asarray(rows, np.int64)] = True
    old = batch.behavior_logprobs
    assert old is not None
    lengths_B = batch.token_ids.lengths
    values_T = np.where(np.repeat(mine_B, lengths_B), b_T, old.values).astype(np.float32)
    column = pa.ListArray.from_arrays(pa.array(batch.token_ids.offsets, pa.int32()), pa.array(values_T))
    return with_column(batch, "behavior_logprobs", column)


def with_column(batch: RolloutBatch, name: str, column: pa.Array) -> RolloutBatch:
    """The batch with one column replaced."""
    at = batch.arrow.schema.get_field_index(name)
    return RolloutBatch.from_arrow(batch.arrow.set_column(at, batch.arrow.schema.field(at), column))


def appended(batch: RolloutBatch, rows: Rows, change: Callable[[Row], None]) -> RolloutBatch:
    """The batch and, behind it, these rows once more, changed."""
    again = batch.arrow.take(pa.array(rows, pa.int64())).to_pylist()
    for row in again:
        change(row)
    new = pa.RecordBatch.from_pylist(again, schema=batch.arrow.schema)
    return RolloutBatch.from_arrow(pa.Table.from_batches([batch.arrow, new]).combine_chunks())


def pairs(count: int, share: float, seed: int = 0) -> list[int]:
    """Rows [count] to spoil: this share of them, ascending, in pairs of neighbours, and an even number."""
    number = max(round(count * share / 2), 1)
    starts = np.sort(np.random.default_rng(seed).permutation(count // 2)[:number]) * 2
    return [row for start in starts.tolist() for row in (start, start + 1)]


# --- what the files alone show ---


def _each(change: Callable[[Row], None]) -> Callable[[RolloutBatch, Rows, Scored | None], RolloutBatch]:
    return lambda batch, rows, scored: edited(batch, rows, change)


def _choices(row: Row) -> list[int]:
    return [t for t, ids in enumerate(row["kept_ids"]) if len(ids) > 1]


def _lengths(row: Row) -> None:
    row["log_kept_mass"].pop()


def _nulls(row: Row) -> None:
    row["behavior_logprobs"] = [None] * len(row["token_ids"])


def _range(row: Row) -> None:
    row["kept_ids"] = [[*ids[:-1], 2**30] for ids in row["kept_ids"]]


def _sorted(row: Row) -> None:
    for t in _choices(row):
        order = sorted(range(len(row["kept_ids"][t])), key=lambda i: (-row["kept_logprobs"][t][i], i))
        if order == sorted(order):
            order.reverse()
        for name in ("kept_ids", "kept_logprobs"):
            row[name][t] = [row[name][t][i] for i in order]


def _empty_set(row: Row) -> None:
    row["kept_ids"] = [[] for _ in row["kept_ids"]]
    row["kept_logprobs"] = [[] for _ in row["kept_logprobs"]]


def _member(row: Row) -> None:
    for t in _choices(row):
        at = row["kept_ids"][t].index(row["token_ids"][t])
        del row["kept_ids"][t][at], row["kept_logprobs"][t][at]


def _logprob(row: Row) -> None:
    row["behavior_logprobs"] = [-b + 0.1 for b in row["behavior_logprobs"]]


def _mass(row: Row) -> None:
    row["log_kept_mass"] = [0.01 - m for m in row["log_kept_mass"]]


def _set_size(row: Row) -> None:
    row["top_k"] = 1


def _version_order(row: Row) -> None:
    row["policy_versions"] = list(range(len(row["token_ids"]), 0, -1))


def _prompt(row: Row) -> None:
    row["prompt_token_ids"] = []


def _conflict(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    """Behind the batch the contents of these rows come again, each under its neighbour's rollout_id."""
    names = {
        batch.rollout_ids[one]: batch.rollout_ids[other] for one, other in zip(rows, _neighbours(rows), strict=True)
    }
    return appended(
        batch, rows, lambda row: row.update(rollout_id=names[row["rollout_id"]], seed=~row["seed"] & 2**62 - 1)
    )


def _neighbours(rows: Rows) -> list[int]:
    return [rows[at ^ 1] for at in range(len(rows))]


def _duplicate(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    return appended(batch, rows, lambda row: None)


def _seed_reused(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    seed = batch.column("seed")[rows[0]].as_py()
    return edited(batch, rows, lambda row: row.update(seed=seed))


def _support_absent(row: Row) -> None:
    row |= {"support": "absent", "kept_ids": None, "kept_logprobs": None}


def _distribution(row: Row) -> None:
    kept = zip(row["kept_logprobs"], row["log_kept_mass"], strict=True)
    row["kept_logprobs"] = [[p + m for p in of_set] for of_set, m in kept]


def _stale(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    """Fresh responses are of the newest version; stale ones end with a token of it, drawn after an update."""
    fresh = edited(batch, range(len(batch)), lambda row: row.update(policy_versions=[NEWEST] * len(row["token_ids"])))

    def stale(row: Row) -> None:
        row["policy_versions"] = [NEWEST - LAG] * (len(row["token_ids"]) - 1) + [NEWEST]

    return edited(fresh, rows, stale)


# --- what takes the model ---


def _of_b(kind: FindingKind) -> Callable[[RolloutBatch, Rows, Scored | None], RolloutBatch]:
    """b as the fault would have it; what lies between the sampler's path and the model's stays."""

    def apply(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
        assert scored is not None and batch.behavior_logprobs is not None
        path_T = batch.behavior_logprobs.values - scored.kept_T
        return with_b(batch, rows, np.minimum(scored.explained[kind] + path_T, 0.0))

    return apply


def _renormalised_twice(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    b, m = batch.behavior_logprobs, batch.log_kept_mass
    assert b is not None and m is not None
    return with_b(batch, rows, b.values - m.values.astype(np.float64))


def _mismatch(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    b = batch.behavior_logprobs
    assert b is not None
    spoilt = with_b(batch, rows, b.values / np.log(10))
    return edited(spoilt, rows, lambda row: row.update(kept_logprobs=None))


def _wrong_version(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    return edited(batch, rows, lambda row: row.update(policy_versions=[1] * len(row["token_ids"])))


def _shifted(row: Row) -> None:
    for name in ("kept_ids", "kept_logprobs"):
        row[name] = [*row[name][1:], row[name][-1]]


def _swapped(batch: RolloutBatch, rows: Rows, scored: Scored | None) -> RolloutBatch:
    found = batch.arrow.take(pa.array(rows, pa.int64())).to_pylist()
    for one, other in zip(found[::2], found[1::2], strict=True):
        both = min(len(one["token_ids"]), len(other["token_ids"]))
        if one["kept_ids"][:both] == other["kept_ids"][:both]:
            continue  # as of short answers to one prompt: nothing is swapped
        for name in ("kept_ids", "kept_logprobs"):
            mine, theirs = one[name], other[name]
            one[name], other[name] = [*theirs[:both], *mine[both:]], [*mine[:both], *theirs[both:]]
    return _with_rows(batch, rows, found)


def _plant(kind: FindingKind, told: str, apply: Any, **more: Any) -> Plant:
    return Plant(kind=kind, told=told, apply=apply, **more)


_K = FindingKind
PLANTS: tuple[Plant, ...] = (
    _plant(_K.LENGTHS, "m of the last token is missing", _each(_lengths)),
    _plant(_K.NULLS, "no b", _each(_nulls)),
    _plant(_K.RANGE, "the last id of each set lies beyond the vocabulary", _each(_range)),
    _plant(_K.SORTED, "sets are in the order of probability", _each(_sorted)),
    _plant(_K.EMPTY_SET, "sets are empty", _each(_empty_set)),
    _plant(_K.MEMBER, "sets do not hold the token", _each(_member)),
    _plant(_K.LOGPROB, "b has the wrong sign, and 0.1 on top", _each(_logprob)),
    _plant(_K.MASS, "m has the wrong sign, and 0.01 on top", _each(_mass)),
    _plant(_K.SET_SIZE, "top_k is recorded as 1", _each(_set_size)),
    _plant(_K.VERSION_ORDER, "versions fall from token to token", _each(_version_order)),
    _plant(_K.PROMPT, "no prompt", _each(_prompt)),
    _plant(_K.CONFLICT, "another response comes under its rollout_id", _conflict),
    _plant(_K.DUPLICATE, "it comes again", _duplicate),
    _plant(_K.SEED_REUSED, "one seed for all of them", _seed_reused),
    _plant(_K.SUPPORT_ABSENT, "no sets", _each(_support_absent)),
    _plant(_K.DISTRIBUTION, "the distribution is not renormalised over the set", _each(_distribution)),
    _plant(_K.STALENESS, f"all but the last token lag by {LAG} versions; 2 are allowed", _stale, max_version_lag=2),
    _plant(_K.FULL_VOCABULARY, "b is over the vocabulary", _of_b(_K.FULL_VOCABULARY), scored=True),
    _plant(_K.RAW_LOGITS, "b is of the raw logits", _of_b(_K.RAW_LOGITS), scored=True),
    _plant(_K.RENORMALISED_TWICE, "m is subtracted from b once more", _renormalised_twice, scored=True),
    _plant(_K.TEMPERATURE_MISSING, "b is without the temperature", _of_b(_K.TEMPERATURE_MISSING), scored=True),
    _plant(
        _K.TEMPERATURE_ON_LOGPROBS,
        "b is a log-probability divided by the temperature",
        _of_b(_K.TEMPERATURE_ON_LOGPROBS),
        scored=True,
    ),
    _plant(
        _K.PROCESSORS_MISSING,
        "b is without the penalties",
        _of_b(_K.PROCESSORS_MISSING),
        scored=True,
        needs_processors=True,
    ),
    _plant(_K.MASK_SHIFTED, "each token has the next one's set", _each(_shifted), scored=True),
    _plant(_K.MASK_SWAPPED, "each two responses have each other's sets", _swapped, scored=True),
    _plant(_K.WRONG_VERSION, "drawn by version 0 and recorded as 1", _wrong_version, scored=True, versions=(0, 1)),
    _plant(
        _K.LOGPROB_MISMATCH,
        "b is a logarithm to base 10, and no distribution is recorded",
        _mismatch,
        scored=True,
    ),
)
"""Every kind that a response can have, in the order of the table."""
