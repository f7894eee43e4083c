"""What every report is made of: rows of plain values, shown as a table, JSON or CSV.

There is one source of rows, with units in the keys; a table formats them for people.
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

from placer.report.plain import plain_line
from placer.units import format_bytes, format_seconds, format_share, significant

Row = Mapping[str, Any]
T = TypeVar("T")
K = TypeVar("K")

_GAP = 2


def text(value: Any) -> str:
    """Show a text as it is, but for what a terminal would take for a command."""
    return plain_line(str(value))


size, seconds, share, number = format_bytes, format_seconds, format_share, significant


def count(value: float) -> str:
    """Show a count: ``1,234``, ``40.0 M``."""
    for scale, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:,.1f} {unit}"
    return significant(value)


def rate(value: float) -> str:
    """Show bytes per second in decimal units, as vendors do."""
    if value >= 0.9995e12:  # What rounds to 1,000 is one of this unit.
        return f"{significant(value / 1e12)} TB/s"
    return f"{significant(value / 1e9)} GB/s"


def times(value: float) -> str:
    """Show a ratio: ``1.25x``."""
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def fraction(value: float) -> str:
    """Show two decimals."""
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
"""How values are shown whose keys end so, the longest ending first."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the key of its values, its heading and how values are shown.

    Without a heading it is in JSON and CSV alone. Values are shown by the unit that ends their key,
    see `UNITS`, else as text, unless `show` says how. `of` takes the value from what a row is
    about, see `table_of`. `wraps` marks prose, which may take several lines where the terminal is
    narrow, and `spare` a column that is left out there, the last one first.
    """

    key: str
    title: str | None = None
    show: Callable[[Any], str] | None = None
    wraps: bool = False
    spare: bool = False
    of: Callable[[Any], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Text is aligned left, numbers right."""
        return self._shows is text

    @property
    def _shows(self) -> Callable[[Any], str]:
        by_unit = (shows for unit, shows in UNITS.items() if self.key.endswith(unit))
        return self.show or next(by_unit, text)

    def cell(self, row: Row) -> str:
        """Return the value of a row for people."""
        value = row[self.key]
        return "–" if value is None else plain_line(self._shows(value))

    def least_width(self, cells: Sequence[str]) -> int:
        """Return the narrowest that the column can be shown without cutting a word."""
        words = [plain_line(self.title or ""), *cells]
        if self.wraps:
            words = [part for cell in words for part in cell.split()]
        return max(cell_len(word) for word in words)

    def value(self, about: Any, place: int) -> Any:
        """Return its value of what a row is about, see `table_of`; `place` is its number."""
        if self.of is not None:
            return self.of(about)
        if isinstance(about, Mapping):
            return about[self.key]
        return about[place] if type(about) is tuple else getattr(about, self.key)


def columns(show: Callable[[Any], str] | None = None, /, **headings: str | None) -> list[Column]:
    """Return columns by their keys and headings, all shown in one way; see `Column`.

    >>> [column.title for column in columns(device="device", total_bytes="in all")]
    ['device', 'in all']
    """
    return [Column(key, heading, show) for key, heading in headings.items()]


@dataclass(frozen=True, slots=True)
class Prose:
    """A sentence that takes several lines where it has to, none of which ends before a unit."""

    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        joined = _BEFORE_UNIT.sub(_JOINER, self.words)
        lines = textwrap.wrap(
            joined, options.max_width, break_long_words=False, break_on_hyphens=False
        )
        yield from (Text(line.replace(_JOINER, " ")) for line in lines)


_JOINER = "\ue000"
"""Of no meaning (private use area), and no white space."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[GT]B/s|B|[um]?s|min|h|[GM])\b)")


@dataclass(frozen=True, slots=True)
class Section:
    """A titled list of rows; its name is its key in JSON.

    Rows are values that JSON has too, None where there is none. A table shows the columns, though
    rows may hold more, and the first `shown` rows, by default all; its note says their `order`.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    shown: int | None = None
    order: str = ""

    def columns_in(self, rows: Sequence[Row]) -> list[Column]:
        """Return the columns in which at least one of the rows has a value other than zero."""
        return [one for one in self.columns if any(row[one.key] for row in rows)]

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
            fits = _width(block, widths) <= options.max_width
            yield _table("" if number else self.title, block, cells, fits)
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

    A column says by `of` how to take its cell from the value. Else it is the value's attribute, or
    of a mapping the entry, that the column's key names; a plain tuple has the cells in order.

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
    """Return a part of a whole; None where either is unknown or the whole is zero."""
    return part / whole if part is not None and whole else None


def _blocks(
    columns: Sequence[Column],
    cells: Mapping[str, Sequence[str]],
    widths: Mapping[str, int],
    most: int,
) -> list[list[Column]]:
    """Divide columns into several tables where one would be too wide for whole numbers.

    Each begins with the columns that tell its rows apart.
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
    """Return the first columns that no two rows have in common; the first one where all do not."""
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
        # A name that is wider than the terminal takes several lines, numbers never.
        wraps = column.wraps or (column.is_text and not fits)
        words = Text(plain_line(column.title or ""))
        table.add_column(words, justify=justify, no_wrap=not wraps, overflow="fold")
    for line in zip(*(cells[column.key] for column in columns), strict=True):
        table.add_row(*map(Text, line))
    return table


@dataclass(frozen=True, slots=True)
class Report:
    """Facts by name, as JSON has them, and sections; for people the `headline` has the facts."""

    title: str
    sections: tuple[Section, ...]
    facts: Row = field(default_factory=dict)
    headline: tuple[str, ...] = ()

    def renderable(self) -> Group:
        """Return what ``rich.print`` or a Console shows."""
        title = Text(plain_line(self.title), style="bold")
        prose = (Prose(plain_line(line)) for line in self.headline)
        tables = (part for one in self.sections if one.rows for part in (Text(""), one))
        return Group(title, *prose, *tables)

    def to_json(self) -> dict[str, Any]:
        """Facts, and rows under their section's name: values that `json.dumps` takes."""
        return {
            **self.facts,
            **{section.name: [dict(row) for row in section.rows] for section in self.sections},
        }

    def section(self, name: str) -> Section | None:
        """Return the section of a name, None if there is none."""
        return next((one for one in self.sections if one.name == name), None)

    def to_csv(self) -> str:
        """Return the rows of all sections, with their keys as header.

        Of several sections, a first column ``section`` names that of a row.
        """
        if len(self.sections) == 1:
            return rows_to_csv(self.sections[0].rows)
        named = [{"section": one.name, **row} for one in self.sections for row in one.rows]
        return rows_to_csv(named)


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group values by a key, in the order in which keys come first.

    >>> grouped([1, 2, 3], lambda n: n % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[K, list[T]] = {}
    for one in values:
        groups.setdefault(key(one), []).append(one)
    return groups


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Return a row, or the start of one: attributes of a value under their own names."""
    return {name: getattr(value, name) for name in names}


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with a column for each key of any row; values that are missing are empty.

    A text that a spreadsheet would take for a formula has an apostrophe before it, which
    spreadsheets do not show. Control characters are written out.
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
