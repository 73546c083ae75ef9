"""Vocabulary-parallel heads: real processes over gloo give what one process gives, forward and backward."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keptset.trainer_bridge import reference

WORKER = Path(__file__).with_name("vocab_parallel_worker.py")
REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS, VOCAB, HIDDEN = 24, 50, 8
BOUNDS = {2: [0, 17, VOCAB], 4: [0, 1, 20, 47, VOCAB]}
"""Uneven on purpose: the first rank of four holds one id, which few sets keep."""


def make_case(rng: np.random.Generator) -> dict[str, np.ndarray]:
    full = np.arange(TOKENS) % 6 == 5
    sizes = rng.integers(1, 12, TOKENS)
    sizes[1], sizes[2], sizes[full] = 1, VOCAB, 0
    sets = [np.sort(rng.choice(VOCAB, size, replace=False)) for size in sizes]
    counts = np.where(full, 3, 0)
    patched = [np.sort(rng.choice(VOCAB, 3, replace=False)) for _ in np.flatnonzero(full)]
    return {
        "token_ids_T": np.array([rng.choice(kept) if len(kept) else rng.integers(VOCAB) for kept in sets]),
        "kept_offsets_T1": np.cumsum([0, *sizes]),
        "kept_ids_N": np.concatenate(sets),
        "temperature_T": rng.uniform(0.3, 2, TOKENS),
        "full_T": full,
        "hidden": rng.normal(size=(TOKENS, HIDDEN)),
        "weight": rng.normal(size=(VOCAB, HIDDEN)),
        "bias": rng.normal(size=VOCAB),
        "divisor_N": rng.uniform(0.5, 2, sizes.sum()),
        "shift_N": rng.normal(size=sizes.sum()),
        "patch_offsets_T1": np.cumsum([0, *counts]),
        "patch_ids_N": np.concatenate(patched),
        "patch_divisor_N": rng.uniform(0.5, 2, counts.sum()),
        "patch_shift_N": rng.normal(size=counts.sum()),
        "upstream_T": rng.normal(size=TOKENS),
        "upstream_N": rng.normal(size=sizes.sum()),
    }


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_ranks(framework: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """Every rank's results; a rank that fails or hangs fails the test with what it printed."""
    master, *ports = free_ports(size + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    ranks = []
    for rank in range(size):
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "GLOO_SOCKET_IFNAME": "lo",
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_MASTER": f"127.0.0.1:{master}",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(folder / f"rank{rank}.log", "w") as log:
            command = [sys.executable, str(WORKER), framework, str(rank), str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(ranks):
            code = process.wait(timeout=120)
            assert code == 0, (folder / f"rank{rank}.log").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(size)]


@pytest.fixture(scope="module", params=[(framework, size) for framework in ("paddle", "torch") for size in (2, 4)])
def parallel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, np.ndarray], list[int], list[dict[str, Any]]]:
    """A case, the bounds of the shards, and what every rank made of it."""
    framework, size = request.param
    target = {
        "paddle": "Paddle is not installed; `make test` has it",
        "torch": "torch is not installed; `make test-torch`",
    }
    pytest.importorskip(framework, reason=target[framework])
    folder = tmp_path_factory.mktemp(f"{framework}{size}")
    case = make_case(np.random.default_rng(size))
    np.savez(folder / "case.npz", **case, bounds=BOUNDS[size])
    return case, BOUNDS[size], run_ranks(framework, size, folder)


def replayed(z: np.ndarray, divisor: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(z > 0, z / divisor, z * divisor) + shift, np.where(z > 0, 1 / divisor, divisor)


class Dense:
    """The whole thing in one process, token by token over replayed dense logits, in float64."""

    def __init__(self, case: dict[str, np.ndarray]) -> None:
        self.case = case
        self.z = case["hidden"] @ case["weight"].T + case["bias"]
        self.slope = np.ones_like(self.z)
        for t in range(TOKENS):
            prefix, offsets = ("patch_", "patch_offsets_T1") if case["full_T"][t] else ("", "kept_offsets_T1")
            at = slice(*case[offsets][t : t + 2])
            ids = case["patch_ids_N"][at] if case["full_T"][t] else case["kept_ids_N"][at]
            self.z[t, ids], self.slope[t, ids] = replayed(
                self.z[t, ids], case[f"{prefix}divisor_N"][at], case[f"{prefix}shift_N"][at]
            )

    def kept(self, t: int) -> np.ndarray | None:
        return None if self.case["full_T"][t] else self.case["kept_ids_N"][self.listed(t)]

    def listed(self, t: int) -> slice:
        return slice(*self.case["kept_offsets_T1"][t : t + 2])

    def scores(self) -> np.ndarray:
        tokens, temperature = self.case["token_ids_T"], self.case["temperature_T"]
        return np.array([reference.score(z, self.kept(t), tokens[t], temperature[t]) for t, z in enumerate(self.z)])

    def log_p(self, t: int) -> np.ndarray:
        ids = self.kept(t)
        s = (self.z[t] if ids is None else self.z[t, ids]) / self.case["temperature_T"][t]
        return s - reference.logsumexp(s)

    def gradient_of_scores(self) -> np.ndarray:
        tokens, temperature = self.case["token_ids_T"], self.case["temperature_T"]
        rows = [reference.score_gradient(z, self.kept(t), tokens[t], temperature[t]) for t, z in enumerate(self.z)]
        return np.stack(rows) * self.slope * self.case["upstream_T"][:, None]

    def gradient_of_distribution(self) -> np.ndarray:
        d = np.zeros_like(self.z)
        for t in np.flatnonzero(~self.case["full_T"]):
            g = self.case["upstream_N"][self.listed(t)]
            d[t, self.kept(t)] = (g - np.exp(self.log_p(t)) * g.sum()) / self.case["temperature_T"][t]
        return d * self.slope


def test_every_rank_has_the_scores_of_one_process(parallel: Any) -> None:
    case, _, ranks = parallel
    dense = Dense(case)
    for rank in ranks:
        np.testing.assert_allclose(rank["logprobs"], dense.scores(), rtol=0, atol=1e-12)
        entropies = [-np.sum(np.exp(dense.log_p(t)) * dense.log_p(t)) for t in range(TOKENS)]
        np.testing.assert_allclose(rank["entropy"], entropies, rtol=0, atol=1e-11)
        listed = np.concatenate([dense.log_p(t) for t in range(TOKENS) if not case["full_T"][t]])
        np.testing.assert_allclose(rank["distribution"], listed, rtol=0, atol=1e-11)


def test_the_share_over_the_vocabulary_is_measured_across_ranks(parallel: Any) -> None:
    case, _, ranks = parallel
    # The share of tokens with a listed set has no patch in this case: raw logits, as `plan_share` was given them.
    raw = case["hidden"] @ case["weight"].T + case["bias"]
    for rank in ranks:
        measured = np.flatnonzero(~np.isnan(rank["full_logprobs"]) & ~case["full_T"])
        assert len(measured) > 4
        for t in measured:
            expected = reference.score(raw[t], None, case["token_ids_T"][t], case["temperature_T"][t])
            assert rank["full_logprobs"][t] == pytest.approx(expected, abs=1e-12)


def test_every_rank_has_the_whole_gradient_of_the_hidden_states(parallel: Any) -> None:
    case, _, ranks = parallel
    expected = Dense(case).gradient_of_scores() @ case["weight"]
    for rank in ranks:
        np.testing.assert_allclose(rank["hidden_gradient"], expected, rtol=0, atol=1e-12)


def test_each_rank_has_the_gradient_of_its_rows(parallel: Any) -> None:
    case, bounds, ranks = parallel
    d = Dense(case).gradient_of_scores()
    for rank, first, end in zip(ranks, bounds[:-1], bounds[1:], strict=True):
        np.testing.assert_allclose(rank["weight_gradient"], (d.T @ case["hidden"])[first:end], rtol=0, atol=1e-12)
        np.testing.assert_allclose(rank["bias_gradient"], d.sum(0)[first:end], rtol=0, atol=1e-12)


def test_parts_of_the_hidden_gradient_add_up_where_the_caller_sums(parallel: Any) -> None:
    case, _, ranks = parallel
    expected = Dense(case).gradient_of_distribution() @ case["weight"]
    np.testing.assert_allclose(sum(rank["hidden_part"] for rank in ranks), expected, rtol=0, atol=1e-11)
    assert np.abs(ranks[-1]["hidden_part"] - expected).max() > 0.1, "each is a part only"


def test_rows_and_buffers_hold_each_rank_s_own_rows(parallel: Any) -> None:
    case, bounds, ranks = parallel
    expected = Dense(case).gradient_of_distribution().T @ case["hidden"]
    for rank, first, end in zip(ranks, bounds[:-1], bounds[1:], strict=True):
        np.testing.assert_allclose(rank["buffer"], expected[first:end], rtol=0, atol=1e-11)
        np.testing.assert_allclose(rank["rows"], expected[first:end][rank["row_ids"]], rtol=0, atol=1e-11)


def test_one_max_and_one_sum_cross_the_group_and_one_sum_back(parallel: Any) -> None:
    _, _, ranks = parallel
    for rank in ranks:
        assert rank["forward_calls"].tolist() == ["max", "sum"]
        assert rank["backward_calls"].tolist() == ["sum"]


def test_shards_that_do_not_make_up_the_vocabulary_are_refused_on_every_rank(parallel: Any) -> None:
    _, _, ranks = parallel
    for rank in ranks:
        assert f"hold {VOCAB} rows of the head together, of a vocabulary of {VOCAB + 3}" in str(rank["error"])
