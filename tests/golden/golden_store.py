"""Recorded results: where they are, and how they are compared with what comes out today."""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
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


def assert_same(
    actual: Any, expected: Any, where: str = "$", *, relative: float = TOLERANCE
) -> None:
    """Raise an AssertionError that names the first places where a value differs from JSON's."""
    as_json = json.loads(json.dumps(actual))
    found = list(itertools.islice(_differences(as_json, expected, relative, where), 10))
    assert not found, "\n".join(found)


def _differences(actual: Any, expected: Any, relative: float, where: str) -> Iterator[str]:
    """Where two values of JSON differ: floats by more than a share, all else at all."""
    if isinstance(expected, float) and isinstance(actual, float):
        if not (
            math.isclose(actual, expected, rel_tol=relative, abs_tol=1e-30)
            or (math.isnan(actual) and math.isnan(expected))
        ):
            yield f"{where}: {actual!r} instead of {expected!r}"
    elif type(actual) is not type(expected):
        yield f"{where}: {actual!r:.200} instead of {expected!r:.200}"
    elif isinstance(expected, dict):
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                yield f"{where}.{key} is missing"
            elif key not in expected:
                yield f"{where}.{key} is new"
            else:
                yield from _differences(actual[key], expected[key], relative, f"{where}.{key}")
        if [key for key in actual if key in expected] != [key for key in expected if key in actual]:
            yield f"{where}: keys in another order, {list(actual)} instead of {list(expected)}"
    elif isinstance(expected, list):
        if len(actual) != len(expected):
            yield f"{where}: {len(actual)} entries instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=False)):
            yield from _differences(one, other, relative, f"{where}[{index}]")
    elif actual != expected:
        yield f"{where}: {actual!r:.200} instead of {expected!r:.200}"
