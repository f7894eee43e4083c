"""Find a text file's dialect: the separator of fields, quotes, header and names of columns."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from placer.data.files.stores import shown
from placer.data.formats.text import record_ends
from placer.data.layout import CATEGORIES, DENSE, LABEL, Format, Layout
from placer.errors import DataError

_SEPARATORS = ("\t", ",", "::", ";", "|", "\x01", " ")
_LINES = 200
_NAME = re.compile(r"^[^\W\d][\w .:/#()\[\]-]*$")
_ANY_NAME = re.compile(r"[^\W\d]")
"""A letter. If numbers below show a header, names need no more: ``CTR (%)``, ``7d``."""
_NUMBERS = re.compile(rb"[0-9]+(?:([ \t]+|,)[0-9]+)*[ \t]*")
"""Matches a line of interactions."""
_DECIMAL_COMMA = re.compile(r"[+-]?(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+)(?:,[0-9]+)?")
_HEX = re.compile(r"^[0-9a-f]{8}$")
_LABELS = ("label", "click", "clicked", "target")
_KNOWN = frozenset(
    (*_LABELS, "user", "item", "user_id", "item_id", "userid", "itemid", "rating", "timestamp")
)
_SQL = re.compile(r"\s*(?:INSERT\s+INTO|CREATE\s+TABLE|DROP\s+TABLE|--|/\*)", re.IGNORECASE)
_VOWPAL = re.compile(r"[^|]*(?:(?<!\S)\|\S[^|]*)+")
"""Matches a line of Vowpal Wabbit's format, with bars before words: ``1 |user 7 |item 3``."""


def sniff(file: str, start: bytes) -> Format:
    """Return the format of a file by its first bytes, if its suffix does not tell."""
    start = start.removeprefix(codecs.BOM_UTF8)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"ARROW1") or start.startswith(b"\xff\xff\xff\xff"):
        return "arrow"
    if start.lstrip()[:1] == b"{":
        return "jsonl"
    if b"\0" in start[:4096]:
        raise DataError(
            f"{shown(file)} is no text and of no known format; write it as Parquet or CSV, or name "
            "its format with --log-format"
        )
    line = start.partition(b"\n")[0].rstrip(b"\r").decode("utf-8", "replace")
    fields = line.split("\t")
    criteo = len(DENSE) + len(CATEGORIES)
    if len(fields) in (criteo, criteo + 1) and not set(fields).issuperset(CATEGORIES):
        return "criteo"
    if _are_interactions(start):
        return "interactions"
    return "tsv" if "\t" in line else "csv"


def _are_interactions(start: bytes) -> bool:
    """Return whether lines hold only whole numbers, and differ in how many they hold."""
    lines = start[: start.rfind(b"\n") + 1].splitlines()[:_LINES]
    if not lines or not all(map(_NUMBERS.fullmatch, lines)):
        return False
    often = Counter(len(re.findall(rb"[0-9]+", line)) for line in lines)
    return max(often) > 2 and often.most_common(1)[0][1] <= 0.9 * len(lines)


def infer_dialect(file: str, start: bytes, layout: Layout, format: str) -> Layout:
    """Return the layout with separator, header, quotes and names of columns filled in.

    Fields that `layout` leaves open are found from the lines of `start`.
    """
    if format == "criteo":
        return _criteo(file, start, layout)
    lines = _records(start, layout)
    separator = layout.separator or ("\t" if format == "tsv" else _separator(file, lines))
    quotes = layout.quotes
    if quotes is None:
        quotes = len(separator.encode()) == 1 and _quotes(lines, separator)
    if quotes and len(separator.encode()) > 1:
        raise DataError(
            f"{shown(file)}: fields between {separator!r} cannot stand in quotes; "
            "say that quotes are plain characters (--no-quotes)"
        )
    rows = [fields(line, separator, quotes) for line in lines]
    header = layout.header
    if header is None:
        header = not layout.names and bool(rows) and _is_header(rows, layout.nulls)
    names, decimal = layout.names, layout.decimal
    if not header and not names:
        names = tuple(f"c{number}" for number in range(len(rows[0]) if rows else 0))
    if decimal is None and separator == ";" and _has_decimal_commas(rows[bool(header) :]):
        decimal = ","
    return replace(
        layout, separator=separator, header=header, quotes=quotes, names=names, decimal=decimal
    )


def _records(start: bytes, layout: Layout) -> list[str]:
    plain = record_ends(start, quotes=False)[0]
    ends = record_ends(start, layout.quotes is not False)[0]
    texts = _texts(start, ends)
    known = layout.separator or ""
    separators = known if len(known.encode()) == 1 else "\t,;|"
    if ends.size < plain.size and not any(_quotes(texts, one) for one in separators):
        texts = _texts(start, plain)  # Quotes that enclose no fields join lines.
    return texts


def _texts(start: bytes, ends: npt.NDArray[np.int64]) -> list[str]:
    parts = zip([0, *ends[:_LINES].tolist()], ends[:_LINES].tolist(), strict=False)
    texts = (start[first:last].decode("utf-8", "replace").strip("\r\n") for first, last in parts)
    return [text for text in texts if text]


def fields(line: str, separator: str, quotes: bool) -> list[str]:
    """Return the fields of a line.

    >>> fields('a,"b,c"', ",", quotes=True), fields('a::"b', "::", quotes=False)
    (['a', 'b,c'], ['a', '"b'])
    """
    if not quotes or '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader(io.StringIO(line, newline=""), delimiter=separator), [])
    except csv.Error:
        return line.split(separator)


def header_names(file: str, header: bytes, layout: Layout) -> tuple[str, ...]:
    """Return names of columns in a file's first line. Raises DataError if it is not UTF-8."""
    try:
        line = header.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown(file)}, line 1 is no UTF-8: {error.reason}; if it is text, write it in UTF-8, "
            "else name its format (--log-format)"
        ) from error
    names = fields(line, layout.separator or ",", bool(layout.quotes))
    if names and names[0].startswith("#"):
        names[0] = names[0].lstrip("#")  # Names in a comment, as in #user,item.
    return tuple(name.strip() for name in names)


def _criteo(file: str, start: bytes, layout: Layout) -> Layout:
    """Return a layout with Criteo's columns; the first line shows whether there is a label."""
    count = start.partition(b"\n")[0].count(b"\t") + 1
    unlabelled = len(DENSE) + len(CATEGORIES)
    if count not in (unlabelled, unlabelled + 1):
        raise DataError(
            f"{shown(file)}, line 1: {count} fields, expected {unlabelled + 1} separated by tabs "
            f"(label, 13 integers, 26 categories), or {unlabelled} without the label"
        )
    label = (LABEL,) if count > unlabelled else ()
    return replace(
        layout, separator="\t", header=False, quotes=False, names=(*label, *DENSE, *CATEGORIES)
    )


def _separator(file: str, lines: list[str]) -> str:
    """Return the separator of fields: found equally often in each line, and most often."""
    if lines and (_SQL.match(lines[0]) or all(map(_VOWPAL.fullmatch, lines))):
        raise DataError(
            f"{shown(file)} looks like SQL, or Vowpal Wabbit's format; write CSV or JSON lines, "
            'such as {"label": 1, "ids": [3, 17]}'
        )
    best, most = "", 0
    for separator in _SEPARATORS:
        counts = [len(fields(line, separator, len(separator) == 1)) - 1 for line in lines]
        count, often = Counter(counts).most_common(1)[0] if counts else (0, 0)
        # All samples may have a comma in a price, but then the header has none.
        if count > most and counts[0] == count and often > 0.9 * len(lines):
            best, most = separator, count
            # If all separators have blanks beside them, the blanks are no part of the fields.
            for spaced in (f" {best} ", f"{best} ") if best != " " else ():
                if all('"' not in one and one.count(spaced) == one.count(best) for one in lines):
                    return spaced
            if separator in ("\t", ",", "::"):
                break
    if not best or (best == " " and all("  " in line for line in lines)):
        raise DataError(
            f"{shown(file)}: no separator divides its lines into equally many fields; name it "
            "with --separator (any, if a line is one id), or the format with --log-format "
            "(interactions: a user and any number of items a line), and remove comments"
        )
    return best


def _quotes(lines: list[str], separator: str) -> bool:
    """Return whether quotes enclose fields: if each is next to a separator or another quote.

    Quotes that join lines have to enclose whole fields.
    """
    edge = re.escape(separator)
    field = rf'(?:"(?:[^"]|"")*"|[^"{edge}]*)'
    enclosed = re.compile(f"{field}(?:{edge}{field})*")
    stray = re.compile(rf'(?<![{edge}"])"(?![{edge}"])' if len(separator) == 1 else '"')
    for line in lines:
        if line.count('"') % 2 or ("\n" in line and not enclosed.fullmatch(line)):
            return False
        if line.startswith('"') or '"' not in line:
            continue
        # The first quote has to open a field.
        if line[line.index('"') - 1] != separator and stray.search(line):
            return False
    return True


def _is_header(rows: list[list[str]], nulls: Sequence[str]) -> bool:
    # Leave out repetitions of the first row: files may have been joined with their headers.
    first, others = rows[0], [row for row in rows if row != rows[0]]
    if len(rows) > 1 and not others:
        return False
    named = [name.strip() for name in first]
    if named:
        named[0] = named[0].lstrip("# ")
    if any(_HEX.match(name) or name in nulls for name in named) or len(named) < 1:
        return False
    columns = list(zip(*(row for row in others if len(row) == len(first)), strict=False))
    known = [[one for one in column if one and one not in nulls] for column in columns]
    names = [name for name in named if name]
    if any(map(_is_number, names)) or not all(map(_ANY_NAME.search, names)):
        return False
    # An index that pandas wrote has no name, and neither has a column after a final separator.
    unnamed = {place for place, name in enumerate(named) if place and not name}
    numbers = {place for place, one in enumerate(known) if one and all(map(_is_number, one))}
    if numbers - unnamed:
        return True
    if any(place >= len(known) or known[place] for place in unnamed):
        return False  # It may be a sample with a missing value.
    if any(name in column for name, column in zip(named, columns, strict=False) if name):
        return False
    if {name.lower() for name in named} & _KNOWN and all(one[0].isalpha() for one in names):
        return True
    # There are no other signs: accept distinct and plain names.
    return len(set(names)) == len(names) and all(map(_NAME.match, names))


def _has_decimal_commas(rows: list[list[str]]) -> bool:
    """Return whether all values of some column are like 1,5."""
    columns = ([value for value in column if value] for column in zip(*rows, strict=False))
    return any("," in "".join(one) and all(map(_DECIMAL_COMMA.fullmatch, one)) for one in columns)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
