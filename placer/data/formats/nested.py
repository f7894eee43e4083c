"""Fields within fields: ``user.id`` of an object ``user``, and ``items.id`` of a list of objects.

Events are logged so, and warehouses export them so. A list of objects is a list of each of their
fields, so that ``items.id`` holds the ids of a bag.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from placer.data.formats.columns import single
from placer.data.keys import is_list, list_offsets

MOST_LEVELS = 32
"""Objects within objects that are looked into."""

Path = tuple[str, ...]
"""A column, a field of it, a field of that, and so on."""


def flat(schema: pa.Schema) -> pa.Schema:
    """Return a schema with a column for each field of its objects, in their place.

    An object with a field that is called like another column is left as it is, and so is what is
    nested deeper than `MOST_LEVELS`.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> flat(pa.schema([("user", user), ("items", pa.list_(user))])).names
    ['user.id', 'user.geo', 'items.id', 'items.geo']
    """
    fields: list[pa.Field] = []
    for field, inner in _unfolding(schema):
        fields += [pa.field(".".join(path), kind) for path, kind in inner] or [field]
    return pa.schema(fields)


def outermost(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """Return the columns of a schema that hold the named ones of `flat`; others as they are."""
    paths = _paths(schema)
    return list(dict.fromkeys(paths.get(name, (name,))[0] for name in names))


def with_fields(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return names of columns; an object's name stands for all that it holds.

    >>> with_fields(["user", "day"], ["user.id", "user.geo", "day"])
    ['user.id', 'user.geo', 'day']
    """
    found: list[str] = []
    own = set(columns)
    inner: dict[str, list[str]] = {}
    for column in columns:
        for end in (place for place, letter in enumerate(column) if letter == "."):
            inner.setdefault(column[:end], []).append(column)
    for name in names:
        found += inner[name] if name in inner and name not in own else [name]
    return found


def pruned(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema's columns that hold those of `types`, each with the named fields.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> pruned(pa.schema([("user", user)]), {"user.id": pa.int32()}).field("user").type
    StructType(struct<id: int32>)
    """
    paths = _paths(schema)
    wanted = {paths.get(name, (name,)): kind for name, kind in types.items()}
    held = {path[:count] for path in wanted for count in range(1, len(path) + 1)}
    fields = []
    for name in outermost(list(types), schema):
        kind = None if (name,) in wanted else schema.field(name).type
        fields.append((name, _pruned((name,), kind, wanted, held)))
    return pa.schema(fields)


def unfolded(batch: pa.RecordBatch | pa.Table, names: Sequence[str]) -> pa.RecordBatch | pa.Table:
    """Return a batch with those of the named columns that objects hold."""
    own = set(batch.schema.names)
    missing = [name for name in names if name not in own]
    paths = _paths(batch.schema) if missing else {}
    for name in missing:
        if name in paths:
            column, *inner = paths[name]
            batch = batch.append_column(name, _field(single(batch.column(column)), inner))
    return batch


def _paths(schema: pa.Schema) -> dict[str, Path]:
    """Return where each column of `flat` is that the schema itself has not."""
    return {".".join(path): path for _, inner in _unfolding(schema) for path, _ in inner}


def _unfolding(schema: pa.Schema) -> Iterator[tuple[pa.Field, list[tuple[Path, pa.DataType]]]]:
    """Yield a schema's columns, each with the fields that stand for it; none if it does itself."""
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
    kind: pa.DataType | None,
    wanted: Mapping[Path, pa.DataType],
    held: Collection[Path],
    *,
    in_list: bool = False,
) -> pa.DataType:
    """Return a type with those of its fields that are in `held`, leaves as `wanted`."""
    if path in wanted:
        leaf = wanted[path]
        return leaf.value_type if in_list and is_list(leaf) else leaf
    assert kind is not None, "a path is of a column, or of what one holds"
    if is_list(kind):
        return pa.list_(_pruned(path, kind.value_type, wanted, held, in_list=True))
    inner = [(field, (*path, field.name)) for field in kind if (*path, field.name) in held]
    return pa.struct(
        [
            (field.name, _pruned(own, field.type, wanted, held, in_list=in_list))
            for field, own in inner
        ]
    )


def _field(column: pa.Array, path: Sequence[str]) -> pa.Array:
    """Return a field of objects, or of lists of objects."""
    if not path:
        return column
    if is_list(column.type):
        return pa.LargeListArray.from_arrays(list_offsets(column), _field(column.flatten(), path))
    # By its number, as dots and slashes in a name would be taken for a path.
    number = column.type.get_field_index(path[0])
    return _field(pc.struct_field(column, [number]), path[1:])
