"""Streams and archives of schema version 1, as people have them, read as they did when they were written.

test_spool_golden.py does the same for the spool. Nothing here writes the files: tests/data/schema_v1/README.md says how
they came about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from keptset.schemas.columns import COLUMNS, Identity
from keptset.schemas.findings import Severity
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import read_archive
from keptset.schemas.validation import validate

SHA256 = {
    "rows.json": "081d6b15d7b7033c15fc0a41814bcbc45355b81306db1585bcbd3a540189678e",
    "spool/golden-00000000.arrow": "45c07df74d17d1d3c95d090c1f49c236a6b3fa0ca8b15f718cc7427b45bb7df9",
    "spool/golden-00000001.open": "be3b2cd14aefd0a5a1ed83107dcab8afe2880ad6d06f933b6c36fd5bbab39cc1",
    "stream.arrows": "4a27d734ce74b450d7f6e816f36c5d2e76bd6b5a61f8d5c4080ac8871ae95e23",
    "archive.parquet": "5294ba10f7081d3fa6fcd3ebda286c476ee2737b9191a04c9b01b445bf7f2498",
}
METADATA = {
    b"keptset.schema_version": b"1",
    b"keptset.vocab_size": b"1000",
    b"keptset.model_id": b"golden",
    b"keptset.model_digest": b"mmmmmmmm",
    b"keptset.tokenizer_digest": b"tttttttt",
    b"keptset.engine": b"keptset",
    b"keptset.engine_version": b"0.1.0",
    b"keptset.filter_order": b"temperature,min_p,top_k,top_p",
    b"keptset.processor_order": b"repetition_penalty,frequency_penalty,presence_penalty,logit_bias",
    b"keptset.logits_dtype": b"float32",
}
TYPES = {
    "rollout_id": "string",
    "prompt_id": "string",
    "group_id": "string",
    "sample_index": "int32",
    "prompt_token_ids": "list<int32>",
    "token_ids": "list<int32>",
    "sampled": "list<bool>",
    "trainable": "list<bool>",
    "behavior_logprobs": "list<float>",
    "logprob_domain": "string",
    "full_logprobs": "list<float>",
    "log_kept_mass": "list<float>",
    "kept_entropy": "list<float>",
    "kept_logprob_var": "list<float>",
    "support": "string",
    "kept_ids": "list<list<int32>>",
    "kept_logprobs": "list<list<float>>",
    "top_ids": "list<list<int32>>",
    "top_logprobs": "list<list<float>>",
    "policy_versions": "list<int32>",
    "kv_policy": "string",
    "finish_reason": "string",
    "error": "string",
    "temperature": "double",
    "top_p": "double",
    "min_p": "double",
    "repetition_penalty": "double",
    "frequency_penalty": "double",
    "presence_penalty": "double",
    "top_k": "int32",
    "logit_bias": "map<int32, float>",
    "sampler_extras": "string",
    "seed": "int64",
}
"""Spelled out here, so that a type that changes in the code changes nothing here."""

Rows = list[dict[str, Any]]


@pytest.fixture
def golden(repository: Path) -> Path:
    return repository / "tests" / "data" / "schema_v1"


@pytest.fixture
def rows(golden: Path) -> Rows:
    """What every file holds, in order."""
    batches: list[Rows] = json.loads((golden / "rows.json").read_text(encoding="utf-8"))
    return [row for batch in batches for row in batch]


def _from_stream(golden: Path) -> list[RolloutBatch]:
    with pa.ipc.open_stream(str(golden / "stream.arrows")) as reader:
        return [RolloutBatch.from_arrow(batch) for batch in reader]


READERS: dict[str, Callable[[Path], list[RolloutBatch]]] = {
    "stream": _from_stream,
    "archive": lambda golden: list(read_archive(golden / "archive.parquet")),
}


@pytest.fixture(params=READERS)
def batch(request: pytest.FixtureRequest, golden: Path) -> RolloutBatch:
    """All responses of one of the files."""
    return concat_batches(READERS[request.param](golden))


def test_the_files_are_those_that_were_written(golden: Path) -> None:
    found = {name: hashlib.sha256((golden / name).read_bytes()).hexdigest() for name in SHA256}
    assert found == SHA256


def plain(rows: Rows) -> Rows:
    """Rows as JSON has them: pairs are lists."""
    return [row | {"logit_bias": row["logit_bias"] and [list(pair) for pair in row["logit_bias"]]} for row in rows]


def test_every_value_is_what_was_written(batch: RolloutBatch, rows: Rows) -> None:
    assert plain(batch.arrow.to_pylist()) == rows


def test_identity_and_types_are_what_was_written(batch: RolloutBatch) -> None:
    assert batch.arrow.schema.metadata == METADATA
    assert batch.identity == Identity.from_metadata(METADATA)
    found = {field.name: str(field.type).replace("item: ", "") for field in batch.arrow.schema}
    assert {name: found[name].removesuffix(" ('logit_bias')") for name in TYPES} == TYPES
    assert list(found)[: len(TYPES)] == list(TYPES) == [column.name for column in COLUMNS]
    assert found["x_reward"] == "double" and found["x_note"] == "string"


def test_the_typed_views_read_the_same(batch: RolloutBatch, rows: Rows) -> None:
    tokens = [token for row in rows for token in row["token_ids"]]
    assert batch.token_ids.values.tolist() == tokens
    assert batch.token_ids.lengths.tolist() == [len(row["token_ids"]) for row in rows]
    b = [value for row in rows for value in row["behavior_logprobs"] or []]
    assert batch.behavior_logprobs is not None and batch.behavior_logprobs.valid is not None
    assert batch.behavior_logprobs.valid.tolist() == [value is not None for value in b]
    expected = np.array([np.nan if value is None else value for value in b], np.float32)
    np.testing.assert_array_equal(batch.behavior_logprobs.values, expected)
    sets = [kept for row in rows for kept in row["kept_ids"] or []]
    assert batch.kept_ids is not None
    assert batch.kept_ids.inner.lengths.tolist() == [len(kept or []) for kept in sets]
    assert batch.kept_ids.inner.values.tolist() == [id_ for kept in sets for id_ in kept or []]


def test_sound_data_stays_sound(batch: RolloutBatch) -> None:
    """Two responses were written twice on purpose, and of one no sets are known: neither is an error."""
    assert not [str(finding) for finding in validate(batch) if finding.severity is Severity.ERROR]


def test_other_readers_of_parquet_find_the_same(golden: Path, rows: Rows) -> None:
    table = ds.dataset(golden / "archive.parquet").to_table()
    assert plain(table.to_pylist()) == rows
    assert METADATA.items() <= table.schema.metadata.items()
