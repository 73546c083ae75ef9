"""`keptset bench wire`: what it compares is the same data, and what it calls a copy or an encoding is one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter
from keptset.schemas.validation import validate
from keptset.scripts import bench_wire, bench_wire_encodings, bench_wire_rollouts, main
from keptset.scripts.bench_wire import WireResult, measure, to_report
from keptset.scripts.bench_wire_encodings import try_encodings
from keptset.scripts.bench_wire_formats import packed_rows, to_json, to_msgpack, to_pickle
from keptset.scripts.bench_wire_rollouts import made_up_rollouts, real_rollouts, without_distributions

TOKENS = 1_500
KEYS = (
    "spool_bytes_per_token",
    "archive_bytes_per_token",
    "msgpack_bytes_per_token",
    "json_bytes_per_token",
    "validate_ids_per_second",
)


@pytest.fixture(scope="module")
def made_up() -> RolloutBatch:
    return made_up_rollouts(TOKENS, row_tokens=100)


@pytest.fixture
def golden(repository: Path) -> RolloutBatch:
    """Rows of every kind."""
    return concat_batches(list(SpoolReader(repository / "tests" / "data" / "schema_v1" / "spool")))


@pytest.fixture(scope="module")
def result(made_up: RolloutBatch) -> WireResult:
    return measure([without_distributions(made_up).slice(start, 3) for start in range(0, len(made_up), 3)], rounds=1)


@pytest.mark.parametrize("even", [False, True])
def test_made_up_responses_are_sound(even: bool) -> None:
    batch = made_up_rollouts(TOKENS, even=even)
    assert validate(batch) == []
    assert batch.num_tokens == TOKENS
    assert batch.kept_ids is not None
    sizes = batch.kept_ids.inner.lengths
    assert sizes.max() <= 512
    assert abs(np.mean(sizes == 1) - 0.46) < 0.04, "P(0.19 + 1.9 N <= 0)"
    assert made_up_rollouts(TOKENS, even=even).arrow.equals(batch.arrow)


def test_ids_of_made_up_responses_are_spread_evenly_or_as_zipf_says() -> None:
    even, zipf = (made_up_rollouts(TOKENS, even=even).kept_ids for even in (True, False))
    assert even is not None and zipf is not None
    assert abs(np.median(even.inner.values) / 151_936 - 0.5) < 0.02
    small = zipf.inner.lengths[np.repeat(np.arange(TOKENS), zipf.inner.lengths)] < 20
    assert abs(np.log(np.median(zipf.inner.values[small]) + 1) / np.log(151_936) - 0.5) < 0.05


def test_sizes_are_those_of_the_same_columns(result: WireResult, made_up: RolloutBatch) -> None:
    batch = without_distributions(made_up)
    assert result.tokens == TOKENS and result.kept_ids == batch.num_kept_ids and result.batches == 5
    for name, encode in (("msgpack", to_msgpack), ("pickle", to_pickle), ("json", to_json)):
        assert getattr(result, f"{name}_bytes_per_token") == len(encode(batch)) / TOKENS
    assert result.memory_bytes_per_token == pytest.approx(batch.arrow.nbytes / TOKENS, rel=0.01)
    assert result.archive_bytes_per_token < result.msgpack_bytes_per_token
    assert result.msgpack_bytes_per_token < result.pickle_bytes_per_token < result.json_bytes_per_token
    joined = measure([batch], rounds=1)
    assert joined.spool_bytes_per_token == pytest.approx(result.spool_bytes_per_token, rel=0.01), "they are joined"
    assert joined.archive_bytes_per_token == pytest.approx(result.archive_bytes_per_token, rel=0.01)
    assert result.archive_to_msgpack == pytest.approx(result.archive_bytes_per_token / result.msgpack_bytes_per_token)
    assert result.spool_to_msgpack == pytest.approx(result.spool_bytes_per_token / result.msgpack_bytes_per_token)


def test_rates_are_measured_for_every_way(result: WireResult) -> None:
    assert set(result.bytes_per_second) == {
        "memory copy",
        "spool append",
        "spool publish",
        "spool read",
        "archive write",
        "archive read",
        "msgpack write",
    }
    assert all(rate > 0 for rate in (*result.bytes_per_second.values(), result.validate_ids_per_second))


def unpacked(array: pa.Array, packed: Any) -> Any:
    """A packed value as the Python value that Arrow gives."""
    kind = array.type
    if packed is None or not pa.types.is_list(kind):
        return packed
    inner = kind.value_type
    if pa.types.is_list(inner):
        counts, *valid, ids = packed
        offsets = np.cumsum([0, *np.frombuffer(counts, np.int32)])
        values = np.frombuffer(ids, inner.value_type.to_pandas_dtype()).tolist()
        flags = np.frombuffer(valid[0], bool) if valid else np.ones(len(offsets) - 1, bool)
        return [values[a:b] if ok else None for (a, b), ok in zip(pairwise(offsets), flags, strict=True)]
    values, *valid = packed if isinstance(packed, list) else [packed]
    items = np.frombuffer(values, inner.to_pandas_dtype()).tolist()
    flags = np.frombuffer(valid[0], bool) if valid else np.ones(len(items), bool)
    return [item if ok else None for item, ok in zip(items, flags, strict=True)]


@pytest.mark.parametrize("name", ["golden", "made_up"])
def test_msgpack_holds_everything_the_batch_holds(name: str, request: pytest.FixtureRequest) -> None:
    batch: RolloutBatch = request.getfixturevalue(name)
    msgpack = pytest.importorskip("msgpack")
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(to_msgpack(batch))
    rows = list(unpacker)
    assert len(rows) == len(batch)
    for row, expected in zip(rows, batch.arrow.to_pylist(), strict=True):
        found = {column: unpacked(batch.column(column), value) for column, value in row.items()}
        if found.get("logit_bias") is not None:
            found["logit_bias"] = [tuple(pair) for pair in found["logit_bias"]]
        assert found == {column: expected[column] for column in found}
        assert all(expected[column] is None for column in expected.keys() - found.keys())


def test_packed_numbers_take_their_width_and_no_more(made_up: RolloutBatch) -> None:
    batch = without_distributions(made_up)
    row = next(packed_rows(batch))
    assert len(row["token_ids"]) == len(row["behavior_logprobs"]) == 4 * 100
    assert len(row["sampled"]) == 100
    counts, ids = row["kept_ids"]
    assert len(counts) == 4 * 100 and len(ids) == 4 * int(np.frombuffer(counts, np.int32).sum())
    assert "kept_logprobs" not in row and "error" not in row


def mapped_ranges(path: Path) -> list[range]:
    """Addresses at which this process has the file mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(start, 16), int(stop, 16)) for start, stop in spans]


def test_reading_an_uncompressed_spool_copies_nothing(made_up: RolloutBatch, tmp_path: Path) -> None:
    assert bench_wire.mapped_read_copies(made_up, tmp_path / "spool") == 0
    (path,) = (tmp_path / "spool").glob("*.arrow")
    (batch,) = SpoolReader(tmp_path / "spool")
    mapped = mapped_ranges(path)
    assert mapped
    buffers = [buffer for column in batch.arrow.columns for buffer in column.buffers() if buffer is not None]
    assert all(any(buffer.address in part for part in mapped) for buffer in buffers if buffer.size)
    assert batch.kept_ids is not None and batch.kept_logprobs is not None and batch.log_kept_mass is not None
    views = [
        batch.token_ids.values,
        batch.token_ids.offsets,
        batch.log_kept_mass.values,
        batch.kept_ids.row_offsets,
        batch.kept_ids.inner.offsets,
        batch.kept_ids.inner.values,
        batch.kept_logprobs.inner.values,
    ]
    assert all(any(view.ctypes.data in part for part in mapped) for view in views)


def test_a_copy_would_be_counted(made_up: RolloutBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(data: pa.RecordBatch) -> RolloutBatch:
        return RolloutBatch(data.take(pa.array(range(len(data)))), made_up.identity)

    monkeypatch.setattr(RolloutBatch, "from_arrow", copying)
    assert bench_wire.mapped_read_copies(made_up, tmp_path / "spool") > made_up.arrow.nbytes // 2


def test_every_encoding_tried_is_reported_at_every_level(made_up: RolloutBatch) -> None:
    tried = {entry.name: entry.bytes_per_token for entry in try_encodings(made_up, levels=(1, 3))}
    assert len(tried) == 2 * 14
    assert tried["gaps, 7 bits a byte, zstd 1"] < tried["ids, int32 (as it is), zstd 1"]


@given(data=st.data())
def test_encodings_hold_what_the_sets_hold(data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sets(st.integers(0, 70_000), min_size=1, max_size=9), min_size=1, max_size=20))
    ids_N = np.concatenate([np.array(sorted(kept), np.int32) for kept in sets])
    offsets_T1 = np.cumsum([0, *map(len, sets)])
    tokens_T = np.array([data.draw(st.sampled_from(sorted(kept))) for kept in sets], np.int32)
    pieces = bench_wire_encodings._pieces(ids_N, offsets_T1, tokens_T)

    (gaps_N,) = pieces["gaps, int32"]
    for start, stop in pairwise(offsets_T1):
        np.testing.assert_array_equal(np.cumsum(gaps_N[start:stop]), ids_N[start:stop])
    (octets,) = pieces["gaps, 7 bits a byte"]
    np.testing.assert_array_equal(seven_bits_back(octets), gaps_N)
    (split,) = pieces["ids, int32, bytes split"]
    np.testing.assert_array_equal(np.ascontiguousarray(split.T).view(np.int32).ravel(), ids_N)
    ranks, by_frequency = pieces["frequency ranks, narrowest type"]
    np.testing.assert_array_equal(by_frequency[ranks], ids_N)
    codes, sizes, distinct = pieces["each distinct set once"]
    starts = np.cumsum([0, *sizes])
    codes = np.ascontiguousarray(codes.T).view(np.int32).ravel()
    np.testing.assert_array_equal(np.concatenate([distinct[starts[c] : starts[c + 1]] for c in codes]), ids_N)
    (places,) = pieces["sampled tokens, places in their sets"]
    places = np.ascontiguousarray(places.T).view(f"u{len(places)}").ravel()
    np.testing.assert_array_equal(ids_N[offsets_T1[:-1] + places], tokens_T)
    (rest,) = pieces["ids without the sampled token's"]
    assert len(rest) == len(ids_N) - len(sets)


def seven_bits_back(octets: np.ndarray) -> list[int]:
    numbers, current, shift = [], 0, 0
    for octet in octets.tolist():
        current |= (octet & 127) << shift
        shift += 7
        if octet < 128:
            numbers.append(current)
            current = shift = 0
    return numbers


def sampling(monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None = None) -> list[int]:
    """Rounds cost nothing; returns the numbers of those that were sampled."""
    rounds: list[int] = []

    def sample(spool: Path, number: int, progress: Callable[[int], None]) -> None:
        rounds.append(number)
        with SpoolWriter(spool, "pool") as writer:
            writer.append(made_up_rollouts(100, seed=number))
            if number == fails_at:
                raise KeyboardInterrupt
        progress(100)

    monkeypatch.setattr(bench_wire_rollouts, "_sample_round", sample)
    monkeypatch.setattr(bench_wire_rollouts, "REAL_TOKENS", 250)
    return rounds


def test_real_responses_are_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, seen = sampling(monkeypatch), []
    batches = real_rollouts(tmp_path, seen.append)
    assert sum(batch.num_tokens for batch in batches) == 300
    assert (rounds, seen) == ([0, 1, 2], [100, 200, 300])
    again = real_rollouts(tmp_path)
    assert rounds == [0, 1, 2]
    assert concat_batches(again).arrow.equals(concat_batches(batches).arrow)


def test_an_interrupted_round_is_sampled_anew_and_whole_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling(monkeypatch, fails_at=1)
    with pytest.raises(KeyboardInterrupt):
        real_rollouts(tmp_path)
    rounds = sampling(monkeypatch)
    assert sum(batch.num_tokens for batch in real_rollouts(tmp_path)) == 300
    assert rounds == [1, 2]


@pytest.fixture
def small(made_up: RolloutBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_wire, "real_rollouts", lambda progress: [made_up.slice(0, 8), made_up.slice(8)])
    monkeypatch.setattr(bench_wire, "MADE_UP_TOKENS", 300)
    monkeypatch.setattr(bench_wire, "ROUNDS", 1)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["keptset", "bench", "wire", *arguments])
    with pytest.raises(SystemExit) as exited:
        main.main()
    assert not exited.value.code
    return capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_json_has_the_agreed_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(run(monkeypatch, capsys, "--json", "--encodings"))
    assert all(told[key] > 0 for key in KEYS)
    assert list(told["sets"]) == ["real", "joined", "distributions", "zipf", "even"]
    assert told["archive_bytes_per_token"] == told["sets"]["real"]["archive_bytes_per_token"]
    assert told["goals"] == {"spool_to_msgpack": 0.55, "archive_to_msgpack": 0.5, "validate_ids_per_second": 60e6}
    assert len(told["encodings_bytes_per_token"]) == 42


@pytest.mark.usefixtures("small")
def test_the_table_shows_every_size_and_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(monkeypatch, capsys, "--encodings")
    for word in ("msgpack, packed", "JSON, lists", "spool publish", "archive read", "validation", "gaps, int32"):
        assert word in out


def test_a_report_leaves_out_encodings_that_were_not_tried(result: WireResult) -> None:
    assert "encodings_bytes_per_token" not in to_report({"real": result})
