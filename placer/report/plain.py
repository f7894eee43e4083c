"""Text that a terminal only shows, of a length that is read."""

import re

MOST_CHARACTERS = 1500
"""Longest message: names and values of files may have any length."""
_KEPT_AT_END = 400
# All but tabs and line ends: a terminal takes some for commands, and others turn text around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    r"""Write out control characters: names in files may hold some.

    >>> plain("C1\x1b[2J")
    'C1\\x1b[2J'
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def plain_line(text: str) -> str:
    r"""Write out control characters, line ends and tabs, so that text is one line.

    >>> plain_line("C1\x1b\n=cmd()")
    'C1\\x1b\\n=cmd()'
    """
    return plain(text).replace("\t", "\\t").replace("\n", "\\n")


def shortened(message: str) -> str:
    """Cut a message to a readable length, in one line: its beginning and its end.

    >>> len(shortened("a" * 10_000))
    1500
    """
    line = plain(" ".join(message.split("\n")))
    if len(line) <= MOST_CHARACTERS:
        return line
    gap = " … "
    begin = MOST_CHARACTERS - _KEPT_AT_END - len(gap)
    return f"{line[:begin]}{gap}{line[-_KEPT_AT_END:]}"
