"""Infer the roles of a log's columns that nobody named, with reasons."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.formats.columns import id_type, once
from placer.data.formats.texts import decimal_of, find_lists, no_ids, prose
from placer.data.keys import can_be_ids, is_list, is_text, is_whole_decimal
from placer.data.layout import (
    CATEGORIES,
    DENSE,
    Columns,
    Decision,
    IdType,
    Layout,
    NamedColumns,
    Role,
)

_NOTHING, _NONE_NAMED = Layout(), NamedColumns()
PARTITION = b"placer.partition"
"""Metadata key that marks a partition column, with values in the names of folders."""
_LABEL_NAMES = ("label", "click", "clicked", "target", "is_click", "is_clicked", "clk")
_TIME_WORDS = ("time", "date", "stamp", "_at", "_ts", "created", "updated")
_FIRST_TIME, _LAST_TIME = 946_684_800, 2_524_608_000
"""The years 2000 and 2050, in seconds since 1970."""
_TIME_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_WRITTEN_TIME = re.compile(
    r"(?:[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}(?::[0-9.]+)?(?: ?[AP]M)?)?"
)
_CALENDAR = re.compile(
    r"(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:[0-9]{2}){0,3}(?:[0-9]{3})?"
)
"""A date such as 20230501, maybe followed by a time of day."""
_TIME_NAME = re.compile(r"timestamp|(?:^|[\W_])(?:time|date|datetime|ts)(?:$|[\W_])")
_INDEX = re.compile(r"__index_level_[0-9]+__|Unnamed: [0-9]+|")
"""Names that pandas and R give to a column of row numbers."""
_LEAST_RISING = 20
"""With more samples than this, values that never fall are no accident."""
_MOST_SHOWN = 80
"""Most characters of a type in a message."""
_LEAST_SAMPLES = 1000
"""From this many samples on, a column with only distinct values may identify samples."""
_DOUBTFUL = ("NA", "None")
"""Texts for missing values that may be ids: NA is Namibia."""
_PAIR = re.compile("[0-9]+,[0-9]+")
_MOST_LOOKED_AT = 2000
"""Number of a column's texts to check for lists."""
_FEW = 0.25
"""With fewer lists among texts, a note says so: a separator may be part of an id."""
_DIGITS = r"^[^a-df-zA-DF-Z\[({]*$"
"""Matches texts of characters that numbers have, with any thousands separators."""


def infer_columns(
    schema: pa.Schema,
    named: NamedColumns = _NONE_NAMED,
    *,
    sample: pa.Table | None = None,
    layout: Layout = _NOTHING,
) -> Columns:
    """Return the roles of columns, and the layout with the types of their values.

    If the label is not named, it is a column called label, click, clicked, target, is_click,
    is_clicked or clk. If a schema has Criteo's columns I1..I13 and C1..C26, only these are read.
    Otherwise texts, integers, booleans and lists of them are categorical, and floating-point
    numbers are numeric. Times, other types, columns without values, and a column ``id`` with all
    values distinct are left out. The rules look at `sample`, some samples of the log.

    Texts such as ``12|7|9`` are taken for lists only if the layout's `lists` is None. Otherwise
    `lists` names all columns of lists.
    """
    decisions = _decide(schema, named, sample, layout.nulls)
    found = {one.column: one for one in decisions}

    def of(role: Role) -> tuple[str, ...]:
        return tuple(one.column for one in decisions if one.role == role)

    sparse = of("sparse") if named.sparse is None else tuple(named.sparse)
    dense = of("dense") if named.dense is None else tuple(named.dense)
    label = named.label if named.label is not None else next(iter(of("label")), None)
    ids, single = set(sparse), set(once(schema.names))
    lists = layout.lists
    if lists is None:
        lists = {one.column: one.separator for one in decisions if one.separator is not None}
    else:
        decisions = tuple(
            _unsplit(one) if one.separator and one.column not in lists else one for one in decisions
        )
    lists = {name: one for name, one in lists.items() if name in ids}
    types: dict[str, IdType] = {}
    for name in dict.fromkeys((*sparse, *dense, *([label] if label else []))):
        own = id_type(schema.field(name).type) if name in single else None
        if own and name in ids:
            types[name] = (found[name].element if name in lists else None) or own
        elif own == "boolean":
            types[name] = own
    types |= {name: one for name, one in layout.types.items() if name in types or name in ids}
    decimal = layout.decimal or next((one.decimal for one in decisions if one.decimal), None)
    layout = replace(layout, types=types, lists=lists, decimal=decimal)
    return Columns(sparse, dense, label, layout, decisions)


def _unsplit(one: Decision) -> Decision:
    """Return the decision on a column of lists that a schema reads as one id each."""
    why = (
        f"its texts look like lists of ids, and each is read as one id; to split them, write "
        f'{{as = "sparse", separator = {json.dumps(one.separator)}}} in the schema'
    )
    return replace(one, why=why, warns=True, separator=None, element=None)


def _decide(
    schema: pa.Schema, said: NamedColumns, sample: pa.Table | None, nulls: Sequence[str]
) -> tuple[Decision, ...]:
    times, ignored, sparse_names = Counter(schema.names), set(said.ignore), set(said.sparse or ())
    named: dict[str, Role] = dict.fromkeys(said.dense or (), "dense")
    named |= dict.fromkeys(sparse_names, "sparse")
    named |= dict.fromkeys(said.ignore, "ignore")
    is_criteo = set(times).issuperset((*DENSE, *CATEGORIES))
    label, called = said.label, said.label is None
    if label is None:
        label = next((n for n in times if n.lower() in _LABEL_NAMES and n not in named), None)
    found = []
    for name in times:
        role, why = named.get(name), "it was named"
        if name == label:
            role, why = "label", f"it is called {label}" if called else why
        elif role is None and is_criteo:
            role = "sparse" if name in CATEGORIES else "dense" if name in DENSE else "ignore"
            why = "the log has Criteo's columns"
        if role == "ignore" or (role is not None and name not in sparse_names):
            found.append(Decision(name, role, why, warns=role == "ignore" and name not in ignored))
            continue
        if times[name] > 1:  # Refused when its type is needed.
            found.append(Decision(name, role or "sparse", "it is there more than once"))
            continue
        if role is None and (schema.field(name).metadata or {}).get(PARTITION):
            found.append(Decision(name, "ignore", "names of folders hold it", warns=True))
            continue
        kind = schema.field(name).type
        column = None if sample is None else _present(sample.column(name), nulls)
        if column is not None and pa.types.is_dictionary(kind) and is_text(kind):
            kind = column.type
        if role == "sparse":
            # A named column's texts may be lists, too.
            guess = _named(Decision(name, "sparse", why), kind, column, nulls)
        else:
            guess = _guess(name, kind, column, 0 if sample is None else len(sample), nulls)
            if (guess.role == "sparse" and said.sparse is not None) or (
                guess.role == "dense" and said.dense is not None
            ):
                guess = Decision(name, "ignore", "it was not named", warns=True)
        if guess.role == "sparse" and sample is not None and is_text(kind) and not is_list(kind):
            texts = _decoded(sample.column(name)).cast(pa.large_binary())
            for mark in _DOUBTFUL:
                if mark in nulls and pc.any(pc.equal(texts, mark.encode())).as_py():
                    why = f"{guess.why}; {mark} is no id but a missing value (else give --null)"
                    guess = replace(guess, why=why, warns=True)
        found.append(replace(guess, has_two_values=_has_two_values(column)))
    return tuple(found)


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts without a dictionary. Arrow decodes only some types, so cast texts first."""
    if pa.types.is_fixed_size_binary(column.type):
        return column.cast(pa.large_binary())
    if not pa.types.is_dictionary(column.type):
        return column
    texts = [one.dictionary.cast(pa.large_binary()).take(one.indices) for one in column.chunks]
    return pa.chunked_array(texts, pa.large_binary())


def _present(column: pa.ChunkedArray, nulls: Sequence[str]) -> pa.ChunkedArray:
    """Return the values of a column without missing ones; `nulls` are missing texts."""
    if is_list(column.type) or not is_text(column.type):
        return column.drop_null()
    column = _decoded(column).drop_null()
    missing = pa.array([one.encode() for one in nulls], pa.large_binary()).cast(column.type)
    return column.filter(pc.invert(pc.is_in(column, missing)))


def _named(
    known: Decision, kind: pa.DataType, column: pa.ChunkedArray | None, nulls: Sequence[str]
) -> Decision:
    """Return the decision on a named column of ids, with a separator if its texts are lists."""
    if column is None or not is_text(kind) or is_list(kind) or pa.types.is_dictionary(kind):
        return known
    texts = _texts(column.slice(0, _MOST_LOOKED_AT))
    lists = find_lists(texts, nulls)
    if lists is not None:
        return replace(known, separator=lists[0], element=lists[1] or "text")
    return _read_as_one(known, texts, ",; ")


def _read_as_one(known: Decision, texts: list[str], separators: Iterable[str]) -> Decision:
    """Note that texts may be lists if most have one of the separators."""
    for between in separators:
        several = [text for text in texts if between in text]
        if len(several) * 2 > len(texts):
            why = (
                f"its texts, such as {several[0]!r}, are read as one id each; if they are lists of "
                f"ids, say in a schema what is between them: separator = {between!r}"
            )
            return replace(known, why=why, warns=True)
    return known


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Return the texts of a column that are not empty."""
    texts = pc.cast(column, pa.binary())
    texts = texts.filter(pc.greater(pc.binary_length(texts), 0))
    return [text.decode("utf-8", "replace") for text in texts.to_pylist()]


def _guess(
    name: str, kind: pa.DataType, column: pa.ChunkedArray | None, samples: int, nulls: Sequence[str]
) -> Decision:
    """Return the decision on a column by its type and by some values that are not missing."""
    if pa.types.is_null(kind.value_type if is_list(kind) else kind):
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
        text = str(kind)
        text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        return Decision(name, "ignore", f"{text} is neither an id nor a number", warns=True)
    if is_list(kind):
        times = None
        if column is not None and pa.types.is_integer(kind.value_type) and _is_named_time(name):
            times = _times(name, pc.list_flatten(column).drop_null(), rises=False)
        if times is not None:
            return Decision(name, "ignore", times, warns=True)
        return Decision(name, "sparse", "it holds lists of ids")
    if pa.types.is_dictionary(kind) or column is None or not len(column):
        return Decision(name, "sparse", "it holds texts" if is_text(kind) else f"it holds {kind}")
    if is_text(kind):
        return _guess_text(name, column, nulls)
    if pa.types.is_boolean(kind):
        return Decision(name, "sparse", "it holds true and false")
    if _INDEX.fullmatch(name):
        return Decision(name, "ignore", "it is an index, as pandas writes it", warns=True)
    times = _times(name, column)
    if times is not None:
        return Decision(name, "ignore", times, warns=True)
    distinct = len(column.unique())
    span = pc.min_max(column).as_py()
    why = f"integers from {span['min']} to {span['max']}, {distinct:,} distinct in {samples:,}"
    return _unless_it_names_samples(Decision(name, "sparse", why), len(column), distinct)


def _guess_number(name: str, kind: pa.DataType, column: pa.ChunkedArray | None) -> Decision:
    if column is not None and pa.types.is_floating(kind) and len(column):
        times = _times(name, column)
        if times is not None:
            return Decision(name, "ignore", times, warns=True)
        values = column.to_numpy().astype(np.float64)
        values = values[np.isfinite(values)]
        whole = bool(values.size) and bool((values == np.floor(values)).all())
        if whole and values.min() < 0 and values.max() >= 1 << 63:
            why = (
                f"numbers, but whole ones from {values.min():.0f} to {values.max():.0f}, which no "
                "integer of 64 bits holds: if they are ids, write them as texts, or say which "
                "stands for a missing one (--null -1)"
            )
            return Decision(name, "dense", why, warns=True)
        named = name.lower() in ("id", "user", "item") or name.lower().endswith(("id", "_key"))
        if whole and values.min() >= 0 and (named or values.max() >= 1 << 24):
            why = (
                f"numbers, but whole ones up to {values.max():.0f}: if they are ids that were "
                "written as floating-point numbers, make it sparse"
            )
            return Decision(name, "dense", why, warns=True)
    return Decision(name, "dense", "it holds numbers")


def _guess_text(name: str, column: pa.ChunkedArray, nulls: Sequence[str]) -> Decision:
    column = pc.cast(column, pa.binary())
    column = column.filter(pc.greater(pc.binary_length(column), 0))
    values, distinct = len(column), len(column.unique())
    some = _texts(column.slice(0, _MOST_LOOKED_AT))
    texts = some[:200]
    # Dates, with or without a time, in forms that Arrow does not parse.
    patterns = (_WRITTEN_TIME, _CALENDAR) if _is_named_time(name) else (_WRITTEN_TIME,)
    if texts and any(all(map(pattern.fullmatch, texts)) for pattern in patterns):
        return Decision(name, "ignore", "it holds times", warns=True)
    other = None
    if pc.all(pc.match_substring_regex(column, _DIGITS)).as_py() and values:
        every = _texts(column)  # A single value may have a thousands separator.
        decimal = decimal_of(every)
        if decimal is not None:
            why = f"it holds numbers such as {max(every, key=len)!r}"
            return Decision(name, "dense", why, decimal=decimal)
        other = no_ids(every)
    other = other or no_ids(texts)
    lists = find_lists(some, nulls) if other is None else None
    if lists is not None and lists[1] is None:
        other = f"it holds lists of numbers, such as {texts[0]!r}, which are no ids"
    elif lists is None and other is None:
        other = prose(texts, distinct / max(values, 1))
    if other is not None:
        return Decision(name, "ignore", other, warns=True)
    if lists is not None:
        why = f"texts of {lists[1]} ids between {lists[0]!r}"
        several = [text for text in some if lists[0] in text and text[0] not in "[({"]
        warns = all(map(_PAIR.fullmatch, some))
        if warns:
            why += '; if they are numbers with decimal commas, say in a schema: decimal = ","'
        elif lists[1] == "text" and 0 < len(several) < _FEW * len(some):
            warns = True
            why += f"; if {several[0]!r} is one id, write a schema (--infer) without the separator"
        return Decision(name, "sparse", why, separator=lists[0], element=lists[1], warns=warns)
    why = f"texts, {distinct:,} distinct in {values:,}"
    guess = _unless_it_names_samples(Decision(name, "sparse", why), values, distinct)
    # Parts of one id, such as country:city, are equally many in all texts. URLs have empty ones.
    varied = [one for one in ":/" if len({text.count(one) for text in some}) > 1]
    varied = [one for one in varied if not any(one * 2 in text for text in some)]
    return guess if guess.warns else _read_as_one(guess, some, varied)


def _unless_it_names_samples(guess: Decision, values: int, distinct: int) -> Decision:
    """Leave a column out, or warn, if no value comes twice: nothing is learned from it."""
    if values < _LEAST_SAMPLES or distinct < values:
        return guess
    why = f"no value comes twice in the first {distinct:,} samples"
    if guess.column.lower() in ("id", "sample_id", "row_id", "index", ""):
        return Decision(guess.column, "ignore", why, warns=True)
    return Decision(guess.column, "sparse", f"{why}; leave it out if it names samples", warns=True)


def _is_named_time(name: str) -> bool:
    called = f"_{name.lower()}".replace(".", "_")
    return any(word in called for word in _TIME_WORDS)


def _times(name: str, column: pa.ChunkedArray, *, rises: bool = True) -> str | None:
    """Return why numbers look like times, or None if they do not.

    Times lie between 2000 and 2050, and their column is called a time or is sorted.
    """
    values = column.to_numpy()
    values = values[np.isfinite(values)] if values.dtype.kind in "iuf" else values[:0]
    if values.size < 2:
        return None
    least, most = int(values.min()), int(values.max())
    is_named = _is_named_time(name)
    rises = rises and least < most and bool((values[1:] >= values[:-1]).all())
    if is_named and all(_CALENDAR.fullmatch(str(int(value))) for value in values[:1000]):
        return "it looks like dates"
    for unit, scale in _TIME_UNITS.items():
        fits = _FIRST_TIME * scale <= least and most < _LAST_TIME * scale
        if fits and (is_named or rises):
            day = datetime.fromtimestamp(most // scale, UTC).date()
            return f"it looks like times in {unit}, up to {day}"
    rises = rises and _TIME_NAME.search(name.lower()) is not None
    if rises and 2 * len(column.unique()) > len(column) > _LEAST_RISING:
        return "it is called a time, and never falls"
    return None


def _has_two_values(column: pa.ChunkedArray | None) -> bool:
    if column is None or not pa.types.is_primitive(column.type):
        return False
    if pa.types.is_temporal(column.type):
        return False
    return set(column.unique().to_pylist()[:3]) in ({0, 1}, {-1, 1})
