"""Spool to Parquet and back without loss, in files that other readers of Parquet take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from keptset.schemas.columns import COLUMNS, Identity
from keptset.schemas.errors import InvalidInput, SchemaError
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.storage.archive import Archived, read_archive, write_archive, writer
from keptset.schemas.storage.spool import SpoolReader, SpoolWriter

BatchOf = Callable[..., RolloutBatch]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.parquet"


def same(ours: RolloutBatch, theirs: RolloutBatch) -> bool:
    equal = ours.arrow.schema.equals(theirs.arrow.schema, check_metadata=True) and ours.arrow.equals(theirs.arrow)
    return bool(equal) and ours.identity == theirs.identity


def test_what_goes_in_comes_back_with_its_identity(batches: list[RolloutBatch], file: Path) -> None:
    archived = write_archive(batches, file)
    (back,) = read_archive(file)
    whole = concat_batches(batches)
    assert same(back, whole)
    assert archived == Archived(
        responses=len(whole),
        tokens=whole.num_tokens,
        kept_ids=whole.num_kept_ids,
        row_groups=1,
        size=file.stat().st_size,
    )


def test_a_spool_archived_and_spooled_again_holds_the_same(
    batches: list[RolloutBatch], file: Path, tmp_path: Path
) -> None:
    with SpoolWriter(tmp_path / "before", "a") as spool:
        for batch in batches:
            spool.append(batch)
    write_archive(SpoolReader(tmp_path / "before"), file)
    with SpoolWriter(tmp_path / "after", "a") as spool:
        for batch in read_archive(file):
            spool.append(batch)
    (back,) = SpoolReader(tmp_path / "after")
    assert same(back, concat_batches(list(SpoolReader(tmp_path / "before"))))
    assert str(back.arrow.schema) == str(batches[0].arrow.schema)


@given(data=st.data())
@settings(max_examples=25)
def test_any_slices_of_batches_survive(data: st.DataObject, golden_whole: RolloutBatch) -> None:
    """Slices keep their parent's buffers; nulls, empty sets and empty responses must not move."""
    mock = fs._MockFileSystem()
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(golden_whole)))
        parts.append(golden_whole.slice(start, data.draw(st.integers(0, len(golden_whole)))))
    rows = data.draw(st.lists(st.integers(0, len(golden_whole) - 1), max_size=5))
    parts.append(golden_whole.take(np.array(rows, np.int64)))
    write_archive(parts, "a.parquet", filesystem=mock)
    back = list(read_archive("a.parquet", filesystem=mock))
    expected = concat_batches(parts)
    if len(expected):
        assert same(concat_batches(back), expected)
    else:
        assert back == []


@pytest.fixture(scope="session")
def golden_whole(repository: Path) -> RolloutBatch:
    """Six responses of every kind: no token, no set, forced tokens, nulls at each level."""
    return concat_batches(list(SpoolReader(repository / "tests" / "data" / "schema_v1" / "spool")))


def test_every_column_lies_in_the_file_as_the_schema_says(batches: list[RolloutBatch], file: Path) -> None:
    """Arrow ignores settings for names it does not know: only the file tells what was done."""
    write_archive(batches, file)
    group = pq.ParquetFile(file).metadata.row_group(0)
    found = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    assert {column.compression for column in found.values()} == {"ZSTD"}
    encodings = {name: set(column.encodings) - {"RLE"} for name, column in found.items()}
    for name in ("kept_ids", "top_ids"):
        assert encodings.pop(f"{name}.list.element.list.element") == {"PLAIN"}
    for name in ("kept_logprobs", "top_logprobs"):
        assert encodings.pop(f"{name}.list.element.list.element") == {"BYTE_STREAM_SPLIT"}
    assert encodings.pop("log_kept_mass.list.element") == {"BYTE_STREAM_SPLIT"}
    text = {column.name for column in COLUMNS if pa.types.is_string(column.type)} | {"x_note"}
    for name in text:
        assert "RLE_DICTIONARY" in encodings.pop(name)
    assert set(encodings) > {"token_ids.list.element", "behavior_logprobs.list.element", "temperature"}
    assert set(map(frozenset, encodings.values())) == {frozenset({"PLAIN"})}
    assert found["policy_versions.list.element"].statistics.max == max(
        int(batch.policy_versions.values.max()) for batch in batches if batch.policy_versions is not None
    )


def test_identity_and_version_stand_in_the_files_metadata(batches: list[RolloutBatch], file: Path) -> None:
    write_archive(batches, file)
    metadata = pq.ParquetFile(file).metadata.metadata
    assert {key: metadata[key] for key in batches[0].identity.to_metadata()} == batches[0].identity.to_metadata()


def test_pyarrow_dataset_reads_an_archive(batches: list[RolloutBatch], file: Path) -> None:
    write_archive(batches, file)
    whole = concat_batches(batches)
    dataset = ds.dataset(file)
    assert dataset.to_table().equals(pa.Table.from_batches([whole.arrow]))
    found = dataset.to_table(columns=["token_ids"], filter=ds.field("rollout_id") == whole.rollout_ids[3])
    assert found["token_ids"].to_pylist() == [whole.token_ids[3].tolist()]


def test_duckdb_reads_an_archive(batches: list[RolloutBatch], file: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    write_archive(batches, file)
    whole = concat_batches(batches)
    connection = duckdb.connect()
    rows = connection.execute(f"select rollout_id, kept_ids, log_kept_mass, kept_logprobs from '{file}'").fetchall()
    expected = whole.arrow.select(["rollout_id", "kept_ids", "log_kept_mass", "kept_logprobs"]).to_pylist()
    assert rows == [tuple(row.values()) for row in expected]
    ((ids,),) = connection.execute(f"select sum(len(k)) from (select unnest(kept_ids) k from '{file}')").fetchall()
    assert ids == whole.num_kept_ids
    connection.close()


def test_pandas_reads_an_archive(batches: list[RolloutBatch], file: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write_archive(batches, file)
    whole = concat_batches(batches)
    frame = pandas.read_parquet(file)
    assert frame["rollout_id"].tolist() == whole.rollout_ids
    for row, expected in zip(frame["token_ids"], whole.column("token_ids").to_pylist(), strict=True):
        assert row.tolist() == expected
    for row, expected in zip(frame["kept_ids"], whole.column("kept_ids").to_pylist(), strict=True):
        assert [None if kept is None else kept.tolist() for kept in row] == expected


def test_row_groups_are_bounded_and_come_back_one_by_one(
    batch_of: BatchOf, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_of(0, 40), *(batch_of(40 + number, 1) for number in range(20))]
    limit = batches[0].arrow.nbytes // 4
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", limit)
    archived = write_archive(iter(batches), file)
    back = list(read_archive(file))
    assert archived.row_groups == len(back) > 4
    assert all(batch.arrow.nbytes <= 1.1 * limit for batch in back)
    assert sum(len(batch) == 1 for batch in back) <= 1, "small batches are joined"
    assert same(concat_batches(back), concat_batches(batches))


def test_a_response_larger_than_a_row_group_stays_whole(
    batch_of: BatchOf, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 1)
    batch = batch_of(0, 3)
    assert write_archive([batch], file).row_groups == 3
    assert same(concat_batches(list(read_archive(file))), batch)


def test_the_writer_holds_no_more_than_a_row_group(
    batch_of: BatchOf, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's memory does not grow with the number of batches."""
    one = batch_of(0, 50)
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 2 * one.arrow.nbytes)
    before, seen = pa.total_allocated_bytes(), []

    def stream() -> Iterator[RolloutBatch]:
        for _ in range(30):
            seen.append(pa.total_allocated_bytes() - before)
            yield one.take(np.arange(len(one)))

    write_archive(stream(), file)
    assert max(seen[10:]) <= 2 * max(seen[:10])


def test_foreign_row_groups_are_cut_on_reading(
    batch_of: BatchOf, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another writer may put everything into one row group."""
    batch = batch_of(0, 60)
    pq.write_table(pa.Table.from_batches([batch.arrow]), file)
    monkeypatch.setattr("keptset.schemas.storage.archive.reader.ROW_GROUP_BYTES", 2_000)
    back = list(read_archive(file, guarded=False))
    assert len(back) > 3
    assert same(concat_batches(back), batch)


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(2),
        pa.array(["a", None]).dictionary_encode(),
        pa.array(["a", None], pa.large_string()),
        pa.array([{"a": 1, "b": [None, "x"]}, None]),
        pa.array([1, None], pa.timestamp("ns", "UTC")),
        pa.array([1, None], pa.duration("s")),
        pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float64())),
        pa.array([b"\xff", None], pa.binary(1)),
        pa.array([0.5, None]).cast(pa.float16()),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_of_the_callers_own_keep_type_and_values(batch_of: BatchOf, file: Path, column: pa.Array) -> None:
    batch = RolloutBatch.from_arrow(batch_of(0, 2).arrow.append_column("x_own", column))
    write_archive([batch, batch], file)
    (back,) = read_archive(file)
    # Arrow's names of list items ("item" or "element") are no part of a type's identity.
    assert back.column("x_own").type.equals(column.type)
    assert back.arrow.equals(concat_batches([batch, batch]).arrow)


def test_a_column_of_fixed_size_lists_is_kept_or_refused_at_once(batch_of: BatchOf, file: Path) -> None:
    """Old Arrow writes null ones, and cannot read them."""
    column = pa.array([[1, 2], None], pa.list_(pa.int64(), 2))
    batch = RolloutBatch.from_arrow(batch_of(0, 2).arrow.append_column("x_own", column))
    try:
        write_archive([batch], file)
    except SchemaError:
        assert not file.exists()
    else:
        (back,) = read_archive(file)
        assert back.arrow.equals(batch.arrow)


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1, 2], pa.timestamp("s")), "give back as timestamp"),
        (pa.array([1, 2]).cast(pa.date64()), "give back as date32"),
        (pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval()), "Parquet cannot hold"),
    ],
)
def test_a_column_that_parquet_would_change_is_refused(
    batch_of: BatchOf, file: Path, column: pa.Array, told: str
) -> None:
    batch = RolloutBatch.from_arrow(batch_of(0, 2).arrow.append_column("x_own", column))
    with pytest.raises(SchemaError, match=f"column x_own has type .*{told}"):
        write_archive([batch], file)
    assert not list(file.parent.iterdir())


def test_batches_of_two_identities_are_refused(batch_of: BatchOf, file: Path) -> None:
    other = batch_of(0, 1, identity=Identity(vocab_size=50, model_id="another"))
    with pytest.raises(SchemaError, match=r"batch 2 differs from the first in keptset\.engine, .*keptset\.model_id"):
        write_archive([batch_of(0, 1), batch_of(1, 1), other], file)
    assert not list(file.parent.iterdir())


@pytest.mark.parametrize("extra", [{"x_other": "a"}, {"x_note": 1.5}, {}])
def test_batches_of_unlike_own_columns_are_refused(batch_of: BatchOf, file: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="batch 1 has other columns of the caller's own"):
        write_archive([batch_of(0, 1), batch_of(1, 1, extra=extra)], file)


def test_no_batch_at_all_is_refused(file: Path) -> None:
    with pytest.raises(InvalidInput, match="no batch to write"):
        write_archive([], file)


@pytest.mark.parametrize("level", [0, 23])
def test_a_compression_level_that_zstd_has_not_is_refused(batch_of: BatchOf, file: Path, level: int) -> None:
    with pytest.raises(InvalidInput, match=f"compression_level is {level}"):
        write_archive([batch_of(0, 1)], file, compression_level=level)


def test_a_higher_level_gives_a_smaller_file_with_the_same_content(batch_of: BatchOf, file: Path) -> None:
    batch = batch_of(0, 200)
    small, large = (write_archive([batch], file, overwrite=True, compression_level=level).size for level in (15, 1))
    assert small < large
    (back,) = read_archive(file)
    assert same(back, batch)
