"""Options of commands that read logs; `placer.knobs` says how fields become options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from placer.errors import DataError
from placer.knobs import option
from placer.tables import Pooling

if TYPE_CHECKING:
    from placer.data.layout import Layout
    from placer.data.schema import Schema

POOLING = option(
    (),
    f"How a bag's rows become one: {', '.join(get_args(Pooling))}; by default sum.",
    metavar="[FEATURE=]POOLING",
)
_HEADER, _QUOTES = "--header/--no-header", "--quotes/--no-quotes"
_SPELT = {"\\t": "\t", "tab": "\t", "\\x01": "\x01"}
"""Separators by the names that users type in a shell."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Properties of text files that are neither recorded nor inferred."""

    HEADING: ClassVar[str] = "Log"

    separator: str | None = option(
        None, "Character between the fields of a text file; by default it is found out."
    )
    header: bool | None = option(
        None, "Whether the first line of a text file names its columns.", _HEADER
    )
    quotes: bool | None = option(
        None, "Whether quotes may enclose the fields of a text file.", _QUOTES
    )
    columns: str | None = option(None, "Names of the columns of a text file, with commas between.")
    null: tuple[str, ...] = option(
        (), "Texts of missing values, such as ?, NULL; '' for none. By default NULL, NA, …"
    )

    def layout(self, known: Layout | None = None) -> Layout | None:
        """Return `known` with the given options; None if there is neither."""
        from placer.data.layout import Layout

        given: dict[str, Any] = {
            "separator": self.separator and _SPELT.get(self.separator, self.separator),
            "header": self.header,
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
        "TOML file that says what the columns are; --infer writes one.",
        "--schema",
        metavar="FILE",
    )
    sparse: tuple[str, ...] = option((), "Column of ids: name all of them, or none. Repeatable.")
    dense: tuple[str, ...] = option((), "Column of numbers: name all of them, or none. Repeatable.")
    label: str | None = option(
        None, "Column of the label; by default the one that is called label, click, …"
    )
    ignore: tuple[str, ...] = option((), "Column to leave out, such as a time; repeatable.")
    feature_table: tuple[str, ...] = option(
        (),
        "Table that a feature reads; several features may read one. Repeatable.",
        metavar="FEATURE=TABLE",
    )
    id_mapping: tuple[str, ...] = option(
        (),
        "How raw ids become rows: auto, identity, hash or vocabulary; repeatable.",
        metavar="[TABLE=]MAPPING",
    )
    rows: tuple[str, ...] = option(
        (), "Rows of every table, or of one; a hash needs them. Repeatable.", metavar="[TABLE=]N"
    )
    min_count: tuple[str, ...] = option(
        (),
        "Ids that are read less often than this get no row of a vocabulary; repeatable.",
        metavar="[TABLE=]N",
    )
    pooling: tuple[str, ...] = POOLING
    headroom: float | None = option(
        None,
        "Share of rows to add for larger ids of later logs, where ids are rows; by default 0.1.",
        least=0,
    )

    def schema(self, log_format: Any = None, id_mapping: str = "auto") -> Schema:
        """Return the schema of the file, if given, with the other options.

        `id_mapping` is the default for tables without an id mapping.
        """
        from placer.data.schema import ALL, Schema

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
            feature_tables={**known.feature_tables, **_pairs("feature-table", self.feature_table)},
            rows={**known.rows, **_numbers("rows", self.rows)},
            min_counts={**known.min_counts, **_numbers("min-count", self.min_count)},
            id_mappings={**mappings, **_pairs("id-mapping", self.id_mapping, ALL)},
            poolings=poolings_of(self.pooling, known.poolings),
            headroom=known.headroom if self.headroom is None else self.headroom,
        )


def dims_of(dims: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """Return the number of columns of each table by name; ``*`` is all other tables.

    >>> dims_of(["64", "user=128"], {"item": 32})
    {'item': 32, '*': 64, 'user': 128}
    """
    return {**known, **_numbers("dim", dims)}


def poolings_of(poolings: Sequence[str], known: Mapping[str, Pooling]) -> dict[str, Pooling]:
    """Return the pooling of each feature by name; ``*`` is all other features.

    >>> poolings_of(["mean", "user=max"], {"item": "sum"})
    {'item': 'sum', '*': 'mean', 'user': 'max'}
    """
    given = _pairs("pooling", poolings, "*")
    for value in given.values():
        if value not in get_args(Pooling):
            raise DataError(f"--pooling {value!r} is none of {', '.join(get_args(Pooling))}")
    return {**known, **given}  # type: ignore[dict-item]


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for text in texts for name in text.split(",") if name)


def _pairs(flag: str, texts: Sequence[str], default: str | None = None) -> dict[str, str]:
    """Parse ``NAME=VALUE`` into values by name. A value alone gets the name `default`."""
    pairs = {}
    for text in texts:
        name, between, value = text.rpartition("=")
        if not between and default is not None:
            name = default
        if not name or not value:
            raise DataError(f"--{flag} {text!r}: write NAME=VALUE")
        pairs[name] = value
    return pairs


def _numbers(flag: str, texts: Sequence[str]) -> dict[str, int]:
    numbers = {}
    for name, value in _pairs(flag, texts, "*").items():
        of = "" if name == "*" else f" of {name!r}"
        try:
            numbers[name] = int(value)
        except ValueError:
            raise DataError(f"--{flag}{of} {value!r} is no whole number") from None
        if numbers[name] < 1:
            raise DataError(f"--{flag}{of} must be at least 1, not {value}")
    return numbers
