"""Format values for people, and parse them: bytes, seconds, shares, large values, any text.

Text is made safe for a terminal, and short enough to read.
"""

import html
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from placer.errors import PlacerError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6,
    "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_MOST_BYTES = 1 << 63
LEAST_WITHOUT_UNIT = 1 << 20
"""A smaller number without a unit is refused: it is surely not meant in bytes."""
_LEAST_PERCENT = 0.001
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """Parse bytes from ``"8GiB"`` (binary), ``"8GB"`` (decimal) or a plain number.

    >>> parse_bytes("8GiB"), parse_bytes("8GB")
    (8589934592, 8000000000)
    """
    if isinstance(text, int | float):
        if not 0 <= text < _MOST_BYTES:
            raise PlacerError(
                f"a size must be at least 0 and less than 8 EiB, not {str(text)[:40]}"
            )
        return int(text)
    match = _PATTERN.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise PlacerError(f"not a size in bytes: {text!r}; write it like 8GiB, 24GB or 512MiB")
    size = float(match[1]) * unit
    if size >= _MOST_BYTES:
        raise PlacerError(f"a size must be less than 8 EiB, not {text[:40]}")
    if not match[2] and 0 < size < LEAST_WITHOUT_UNIT:
        number = match[1]
        raise PlacerError(
            f"{number} has no unit: write {number}GiB, or {number}B if bytes are meant"
        )
    return round(size)


def parse_sizes(text: str) -> list[int]:
    """Parse bytes from texts with commas between.

    >>> parse_sizes("8GiB, 512MiB")
    [8589934592, 536870912]
    """
    return [parse_bytes(size.strip()) for size in text.split(",")]


def significant(value: float, digits: int = 3) -> str:
    """Format a number with this many significant digits, without an exponent.

    >>> significant(0.000123456), significant(1234.5), significant(999.96)
    ('0.000123', '1,234', '1,000')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # Take the exponent after rounding: 0.9996 rounds to 1.
    exponent = int(f"{value:.{digits - 1}e}".rpartition("e")[2])
    text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(count: int, noun: str, nouns: str = "") -> str:
    """Format a count with a noun, singular or plural.

    >>> counted(1, "table"), counted(1200, "table"), counted(2, "batch", "batches")
    ('1 table', '1,200 tables', '2 batches')
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def listed(names: Sequence[str], most: int = 40) -> str:
    """Join names for a message. If there are more than `most`, give only the first ones.

    >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2)
    ('a, b, c', 'a, b and 1 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def format_share(value: float) -> str:
    """Format a share of 1 as a percentage.

    >>> format_share(0.1234), format_share(12.3), format_share(0.9999), format_share(6e-16)
    ('12.3%', '1,230%', '>99.9%', '<0.001%')
    """
    percent = 100 * value
    # Smaller shares are rounding errors, or negligible.
    if 0 < abs(percent) < _LEAST_PERCENT:
        return f"<{_LEAST_PERCENT}%" if percent > 0 else "0%"
    # A share just below 1 must not look like 1.
    return ">99.9%" if 99.95 <= percent < 100 else f"{significant(percent)}%"


def format_bytes(count: float) -> str:
    """Format a size in binary units.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.5:  # 1023.5 rounds to one of the next unit.
            # Below 1024 of a unit, write no thousands separator.
            return f"{size:.0f} {unit}" if unit == "B" else f"{_plain(size)} {unit}"
        size /= 1024
    return f"{significant(size, 4)} TiB"


def _plain(value: float) -> str:
    return significant(value).replace(",", "")


_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(us|ms|s|sec|min|h|)\s*", re.IGNORECASE)
_DURATIONS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Parse seconds from ``"3min"``, ``"90s"``, ``"12ms"``, ``"1.5h"`` or a plain number.

    >>> parse_seconds("1.5h")
    5400.0
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise PlacerError(f"not a duration: {text!r}; write it like 3min, 90s, 12ms or 1.5h")
    return float(match[1]) * _DURATIONS[match[2].lower()]


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(0.00123)
    '1.23 ms'
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * scale:  # 999.5 of a unit rounds to one of the next.
            return f"{_plain(seconds / scale)} {unit}"
    return f"{significant(seconds / 1e-9)} ns"


MOST_CHARACTERS = 1500
"""Longest message. Names and values in files may have any length."""
_KEPT_AT_END = 400
# Control characters except tabs and line ends: terminals obey some, and others reverse text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    r"""Escape control characters, which names in files may contain.

    >>> plain("C1\x1b[2J")
    'C1\\x1b[2J'
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def plain_line(text: str) -> str:
    r"""Escape control characters, line ends and tabs, so that the text is one line.

    >>> plain_line("C1\x1b\n=cmd()")
    'C1\\x1b\\n=cmd()'
    """
    return plain(text).replace("\t", "\\t").replace("\n", "\\n")


def shortened(message: str) -> str:
    """Shorten a message to one readable line that has its beginning and its end.

    >>> len(shortened("a" * 10_000))
    1500
    """
    line = plain(" ".join(message.split("\n")))
    if len(line) <= MOST_CHARACTERS:
        return line
    gap = " … "
    begin = MOST_CHARACTERS - _KEPT_AT_END - len(gap)
    return f"{line[:begin]}{gap}{line[-_KEPT_AT_END:]}"


class Summarized(ABC):
    """Base class of large values, which show only a few facts when printed.

    >>> class Box(Summarized):
    ...     def summary(self) -> dict[str, str]:
    ...         return {"things": "3", "weight": "2 kg"}
    >>> Box()
    Box(things: 3, weight: 2 kg)
    """

    __slots__ = ()

    @abstractmethod
    def summary(self) -> dict[str, str]:
        """Return the facts to show, as texts by name."""

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}: {value}" for name, value in self.summary().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the facts. Notebooks call this."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.summary().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"
