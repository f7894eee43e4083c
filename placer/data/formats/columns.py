"""Types of columns, and whether a file has the columns that are read."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from placer.data.files.stores import shown
from placer.data.keys import can_be_ids, is_list, is_text
from placer.data.layout import Columns, IdType
from placer.errors import DataError
from placer.units import listed

ARROW_TYPES: Mapping[IdType, pa.DataType] = {
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "text": pa.large_binary(),
    "boolean": pa.bool_(),
}


def id_type(kind: pa.DataType) -> IdType:
    """Return how ids of an Arrow type, or of lists of it, are read."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return id_type(kind.value_type)
    if is_text(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "unsigned" if pa.types.is_uint64(kind) else "integer"


def once(names: Sequence[str]) -> list[str]:
    """Return the names that are there once; `check_column` says which of the others is needed.

    >>> once(["a", "b", "a"])
    ['b']
    """
    times = Counter(names)
    return [name for name in names if times[name] == 1]


def check_column(file: str, schema: pa.Schema, name: str) -> pa.DataType:
    """Return the type of a column that must be there once; raises DataError if it is not."""
    places = schema.get_all_field_indices(name)
    if len(places) != 1:
        count = "more than one" if places else "no"
        raise DataError(f"{shown(file)} has {count} column {name!r}; it has {listed(schema.names)}")
    return schema.field(places[0]).type


def check_schema(file: str, schema: pa.Schema, columns: Columns) -> None:
    """Check that a file has the columns, of types that fit what they are read as."""
    sparse = set(columns.sparse)
    for name in columns.names:
        kind = check_column(file, schema, name)
        whole = pa.types.is_floating(kind) and columns.layout.types.get(name) == "integer"
        if name in sparse and not can_be_ids(kind) and not whole:
            raise DataError(
                f"{shown(file)}: column {name!r} is {kind}, which cannot hold ids; "
                "ids are integers, texts or lists of them"
            )
        if name not in sparse and is_list(kind):
            raise DataError(f"{shown(file)}: column {name!r} is {kind}, but should hold one number")


def check_columns(
    file: str, schema: pa.Schema, columns: Columns, ignore: Sequence[str] = ()
) -> None:
    """Check that a log has the columns, of types that fit, and one to count."""
    for column in ignore:
        check_column(file, schema, column)
    check_schema(file, schema, columns)
    if not columns.sparse:
        raise DataError(
            f"{shown(file)} has no categorical column; name them with sparse=, "
            f"there are {listed(schema.names)}"
        )


def written_as_text(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a text file as ids could be read from them.

    What Arrow took for times, or saw no value of, is text.
    """

    def readable(field: pa.Field) -> pa.Field:
        kind = field.type
        if pa.types.is_temporal(kind) or pa.types.is_null(kind):
            return field.with_type(pa.string())
        if is_list(kind) and pa.types.is_null(kind.value_type):
            return field.with_type(pa.list_(pa.int64()))
        return field

    return pa.schema([readable(field) for field in schema])


def single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
