"""Options of commands that read logs; `placer.knobs` says how fields become options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from placer.data.layout import ALL, ID_MAPPINGS
from placer.errors import DataError
from placer.knobs import option
from placer.tables import Pooling

if TYPE_CHECKING:
    from placer.data.layout import Layout
    from placer.data.schema import Schema


def _pair(text: str, default: str = "") -> tuple[str, str]:
    """Parse ``NAME=VALUE``. A value alone gets the name `default`, if there is one."""
    name, between, value = text.rpartition("=")
    name = name if between else default
    if not name or not value:
        raise DataError(
            f"{text!r} is not of the form {'[NAME=]VALUE' if default else 'NAME=VALUE'}"
        )
    return name, value


def number_of(text: str) -> tuple[str, int]:
    """Parse ``[NAME=]N`` into a name, by default ``*``, and a whole number of at least 1.

    >>> number_of("user=128")
    ('user', 128)
    """
    name, value = _pair(text, "*")
    of = "" if name == "*" else f" of {name!r}"
    try:
        number = int(value)
    except ValueError:
        raise DataError(f"{value!r}{of} is no whole number") from None
    if not 1 <= number <= sys.maxsize:
        raise DataError(f"{value}{of} is not from 1 to {sys.maxsize}")
    return name, number


def _pooling(text: str) -> tuple[str, str]:
    return _one_of(text, get_args(Pooling))


def _separator(text: str) -> None:
    if set(text) & {"\n", "\r", '"'}:
        raise DataError(f"{text!r} has a line end or a quote, which cannot separate fields")


def _columns(text: str) -> None:
    names = text.split(",")
    if not all(map(str.strip, names)) or len(set(names)) < len(names):
        raise DataError(f"{text!r}: write names that differ, with commas between")


def _mapping(text: str) -> tuple[str, str]:
    return _one_of(text, ID_MAPPINGS)


def _one_of(text: str, known: Sequence[str]) -> tuple[str, str]:
    name, value = _pair(text, ALL)
    if value not in known:
        raise DataError(f"{value!r} is none of {', '.join(known)}")
    return name, value


POOLING = option(
    (),
    f"How the rows of a bag are combined: {', '.join(get_args(Pooling))}; by default sum.",
    metavar="[FEATURE=]POOLING",
    kind=_pooling,
)
_HEADER, _QUOTES = "--header/--no-header", "--quotes/--no-quotes"
_SPELT = {"\\t": "\t", "tab": "\t", "\\x01": "\x01"}
"""Separators by the names that users type in a shell."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Properties of text files that are neither recorded nor inferred."""

    HEADING: ClassVar[str] = "Log"

    separator: str | None = option(
        None,
        "Character between the fields of a text file; by default it is found from the file.",
        kind=_separator,
    )
    header: bool | None = option(
        None, "Whether the first line of a text file names its columns.", _HEADER
    )
    quotes: bool | None = option(
        None, "Whether quotes may enclose the fields of a text file.", _QUOTES
    )
    columns: str | None = option(
        None, "Names of the columns of a text file, with commas between.", kind=_columns
    )
    null: tuple[str, ...] = option(
        (), "Texts that stand for a missing value: ?,NULL; '' for none. By default NULL, NA, …"
    )

    def layout(self, known: Layout | None = None) -> Layout | None:
        """Return `known` with the given options; None if there is neither."""
        from placer.data.layout import Layout

        given: dict[str, Any] = {
            "separator": self.separator and _SPELT.get(self.separator, self.separator),
            "header": False if self.columns and self.header is None else self.header,
            "quotes": self.quotes,
            "names": tuple(self.columns.split(",")) if self.columns else None,
            "nulls": _names(self.null) if self.null else None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return replace(known or Layout(), **given) if given else known


@dataclass(frozen=True, slots=True)
class LogOptions(TextOptions):
    """The columns of a log, and how its ids become rows."""

    schema_path: str | None = option(
        None,
        "TOML file that describes the columns; --infer writes one.",
        "--schema",
        metavar="FILE",
    )
    sparse: tuple[str, ...] = option((), "Column of ids; name all or none of them. Repeatable.")
    dense: tuple[str, ...] = option((), "Column of numbers; name all or none of them. Repeatable.")
    label: str | None = option(
        None, "Column of the label; by default the one called label, click, …"
    )
    ignore: tuple[str, ...] = option((), "Column to leave out, such as a time; repeatable.")
    feature_table: tuple[str, ...] = option(
        (),
        "Table that a feature reads. Several features may read the same table. Repeatable.",
        metavar="FEATURE=TABLE",
        kind=_pair,
    )
    id_mapping: tuple[str, ...] = option(
        (),
        "How raw ids become rows: auto, identity, hash or vocabulary; repeatable.",
        metavar="[TABLE=]MAPPING",
        kind=_mapping,
    )
    rows: tuple[str, ...] = option(
        (),
        "Number of rows of all tables or of one; --id-mapping hash needs it. Repeatable.",
        metavar="[TABLE=]N",
        kind=number_of,
    )
    min_count: tuple[str, ...] = option(
        (),
        "Least number of reads for an id to get a row of its own in a vocabulary; repeatable.",
        metavar="[TABLE=]N",
        kind=number_of,
    )
    pooling: tuple[str, ...] = POOLING
    headroom: float | None = option(
        None,
        "Share of rows to add for larger ids of later logs, if ids are rows; by default 0.1.",
        least=0,
    )

    def schema(self, log_format: Any = None, id_mapping: str = "auto") -> Schema:
        """Return the schema of the file, if given, with the other options.

        `id_mapping` is the default for tables without an id mapping.
        """
        from placer.data.schema import Schema

        known = Schema(headroom=0.1) if self.schema_path is None else Schema.load(self.schema_path)
        mappings = {ALL: id_mapping} | dict(known.id_mappings)
        return replace(
            known,
            format=log_format or known.format,
            layout=self.layout(known.layout),
            sparse=_names(self.sparse) or known.sparse,
            dense=_names(self.dense) or known.dense,
            label=self.label or known.label,
            ignore=(*known.ignore, *_names(self.ignore)),
            feature_tables={**known.feature_tables, **dict(map(_pair, self.feature_table))},
            rows={**known.rows, **dict(map(number_of, self.rows))},
            min_counts={**known.min_counts, **dict(map(number_of, self.min_count))},
            id_mappings={**mappings, **dict(map(_mapping, self.id_mapping))},
            poolings=poolings_of(self.pooling, known.poolings),
            headroom=known.headroom if self.headroom is None else self.headroom,
        )


def dims_of(dims: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """Return the number of columns of each table by name; ``*`` is all other tables.

    >>> dims_of(["64", "user=128"], {"item": 32})
    {'item': 32, '*': 64, 'user': 128}
    """
    return {**known, **dict(map(number_of, dims))}


def poolings_of(poolings: Sequence[str], known: Mapping[str, Pooling]) -> dict[str, Pooling]:
    """Return the pooling of each feature by name; ``*`` is all other features.

    >>> poolings_of(["mean", "user=max"], {"item": "sum"})
    {'item': 'sum', '*': 'mean', 'user': 'max'}
    """
    given: dict[str, Any] = dict(map(_pooling, poolings))
    return {**known, **given}


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for text in texts for name in text.split(",") if name)
