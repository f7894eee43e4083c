"""Files of kinds that placer does not read, known by how they begin, and what to do about each."""

import re
from collections.abc import Sequence

_BINARY = {
    b"ORC": (
        "an ORC file; write it as Parquet, or read it from Python, where open_log takes "
        'pyarrow.dataset.dataset(PATH, format="orc")'
    ),
    b"Obj\x01": "an Avro file; write it as Parquet or JSON lines",
    b"PK\x03\x04": "a ZIP archive, or a spreadsheet, which is one; unpack it, or save it as CSV",
    b"SQLite format 3\0": "a SQLite database; export the table as CSV",
    b"\x89HDF": "an HDF5 file; write it as Parquet",
    b"\x93NUMPY": "an array of NumPy's; write it as Parquet",
    b"\x04\x22\x4d\x18": "packed by LZ4; unpack it (lz4 -d)",
    b"\xff\x06\x00\x00sNaPpY": "packed by Snappy; unpack it",
}
_SQL = re.compile(r"\s*(?:INSERT\s+INTO|CREATE\s+TABLE|DROP\s+TABLE|--|/\*)", re.IGNORECASE)
_LIBSVM = re.compile(r"[^\s:]+(?: [0-9]+:[^\s:]+(?::[^\s:]+)?)* *")
_VOWPAL = re.compile(r"[-+0-9. ]*(?:'?\S+ ?)?\|\S* [^|]*(?:\|\S* [^|]*)*")
_FILM = re.compile(r"[0-9]+:")


def binary_kind(start: bytes) -> str | None:
    """What a file that is no text is, and what to do about it; None if it is unknown.

    >>> binary_kind(b"Obj\\x01...")
    'an Avro file; write it as Parquet or JSON lines'
    """
    return next((kind for magic, kind in _BINARY.items() if start.startswith(magic)), None)


def text_kind(lines: Sequence[str]) -> str | None:
    """What lines that are no samples are, and what to do about it; None if they may be some."""
    first = lines[0] if lines else ""
    if first.startswith("<"):
        return "XML or HTML; write CSV or JSON lines"
    if _SQL.match(first):
        return "a script of SQL; export the table as CSV"
    if _FILM.fullmatch(first):
        return (
            f"the Netflix prize's format, where lines such as {first!r} speak for those below; "
            """write them in front of each: awk '/:$/ {key = $0; sub(":", "", key); next} """
            """{print key "," $0}'"""
        )
    if "|" in first and all(map(_VOWPAL.fullmatch, lines)) and _has_namespaces(lines):
        return 'Vowpal Wabbit\'s format; write JSON lines, such as {"label": 1, "ids": [3, 17]}'
    return None


def undivided_kind(lines: Sequence[str]) -> str | None:
    """The same of lines that no separator divides into equally many fields."""
    if lines and lines[0].startswith("#"):
        return "text that begins with comments; remove them (grep -v '^#')"
    if ":" in "".join(lines) and all(map(_LIBSVM.fullmatch, lines)):
        return (
            "LibSVM's format, which placer does not read; write JSON lines, such as "
            '{"label": 1, "ids": [3, 17]}'
        )
    if len({len(line.split()) for line in lines}) == 1 and len(lines[0].split()) > 1:
        return r"columns between several blanks; write one (sed -E 's/^ +//; s/ +/ /g')"
    return None


def _has_namespaces(lines: Sequence[str]) -> bool:
    """Whether bars begin words: ``1 |user 7 |item 3``."""
    return all(re.search(r"(?:^| )\|\S", line) and not re.search(r"\S\|", line) for line in lines)
