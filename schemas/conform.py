"""Arrow data as it comes, made to follow the schema: casts that keep every value, refusals that name row and column.

A float64 where the schema says float32 is rounded to that, which is the schema's precision and no loss of it.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from keptset.schemas.columns import COLUMNS, WORDS, Identity, arrow_schema, words
from keptset.schemas.errors import SchemaError
from keptset.schemas.ragged import holds_list_view, is_list_like, without_list_views


def conform(data: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """One record batch with exactly the schema's columns and types, then the columns the schema does not know.

    Taken as they are or cast: large lists, list views, 64-bit ids, dictionaries and the other string layouts, missing
    optional columns (as null). Errors: SchemaError naming the column, and for a value that does not fit the row.
    """
    identity = Identity.from_metadata(data.schema.metadata)
    try:
        names = data.schema.names
    except UnicodeDecodeError as error:
        raise SchemaError(f"the name of a column is no UTF-8 ({error}); rename it") from error
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise SchemaError(f"columns occur more than once: {', '.join(sorted(repeated))}")
    columns = {name: one_chunk(name, data.column(name)) for name in names}
    arrays = []
    for column in COLUMNS:
        array = columns.pop(column.name, None)
        if array is None:
            if column.required:
                raise SchemaError(f"column {column.name} ({column.type}) is missing; it is required: {column.meaning}")
            array = pa.nulls(data.num_rows, column.type)
        array = _cast(column.name, array, column.type)
        if column.name in WORDS:
            _check_words(column.name, array)
        arrays.append(array)
    extra = [_own_field(data.schema.field(name), array) for name, array in columns.items()]
    return pa.RecordBatch.from_arrays([*arrays, *columns.values()], schema=arrow_schema(identity, extra))


def _own_field(field: pa.Field, array: pa.Array) -> pa.Field:
    """A caller's own field as its owner describes it, metadata (where an extension type may live) and all."""
    if array.null_count and not field.nullable:
        raise SchemaError(
            f"column {field.name} holds {array.null_count} nulls and is declared not nullable; one is wrong"
        )
    return field.with_type(array.type)


def _check_words(name: str, array: pa.Array) -> None:
    known = pc.is_in(array, value_set=pa.array(words(name)))
    strange = pc.and_(pc.is_valid(array), pc.invert(known))
    if pc.any(strange).as_py():
        row = pc.index(strange, True).as_py()
        raise SchemaError(f"row {row}, column {name}: {array[row].as_py()!r} is none of {', '.join(words(name))}")


def one_chunk(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array. Errors: SchemaError where Arrow's 32-bit offsets cannot span it."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    too_large = f"column {name} is too large for one batch"
    try:
        combined = column.combine_chunks()
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{too_large} ({error}); join fewer, or read a table batch by batch") from error
    if isinstance(combined, pa.ChunkedArray):
        if combined.num_chunks > 1:
            raise SchemaError(f"{too_large}; join fewer, or read a table batch by batch")
        combined = combined.chunk(0) if combined.num_chunks else pa.nulls(0, column.type)
    return combined


def _is_string(kind: pa.DataType) -> bool:
    types = pa.types
    view = types.is_string_view(kind) if hasattr(types, "is_string_view") else False
    return bool(types.is_string(kind) or types.is_large_string(kind) or view)


def _castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether values of `source` mean the same once cast to `target`."""
    types = pa.types
    if source.equals(target) or types.is_null(source):
        return True
    if types.is_dictionary(source):
        return _castable(source.value_type, target)
    if types.is_list(target):
        return is_list_like(source) and _castable(source.value_type, target.value_type)
    if types.is_map(target):
        return (
            types.is_map(source)
            and _castable(source.key_type, target.key_type)
            and _castable(source.item_type, target.item_type)
        )
    if types.is_string(target):
        return _is_string(source)
    if types.is_integer(target):
        return bool(types.is_integer(source))
    if types.is_floating(target):
        return bool(types.is_floating(source) or types.is_integer(source))
    return False


def _cast(name: str, array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type.equals(target):
        return array
    if not _castable(array.type, target):
        raise SchemaError(f"column {name} has type {array.type}; the schema says {target}")
    try:
        cast = _cast_values(array, target)
    except pa.ArrowNotImplementedError as error:
        raise SchemaError(
            f"column {name} has type {array.type}, which pyarrow {pa.__version__} cannot cast to {target}; "
            "cast it where it is made, or use a newer pyarrow"
        ) from error
    except pa.ArrowInvalid:
        # Arrow casts the parent's values of a sliced list too: a dense copy tells whether a value of ours is at fault.
        array = _dense(array, 0, len(array))
        if not _fits(array, target):
            raise _misfit(name, array, target) from None
        return _cast_values(array, target)
    if _overflowed(array, cast):
        raise _misfit(name, array, target)
    return cast


def _dense(array: pa.Array, start: int, stop: int) -> pa.Array:
    return array.take(pa.array(range(start, stop), pa.int64()))


def _cast_values(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if holds_list_view(array.type):
        array = without_list_views(array)
    return array if array.type.equals(target) else array.cast(target, safe=True)


def _overflowed(before: pa.Array, after: pa.Array) -> bool:
    """Whether a finite float64 became infinite in float32, which Arrow's safe cast lets pass."""
    while is_list_like(before.type):
        before, after = before.flatten(), after.flatten()
    if pa.types.is_map(before.type):  # dense copies, or the values would be those of a slice's parent
        before, after = (_dense(side, 0, len(side)).items for side in (before, after))
    if not pa.types.is_float64(before.type) or not pa.types.is_float32(after.type):
        return False
    return bool(pc.any(pc.and_(pc.is_finite(before), pc.invert(pc.is_finite(after)))).as_py())


def _misfit(name: str, array: pa.Array, target: pa.DataType) -> SchemaError:
    """The error for a value that does not fit, found by halving the rows."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(_dense(array, low, middle), target):
            low = middle
        else:
            high = middle
    value = str(array[low].as_py())
    shown = value if len(value) <= 80 else value[:77] + "..."
    return SchemaError(
        f"row {low}, column {name}: {shown} does not fit {target}; write the column as the schema says, "
        "or drop the row if the value is an engine's marker for missing"
    )


def _fits(part: pa.Array, target: pa.DataType) -> bool:
    try:
        return not _overflowed(part, _cast_values(part, target))
    except pa.ArrowInvalid:
        return False
