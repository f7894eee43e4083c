"""Fields within fields: ``user.id`` of an object ``user``, and ``items.id`` of a list of objects.

Events are logged so, and warehouses export them so. A list of objects is a list of each of their
fields, so that ``items.id`` holds the ids of a bag.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.formats.columns import single
from placer.data.keys import is_list

MOST_LEVELS = 32
"""Objects within objects that are looked into."""


def flat(schema: pa.Schema) -> pa.Schema:
    """A schema with a column for each field of its objects, in their place.

    An object with a field that is called like another column is left as it is, and so is what is
    nested deeper than `MOST_LEVELS`.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> flat(pa.schema([("user", user), ("items", pa.list_(user))])).names
    ['user.id', 'user.geo', 'items.id', 'items.geo']
    """
    taken = set(schema.names)
    fields: list[pa.Field] = []
    for field in schema:
        inner = list(_leaves(field.name, field.type))
        names = {name for name, _ in inner}
        is_plain = not names or names == {field.name}
        if is_plain or not names.isdisjoint(taken) or len(names) < len(inner):
            fields.append(field)
            continue
        taken |= names
        fields += [pa.field(name, kind) for name, kind in inner]
    return pa.schema(fields)


def outermost(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """The columns of a schema that hold the named ones of `flat`; others as they are."""
    return list(dict.fromkeys(_holder(name, schema.names) or name for name in names))


def pruned(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns of a schema that hold those of `types`, each with the fields that are named.

    >>> user = pa.struct([("id", pa.int64()), ("geo", pa.string())])
    >>> pruned(pa.schema([("user", user)]), {"user.id": pa.int32()}).field("user").type
    StructType(struct<id: int32>)
    """
    held = {prefix for name in types for prefix in _prefixes(name)}
    fields = []
    for name in outermost(list(types), schema):
        kind = schema.field(name).type if name in schema.names else None
        fields.append((name, _pruned(name, kind, types, held)))
    return pa.schema(fields)


def unfolded(batch: pa.RecordBatch | pa.Table, names: Sequence[str]) -> pa.RecordBatch | pa.Table:
    """A batch with those of the named columns that objects hold."""
    own = batch.schema.names
    for name in names:
        holder = None if name in own else _holder(name, own)
        if holder is not None:
            inner = name.removeprefix(f"{holder}.")
            column = _field(single(batch.column(holder)), inner)
            if column is not None:
                batch = batch.append_column(name, column)
    return batch


def _prefixes(name: str) -> list[str]:
    """The name itself, and the objects that may hold it, the longest first.

    >>> _prefixes("user.geo.country")
    ['user.geo.country', 'user.geo', 'user']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _holder(name: str, columns: Sequence[str]) -> str | None:
    """The column that is called so, or else the object that holds it."""
    return next((prefix for prefix in _prefixes(name) if prefix in columns), None)


def _leaves(name: str, kind: pa.DataType, level: int = 0) -> Iterator[tuple[str, pa.DataType]]:
    if level == MOST_LEVELS:
        yield name, kind
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{name}.{field.name}", field.type, level + 1)
    elif is_list(kind) and pa.types.is_struct(kind.value_type):
        for inner, leaf in _leaves(name, kind.value_type, level + 1):
            yield inner, pa.large_list(leaf)
    else:
        yield name, kind


def _pruned(
    name: str,
    kind: pa.DataType | None,
    types: Mapping[str, pa.DataType],
    held: Collection[str],
    *,
    in_list: bool = False,
) -> pa.DataType:
    """A type with those of its fields that are in `held`, the leaves as in `types`."""
    if name in types:
        wanted = types[name]
        return wanted.value_type if in_list and is_list(wanted) else wanted
    assert kind is not None, "a name is of a column, or of what one holds"
    if is_list(kind):
        return pa.list_(_pruned(name, kind.value_type, types, held, in_list=True))
    inner = {f"{name}.{field.name}": field for field in kind}
    return pa.struct(
        [
            (field.name, _pruned(path, field.type, types, held, in_list=in_list))
            for path, field in inner.items()
            if path in held
        ]
    )


def _field(column: pa.Array, path: str) -> pa.Array | None:
    """A field of objects, or of lists of objects; None where there is none of this path."""
    kind = column.type
    if is_list(kind):
        values = _field(column.flatten(), path)
        if values is None:
            return None
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    if not pa.types.is_struct(kind):
        return None
    name = _holder(path, [field.name for field in kind])
    if name is None:
        return None
    inner = pc.struct_field(column, name)
    return inner if name == path else _field(inner, path.removeprefix(f"{name}."))
