"""Which columns of a log are what, and how their values become keys and numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.files.stores import shown
from placer.data.formats.inference import Decision, decide
from placer.data.keys import bags_from_arrow, can_be_ids, is_list, is_text
from placer.data.layout import Layout
from placer.data.names import NULLS, IdType, Missing
from placer.data.source import RawBags, RawBatch
from placer.errors import DataError

ARROW_TYPES: Mapping[IdType, pa.DataType] = {
    "integer": pa.int64(),
    "unsigned": pa.uint64(),
    "text": pa.large_binary(),
    "boolean": pa.bool_(),
}
_WHOLE = 1 << 53
"""Beyond it, floating-point numbers no longer tell neighbouring whole numbers apart."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a log are what.

    Attributes
    ----------
    sparse, dense : tuple of str
    label : str or None
    types : mapping of column name to IdType
        Of sparse columns, and of booleans among the others.
    lists : mapping of column name to str
        Sparse columns of texts that hold several ids, and what separates these.
    decisions : tuple of Decision
        What each column was taken for where nobody said.
    """

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    label: str | None
    types: Mapping[str, IdType] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @property
    def names(self) -> list[str]:
        """All of them."""
        label = [] if self.label is None else [self.label]
        return [*label, *self.dense, *self.sparse]

    @property
    def layout(self) -> Layout:
        """What another log of these columns is read by, where its files say all else."""
        return Layout(types=self.types, lists=self.lists)

    def is_text(self, name: str) -> bool:
        """Whether the ids of a sparse column are texts."""
        return self.types[name] == "text"


def infer_columns(
    schema: pa.Schema,
    sparse: Sequence[str] | None = None,
    dense: Sequence[str] | None = None,
    label: str | None = None,
    ignore: Sequence[str] = (),
    *,
    sample: pa.Table | None = None,
    types: Mapping[str, IdType] | None = None,
    lists: Mapping[str, str] | None = None,
) -> Columns:
    """Which columns are what, where the caller does not say.

    The rules are in `placer.data.formats.inference.decide`; `sample` holds some samples of the
    log, which they look at. Texts are taken for lists only if `lists` is None; else it names all
    columns of lists.
    """
    decisions = decide(schema, sample, sparse, dense, label, ignore)
    roles = {one.column: one.role for one in decisions}

    def of(role: str) -> tuple[str, ...]:
        return tuple(name for name, own in roles.items() if own == role)

    label = label if label is not None else next(iter(of("label")), None)
    chosen = of("sparse") if sparse is None else tuple(sparse)
    numbers = of("dense") if dense is None else tuple(dense)
    separators = {one.column: one.separator for one in decisions if one.separator is not None}
    separators = separators if lists is None else dict(lists)
    separators = {name: one for name, one in separators.items() if name in chosen}
    known: dict[str, IdType] = {}
    for name in dict.fromkeys((*chosen, *numbers, *([label] if label else []))):
        if schema.names.count(name) == 1:
            own = id_type(schema.field(name).type)
            if name in chosen:
                element = next((one.element for one in decisions if one.column == name), None)
                known[name] = (element or "text") if name in separators else own
            elif own == "boolean":
                known[name] = own
    known |= {name: one for name, one in (types or {}).items() if name in known or name in chosen}
    return Columns(chosen, numbers, label, known, separators, decisions)


def id_type(kind: pa.DataType) -> IdType:
    """How ids of an Arrow type, or of lists of it, are read."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return id_type(kind.value_type)
    if is_text(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "boolean"
    return "unsigned" if pa.types.is_uint64(kind) else "integer"


def once(names: Sequence[str]) -> list[str]:
    """The names that are there once; `check_column` says which of the others is needed.

    >>> once(["a", "b", "a"])
    ['b']
    """
    times = Counter(names)
    return [name for name in names if times[name] == 1]


def check_column(file: str, schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column that must be there once.

    Raises
    ------
    DataError
        If it is not.
    """
    if schema.names.count(name) != 1:
        count = "no" if name not in schema.names else "more than one"
        raise DataError(
            f"{shown(file)} has {count} column {name!r}; it has {', '.join(schema.names)}"
        )
    return schema.field(name).type


def check_schema(file: str, schema: pa.Schema, columns: Columns) -> None:
    """Check that a file has the columns, of types that fit what they are read as.

    Raises
    ------
    DataError
        Names the column that is missing or does not fit.
    """
    for name in columns.names:
        kind = check_column(file, schema, name)
        whole = pa.types.is_floating(kind) and columns.types.get(name) == "integer"
        if name in columns.sparse and not can_be_ids(kind) and not whole:
            raise DataError(
                f"{shown(file)}: column {name!r} is {kind}, which cannot hold ids; "
                "ids are integers, texts or lists of them"
            )
        if name not in columns.sparse and is_list(kind):
            raise DataError(f"{shown(file)}: column {name!r} is {kind}, but should hold one number")


def check_columns(
    file: str, schema: pa.Schema, columns: Columns, ignore: Sequence[str] = ()
) -> None:
    """Check that a log has the columns, of types that fit, and one to count.

    Raises
    ------
    DataError
        Names the column that is missing or does not fit.
    """
    for column in ignore:
        check_column(file, schema, column)
    check_schema(file, schema, columns)
    if not columns.sparse:
        raise DataError(
            f"{shown(file)} has no categorical column; name them with sparse=, "
            f"there are {', '.join(schema.names)}"
        )


def written_as_text(schema: pa.Schema) -> pa.Schema:
    """The columns of a text file as ids could be read from them.

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


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the samples of a batch are; see `RawBatch`."""

    file: str
    first: int
    unit: str = "row"
    lines: npt.NDArray[np.int64] | None = None

    def of(self, sample: int) -> str:
        """Where one of them is, for a message."""
        place = self.first + sample if self.lines is None else int(self.lines[sample])
        return f"{shown(self.file)}, {self.unit} {place}"


def raw_batch(
    batch: pa.RecordBatch | pa.Table, place: Place, columns: Columns, missing: Missing
) -> RawBatch:
    """The samples of a batch of Arrow's, from the columns that are read.

    Raises
    ------
    DataError
        If a value does not fit; the message names its place.
    """
    features = {}
    for name in columns.sparse:
        ids = _ids(batch, name, columns, place)
        try:
            keys, offsets = bags_from_arrow(ids, missing)
        except DataError as error:
            raise DataError(
                f"{_where(ids, place)}: {name}: {error}; if it is no id, leave it out "
                f"(--ignore {name})"
            ) from error
        features[name] = RawBags(keys, offsets)
    dense = np.empty((batch.num_rows, len(columns.dense)), dtype=np.float32)
    for position, name in enumerate(columns.dense):
        dense[:, position] = _numbers(single(batch.column(name)), name, place)
    labels = None
    if columns.label is not None:
        labels = _numbers(single(batch.column(columns.label)), columns.label, place)
    samples, at = batch.num_rows, place
    return RawBatch(at.file, at.first, at.unit, samples, features, dense, labels, at.lines)


def _where(ids: pa.Array, place: Place) -> str:
    """The sample with the longest text, or the first."""
    if not is_text(ids.type) or is_list(ids.type) or pa.types.is_dictionary(ids.type):
        return f"{place.of(0)} and on"
    lengths = pc.fill_null(pc.binary_length(ids), 0).to_numpy(zero_copy_only=False)
    return place.of(int(np.argmax(lengths)))


def single(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _ids(batch: pa.RecordBatch | pa.Table, name: str, columns: Columns, place: Place) -> pa.Array:
    """A sparse column as integers, texts, or lists of these."""
    column, kind = single(batch.column(name)), columns.types[name]
    if name in columns.lists and not is_list(column.type):
        return _split(column, name, columns.lists[name], kind, place)
    if kind != "text" and is_text(column.type) and not is_list(column.type):
        return _integers(column, name, kind, place)
    if pa.types.is_floating(column.type):
        return _whole(column, name, place)
    return column


def _split(column: pa.Array, name: str, separator: str, kind: IdType, place: Place) -> pa.Array:
    """Lists that texts hold; brackets around one, blanks and quotes around its ids are no part."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        texts = pc.ascii_trim(column.cast(pa.large_string()), "[]() ")
    except pa.ArrowException as error:
        raise DataError(f"{place.of(0)} and on: {name} is no UTF-8 text") from error
    if pc.any(pc.starts_with(texts, "{")).as_py():  # A list of PostgreSQL's.
        texts = pc.replace_substring_regex(texts, r"^\{([^{}]*)\}$", r"\1")
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    if kind != "text":
        texts = _without_nulls(texts)
    split = pc.split_pattern(texts, separator)
    elements = pc.ascii_trim(split.flatten(), " '\"")
    if kind != "text":
        lengths = pc.fill_null(pc.list_value_length(split), 0).to_numpy(zero_copy_only=False)
        samples = np.repeat(np.arange(lengths.size), lengths)
        elements = _integers(_without_nulls(elements), name, kind, place, samples)
    offsets = split.offsets if split.null_count == 0 else _offsets(split)
    return pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), elements)


def _without_nulls(texts: pa.Array) -> pa.Array:
    """Texts that should be numbers; those that stand for a missing one are missing."""
    null = pc.is_in(texts, pa.array(list(NULLS), texts.type))
    return pc.if_else(null, pa.scalar(None, texts.type), texts)


def _offsets(lists: pa.Array) -> pa.Array:
    """Offsets of lists' elements, that of a missing list empty."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())


def _integers(
    column: pa.Array,
    name: str,
    kind: IdType,
    place: Place,
    samples: npt.NDArray[np.int64] | None = None,
) -> pa.Array:
    """Texts as whole numbers; an empty one is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        texts = column.cast(pa.large_string())
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
        return texts.cast(ARROW_TYPES[kind])
    except pa.ArrowException as error:
        for row, value in enumerate(column.to_pylist()):
            try:
                pa.array([value.decode() if isinstance(value, bytes) else value or None]).cast(
                    ARROW_TYPES[kind]
                )
            except (pa.ArrowException, UnicodeDecodeError):
                row = row if samples is None else int(samples[row])
                raise wrong_id(place.of(row), name, value, kind) from error
        raise


def wrong_id(place: str, name: str, value: object, kind: IdType) -> DataError:
    """What to say of an id of another type than its column's."""
    what = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return DataError(
        f"{place}: {name} is {what!r}, and its column was taken for {_CALLED[kind]}; if its ids "
        'are texts, say so in a schema: type = "text"'
    )


_CALLED: Mapping[IdType, str] = {
    "integer": "integers",
    "unsigned": "integers",
    "boolean": "true and false",
    "text": "texts",
}


def _whole(column: pa.Array, name: str, place: Place) -> pa.Array:
    """Ids that were written as floating-point numbers, as pandas does where some are missing."""
    numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    missing = np.isnan(numbers)
    with np.errstate(invalid="ignore"):
        wrong = ~missing & ((numbers != np.floor(numbers)) | (np.abs(numbers) >= _WHOLE))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{place.of(row)}: {name} is {numbers[row]:.17g}, which is no id; "
            "ids are whole numbers below 2^53 where they are written as floating-point numbers"
        )
    numbers[missing] = 0
    return pa.array(numbers.astype(np.int64), mask=missing)


def _numbers(column: pa.Array, name: str, place: Place) -> npt.NDArray[np.float32]:
    """A numeric column, which may be written as text; NaN where a value is missing."""
    try:
        if is_text(column.type):
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            column = pc.replace_with_mask(
                column, pc.equal(pc.binary_length(column), 0), pa.scalar(None, column.type)
            )
        values = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{shown(place.file)}, from {place.unit} {place.first} on: column {name!r} is not "
            f"numeric: {reason}"
        ) from error
    return np.asarray(values, dtype=np.float32)
