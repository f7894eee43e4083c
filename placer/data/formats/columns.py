"""Columns of files: check their presence and types, and turn nested fields into columns.

Event logs have objects with fields: column ``user.id`` is a field of the object ``user``, and
``items.id``, a field of a list of objects, holds the ids of a bag.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from placer.data.files.stores import shown
from placer.data.keys import can_be_ids, is_list, is_text, list_offsets
from placer.data.layout import Columns, IdType
from placer.errors import DataError
from placer.units import listed

ARROW_TYPES: Mapping[IdType, pa.DataType] = {
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "text": pa.large_binary(),
    "boolean": pa.bool_(),
}
MOST_LEVELS = 32
"""Levels of nested objects that become columns."""

Path = tuple[str, ...]
"""A column, a field of it, a field of that, and so on."""


def id_type(kind: pa.DataType) -> IdType:
    """Return the type of ids for an Arrow type, or for lists of it."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return id_type(kind.value_type)
    if is_text(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "unsigned" if pa.types.is_uint64(kind) else "integer"


def once(names: Sequence[str]) -> list[str]:
    """Return names that appear only once. `check_column` refuses a needed name that does not.

    >>> once(["a", "b", "a"])
    ['b']
    """
    times = Counter(names)
    return [name for name in names if times[name] == 1]


def check_column(file: str, schema: pa.Schema, name: str) -> pa.DataType:
    """Return a column's type. Raises DataError if it is missing or there more than once."""
    places = schema.get_all_field_indices(name)
    if len(places) != 1:
        count = "more than one" if places else "no"
        raise DataError(f"{shown(file)} has {count} column {name!r}; it has {listed(schema.names)}")
    return schema.field(places[0]).type


def check_schema(file: str, schema: pa.Schema, columns: Columns) -> None:
    """Raise DataError unless a file has the columns, with types that they can be read as."""
    sparse = set(columns.sparse)
    for name in columns.names:
        kind = check_column(file, schema, name)
        known = columns.layout.types.get(name)
        whole = pa.types.is_floating(kind) and known == "integer"
        if name in sparse and pa.types.is_null(kind):
            raise DataError(
                f"{shown(file)}: column {name!r} has no value, and so no type; write it with the "
                "type that it has in other files"
            )
        if name in sparse and known == "text" and not is_text(kind) and can_be_ids(kind):
            raise DataError(
                f"{shown(file)}: column {name!r} is {kind}, and its ids are read as texts, as in "
                "the first file, or as a profile or schema says; write it as text, as a number "
                "has another key"
            )
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
    """Raise DataError unless a log has the columns, fitting types, and a categorical column."""
    for column in ignore:
        check_column(file, schema, column)
    check_schema(file, schema, columns)
    if not columns.sparse:
        held = [f"{one.column} ({one.why})" for one in columns.decisions] or schema.names
        raise DataError(
            f"{shown(file)} has no categorical column; name those of ids with --sparse (in Python "
            f"sparse=), there are {listed(held, most=10)}"
        )


def written_as_text(schema: pa.Schema) -> pa.Schema:
    """Return a text file's schema with texts for all values, so that any column may be ids.

    Arrow's types are guesses. Values that do not fit are refused when they are read.
    """

    def readable(field: pa.Field) -> pa.Field:
        kind = field.type
        if is_list(kind) and can_be_ids(kind):
            return field.with_type(pa.list_(pa.string()))
        is_value = pa.types.is_primitive(kind) or pa.types.is_null(kind)
        return field.with_type(pa.string()) if is_value else field

    return pa.schema([readable(field) for field in schema])


def single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def flat(schema: pa.Schema) -> pa.Schema:
    """Return a schema with each object replaced by columns for its fields.

    An object stays if a field would have the name of another column. Fields nested deeper than
    `MOST_LEVELS` stay, too.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> flat(pa.schema([("user", user), ("items", pa.list_(user))])).names
    ['user.id', 'user.geo', 'items.id', 'items.geo']
    """
    fields: list[pa.Field] = []
    for field, inner in _unfolding(schema):
        fields += [pa.field(".".join(path), kind) for path, kind in inner] or [field]
    return pa.schema(fields)


def outermost(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """Return the columns of a schema that contain the named columns of its `flat` schema."""
    paths = _paths(schema)
    return list(dict.fromkeys(paths.get(name, (name,))[0] for name in names))


def with_fields(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return names of columns. An object's name is replaced by the names of all its fields.

    >>> with_fields(["user", "day"], ["user.id", "user.geo", "day"])
    ['user.id', 'user.geo', 'day']
    """
    found: list[str] = []
    own = set(columns)
    for name in names:
        inner = [] if name in own else [one for one in columns if one.startswith(f"{name}.")]
        found += inner or [name]
    return found


def pruned(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return a schema with only the columns and fields that `types` names, of these types.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> pruned(pa.schema([("user", user)]), {"user.id": pa.int32()}).field("user").type
    StructType(struct<id: int32>)
    """
    paths = _paths(schema)
    wanted = {paths.get(name, (name,)): kind for name, kind in types.items()}
    held = {path[:count] for path in wanted for count in range(1, len(path) + 1)}
    columns = {field.name: field.type for field in schema}
    names = outermost(list(types), schema)
    return pa.schema([(name, _pruned((name,), columns[name], wanted, held)) for name in names])


def unfolded(batch: pa.RecordBatch | pa.Table, names: Sequence[str]) -> pa.RecordBatch | pa.Table:
    """Return a batch with columns added for names that are fields of objects."""
    own = set(batch.schema.names)
    missing = [name for name in names if name not in own]
    paths = _paths(batch.schema) if missing else {}
    for name in missing:
        if name in paths:
            column, *inner = paths[name]
            batch = batch.append_column(name, _field(single(batch.column(column)), inner))
    return batch


def _paths(schema: pa.Schema) -> dict[str, Path]:
    """Return the path of each column of `flat` that is a field of an object."""
    return {".".join(path): path for _, inner in _unfolding(schema) for path, _ in inner}


def _unfolding(schema: pa.Schema) -> Iterator[tuple[pa.Field, list[tuple[Path, pa.DataType]]]]:
    """Yield a schema's columns, each with the fields that replace it; none if it stays."""
    times = Counter(schema.names)
    taken = set(schema.names)
    for field in schema:
        inner = list(_leaves((field.name,), field.type)) if times[field.name] == 1 else []
        names = {".".join(path) for path, _ in inner}
        if not names.isdisjoint(taken) or len(names) < len(inner):
            inner, names = [], set()
        taken |= names
        yield field, inner


def _leaves(path: Path, kind: pa.DataType) -> Iterator[tuple[Path, pa.DataType]]:
    if len(path) > MOST_LEVELS:
        yield path, kind
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves((*path, field.name), field.type)
    elif is_list(kind) and pa.types.is_struct(kind.value_type):
        for inner, leaf in _leaves(path, kind.value_type):
            yield inner, pa.large_list(leaf)
    else:
        yield path, kind


def _pruned(
    path: Path,
    kind: pa.DataType,
    wanted: Mapping[Path, pa.DataType],
    held: Collection[Path],
    *,
    in_list: bool = False,
) -> pa.DataType:
    """Return a type with only its fields in `held`, and leaves of the types in `wanted`."""
    if path in wanted:
        leaf = wanted[path]
        return leaf.value_type if in_list and is_list(leaf) else leaf
    if is_list(kind):
        return pa.list_(_pruned(path, kind.value_type, wanted, held, in_list=True))
    inner = [(field, (*path, field.name)) for field in kind if (*path, field.name) in held]
    return pa.struct(
        [(one.name, _pruned(own, one.type, wanted, held, in_list=in_list)) for one, own in inner]
    )


def _field(column: pa.Array, path: Sequence[str]) -> pa.Array:
    """Return a field of objects, or of lists of objects."""
    if not path:
        return column
    if is_list(column.type):
        return pa.LargeListArray.from_arrays(list_offsets(column), _field(column.flatten(), path))
    # Use the field's number: dots and slashes in a name would be taken for a path.
    number = column.type.get_field_index(path[0])
    return _field(pc.struct_field(column, [number]), path[1:])
