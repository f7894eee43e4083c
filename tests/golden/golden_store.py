"""Recorded results: where they are, and how they are compared with what comes out today."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
TOLERANCE = 1e-9
"""Relative; of numbers that are not whole."""


def recorded(name: str) -> Any:
    """The recorded tree of that name."""
    plain = DATA / f"{name}.json"
    if plain.exists():
        return json.loads(plain.read_text(encoding="utf-8"))
    return json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))


def record(name: str, tree: Any, *, compress: bool = False) -> Path:
    """Write a tree under that name; the same tree gives the same bytes."""
    text = json.dumps(tree, indent=None if compress else 1, allow_nan=True) + "\n"
    path = DATA / (f"{name}.json.gz" if compress else f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if compress else text.encode())
    return path


def assert_same(actual: Any, expected: Any, where: str = "result") -> None:
    """Raise an AssertionError that names the place unless two trees of JSON are the same.

    Whole numbers, strings and structure have to be equal; of two numbers of which one is a
    float, their relative difference is at most `TOLERANCE`.
    """
    if isinstance(expected, dict):
        assert isinstance(actual, dict), f"{where}: {actual!r} is no mapping"
        assert actual.keys() == expected.keys(), (
            f"{where}: keys {sorted(actual.keys() ^ expected.keys())} are on one side only"
        )
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list | tuple), f"{where}: {actual!r} is no list"
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif _is_number(expected) and _is_number(actual) and float in (type(actual), type(expected)):
        close = math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=0.0)
        both_nan = math.isnan(actual) and math.isnan(expected)
        assert close or both_nan, f"{where}: {actual!r}, not {expected!r}"
    else:
        assert type(actual) is type(expected), f"{where}: {actual!r}, not {expected!r}"
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
