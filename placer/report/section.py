"""`Report`, `Section` and `Column`: rows of plain values, shown as a table, JSON or CSV.

All three show the same rows, with units in their keys. A table formats the values for people.
"""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

from placer.units import format_bytes, format_seconds, format_share, plain_line, significant

Row = Mapping[str, Any]
T = TypeVar("T")
K = TypeVar("K")

_GAP = 2


def text(value: Any) -> str:
    """Return a value as text in one line, with control characters escaped."""
    return plain_line(str(value))


size, seconds, share, number = format_bytes, format_seconds, format_share, significant


def count(value: float) -> str:
    """Format a count.

    >>> count(1234), count(999_999), count(1e6), count(40e6), count(1e9)
    ('1,234', '999,999', '1.0 M', '40.0 M', '1.0 G')
    """
    for scale, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:,.1f} {unit}"
    return significant(value)


def rate(value: float) -> str:
    """Format bytes per second in decimal units, as vendors do."""
    if value >= 0.9995e12:  # 999.5 GB/s and more round to 1 TB/s.
        return f"{significant(value / 1e12)} TB/s"
    return f"{significant(value / 1e9)} GB/s"


def times(value: float) -> str:
    """Format a ratio: ``1.25x``."""
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def fraction(value: float) -> str:
    """Format a number with two decimals."""
    return f"{value:.2f}"


UNITS: Mapping[str, Callable[[Any], str]] = {
    "_bytes_per_s": rate,
    "_per_s": count,
    "_bytes": size,
    "_s": seconds,
    "share": share,
    "gap": share,
    "ratio": times,
    "rows": count,
    "lookups": count,
}
"""Formats of values by the ending of their key. The first ending that matches counts."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the key of its values, its heading, and the format of values.

    A column without a heading is only in JSON and CSV. `show` formats values; by default the
    ending of the key chooses the format (see `UNITS`), or else values are text. `of` computes the
    value from a row's object; see `table_of`. On a narrow terminal, a column that `wraps` takes
    several lines, and `spare` columns are left out, the last one first.
    """

    key: str
    title: str | None = None
    show: Callable[[Any], str] | None = None
    wraps: bool = False
    spare: bool = False
    of: Callable[[Any], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the column is text, which is aligned left. Numbers are aligned right."""
        return self._shows is text

    @property
    def _shows(self) -> Callable[[Any], str]:
        by_unit = (shows for unit, shows in UNITS.items() if self.key.endswith(unit))
        return self.show or next(by_unit, text)

    def cell(self, row: Row) -> str:
        """Return the formatted value of a row; rows may lack it."""
        value = row.get(self.key)
        return "–" if value is None else plain_line(self._shows(value))

    def least_width(self, cells: Sequence[str]) -> int:
        """Return the least width that does not break a word."""
        words = [plain_line(self.title or ""), *cells]
        if self.wraps:
            words = [part for cell in words for part in cell.split()]
        return max(cell_len(word) for word in words)

    def value(self, about: Any, place: int) -> Any:
        """Return the column's value for a row's object; `place` is its position in a tuple."""
        if self.of is not None:
            return self.of(about)
        if isinstance(about, Mapping):
            return about[self.key]
        return about[place] if type(about) is tuple else getattr(about, self.key)


def columns(show: Callable[[Any], str] | None = None, /, **headings: str | None) -> list[Column]:
    """Return columns by their keys and headings, all with the same format; see `Column`.

    >>> [column.title for column in columns(device="device", total_bytes="in all")]
    ['device', 'in all']
    """
    return [Column(key, heading, show) for key, heading in headings.items()]


@dataclass(frozen=True, slots=True)
class Prose:
    """A sentence that wraps into lines if needed, but never between a number and its unit."""

    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        joined = _BEFORE_UNIT.sub(_JOINER, self.words)
        lines = textwrap.wrap(
            joined, options.max_width, break_long_words=False, break_on_hyphens=False
        )
        yield from (Text(line.replace(_JOINER, " ")) for line in lines)


_JOINER = "\ue000"
"""A character that has no meaning (private use area) and is not white space."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[GT]B/s|B|[um]?s|min|h|[GM])\b)")


@dataclass(frozen=True, slots=True)
class Section:
    """A titled list of rows. Its name is its key in JSON.

    Rows have JSON values, and None for missing ones. A table shows only `columns`, even if rows
    have more keys, and only the first `shown` rows, by default all. A note states their `order`.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    shown: int | None = None
    order: str = ""

    def columns_in(self, rows: Sequence[Row]) -> list[Column]:
        """Return the columns with a nonzero value in at least one row; pages call this, too."""
        return [one for one in self.columns if any(row.get(one.key) for row in rows)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        visible = self.rows[: self.shown]
        columns = self.columns_in(visible)
        cells = {column.key: [column.cell(row) for row in visible] for column in columns}
        widths = {column.key: column.least_width(cells[column.key]) for column in columns}
        spare = [column for column in columns if column.spare]
        fitting = columns.copy()
        while spare and _width(fitting, widths) > options.max_width:
            fitting.remove(spare.pop())
        for number, block in enumerate(_blocks(fitting, cells, widths, options.max_width)):
            if number:
                yield Text("")
            width = _width(block, widths)
            title = "" if number else self.title
            if len(title) > width + _GAP:  # A table would wrap its title into its own width.
                yield Text(plain_line(title), style="bold")
                title = ""
            yield _table(title, block, cells, width <= options.max_width)
        if len(visible) < len(self.rows):
            order = f", {self.order}" if self.order else ""
            words = f"{len(visible)} of {len(self.rows)}{order}; --format json has all"
            yield Text(words, style="dim")
        if len(fitting) < len(columns):
            yield Text("--format json has more columns", style="dim")


def table_of(
    values: Iterable[Any],
    name: str,
    title: str,
    *columns: Column,
    shown: int | None = None,
    order: str = "",
) -> Section:
    """Make a section with one row for each value.

    A column's `of` computes its cell from the value. By default the cell is the value's attribute,
    or a mapping's entry, with the column's key. A plain tuple has the cells in order.

    >>> real, doubled = Column("real", "n"), Column("doubled", of=lambda one: 2 * one)
    >>> section = table_of([1, 2], "numbers", "Numbers", real, doubled)
    >>> section.rows, len(section.columns)
    (({'real': 1, 'doubled': 2}, {'real': 2, 'doubled': 4}), 1)
    """
    rows = tuple(
        {one.key: one.value(value, place) for place, one in enumerate(columns)} for value in values
    )
    visible = tuple(one for one in columns if one.title is not None)
    return Section(name, title, visible, rows, shown, order)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None if either is None or the whole is zero."""
    return part / whole if part is not None and whole else None


def _blocks(
    columns: Sequence[Column],
    cells: Mapping[str, Sequence[str]],
    widths: Mapping[str, int],
    most: int,
) -> list[list[Column]]:
    """Divide columns into several tables if one would be too wide.

    Each table begins with the columns that identify its rows.
    """
    names = _names_of_rows(columns, cells)
    if _width(names, widths) > most // 2:
        names = columns[:1]
    blocks = [list(names)]
    for column in columns[len(names) :]:
        if _width([*blocks[-1], column], widths) > most and len(blocks[-1]) > len(names):
            blocks.append(list(names))
        blocks[-1].append(column)
    return blocks


def _names_of_rows(
    columns: Sequence[Column], cells: Mapping[str, Sequence[str]]
) -> Sequence[Column]:
    """Return the fewest first columns that identify rows; if none do, only the first column."""
    for last in range(1, len(columns) + 1):
        rows = list(zip(*(cells[column.key] for column in columns[:last]), strict=True))
        if len(set(rows)) == len(rows):
            return columns[:last]
    return columns[:1]


def _width(columns: Sequence[Column], widths: Mapping[str, int]) -> int:
    return sum(widths[column.key] + _GAP for column in columns) - _GAP


def _table(
    title: str, columns: Sequence[Column], cells: Mapping[str, Sequence[str]], fits: bool
) -> Table:
    heading = Text(plain_line(title), style="bold") if title else None
    padding = (0, _GAP, 0, 0)
    table = Table(title=heading, title_justify="left", box=None, padding=padding, pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "left" if column.is_text else "right"
        # Names wider than the terminal wrap into several lines; numbers never do.
        wraps = column.wraps or (column.is_text and not fits)
        words = Text(plain_line(column.title or ""))
        table.add_column(words, justify=justify, no_wrap=not wraps, overflow="fold")
    for line in zip(*(cells[column.key] for column in columns), strict=True):
        table.add_row(*map(Text, line))
    return table


@dataclass(frozen=True, slots=True)
class Report:
    """Facts by name for JSON, a `headline` that states them for people, and sections."""

    title: str
    sections: tuple[Section, ...]
    facts: Row = field(default_factory=dict)
    headline: tuple[str, ...] = ()

    def renderable(self) -> Group:
        """Return an object that ``rich.print`` or a Console can show."""
        title = Text(plain_line(self.title), style="bold")
        prose = (Prose(plain_line(line)) for line in self.headline)
        tables = (part for one in self.sections if one.rows for part in (Text(""), one))
        return Group(title, *prose, *tables)

    def to_json(self) -> dict[str, Any]:
        """Return facts, and rows by section's name, as values for `json.dumps`."""
        return {
            **self.facts,
            **{section.name: [dict(row) for row in section.rows] for section in self.sections},
        }

    def to_csv(self) -> str:
        """Return the rows of all sections as CSV, with their keys as the header.

        With several sections, a first column ``section`` has the name of each row's section.
        """
        if len(self.sections) == 1:
            return rows_to_csv(self.sections[0].rows)
        named = [{"section": one.name, **row} for one in self.sections for row in one.rows]
        return rows_to_csv(named)


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group values by key, in the order of each key's first appearance.

    >>> grouped([1, 2, 3], lambda n: n % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[K, list[T]] = {}
    for one in values:
        groups.setdefault(key(one), []).append(one)
    return groups


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a value by name, to make a row or a part of one."""
    return {name: getattr(value, name) for name in names}


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with a column for each key of any row. Missing values are empty.

    A text that a spreadsheet would take for a formula gets an apostrophe first, which spreadsheets
    do not show. Control characters are escaped.
    """
    buffer = io.StringIO()
    if rows:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(map(_cell, keys))
        writer.writerows([_cell(row.get(key)) for key in keys] for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    line = plain_line(value)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line
