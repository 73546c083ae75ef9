"""Files of schema version 1 stay readable: a spool written by the first release, and its rows as JSON beside it.

A change that these tests refuse is a new schema version, or a mistake. The files are not to be made again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from keptset.schemas.columns import Identity, arrow_schema
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.spool import SpoolReader, recover

IDENTITY = Identity(
    vocab_size=1000,
    model_id="golden",
    model_digest="mmmmmmmm",
    tokenizer_digest="tttttttt",
    engine="keptset",
    engine_version="0.1.0",
    filter_order="temperature,min_p,top_k,top_p",
    processor_order="repetition_penalty,frequency_penalty,presence_penalty,logit_bias",
    logits_dtype="float32",
)


@pytest.fixture
def golden(repository: Path) -> Path:
    return repository / "tests" / "data" / "schema_v1"


@pytest.fixture
def expected(golden: Path) -> list[pa.RecordBatch]:
    schema = arrow_schema(IDENTITY, [pa.field("x_reward", pa.float64()), pa.field("x_note", pa.string())])
    batches = json.loads((golden / "rows.json").read_text(encoding="utf-8"))
    for row in (row for rows in batches for row in rows):
        row["logit_bias"] = row["logit_bias"] and [tuple(entry) for entry in row["logit_bias"]]
    return [pa.RecordBatch.from_pylist(rows, schema=schema) for rows in batches]


def check(batches: list[RolloutBatch], expected: list[pa.RecordBatch]) -> None:
    assert [len(batch) for batch in batches] == [2, 2, 1, 1]
    for batch, arrow in zip(batches, expected, strict=True):
        assert batch.identity == IDENTITY
        assert batch.arrow.schema.equals(arrow.schema, check_metadata=True)
        assert batch.arrow.equals(arrow)


def test_a_spool_of_the_first_release_is_read(golden: Path, expected: list[pa.RecordBatch]) -> None:
    reader = SpoolReader(golden / "spool", duplicates="keep")  # two of its responses were stored twice
    check(list(reader), expected)
    assert reader.position == {"golden": (1, 2)}


def test_an_open_file_of_the_first_release_is_recovered(
    golden: Path, expected: list[pa.RecordBatch], tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    shutil.copytree(golden / "spool", folder)
    (recovered,) = recover(folder)
    assert (recovered.seq, recovered.batches, recovered.damage) == (1, 2, None)
    check(list(SpoolReader(folder, include_open=False, duplicates="keep")), expected)
