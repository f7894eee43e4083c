"""Make text safe for a terminal, and short enough to read."""

import re

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
