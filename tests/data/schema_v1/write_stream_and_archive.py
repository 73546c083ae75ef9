"""Wrote stream.arrows and archive.parquet; see README.md. Run by hand, once per schema version, never by a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa

from keptset.schemas.columns import Identity, arrow_schema
from keptset.schemas.rollout_batch import RolloutBatch
from keptset.schemas.storage.archive import write_archive

HERE = Path(__file__).parent
STREAM, ARCHIVE = HERE / "stream.arrows", HERE / "archive.parquet"
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


def main() -> None:
    present = [path.name for path in (STREAM, ARCHIVE) if path.exists()]
    if present:
        sys.exit(f"{', '.join(present)} exist: golden files are written once; a new schema version gets a folder")
    schema = arrow_schema(IDENTITY, [pa.field("x_reward", pa.float64()), pa.field("x_note", pa.string())])
    batches = []
    for rows in json.loads((HERE / "rows.json").read_text(encoding="utf-8")):
        for row in rows:
            row["logit_bias"] = row["logit_bias"] and [tuple(pair) for pair in row["logit_bias"]]
        batches.append(pa.RecordBatch.from_pylist(rows, schema=schema))
    with pa.ipc.new_stream(str(STREAM), schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    write_archive(map(RolloutBatch.from_arrow, batches), ARCHIVE)


if __name__ == "__main__":
    main()
