"""Which columns of a log are what."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from placer.data.files.stores import shown
from placer.data.formats.inference import Decision, decide
from placer.data.keys import can_be_ids, is_list, is_text
from placer.data.layout import Layout, NamedColumns
from placer.data.names import NULLS, Decimal, IdType
from placer.errors import DataError
from placer.units import listed

ARROW_TYPES: Mapping[IdType, pa.DataType] = {
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "text": pa.large_binary(),
    "boolean": pa.bool_(),
}
_NOTHING, _NONE_NAMED = Layout(), NamedColumns()


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a log are what."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    label: str | None
    # Of sparse columns, and of booleans among the others.
    types: Mapping[str, IdType] = field(default_factory=dict)
    # Sparse columns of texts that hold several ids, and what separates these.
    lists: Mapping[str, str] = field(default_factory=dict)
    # Texts that stand for a missing value; an empty one always does.
    nulls: tuple[str, ...] = NULLS
    # What begins the decimals of numbers in texts; by default a point.
    decimal: Decimal | None = None
    decisions: tuple[Decision, ...] = ()  # What each column was taken for where nobody said.

    @property
    def names(self) -> list[str]:
        """All of them."""
        label = [] if self.label is None else [self.label]
        return [*label, *self.dense, *self.sparse]

    @property
    def layout(self) -> Layout:
        """What another log of these columns is read by, where its files say all else."""
        return Layout(types=self.types, lists=self.lists, nulls=self.nulls, decimal=self.decimal)

    def is_text(self, name: str) -> bool:
        """Return whether the ids of a sparse column are texts."""
        return self.types[name] == "text"


def infer_columns(
    schema: pa.Schema,
    named: NamedColumns = _NONE_NAMED,
    *,
    sample: pa.Table | None = None,
    layout: Layout = _NOTHING,
) -> Columns:
    """Return which columns are what, where the caller does not say.

    The rules are in `placer.data.formats.inference.decide`; `sample` holds some samples of the
    log, which they look at. Texts are taken for lists only if the layout's `lists` is None; else it
    names all columns of lists.
    """
    lists, nulls = layout.lists, layout.nulls
    decisions = decide(schema, named, sample, layout.nulls)
    roles = {one.column: one.role for one in decisions}

    def of(role: str) -> tuple[str, ...]:
        return tuple(name for name, own in roles.items() if own == role)

    label = named.label if named.label is not None else next(iter(of("label")), None)
    chosen = of("sparse") if named.sparse is None else tuple(named.sparse)
    numbers = of("dense") if named.dense is None else tuple(named.dense)
    separators = {one.column: one.separator for one in decisions if one.separator is not None}
    separators = separators if lists is None else dict(lists)
    sparse_names, found = set(chosen), {one.column: one for one in decisions}
    separators = {name: one for name, one in separators.items() if name in sparse_names}
    known: dict[str, IdType] = {}
    single = set(once(schema.names))
    for name in dict.fromkeys((*chosen, *numbers, *([label] if label else []))):
        if name in single:
            own = id_type(schema.field(name).type)
            if name in sparse_names:
                element = found[name].element if name in separators else None
                known[name] = element or own
            elif own == "boolean":
                known[name] = own
    types = layout.types.items()
    known |= {name: one for name, one in types if name in known or name in sparse_names}
    if lists is not None:
        decisions = tuple(
            _unsplit(one) if one.separator and one.column not in lists else one for one in decisions
        )
    decimal = layout.decimal or next((one.decimal for one in decisions if one.decimal), None)
    return Columns(chosen, numbers, label, known, separators, nulls, decimal, decisions)


def _unsplit(one: Decision) -> Decision:
    """Return what to say of a column of lists that a schema reads as an id each."""
    why = (
        f"its texts look like lists of ids, and each is read as one id; to split them, write "
        f'{{as = "sparse", separator = {json.dumps(one.separator)}}} in the schema'
    )
    return replace(one, why=why, warns=True, separator=None, element=None)


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
        whole = pa.types.is_floating(kind) and columns.types.get(name) == "integer"
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
