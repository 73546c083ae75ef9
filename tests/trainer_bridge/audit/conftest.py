"""Rollouts of an honest sampler, for audits to find nothing in, and to plant faults in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams

VOCABULARY = 60
Rows = list[dict[str, Any]]


def honest_rollouts(
    count: int, *, tokens: int = 12, seed: int = 0, first: int = 0, distributions: bool = True, **changes: Any
) -> RolloutBatch:
    """Sound responses, each token drawn from its recorded kept distribution. Numbers first, first + 1, ..."""
    random = np.random.default_rng([seed, first])
    builder = BatchBuilder(Identity(vocab_size=VOCABULARY, model_id="made up", engine="test"))
    for number in range(first, first + count):
        sizes = np.where(random.random(tokens) < 0.3, 1, random.integers(2, 9, tokens))
        sizes[:2] = 3, 1  # so that every response has both
        sets = [np.sort(random.choice(VOCABULARY, size, replace=False)) for size in sizes]
        logp = [np.log(random.dirichlet(np.ones(size))) if size > 1 else np.zeros(1) for size in sizes]
        logp = [np.float64(np.float32(p)) for p in logp]  # as it will be recorded
        picks = [int(np.searchsorted(np.cumsum(np.exp(p)), random.random())) for p in logp]
        picks = [min(pick, len(p) - 1) for pick, p in zip(picks, logp, strict=True)]
        fields: dict[str, Any] = {
            "rollout_id": f"rollout-{number}",
            "prompt_id": f"prompt-{number // 4}",
            "group_id": f"group-{number // 4}",
            "sample_index": number % 4,
            "prompt_token_ids": np.arange(1 + number % 3),
            "token_ids": np.array([ids[pick] for ids, pick in zip(sets, picks, strict=True)]),
            "behavior_logprobs": np.array([p[pick] for p, pick in zip(logp, picks, strict=True)]),
            "log_kept_mass": np.full(tokens, np.log(0.97)),
            "kept_entropy": np.array([-(np.exp(p) * p).sum() for p in logp]),
            "kept_logprob_var": np.array([(np.exp(p) * p**2).sum() - (np.exp(p) * p).sum() ** 2 for p in logp]).clip(0),
            "kept_offsets": np.cumsum([0, *sizes]),
            "kept_ids": np.concatenate(sets),
            "kept_logprobs": np.concatenate(logp) if distributions else None,
            "policy_versions": np.full(tokens, number // 8),
            "finish_reason": "length" if number % 3 else "stop",
            "params": SamplingParams(temperature=0.8, top_p=0.95, top_k=20 if number % 2 else 0),
            "seed": 1000 + number,
        }
        builder.add(Response(**{**fields, **changes}))
    return builder.build()


@pytest.fixture(scope="session")
def honest() -> Callable[..., RolloutBatch]:
    """`honest(count, tokens=12, seed=0, first=0, distributions=True, **changes)`."""
    return honest_rollouts


@pytest.fixture(scope="session")
def edited() -> Callable[[RolloutBatch, Callable[[Rows], None]], RolloutBatch]:
    """`edited(batch, change)`: the batch after `change` had its way with the rows as Python objects."""

    def rebuild(batch: RolloutBatch, change: Callable[[Rows], None]) -> RolloutBatch:
        rows = batch.arrow.to_pylist()
        change(rows)
        return RolloutBatch.from_arrow(pa.RecordBatch.from_pylist(rows, schema=batch.arrow.schema))

    return rebuild


def positions(batch: RolloutBatch) -> Iterator[tuple[int, int]]:
    """(row, position) of every token."""
    for row, length in enumerate(batch.token_ids.lengths.tolist()):
        for position in range(length):
            yield row, position
