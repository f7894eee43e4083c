"""Read untrusted files within limits of size, depth, numbers and kinds of files."""

import errno
import json
import math
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 256 << 20
"""Largest JSON file. A plan of 100,000 tables and 100,000 shards takes 60 MB."""
MOST_VALUES = 8_000_000
"""Most values of a JSON file. Each takes about 100 bytes of memory."""
MOST_DIGITS = 40
"""Most digits of an integer. Placer's integers fit into 64 bits, but a file's may not."""


_KINDS = {
    "shards": "a plan", "sampling": "a profile", "epoch": "a checkpoint",
    "constants": "a calibration", "gpus": "a topology",
}  # fmt: skip
"""What a file with a field is."""


class LimitError(ValueError):
    """A file exceeds a limit or is damaged, and is not read."""


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for anything else."""
    # Without O_NONBLOCK, opening a pipe without a writer would wait forever.
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device, a pipe or a folder, and no file")
    return file


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file. Raises LimitError if it is too large."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > most_bytes:
        raise LimitError(
            f"it has {max(size, len(content))} bytes, and at most {most_bytes} are read"
        )
    return content


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the value of a JSON file.

    Raises OSError if the file cannot be opened. Raises LimitError if it is not JSON, too large or
    nested too deeply, or has a duplicate key or a number that is not finite or too long.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "file")
    ...     _ = path.write_text('{"a": 1, "a": 2}')
    ...     read_json(path)
    Traceback (most recent call last):
    placer.files.reading.LimitError: the key 'a' is there twice
    """
    content = read_limited(path, most_bytes)
    if not content.strip():
        raise LimitError("it is empty")
    if content.startswith(b"\x1f\x8b"):
        raise LimitError("it is compressed: gunzip it")
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise LimitError(f"it has about {values} values, and at most {MOST_VALUES} are read")
    try:
        text = content.decode("utf-8")
        return json.loads(
            text,
            parse_constant=_refuse,
            parse_int=_whole,
            parse_float=_number,
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError as error:
        raise LimitError(f"it is not UTF-8 from byte {error.start} on") from error
    except RecursionError as error:
        raise LimitError("its values are nested too deeply") from error
    except json.JSONDecodeError as error:
        raise LimitError(f"{error}") from error


def kind_of(document: object) -> str:
    """Return what a file of these values is, such as ``a plan``; empty if that is unknown."""
    fields = document if isinstance(document, dict) else {}
    return next((kind for field, kind in _KINDS.items() if field in fields), "")


def _refuse(constant: str) -> None:
    raise LimitError(f"{constant} is no number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise LimitError(f"a number has {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise LimitError(f"the number {digits[:MOST_DIGITS]} is too large")
    return value


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise LimitError(f"the key {key[:80]!r} is there twice")
        found[key] = value
    return found
