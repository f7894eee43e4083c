"""What tests of logs share."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from placer.data import open_log
from placer.data.log import Chunk, Log
from placer.errors import DataError


def refused(message: str, log: Any, *format: Any, **how: Any) -> str:
    """Check that a log cannot be opened; return what is said of it, in which `message` is found."""
    with pytest.raises(DataError, match=message) as error:
        open_log(log, *format, **how)
    return str(error.value)


def with_lines(path: Path, lines: Sequence[str]) -> Path:
    """A file of lines of text."""
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8", newline="")
    return path


def bags_of_chunk(chunk: Chunk, feature: str) -> list[list[int]]:
    """Ids of a feature, sample by sample."""
    ids, offsets = chunk.features[feature].ids, chunk.features[feature].offsets
    ends = range(chunk.samples + 1) if offsets is None else offsets.tolist()
    return [ids[first:end].tolist() for first, end in pairwise(ends)]


def bags(log: Log, feature: str, samples: int = 17) -> list[list[int]]:
    return [bag for chunk in log.chunks(samples) for bag in bags_of_chunk(chunk, feature)]
