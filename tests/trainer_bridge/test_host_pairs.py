"""Pairs of a position and a kept id on the host: right however they are cut, shared over threads and stored."""

from __future__ import annotations

import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keptset.trainer_bridge import reference
from keptset.trainer_bridge.scoring import Head, host_pairs, score_from_hidden
from keptset.trainer_bridge.scoring.host_pairs import (
    HostPairs,
    HostWork,
    add_weighted_rows,
    dots,
    host_threads,
    weighted_rows,
)

VOCAB = 300
WIDE: dict[str, Any] = {"float32": np.float32, "float64": np.float64}
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def work(dtype: str = "float32", *, threads: int = 1, scratch_bytes: int = 1 << 20) -> HostWork:
    return HostWork(dtype=WIDE[dtype], scratch_bytes=scratch_bytes, threads=threads)


def pairs_of(rng: np.random.Generator, sizes: list[int], spare: int = 3) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows (each standing together, in no order), ids, and how many rows the hidden states have: some have no pair."""
    num_rows = len(sizes) + spare
    rows_M = np.repeat(rng.permutation(num_rows)[: len(sizes)], sizes)
    return rows_M, rng.integers(0, VOCAB, len(rows_M)), num_rows


def check(
    how: HostWork, hidden_RH: np.ndarray, table_VH: np.ndarray, rows_M: np.ndarray, ids_M: np.ndarray, seed: int = 0
) -> None:
    """Both directions against float64 sums over the numbers as they are stored."""
    h, w = hidden_RH.astype(np.float64), table_VH.astype(np.float64)
    weight_M = np.random.default_rng(seed).normal(size=len(ids_M))
    expected_RH = np.zeros(h.shape)
    np.add.at(expected_RH, rows_M, weight_M[:, None] * w[ids_M])
    z_M = dots(hidden_RH, table_VH, HostPairs(rows_M, ids_M), how)
    got_RH = weighted_rows(table_VH, HostPairs(rows_M, ids_M), weight_M, len(h), how)
    atol = TOLERANCE[np.dtype(how.dtype).name] * np.sqrt(h.shape[1])
    assert z_M.dtype == got_RH.dtype == how.dtype
    np.testing.assert_allclose(z_M, np.sum(h[rows_M] * w[ids_M], axis=1), rtol=0, atol=atol)
    np.testing.assert_allclose(got_RH, expected_RH, rtol=0, atol=atol * max(1, np.sqrt(len(ids_M))))
    before_RH = np.random.default_rng(seed + 1).normal(size=h.shape).astype(how.dtype)
    sums_RH = before_RH.copy()
    add_weighted_rows(sums_RH, table_VH, HostPairs(rows_M, ids_M), weight_M, how)
    np.testing.assert_allclose(sums_RH, before_RH + expected_RH, rtol=0, atol=atol * max(1, np.sqrt(len(ids_M))))
    assert (got_RH[np.setdiff1d(np.arange(len(h)), rows_M)] == 0).all(), "a row without a pair has a gradient"


def tables(rng: np.random.Generator, num_rows: int, width: int, stored: str = "float32") -> tuple[Any, Any]:
    return rng.normal(size=(num_rows, width)).astype(stored), rng.normal(size=(VOCAB, width)).astype(stored)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 1 << 14),
    st.sampled_from(["float32", "float64"]),
)
def test_any_sets_cut_and_shared_in_any_way_give_the_sums(
    seed: int, sizes: list[int], width: int, threads: int, scratch_bytes: int, dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    rows_M, ids_M, num_rows = pairs_of(rng, sizes)
    check(work(dtype, threads=threads, scratch_bytes=scratch_bytes), *tables(rng, num_rows, width), rows_M, ids_M)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_sets_are_cut_into_pieces_that_add_up(threads: int, rng: np.random.Generator) -> None:
    # 64 KiB over the threads hold 6 to 32 rows at once: the sets of 700 and 3,001 are cut, those of 1 and 2 are not.
    rows_M, ids_M, num_rows = pairs_of(rng, [1, 700, 2, 3001, 1, 33, 32, 31])
    check(work(threads=threads, scratch_bytes=1 << 16), *tables(rng, num_rows, 256), rows_M, ids_M)


def test_a_bound_below_one_row_still_takes_pair_after_pair(rng: np.random.Generator) -> None:
    rows_M, ids_M, num_rows = pairs_of(rng, [1, 9, 2])
    check(work(threads=3, scratch_bytes=1), *tables(rng, num_rows, 16), rows_M, ids_M)


def test_a_row_of_the_table_may_meet_one_position_more_than_once(rng: np.random.Generator) -> None:
    rows_M, _, num_rows = pairs_of(rng, [500, 3])
    hidden_RH, table_VH = tables(rng, num_rows, 64)
    check(work(threads=2, scratch_bytes=1 << 14), hidden_RH, table_VH, rows_M, np.full(len(rows_M), 7))


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_widened_before_anything_is_summed(stored: str, dtype: str, rng: np.random.Generator) -> None:
    if (stored, dtype) == ("float64", "float32"):
        pytest.skip("a head in float64 takes hidden states in float64, and these work in it")
    rows_M, ids_M, num_rows = pairs_of(rng, [5, 200, 1, 1])
    check(work(dtype, threads=2, scratch_bytes=1 << 15), *tables(rng, num_rows, 128, stored), rows_M, ids_M)


def test_hidden_states_and_table_may_differ_in_dtype(rng: np.random.Generator) -> None:
    rows_M, ids_M, num_rows = pairs_of(rng, [5, 20, 1])
    hidden_RH, table_VH = tables(rng, num_rows, 32)
    check(work(), hidden_RH.astype(np.float16), table_VH, rows_M, ids_M)
    check(work("float64"), hidden_RH.astype(np.float64), table_VH, rows_M, ids_M)


def test_tables_may_be_read_only_and_views(rng: np.random.Generator) -> None:
    rows_M, ids_M, num_rows = pairs_of(rng, [5, 200, 1])
    hidden_RH, table_VH = tables(rng, num_rows, 64)
    lying_HV = np.ascontiguousarray(table_VH.T)
    for array in (hidden_RH, lying_HV):
        array.flags.writeable = False
    check(work(threads=2, scratch_bytes=1 << 14), hidden_RH, lying_HV.T, rows_M, ids_M)
    check(work(), np.repeat(hidden_RH, 2, axis=1)[:, ::2], table_VH, rows_M, ids_M)


def test_threads_give_the_same_numbers_every_time(rng: np.random.Generator) -> None:
    rows_M, ids_M, num_rows = pairs_of(rng, [300, 2, 2, 5, 1000] * 8)
    hidden_RH, table_VH = tables(rng, num_rows, 64)
    how, weight_M = work(threads=4, scratch_bytes=1 << 16), rng.normal(size=len(ids_M))
    z_M = dots(hidden_RH, table_VH, HostPairs(rows_M, ids_M), how)
    sums_RH = weighted_rows(table_VH, HostPairs(rows_M, ids_M), weight_M, num_rows, how)
    for _ in range(5):
        np.testing.assert_array_equal(dots(hidden_RH, table_VH, HostPairs(rows_M, ids_M), how), z_M)
        np.testing.assert_array_equal(
            weighted_rows(table_VH, HostPairs(rows_M, ids_M), weight_M, num_rows, how), sums_RH
        )


def traced_peak(run: Callable[[], Any]) -> int:
    """Bytes that NumPy and Python hold at once beyond what they held before."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stored", ["float16", "float32"])
@pytest.mark.parametrize("size", [2, 6, 4000])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_what_is_read_at_once_stays_within_the_bound(
    threads: int, size: int, stored: str, rng: np.random.Generator
) -> None:
    # All rows that are read, widened, are 32 MiB.
    rows_M, ids_M, num_rows = pairs_of(rng, [size] * (8000 // size), spare=0)
    hidden_RH, table_VH = tables(rng, num_rows, 1024, stored)
    weight_M, scratch_bytes = np.ones(len(ids_M)), 4 << 20
    how = work(threads=threads, scratch_bytes=scratch_bytes)
    numbers = 100 * len(ids_M)  # what is kept of each pair: where it stands, its id, its logit
    assert traced_peak(lambda: dots(hidden_RH, table_VH, HostPairs(rows_M, ids_M), how)) <= scratch_bytes + numbers
    returned = 4 * num_rows * 1024
    peak = traced_peak(lambda: weighted_rows(table_VH, HostPairs(rows_M, ids_M), weight_M, num_rows, how))
    assert peak <= scratch_bytes + numbers + returned


@pytest.mark.parametrize(("asked", "expected"), [("1", 1), ("2", 2), ("99", 3), ("0", 1), ("", 3), ("all", 3)])
def test_threads_are_as_many_as_cores_or_fewer_where_the_user_says_so(
    asked: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pairs, "usable_cores", lambda: 3)
    monkeypatch.setenv("MKL_NUM_THREADS", asked)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert host_threads() == expected


def many_sets(rng: np.random.Generator, tokens: int = 400, size: int = 24) -> dict[str, Any]:
    sets = [np.sort(rng.choice(VOCAB, size, replace=False)) for _ in range(tokens)]
    return {
        "token_ids_T": np.array([kept[3] for kept in sets]),
        "kept_offsets_T1": np.arange(tokens + 1) * size,
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": rng.uniform(0.5, 2, tokens),
    }


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
def test_scores_and_gradients_over_many_threads_are_the_oracles(
    anywhere: Any, stored: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pairs, "usable_cores", lambda: 4)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    case = many_sets(rng)
    hidden = anywhere.tensor(rng.normal(size=(400, 64)) / 4, stored, gradient=True)
    weight = anywhere.tensor(rng.normal(size=(VOCAB, 64)) / 4, stored, gradient=True)
    h, w = anywhere.host(hidden), anywhere.host(weight)
    scores = score_from_hidden(hidden, Head(weight_VH=weight), **case, scratch_bytes=1 << 16)
    kept_TK, z_TV = case["kept_ids_N"].reshape(400, -1), h @ w.T
    every = list(zip(z_TV, kept_TK, case["token_ids_T"], case["temperature_T"], strict=True))
    expected = [reference.score(*one) for one in every]
    atol = 1e-12 if stored == "float64" or anywhere.name == "numpy" else 2e-5
    np.testing.assert_allclose(anywhere.host(scores.logprobs_T), expected, rtol=0, atol=atol)
    if anywhere.name == "numpy":
        return
    scores.logprobs_T.sum().backward()
    d_TV = np.stack([reference.score_gradient(*one) for one in every])
    unit = {"float16": 2**-10, "float32": 1e-5, "float64": 1e-12}[stored]  # Paddle 2.6 cuts where it should round
    np.testing.assert_allclose(anywhere.host(hidden.grad), d_TV @ w, rtol=unit, atol=unit)
    np.testing.assert_allclose(anywhere.host(weight.grad), d_TV.T @ h, rtol=unit, atol=20 * unit)


@pytest.mark.parametrize("tokens", [3, 400])
def test_hidden_states_that_are_infinite_pass_through_without_a_warning(
    anywhere: Any, tokens: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pairs, "usable_cores", lambda: 4)
    case, h = many_sets(rng, tokens), rng.normal(size=(tokens, 64))
    h[1] = np.inf
    weight = anywhere.tensor(rng.normal(size=(VOCAB, 64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = score_from_hidden(anywhere.tensor(h), Head(weight_VH=weight), **case, scratch_bytes=1 << 16)
    assert np.flatnonzero(np.isnan(anywhere.host(scores.logprobs_T))).tolist() == [1]


def test_after_an_error_no_thread_goes_on_writing() -> None:
    begun, lock = [], threading.Lock()

    def work(batch: Any) -> None:
        with lock:
            begun.append(batch)
            first = len(begun) == 1
        if first:
            raise MemoryError("no room")
        time.sleep(0.02)

    with pytest.raises(MemoryError, match="no room"):
        host_pairs._on_threads(work, list(range(200)), 4)
    count = len(begun)
    time.sleep(0.1)
    assert len(begun) == count < 10
