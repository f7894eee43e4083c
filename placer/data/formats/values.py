"""Turn the values of Arrow columns into keys and numbers."""

import re
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.formats.columns import ARROW_TYPES, single
from placer.data.formats.texts import ELIDED, GROUPED, THOUSANDS, separator_in, split_lists
from placer.data.keys import bags_from_arrow, is_list, is_text, list_offsets
from placer.data.layout import Columns, Decimal, IdType, Missing
from placer.data.log import Bags, Chunk
from placer.data.source import Place, RawBatch
from placer.errors import DataError

_MOST_NULL = 8
"""Suggest --null for texts shorter than this: they may stand for a missing value."""
TRUE = ("1", "true", "True", "TRUE", "t", "T", "yes", "Yes", "YES", "y", "Y")
FALSE = ("0", "false", "False", "FALSE", "f", "F", "no", "No", "NO", "n", "N")
"""Texts of Booleans, in columns that hold nothing else."""
_WHOLE = 1 << 53
"""From here on, float64 cannot represent every whole number."""


def raw_batch(
    batch: pa.RecordBatch | pa.Table, place: Place, columns: Columns, missing: Missing
) -> RawBatch:
    """Return the samples of an Arrow batch, with the columns that are read."""
    features = {}
    for name in columns.sparse:
        ids = _ids(batch, name, columns, place)
        try:
            keys, offsets = bags_from_arrow(ids, missing, columns.layout.nulls)
        except DataError as error:
            raise DataError(
                f"{_where(ids, place)}: {name}: {error}; if it is no id, leave it out "
                f"(--ignore {name})"
            ) from error
        features[name] = Bags(keys.view(np.int64), offsets)
    dense = np.empty((batch.num_rows, len(columns.dense)), dtype=np.float32)
    for position, name in enumerate(columns.dense):
        dense[:, position] = _numbers(batch, name, columns, place)
    labels = None
    if columns.label is not None:
        labels = _numbers(batch, columns.label, columns, place)
    return RawBatch(place, Chunk(batch.num_rows, features, dense, labels))


def _where(ids: pa.Array, place: Place) -> str:
    """Return the place of the longest text, or of the first sample if there are no texts."""
    if not is_text(ids.type) or is_list(ids.type) or pa.types.is_dictionary(ids.type):
        return f"{place.of(0)} and on"
    lengths = pc.fill_null(pc.binary_length(ids), 0).to_numpy(zero_copy_only=False)
    return place.of(int(np.argmax(lengths)))


def _ids(batch: pa.RecordBatch | pa.Table, name: str, columns: Columns, place: Place) -> pa.Array:
    """Return a sparse column as integers, texts, or lists of these."""
    layout = columns.layout
    kind, separator = layout.types[name], (layout.lists or {}).get(name)
    column = single(batch.column(name))
    if separator is not None and not is_list(column.type):
        column = _split(present(column, layout.nulls), name, separator, place)
    if kind == "text" and is_text(column.type):
        return column
    column = _values(column, name, columns, place)
    return _whole(column, name, place) if pa.types.is_floating(column.type) else column


def _split(column: pa.Array, name: str, separator: str, place: Place) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        split = split_lists(column.cast(pa.large_string()), separator)
    except pa.ArrowException as error:
        raise DataError(
            f"{place.of(0)} and on: {name} is no UTF-8 text; write it in UTF-8"
        ) from error
    elided = pc.index(split.values, pa.scalar(ELIDED, split.values.type)).as_py()
    if elided >= 0:
        row = int(np.searchsorted(split.offsets.to_numpy(), elided, side="right")) - 1
        raise DataError(
            f"{place.of(row)}: {name} holds a list that was cut short ({ELIDED}) when it was "
            f"written; write it whole, or leave it out (--ignore {name})"
        )
    return split


def present(column: pa.Array, nulls: Sequence[str]) -> pa.Array:
    """Return a column with null for values that stand for a missing value, in lists too.

    >>> present(pa.array(["NA", "a"]), ["NA"]).to_pylist(), present(pa.array([-1, 2]), ["-1"])[0]
    ([None, 'a'], <pyarrow.Int64Scalar: None>)
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = present(column.dictionary, nulls)
        if values is column.dictionary:
            return column
        return pa.DictionaryArray.from_arrays(column.indices, values)
    if is_list(kind):
        values = column.flatten()
        known = present(values, nulls)
        if known is values:
            return column
        return pa.LargeListArray.from_arrays(list_offsets(column), known)
    if is_text(kind):
        if pa.types.is_string_view(kind) or pa.types.is_fixed_size_binary(kind):
            return present(column.cast(pa.large_binary()), nulls)
        known = pa.array([one.encode() for one in nulls], pa.large_binary()).cast(kind)
    elif pa.types.is_integer(kind):
        least, most = np.iinfo(kind.to_pandas_dtype()).min, np.iinfo(kind.to_pandas_dtype()).max
        whole = [int(one) for one in numbers_among(tuple(nulls)) if one == int(one)]
        known = pa.array([one for one in whole if least <= one <= most], kind)
    elif pa.types.is_floating(kind):
        known = pa.array(numbers_among(tuple(nulls)), pa.float64()).cast(kind)
    else:
        return column
    if not len(known):
        return column
    found = pc.is_in(column, known)
    if not pc.any(found).as_py():
        return column
    return pc.if_else(found, pa.scalar(None, kind), column)


@cache
def numbers_among(nulls: tuple[str, ...]) -> tuple[float, ...]:
    """Return the numbers among the texts that stand for a missing value, such as -1."""
    return tuple(float(one) for one in nulls if re.fullmatch(r"[-+]?[0-9]+(?:\.[0-9]*)?", one))


def _values(column: pa.Array, name: str, columns: Columns, place: Place) -> pa.Array:
    """Return a column with null for missing values, and with texts converted to their type."""
    nulls = columns.layout.nulls
    column = present(column, nulls)
    if is_text(column.type):
        column = present(_parse(column, name, columns, place), nulls)  # Such as 7.0 for 7.
    return column


def _parse(
    column: pa.Array,
    name: str,
    columns: Columns,
    place: Place,
    samples: npt.NDArray[np.int64] | None = None,
) -> pa.Array:
    """Return texts, or lists of texts, as values of the column's type; an empty text is missing."""
    if is_list(column.type):
        offsets = list_offsets(column)
        samples = np.repeat(np.arange(len(column)), np.diff(offsets))
        values = _parse(column.flatten(), name, columns, place, samples)
        return pa.LargeListArray.from_arrays(offsets, values)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind, decimal = columns.layout.types.get(name), columns.layout.decimal or "."
    try:
        return _parsed(column, kind, decimal)
    except pa.ArrowException as error:
        for row in range(len(column)):
            try:
                _parsed(column.slice(row, 1), kind, decimal)
            except pa.ArrowException:
                at = place.of(row if samples is None else int(samples[row]))
                value = column[row].as_py()
                is_label = name == columns.label
                known = kind if name in columns.sparse else None
                raise wrong_value(at, name, value, known, is_label=is_label) from error
        raise


def _parsed(texts: pa.Array, kind: IdType | None, decimal: Decimal) -> pa.Array:
    """Return texts as whole numbers, as true and false, or without a kind as numbers."""
    texts = pc.ascii_trim_whitespace(texts.cast(pa.large_string()))
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    if kind == "boolean":
        words = pc.if_else(pc.is_in(texts, pa.array(TRUE, texts.type)), "true", texts)
        return pc.if_else(pc.is_in(texts, pa.array(FALSE, texts.type)), "false", words).cast(
            pa.bool_()
        )
    if kind is not None:
        # pandas writes ids as 7.0 if some are missing.
        return pc.replace_substring_regex(texts, r"^(-?[0-9]+)\.0*$", r"\1").cast(ARROW_TYPES[kind])
    grouped = pc.match_substring_regex(texts, f"^(?:{GROUPED[decimal]})$")
    bare = pc.replace_substring_regex(texts, THOUSANDS[decimal], "")
    texts = pc.if_else(grouped, bare, texts)
    texts = texts if decimal == "." else pc.replace_substring(texts, ",", ".")
    return texts.cast(pa.float32())


def wrong_value(
    place: str, name: str, value: object, kind: IdType | None, *, is_label: bool = False
) -> DataError:
    """Return an error for an id of another type than its column, or without a kind for a number."""
    what = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if kind is None:
        fix = f"if it stands for a missing value, say so: --null {what!r}"
        if is_label:
            fix = "write 1 and 0, or true and false"
        elif re.fullmatch(r"[-+]?[0-9]*[.,][0-9.,]*", str(what)):
            fix = 'say in a schema what begins decimals: decimal = "," or "."'
        return DataError(f"{place}: {name} is {what!r}, which is not a number; {fix}")
    fix = 'if its ids are texts, say so in a schema: type = "text"'
    between = separator_in(what) if isinstance(what, str) else None
    if between is not None:
        fix = f"if it is a list, say in a schema what separates its ids: separator = {between!r}"
    elif kind == "integer" and re.fullmatch("[0-9]{19,20}", str(what)):
        fix = 'ids from 2^63 on are unsigned; say so in a schema: type = "unsigned"'
    elif not isinstance(what, str):
        fix = "write all values of a column alike, or say in a schema what they are (type)"
    elif len(what) < _MOST_NULL:
        fix += f"; if it stands for a missing value: --null {what}"
    return DataError(
        f"{place}: {name} is {what!r}, and its column was taken for {_CALLED[kind]}; {fix}"
    )


_CALLED: Mapping[IdType, str] = {
    "integer": "integers",
    "unsigned": "integers",
    "boolean": "true and false",
    "text": "texts",
}


def _whole(column: pa.Array, name: str, place: Place) -> pa.Array:
    """Return ids written as floating-point numbers; pandas does so if some are missing."""
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


def _numbers(
    batch: pa.RecordBatch | pa.Table, name: str, columns: Columns, place: Place
) -> npt.NDArray[np.float32]:
    """Return a numeric column, converted from text if needed; NaN for missing values."""
    column = _values(single(batch.column(name)), name, columns, place)
    try:
        values = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise DataError(f"{place.of_all}: column {name!r} is not numeric: {error}") from error
    return np.asarray(values, dtype=np.float32)
