"""What the columns of a log are taken for where nobody says, and why."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.formats.prose import no_ids
from placer.data.keys import can_be_ids, is_list, is_text, is_whole_decimal
from placer.data.names import CATEGORIES, DENSE, NULLS, IdType

Role = Literal["label", "sparse", "dense", "ignore"]

PARTITION = b"placer.partition"
"""Metadata of a field whose values the names of folders hold."""
_LABEL_NAMES = ("label", "click", "clicked", "target", "is_click", "is_clicked", "clk")
_TIME_WORDS = ("time", "date", "stamp", "_at", "_ts", "created", "updated")
_FIRST_YEAR, _LAST_YEAR = 2000, 2050
_TIME_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_PLAIN_SEPARATORS = ("\x01", "\x02", "\x03", "|", "^")
"""They separate ids and nothing else. The first three are Hive's, the outermost first."""
_SEPARATORS = (*_PLAIN_SEPARATORS, ";", ",", " ")
_CODE = re.compile(r"[A-Za-z_]{0,8}[0-9]+(?:[-_][0-9]+)?")
"""What a word between blanks has to be, such as N412 or N412-0, so that it is an id."""
_WRITTEN_TIME = re.compile(
    r"(?:[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}(?::[0-9.]+)?(?: ?[AP]M)?)?"
)
_CALENDAR = re.compile(
    r"(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:[0-9]{2}){0,3}(?:[0-9]{3})?"
)
"""A date such as 20230501, and a time of the day behind it."""
_TIME_NAME = re.compile(r"timestamp|(?:^|[\W_])(?:time|date|datetime|ts)(?:$|[\W_])")
_LEAST_RISING = 20
"""Samples from which on it is no accident that values never fall."""
_MOST_SHOWN = 80
"""Characters of a type in a message."""
_LEAST_SAMPLES = 1000
"""Samples from which on a column whose values all differ may name the samples."""
_LEAST_SHARE = 0.05
"""Share of a column's texts that hold a separator, from which on they are lists."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a column was taken for.

    Attributes
    ----------
    column : str
    role : {"label", "sparse", "dense", "ignore"}
    why : str
    warns : bool
        Whether the user should hear of it.
    separator : str or None
        Of the ids in a column of texts that are lists.
    element : str or None
        How these ids are read.
    has_two_values : bool
        Whether a label could be meant: it holds 0 and 1, -1 and 1, or true and false.
    """

    column: str
    role: Role
    why: str
    warns: bool = False
    separator: str | None = None
    element: IdType | None = None
    has_two_values: bool = False


def decide(
    schema: pa.Schema,
    sample: pa.Table | None = None,
    sparse: Sequence[str] | None = None,
    dense: Sequence[str] | None = None,
    label: str | None = None,
    ignore: Sequence[str] = (),
) -> tuple[Decision, ...]:
    """What each column is taken for, in the schema's order.

    The label is the column called label, click, clicked, target, is_click, is_clicked or clk. A
    schema with Criteo's columns I1..I13 and C1..C26 has these alone. Otherwise texts, integers,
    booleans and lists of them are categorical, and floating-point numbers are numeric. Times,
    values of other types, columns without a value, and a column ``id`` whose values all differ are
    left out. Texts such as ``12|7|9`` are lists.

    Parameters
    ----------
    schema : pyarrow.Schema
    sample : pyarrow.Table, optional
        Some samples of the log.
    sparse, dense, label, ignore
        What somebody said: `sparse` and `dense` name all columns of their role.
    """
    names = list(dict.fromkeys(schema.names))
    is_criteo = set(names).issuperset((*DENSE, *CATEGORIES))
    if label is None:
        taken = {*ignore, *(sparse or ()), *(dense or ())}
        label = next((n for n in names if n.lower() in _LABEL_NAMES and n not in taken), None)
        why_label = f"it is called {label}"
    else:
        why_label = "it was named"
    found = []
    for name in names:
        role: Role | None = None
        if name == label:
            role, why = "label", why_label
        elif name in ignore:
            role, why = "ignore", "it was named"
        elif sparse is not None and name in sparse:
            role, why = "sparse", "it was named"
        elif dense is not None and name in dense:
            role, why = "dense", "it was named"
        elif is_criteo:
            role = "sparse" if name in CATEGORIES else "dense" if name in DENSE else "ignore"
            why = "the log has Criteo's columns"
        if role is not None and (role == "ignore" or name not in (sparse or ())):
            found.append(Decision(name, role, why, warns=role == "ignore" and name not in ignore))
            continue
        if schema.names.count(name) > 1:  # Refused as soon as its type is wanted.
            found.append(Decision(name, role or "sparse", "it is there more than once"))
            continue
        if role is None and (schema.field(name).metadata or {}).get(PARTITION):
            found.append(Decision(name, "ignore", "names of folders hold it", warns=True))
            continue
        column = None if sample is None else sample.column(name).drop_null()
        guess = _guess(name, schema.field(name).type, column, 0 if sample is None else len(sample))
        if role == "sparse":
            # Named by somebody, yet its texts may be lists.
            lists = {"separator": guess.separator, "element": guess.element}
            guess = Decision(name, "sparse", why, **lists)  # type: ignore[arg-type]
        elif (guess.role == "sparse" and sparse is not None) or (
            guess.role == "dense" and dense is not None
        ):
            guess = Decision(name, "ignore", "it was not named", warns=True)
        found.append(replace(guess, has_two_values=_has_two_values(column)))
    return tuple(found)


def _guess(name: str, kind: pa.DataType, column: pa.ChunkedArray | None, samples: int) -> Decision:
    """What a column is taken for by its type and some values, without missing ones."""
    if pa.types.is_null(kind):
        why = f"it has no value in the first {samples:,} samples"
        return Decision(name, "ignore", why, warns=True)
    if pa.types.is_temporal(kind):
        return Decision(name, "ignore", "it holds times", warns=True)
    if is_whole_decimal(kind) and column is not None and len(column):
        with contextlib.suppress(pa.ArrowInvalid):
            kind, column = pa.int64(), column.cast(pa.int64())
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale):
        return _guess_number(name, kind, column)
    if not can_be_ids(kind):
        return Decision(name, "ignore", f"{_shown(kind)} is neither an id nor a number", warns=True)
    if is_list(kind):
        times = None if column is None else _times_in_lists(name, column)
        if times is not None:
            return Decision(name, "ignore", times, warns=True)
        return Decision(name, "sparse", "it holds lists of ids")
    if pa.types.is_dictionary(kind) or column is None or not len(column):
        return Decision(name, "sparse", "it holds texts" if is_text(kind) else f"it holds {kind}")
    if is_text(kind):
        return _guess_text(name, column)
    if pa.types.is_boolean(kind):
        return Decision(name, "sparse", "it holds true and false")
    times = _times(name, column)
    if times is not None:
        return Decision(name, "ignore", times, warns=True)
    distinct = len(column.unique())
    span = pc.min_max(column).as_py()
    why = f"integers from {span['min']} to {span['max']}, {distinct:,} distinct in {samples:,}"
    return _unless_it_names_samples(Decision(name, "sparse", why), column, distinct)


def _shown(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _guess_number(name: str, kind: pa.DataType, column: pa.ChunkedArray | None) -> Decision:
    if column is not None and pa.types.is_floating(kind) and len(column):
        values = column.to_numpy().astype(np.float64)
        values = values[np.isfinite(values)]
        whole = bool(values.size) and bool((values == np.floor(values)).all())
        named = name.lower() in ("id", "user", "item") or name.lower().endswith(("id", "_key"))
        if whole and values.min() >= 0 and (named or values.max() >= 1 << 24):
            why = (
                f"numbers, but whole ones up to {values.max():.0f}: if they are ids that were "
                "written as floating-point numbers, make it sparse"
            )
            return Decision(name, "dense", why, warns=True)
    return Decision(name, "dense", "it holds numbers")


def _guess_text(name: str, column: pa.ChunkedArray) -> Decision:
    column = pc.cast(column, pa.binary())
    column = column.filter(pc.greater(pc.binary_length(column), 0))
    distinct = len(column.unique())
    texts = [text.decode("utf-8", "replace") for text in column.slice(0, 200).to_pylist()]
    if _are_written_times(name, texts):
        return Decision(name, "ignore", "it holds times", warns=True)
    other = no_ids(texts, distinct / max(len(column), 1))
    if other is not None:
        return Decision(name, "ignore", other, warns=True)
    separator, element = _list_separator(column)
    if separator is not None:
        why = f"texts of {element} ids between {separator!r}"
        return Decision(name, "sparse", why, separator=separator, element=element)
    why = f"texts, {distinct:,} distinct in {len(column):,}"
    return _unless_it_names_samples(Decision(name, "sparse", why), column, distinct)


def _unless_it_names_samples(guess: Decision, column: pa.ChunkedArray, distinct: int) -> Decision:
    """A column in which no value comes twice is no feature to learn from."""
    if len(column) < _LEAST_SAMPLES or distinct < len(column):
        return guess
    why = f"no value comes twice in the first {distinct:,} samples"
    if guess.column.lower() in ("id", "sample_id", "row_id", "index", ""):
        return Decision(guess.column, "ignore", why, warns=True)
    return Decision(guess.column, "sparse", f"{why}; leave it out if it names samples", warns=True)


def _is_named_time(name: str) -> bool:
    called = f"_{name.lower()}".replace(".", "_")
    return any(word in called for word in _TIME_WORDS)


def _times_in_lists(name: str, column: pa.ChunkedArray) -> str | None:
    """Why the integers of lists are times, if they are and are called so."""
    if not pa.types.is_integer(column.type.value_type) or not _is_named_time(name):
        return None
    return _times(name, pc.list_flatten(column).drop_null(), rises=False)


def _times(name: str, column: pa.ChunkedArray, *, rises: bool = True) -> str | None:
    """Why integers are times, if they are: of this century, and called so or never falling."""
    values = column.to_numpy()
    if values.size < 2 or values.dtype.kind not in "iu":
        return None
    least, most = int(values.min()), int(values.max())
    is_named = _is_named_time(name)
    rises = rises and least < most and bool((values[1:] >= values[:-1]).all())
    if is_named and all(_CALENDAR.fullmatch(str(value)) for value in values[:1000].tolist()):
        return "it looks like dates"
    for unit, scale in _TIME_UNITS.items():
        first, last = (
            int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * scale
            for year in (_FIRST_YEAR, _LAST_YEAR)
        )
        if first <= least and most < last and (is_named or rises):
            day = datetime.fromtimestamp(most // scale, UTC).date()
            return f"it looks like times in {unit}, up to {day}"
    if (
        _TIME_NAME.search(name.lower())
        and rises
        and 2 * len(column.unique()) > len(column) > _LEAST_RISING
    ):
        return "it is called a time, and never falls"
    return None


def _are_written_times(name: str, texts: Sequence[str]) -> bool:
    """Whether texts are dates, with or without a time of the day, that Arrow does not read."""
    if not texts:
        return False
    if _is_named_time(name) and all(_CALENDAR.fullmatch(text) for text in texts):
        return True
    return all(_WRITTEN_TIME.fullmatch(text) for text in texts)


def _has_two_values(column: pa.ChunkedArray | None) -> bool:
    kind = None if column is None else column.type
    if kind is None or not any(
        is_kind(kind)
        for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    ):
        return False
    values = {float(value) for value in pc.unique(column).to_pylist()[:3]}
    return values in ({0.0, 1.0}, {-1.0, 1.0})


def _unbraced(text: str) -> str:
    """A list of PostgreSQL's without its braces."""
    is_braced = text[:1] == "{" and text[-1:] == "}" and text.count("{") == text.count("}") == 1
    return text[1:-1] if is_braced else text


def _list_separator(column: pa.ChunkedArray) -> tuple[str | None, IdType | None]:
    """What separates the ids of texts that are lists, and how these are read; else None."""
    values = column.slice(0, 2000).to_pylist()
    together = b"".join(values)
    separators = [one for one in _SEPARATORS if one.encode() in together]
    if not separators:
        return None, None
    try:
        texts = [text.decode() for text in values]
    except UnicodeDecodeError:
        return None, None
    if not texts:
        return None, None
    bracketed = sum(text[:1] == "[" and text[-1:] == "]" for text in texts) > len(texts) / 2
    texts = [_unbraced(text).strip("[]() ") for text in texts]
    for separator in separators:
        holding = sum(separator in text for text in texts)
        if holding < max(1, _LEAST_SHARE * len(texts)):
            continue
        ids = [one.strip(" '\"") for text in texts if text for one in text.split(separator)]
        whole = all(
            one.isascii() and one.removeprefix("-").isdigit() for one in ids if one not in NULLS
        )
        padded = any(len(one) > 1 and one[0] == "0" for one in ids)
        if whole and not padded:
            return separator, "integer"
        # Words of a phrase are separated too: ids are many times fewer than what they make.
        plain = separator in _PLAIN_SEPARATORS or bracketed
        if separator == " ":
            plain = all(_CODE.fullmatch(one) for one in ids if one)
        elif not plain:
            plain = len(set(ids)) < 0.5 * len(set(texts))
        if plain:
            return separator, "text"
    return None, None
