"""One framework's half of `keptset bench scoring`, in a process of its own, which prints its measurements as JSON.

Dense and kept ways take turns, each thing is measured several times, and medians are compared.

Legend: T tokens, N kept ids over them, B tokens of a block, C candidates, H hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from keptset.rollout.cpu_threads import configure, usable_cores
from keptset.scripts.bench_scoring_case import LARGEST_SET, QUICK, KeptCase, Shape, kept_case
from keptset.trainer_bridge.scoring import Head, RowSparseHeadGradient, score_from_hidden

BLOCK_TOKENS = 256
"""Tokens whose logits a dense way holds at once: 156 MB at V = 151936; fewer make the products less efficient."""
PADDED_BLOCK_TOKENS = 512
"""Tokens whose padded rows of the head exist at once where it goes in blocks (0.9 GB): the best found."""
DENSE_ROUNDS, KEPT_PER_ROUND = 3, 5
MEMORY_PASSES = 7
TRIALS = 5
"""Of each number of threads in the kept way."""
LINEAR_TOKENS, LINEAR_ROUNDS, LINEAR_STEPS = (1024, 4096, 16384, 65536), 7, 4
"""Steps: passes of one size in a row, of small ones."""
LOGIT_SCALE = 0.02


class Bench:
    """One framework, one shape."""

    def __init__(self, of: Any, shape: Shape) -> None:
        self.of, self.shape = of, shape
        self.case = kept_case(shape)
        self.weight = of.normal([shape.vocab, shape.hidden], LOGIT_SCALE)
        self.hidden = of.normal([shape.tokens, shape.hidden], 1.0)
        self.tokens = of.tensor(self.case.token_ids_T)
        self.logsumexp = of.logsumexp_by_parts
        self.dense_threads = self.kept_threads = usable_cores()

    def blocks(self, step: int = BLOCK_TOKENS) -> list[slice]:
        return [slice(begin, begin + step) for begin in range(0, self.shape.tokens, step)]

    def choose(self) -> dict[str, Any]:
        """Threads and logsumexp of the dense way, threads of the kept way, with which each is fastest here."""
        tried = {}
        block = self.blocks()[0]
        for threads in sorted({1, usable_cores()}):
            self.of.set_threads(threads)
            for logsumexp in (self.of.logsumexp_by_parts, self.of.logsumexp_by_operator):
                tried[threads, logsumexp.__name__] = median(self._forward_blocks([block], logsumexp) for _ in range(3))
        self.dense_threads, name = min(tried, key=lambda key: tried[key])
        self.logsumexp = getattr(self.of, name)
        kept: dict[int, list[float]] = {threads: [] for threads in sorted({1, usable_cores()})}
        for _ in range(TRIALS):
            for self.kept_threads, times in kept.items():
                times += [self.kept(hidden=True) for _ in range(KEPT_PER_ROUND)][1:]  # the first wakes the threads
        self.kept_threads = min(kept, key=lambda threads: median(kept[threads]))
        return {"threads": self.dense_threads, "logsumexp": name, "kept_threads": self.kept_threads}

    def _forward_blocks(self, blocks: list[slice], logsumexp: Any) -> float:
        begin = perf_counter()
        for block in blocks:
            self.of.forward_block(self.hidden[block], self.weight, self.tokens[block], logsumexp)
        return perf_counter() - begin

    def dense_forward(self) -> float:
        self.of.set_threads(self.dense_threads)
        return self._forward_blocks(self.blocks(), self.logsumexp)

    def dense_backward(self, *, head: bool) -> float:
        self.of.set_threads(self.dense_threads)
        begin = perf_counter()
        head_gradient = self.of.zeros([self.shape.vocab, self.shape.hidden]) if head else None
        for block in self.blocks():
            self.of.gradient_block(self.hidden[block], self.weight, self.tokens[block], head_gradient)
        return perf_counter() - begin

    def padded_candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and biases [T, C] of candidates padded to the largest set, the sampled one first."""
        case, num = self.case, self.shape.tokens
        sizes = np.diff(case.kept_offsets_T1)
        candidates = np.zeros((num, LARGEST_SET), np.int64)
        bias = np.full((num, LARGEST_SET), -np.inf, np.float32)
        inside = np.arange(LARGEST_SET) < sizes[:, None]
        candidates[inside], bias[inside] = case.kept_ids_N, 0.0
        own = (candidates == case.token_ids_T[:, None]).argmax(axis=1)
        rows = np.arange(num)
        candidates[rows, own], candidates[:, 0] = candidates[:, 0].copy(), case.token_ids_T
        bias[rows, own], bias[:, 0] = bias[:, 0].copy(), 0.0
        return candidates, bias

    def padded(self, *, block_tokens: int | None = None) -> float:
        """Candidates of all tokens gathered at once, as trainers that pad do it (3.8 GB), or in blocks.

        Padding itself is done beforehand: only what a trainer computes is timed."""
        self.of.set_threads(self.dense_threads)
        candidates_TC, bias_TC = (self.of.tensor(array) for array in self.padded_candidates())
        begin = perf_counter()
        for block in self.blocks(block_tokens or self.shape.tokens):
            self.of.padded_block(self.hidden[block], self.weight, candidates_TC[block], bias_TC[block])
        return perf_counter() - begin

    def kept(self, *, hidden: bool = False, head: str = "", case: KeptCase | None = None, states: Any = None) -> float:
        """Seconds of scoring over the kept sets: forward, and backward to hidden states and a dense or sparse head."""
        case = self.case if case is None else case
        leaves = [(self.hidden if states is None else states).detach(), self.weight.detach()]
        for leaf, asks in zip(leaves, (hidden, bool(head)), strict=True):
            self._ask(leaf, asks)
        sink = RowSparseHeadGradient() if head == "sparse" else None
        self.of.set_threads(self.kept_threads)
        begin = perf_counter()
        scores = score_from_hidden(
            leaves[0],
            Head(weight_VH=leaves[1]),
            case.token_ids_T,
            case.kept_offsets_T1,
            case.kept_ids_N,
            case.temperature_T,
            head_gradient=sink,
        )
        if hidden or head:
            scores.logprobs_T.sum().backward()
        return perf_counter() - begin

    def _ask(self, leaf: Any, asks: bool) -> None:
        if hasattr(leaf, "stop_gradient"):
            leaf.stop_gradient = not asks
        else:
            leaf.requires_grad_(asks)

    def memory_share(self) -> float:
        """Peak memory of a pass to hidden states and sparse head beyond inputs and gradients, of the [T, V] logits."""
        sizes = np.diff(self.case.kept_offsets_T1)
        rows = len(np.unique(self.case.kept_ids_N[np.repeat(sizes > 1, sizes)]))
        returned = 4 * self.shape.hidden * (self.shape.tokens + rows)
        extra = []
        for _ in range(MEMORY_PASSES):
            before = _reset_peak()
            self.kept(hidden=True, head="sparse")
            extra.append(max(0, _peak() - before - returned))
        # The first passes also grow the process to the size it then keeps.
        return median(extra[2:]) / self.shape.logits_bytes

    def seconds_per_kept_id(self, sizes: list[int]) -> dict[int, float]:
        """Forward and backward to hidden states of so many tokens, the sizes in turn.

        Each time on sets of their own, as in training: the rows of small ones would still lie in a cache.
        """
        states = {tokens: self.of.normal([tokens, self.shape.hidden], 1.0) for tokens in sizes}
        times: dict[int, list[float]] = {tokens: [] for tokens in sizes}
        for number in range(1 + LINEAR_ROUNDS):
            for tokens in sizes:
                for step in range(max(1, min(LINEAR_STEPS, max(sizes) // (4 * tokens)))):
                    case = kept_case(self.shape, tokens, seed=LINEAR_STEPS * number + step)
                    seconds = self.kept(hidden=True, case=case, states=states[tokens])
                    if number:
                        times[tokens].append(seconds / case.num_kept)
        return {tokens: median(of_size) for tokens, of_size in times.items()}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _reset_peak() -> int:
    """Give free memory back, start the peak anew, and say what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS:")


def _peak() -> int:
    return _status("VmHWM:")


def measure(of: Any, shape: Shape, say: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of one framework."""
    bench = Bench(of, shape)
    bench.kept()
    say("peak memory")
    memory_share = bench.memory_share()
    say("threads of the dense way")
    chosen = bench.choose()
    dense: dict[str, list[float]] = {
        "forward": [],
        "backward_hidden": [],
        "backward_head": [],
        "padded": [],
        "padded_in_blocks": [],
    }
    ways: dict[str, dict[str, Any]] = {
        "forward": {},
        "backward_hidden": {"hidden": True},
        "backward_head_dense": {"hidden": True, "head": "dense"},
        "backward_head_sparse": {"hidden": True, "head": "sparse"},
    }
    kept: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        bench.kept(**way)
    for number in range(1, DENSE_ROUNDS + 1):
        say(f"round {number} of {DENSE_ROUNDS}")
        for name, dense_way in (
            ("forward", bench.dense_forward),
            ("backward_hidden", lambda: bench.dense_backward(head=False)),
            ("backward_head", lambda: bench.dense_backward(head=True)),
            ("padded", bench.padded),
            ("padded_in_blocks", lambda: bench.padded(block_tokens=PADDED_BLOCK_TOKENS)),
        ):
            dense[name].append(dense_way())
            for of_kept, way in ways.items():
                if of_kept.startswith(name) or (name == "padded" and of_kept == "forward"):
                    kept[of_kept] += [bench.kept(**way) for _ in range(KEPT_PER_ROUND)]
    say("growth with the number of kept ids")
    sizes = [tokens for tokens in LINEAR_TOKENS if tokens <= 32 * shape.tokens]
    per_id = bench.seconds_per_kept_id(sizes)
    dense_s = {name: median(times) for name, times in dense.items()}
    kept_s = {name: median(times) for name, times in kept.items()}
    products = {"forward": 1, "backward_hidden": 2, "backward_head": 3}
    return {
        "forward_speedup": dense_s["forward"] / kept_s["forward"],
        "backward_hidden_speedup": dense_s["backward_hidden"] / kept_s["backward_hidden"],
        "backward_head_dense_speedup": dense_s["backward_head"] / kept_s["backward_head_dense"],
        "backward_head_sparse_speedup": dense_s["backward_head"] / kept_s["backward_head_sparse"],
        "padded_speedup": dense_s["padded"] / kept_s["forward"],
        "padded_in_blocks_speedup": dense_s["padded_in_blocks"] / kept_s["forward"],
        "memory_share": memory_share,
        "linearity": max(per_id.values()) / min(per_id.values()),
        "kept_ids": bench.case.num_kept,
        "kept_seconds": kept_s,
        "dense_seconds": dense_s,
        "dense_gflops": {name: n * shape.product_flops / dense_s[name] / 1e9 for name, n in products.items()},
        "dense_uses": chosen,
        "seconds_per_kept_id": {str(tokens): seconds for tokens, seconds in per_id.items()},
        "version": of.VERSION,
    }


def main() -> None:
    """See the module."""
    configure()
    name, quick = sys.argv[1], "--quick" in sys.argv[2:]
    of = importlib.import_module(f"keptset.scripts.bench_scoring_{name}")
    results = measure(
        of, QUICK if quick else Shape(), lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
