"""Batches to test with: small, whole, and different in every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.columns import Identity
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.sampling_params import SamplingParams

IDENTITY = Identity(vocab_size=50, model_id="tiny", engine="test", engine_version="1")
Rows = list[dict[str, Any]]


def make_response(number: int, **changes: Any) -> Response:
    """A sound response whose length, sets and settings follow from its number."""
    random = np.random.default_rng(number)
    tokens = 3 + number % 4
    sizes = [1 if t == 1 else 2 + int(random.integers(4)) for t in range(tokens)]
    sets = [np.sort(random.choice(50, size, replace=False)) for size in sizes]
    logp = [np.log(random.dirichlet(np.ones(size))) if size > 1 else np.zeros(1) for size in sizes]
    picks = [int(random.integers(size)) for size in sizes]
    fields: dict[str, Any] = {
        "rollout_id": f"rollout-{number}",
        "prompt_id": f"prompt-{number // 2}",
        "group_id": f"group-{number // 2}",
        "sample_index": number % 2,
        "prompt_token_ids": np.arange(1 + number % 3),
        "token_ids": np.array([ids[pick] for ids, pick in zip(sets, picks, strict=True)]),
        "sampled": np.array([t != 2 or number % 2 == 0 for t in range(tokens)]),
        "behavior_logprobs": np.array([p[pick] for p, pick in zip(logp, picks, strict=True)]),
        "log_kept_mass": np.full(tokens, np.log(0.96)),
        "kept_entropy": np.array([-(np.exp(p) * p).sum() for p in logp]),
        "kept_logprob_var": np.full(tokens, 0.5),
        "kept_ids": sets,
        "kept_logprobs": logp if number % 3 else None,
        "policy_versions": np.arange(tokens) // 2 + number,
        "finish_reason": "stop",
        "params": SamplingParams(temperature=0.8, top_p=0.95, logit_bias={3: 0.5}),
        "seed": 1000 + number,
        "extra": {"x_note": f"note {number}"},
    }
    fields |= changes
    if fields["kept_ids"] is not None and "kept_offsets" not in fields:
        keep = fields["sampled"]
        for name in ("kept_ids", "kept_logprobs"):
            if fields[name] is not None:
                fields[name] = [part if kept else part[:0] for part, kept in zip(fields[name], keep, strict=True)]
        fields["kept_offsets"] = np.cumsum([0, *map(len, fields["kept_ids"])])
        fields["kept_ids"] = np.concatenate(fields["kept_ids"])
        if fields["kept_logprobs"] is not None:
            fields["kept_logprobs"] = np.concatenate(fields["kept_logprobs"])
    return Response(**fields)


@pytest.fixture
def response() -> Callable[..., Response]:
    """`response(number, **changes)`."""
    return make_response


@pytest.fixture
def batch_of() -> Callable[..., RolloutBatch]:
    """`batch_of(first, count, identity=..., **changes)`: sound responses first, first + 1, ..."""

    def build(first: int, count: int, identity: Identity = IDENTITY, **changes: Any) -> RolloutBatch:
        builder = BatchBuilder(identity)
        for number in range(first, first + count):
            builder.add(make_response(number, **changes))
        return builder.build()

    return build


@pytest.fixture
def changed() -> Callable[[RolloutBatch, Callable[[Rows], None]], RolloutBatch]:
    """`changed(batch, change)`: the batch after `change` had its way with the rows as Python objects."""

    def rebuild(batch: RolloutBatch, change: Callable[[Rows], None]) -> RolloutBatch:
        rows = batch.arrow.to_pylist()
        change(rows)
        return RolloutBatch.from_arrow(pa.RecordBatch.from_pylist(rows, schema=batch.arrow.schema))

    return rebuild
