"""Validation against a second one, on data bad in every way: the same rules in plain Python, one token at a time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.columns import COLUMNS, WORDS, Identity, arrow_schema, words
from keptset.schemas.errors import SchemaError
from keptset.schemas.findings import FindingKind as K
from keptset.schemas.ragged import NestedRagged, Ragged
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.validation import kept_sets, validate

V = 12
MASS_TOLERANCE = 2e-6
IDENTITY = Identity(vocab_size=V)
Seen = Counter[tuple[K, int, int | None]]
PER_TOKEN = [
    "sampled",
    "trainable",
    "behavior_logprobs",
    "full_logprobs",
    "log_kept_mass",
    "kept_entropy",
    "kept_logprob_var",
    "policy_versions",
    "kept_ids",
    "kept_logprobs",
    "top_ids",
    "top_logprobs",
]


def messy_rows(random: np.random.Generator, count: int, badness: float) -> list[dict[str, Any]]:
    """Rows that are sound but for faults, which come with probability `badness` at each place."""

    def bad() -> bool:
        return random.random() < badness

    def or_null(value: Any) -> Any:
        return None if bad() else value

    def short(values: list[Any] | None) -> list[Any] | None:
        return values[:-1] if values and bad() else values

    def an_id() -> int:
        return int(random.choice([-1, V, 2**31 - 1, -(2**31)])) if bad() else int(random.integers(V))

    def mass() -> float:
        return float(random.choice([math.nan, 1.0, -3.0])) if bad() else -0.01

    def spread(sound: float) -> float:
        return float(random.choice([math.nan, math.inf, -0.1, 7.0])) if bad() else sound

    def full() -> float:
        return float(random.choice([math.nan, -math.inf, 1.0, -1e4])) if bad() else -2.5

    rows = []
    for number in range(count):
        tokens = int(random.integers(5))
        support = str(random.choice(["kept", "kept", "kept", "full", "absent"]))
        sampled = [bool(random.random() < 0.8) for _ in range(tokens)]
        token_ids = [an_id() for _ in range(tokens)]
        sets: list[Any] = []
        logp: list[Any] = []
        b: list[Any] = []
        entropies: list[float] = []
        for token, drawn in zip(token_ids, sampled, strict=True):
            ids = sorted(
                {int(i) for i in random.integers(V, size=random.integers(1, 5))} | (set() if bad() else {token})
            )
            if bad():
                random.shuffle(ids)
            if bad():
                ids = ids + ids[-1:]
            if bad():
                ids = []
            p = np.log(random.dirichlet(np.ones(len(ids)))) if ids else np.zeros(0)
            entropies.append(spread(-float((np.exp(p) * p).sum())))
            own = float(p[ids.index(token)]) if token in ids else -0.5
            keep = drawn != bad()
            sets.append([or_null(i) for i in ids] if keep else None)
            logp.append([float(x) * (2 if bad() else 1) for x in (p[:-1] if bad() else p)] if keep else None)
            b.append(
                float(random.choice([math.nan, 1.0, -1e4, -math.inf, -0.7]))
                if bad()
                else own
                if drawn != bad()
                else None
            )
        row = {
            "rollout_id": or_null(f"r{number - (1 if bad() else 0)}"),
            "prompt_id": or_null("p"),
            "sample_index": or_null(0),
            "prompt_token_ids": or_null([or_null(an_id()) for _ in range(int(random.integers(3)))]),
            "token_ids": or_null([or_null(token) for token in token_ids]),
            "sampled": or_null(short([or_null(drawn) for drawn in sampled])),
            "trainable": short([True] * tokens) if bad() else None,
            "behavior_logprobs": or_null(short(b)),
            "logprob_domain": or_null(str(random.choice(["kept", "kept", "full"]))),
            "log_kept_mass": or_null(short([mass() if drawn else None for drawn in sampled])),
            "kept_entropy": or_null(
                short([or_null(h) if drawn != bad() else None for h, drawn in zip(entropies, sampled, strict=True)])
            ),
            "kept_logprob_var": or_null(short([spread(0.25) if drawn != bad() else None for drawn in sampled])),
            "full_logprobs": or_null(short([full() for _ in sampled])),
            "support": or_null(support),
            "kept_ids": short(sets) if (support == "kept") != bad() else None,
            "kept_logprobs": short(logp) if support == "kept" and random.random() < 0.5 else None,
            "top_ids": [[1]] * tokens if bad() else None,
            "top_logprobs": [[-1.0]] * tokens if bad() else None,
            "policy_versions": or_null(short([number - bad() if drawn != bad() else None for drawn in sampled])),
            "finish_reason": or_null("stop"),
            "top_p": or_null(float(random.choice([1.0, 0.9]))),
            "min_p": or_null(0.0),
            "top_k": or_null(int(random.choice([0, 0, 3]))),
            "seed": or_null(number - (1 if bad() else 0)),
        }
        rows.append(row)
    return rows


def batch_of_rows(rows: list[dict[str, Any]]) -> RolloutBatch:
    arrays = [pa.array([row.get(column.name) for row in rows], column.type) for column in COLUMNS]
    return RolloutBatch.from_arrow(pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(IDENTITY)))


def outside(token: int | None) -> bool:
    return token is not None and not 0 <= token < V


def oracle(rows: list[dict[str, Any]]) -> Seen:
    """Every violation, by the words of the kinds' meanings."""
    seen: Seen = Counter()
    first_of: dict[str, int] = {}
    seeds = Counter()
    originals = []
    for at, row in enumerate(rows):
        rollout_id = row["rollout_id"]
        if rollout_id is not None and rollout_id in first_of:
            other = rows[first_of[rollout_id]]
            seen[(K.DUPLICATE if repr(row) == repr(other) else K.CONFLICT), at, None] += 1
            continue
        if rollout_id is not None:
            first_of[rollout_id] = at
        originals.append(at)
        if row["seed"] is not None:
            seeds[row["seed"]] += 1
    for at in originals:
        if seeds[rows[at]["seed"]] > 1:
            seen[K.SEED_REUSED, at, None] += 1
    for at, row in enumerate(rows):
        seen.update({(kind, at, position): count for (kind, position), count in check_row(row).items()})
    return seen


def check_row(row: dict[str, Any]) -> Counter[tuple[K, int | None]]:
    seen: Counter[tuple[K, int | None]] = Counter()
    for column in COLUMNS:
        if column.required and row.get(column.name) is None:
            seen[K.NULLS, None] += 1
    tokens, sampled = row["token_ids"], row["sampled"]
    drawn_any = any(sampled or [])
    if row["support"] == "absent":
        seen[K.SUPPORT_ABSENT, None] += 1
    if row["support"] == "kept" and row["kept_ids"] is None and drawn_any:
        seen[K.NULLS, None] += 1
    for name in ("kept_ids", "kept_logprobs"):
        if row["support"] in ("full", "absent") and row[name] is not None:
            seen[K.NULLS, None] += 1
    if sampled and sampled[0] and not row["prompt_token_ids"]:
        seen[K.PROMPT, 0] += 1
    for token in row["prompt_token_ids"] or []:
        seen[K.NULLS, None] += token is None
        seen[K.RANGE, None] += outside(token)
    usable = tokens is not None and sampled is not None
    if usable and any(row[name] is not None and len(row[name]) != len(tokens) for name in PER_TOKEN if name in row):
        seen[K.LENGTHS, None] += 1
        usable = False
    for name in ("token_ids", "sampled", "trainable"):
        for position, value in enumerate(row[name] or []):
            if value is None:
                seen[K.NULLS, position] += 1
                usable = False
    for name in ("kept_ids", "kept_logprobs", "top_ids", "top_logprobs"):
        for position, entries in enumerate(row[name] or []):
            if entries is not None and None in entries:
                seen[K.NULLS, position] += 1
                usable = False
    if usable:
        check_tokens(row, seen)
    return +seen


def check_tokens(row: dict[str, Any], seen: Counter[tuple[K, int | None]]) -> None:
    versions = [(t, v) for t, v in enumerate(row["policy_versions"] or []) if v is not None]
    for (_, before), (position, after) in itertools.pairwise(versions):
        seen[K.VERSION_ORDER, position] += after < before
    bound = -math.inf
    if row["top_p"] is not None and row["top_k"] == 0 and row["min_p"] == 0:
        bound = math.log(row["top_p"] - MASS_TOLERANCE)
    unequal = misplaced = False
    for t, (token, drawn) in enumerate(zip(row["token_ids"], row["sampled"], strict=True)):
        item = {name: row[name][t] if row.get(name) is not None else None for name in PER_TOKEN}
        seen[K.RANGE, t] += outside(token)
        for name in ("behavior_logprobs", "log_kept_mass", "kept_entropy", "kept_logprob_var", "policy_versions"):
            seen[K.NULLS, t] += not drawn and item[name] is not None
        seen[K.NULLS, t] += drawn and item["behavior_logprobs"] is None and row["behavior_logprobs"] is not None
        ids, logp, b, m = item["kept_ids"], item["kept_logprobs"], item["behavior_logprobs"], item["log_kept_mass"]
        if row["kept_ids"] is not None:
            seen[K.NULLS, t] += drawn != (ids is not None)
            if row["kept_logprobs"] is not None:
                seen[K.NULLS, t] += drawn != (logp is not None)
                misplaced |= (ids is None) != (logp is None)
                if ids is not None and logp is not None and len(ids) != len(logp):
                    seen[K.LENGTHS, t] += 1
                    unequal = True
        seen[K.NULLS, t] += (item["top_ids"] is None) != (item["top_logprobs"] is None)
        if ids is not None:
            seen[K.RANGE, t] += any(map(outside, ids))
            seen[K.SORTED, t] += any(later <= sooner for sooner, later in itertools.pairwise(ids))
            seen[K.EMPTY_SET, t] += drawn and not ids
            seen[K.MEMBER, t] += bool(drawn and ids and token not in ids and not outside(token))
            seen[K.SET_SIZE, t] += bool(row["top_k"]) and len(ids) > row["top_k"]
        if drawn and b is not None:
            sound = -1000 < b <= 1e-6
            seen[K.LOGPROB, t] += not sound
            single = ids is not None and len(ids) == 1 and row["logprob_domain"] == "kept"
            seen[K.LOGPROB, t] += sound and single and np.float32(b) != 0
        for name in ("kept_entropy", "kept_logprob_var"):
            if drawn and item[name] is not None:
                seen[K.DISTRIBUTION, t] += not -1e-4 <= item[name] < math.inf
        if drawn and item["full_logprobs"] is not None:
            seen[K.DISTRIBUTION, t] += not -1000 < item["full_logprobs"] <= 1e-6
        if drawn and m is not None:
            seen[K.MASS, t] += not (bound <= m <= 1e-6)
    if row["kept_ids"] is None or row["kept_logprobs"] is None or unequal or misplaced:
        return
    for t, (ids, logp) in enumerate(zip(row["kept_ids"], row["kept_logprobs"], strict=True)):
        if not row["sampled"][t] or not ids:
            continue
        if abs(math.fsum(map(math.exp, logp)) - 1) > 1e-4:
            seen[K.DISTRIBUTION, t] += 1
            continue
        token, b = row["token_ids"][t], None if row["behavior_logprobs"] is None else row["behavior_logprobs"][t]
        h, derived = (row["kept_entropy"] or [None] * len(row["sampled"]))[t], -math.fsum(math.exp(x) * x for x in logp)
        if h is not None and 0 <= h < math.inf:
            seen[K.DISTRIBUTION, t] += abs(h - derived) > 1e-4 * max(1.0, derived)
        if b is not None and ids.count(token) == 1 and row["logprob_domain"] == "kept":
            own = logp[ids.index(token)]
            seen[K.DISTRIBUTION, t] += abs(b - own) > 1e-4 * max(1.0, abs(own))


def found(batch: RolloutBatch) -> Seen:
    row_of = {name: row for row, name in reversed(list(enumerate(batch.rollout_ids))) if name is not None}
    seen: Seen = Counter()
    for finding in validate(batch, examples=10**6):
        assert finding.count == len(finding.examples)
        for example in finding.examples:
            if example.rollout_id in row_of:
                row = row_of[example.rollout_id]
            else:
                row = int(example.rollout_id.removeprefix("(row ").split(",")[0])
            seen[finding.kind, row, example.position] += 1
    return seen


def by_first_row(rows: list[dict[str, Any]], seen: Seen) -> Seen:
    """Rows that share a rollout_id cannot be told apart by it: count them under the first of them."""
    first: dict[str, int] = {}
    for at, row in enumerate(rows):
        if row["rollout_id"] is not None:
            first.setdefault(row["rollout_id"], at)
    together: Seen = Counter()
    for (kind, at, position), count in seen.items():
        together[kind, first.get(rows[at]["rollout_id"], at), position] += count
    return together


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 8),
    badness=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    block=st.sampled_from([1, 3, 2**16]),
)
def test_validation_finds_what_the_plain_rules_find(seed: int, count: int, badness: float, block: int) -> None:
    rows = messy_rows(np.random.default_rng(seed), count, badness)
    batch = batch_of_rows(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_sets, "BLOCK_IDS", block)
        assert found(batch) == by_first_row(rows, oracle(rows))


@given(seed=st.integers(0, 2**32 - 1), start=st.integers(0, 6), badness=st.sampled_from([0.05, 0.3]))
def test_validation_of_a_slice_finds_what_the_plain_rules_find_in_its_rows(
    seed: int, start: int, badness: float
) -> None:
    rows = messy_rows(np.random.default_rng(seed), 8, badness)
    part = rows[start : start + 3]
    assert found(batch_of_rows(rows).slice(start, 3)) == by_first_row(part, oracle(part))


def random_lists(random: np.random.Generator, lists: int, item: pa.DataType) -> pa.Array:
    """Lists of any lengths, null or not, over items of any bits, null or not; null lists may span items."""
    offsets = np.cumsum([0, *random.integers(0, 4, lists)])
    if pa.types.is_list(item):
        return wrap(random, offsets, random_lists(random, int(offsets[-1]), item.value_type))
    size = int(offsets[-1])
    if pa.types.is_boolean(item):
        values = random.random(size) < 0.5
    else:
        values = np.frombuffer(random.bytes(size * 4), np.int32 if pa.types.is_integer(item) else np.float32)
    mask = random.random(size) < 0.2 if random.random() < 0.5 else None
    return wrap(random, offsets, pa.array(values, item, mask=mask))


def wrap(random: np.random.Generator, offsets: np.ndarray, items: pa.Array) -> pa.Array:
    mask = pa.array(random.random(len(offsets) - 1) < 0.2) if random.random() < 0.5 else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, pa.list_(items.type), mask=mask)


def garbage(random: np.random.Generator, rows: int) -> RolloutBatch:
    arrays = []
    for column in COLUMNS:
        if column.name in WORDS:
            values: Any = random.choice([*words(column.name), None], rows).tolist()
        elif pa.types.is_list(column.type):
            arrays.append(random_lists(random, rows, column.type.value_type))
            continue
        elif pa.types.is_map(column.type):
            values = [None if random.random() < 0.3 else [(int(random.integers(-5, 99)), 1.0)] for _ in range(rows)]
        elif pa.types.is_string(column.type):
            values = random.choice(["a", "b", None], rows).tolist()
        else:
            values = [
                None if x < 0.2 else (int(x * 10) if pa.types.is_integer(column.type) else x)
                for x in random.random(rows)
            ]
            if pa.types.is_floating(column.type):
                values = [random.choice([np.nan, np.inf, -np.inf, x]) if x is not None else None for x in values]
        arrays.append(pa.array(values, column.type))
    return RolloutBatch.from_arrow(pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(IDENTITY)))


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 6), start=st.integers(0, 3))
def test_garbage_that_arrow_accepts_gives_findings_and_never_an_exception(seed: int, rows: int, start: int) -> None:
    batch = garbage(np.random.default_rng(seed), rows).slice(start)
    for finding in validate(batch, examples=2):
        assert finding.count >= finding.responses >= 1
        assert len(finding.examples) <= 2
        assert str(finding)


def test_data_that_is_not_valid_arrow_is_refused_before_anything_is_read() -> None:
    batch = batch_of_rows(messy_rows(np.random.default_rng(1), 3, 0.0))
    broken = pa.ListArray.from_buffers(
        pa.list_(pa.int32()),
        3,
        [None, pa.py_buffer(np.array([0, 9, 2, 4], np.int32))],
        children=[pa.array([1, 2, 3, 4], pa.int32())],
    )
    arrow = batch.arrow.set_column(batch.arrow.schema.get_field_index("token_ids"), "token_ids", broken)
    with pytest.raises(SchemaError, match="not valid Arrow data"):
        validate(RolloutBatch(arrow, batch.identity))


def test_null_lists_that_span_items_are_read_as_null() -> None:
    items = pa.array([1, 2, 3, 4], pa.int32())
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), items, mask=pa.array([True, False]))
    assert Ragged.from_arrow(lists).values.tolist() == [3, 4]
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), lists, mask=pa.array([False, True]))
    assert NestedRagged.from_arrow(nested).inner.values.tolist() == []
