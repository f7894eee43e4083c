"""What a file format provides: raw samples, read or skipped in order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from placer.data.files.opening import FileIdentity, FileState, identify
from placer.data.files.stores import shown
from placer.data.layout import Columns
from placer.data.log import Chunk, slice_chunk

# Called with the number of samples that are done and the total, None if unknown.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """File and place of consecutive samples."""

    file: str
    numbers: Sequence[int] | npt.NDArray[np.int64]  # Of each sample's line, row or sample.
    unit: str = "row"  # What is numbered: ``line`` (from 1), ``row`` or ``sample`` (from 0).

    def of(self, sample: int) -> str:
        """Return the place of a sample, for a message."""
        return f"{shown(self.file)}, {self.unit} {self.numbers[sample]}"

    @property
    def of_all(self) -> str:
        """The place of all samples, for a message."""
        return f"{shown(self.file)}, from {self.unit} {self.numbers[0]} on"


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """Consecutive samples of one file, with their place. Ids are keys (see `placer.data.keys`)."""

    place: Place
    chunk: Chunk

    def slice(self, start: int, stop: int) -> "RawBatch":
        """Return samples start..stop of the batch."""
        stop = min(stop, self.chunk.samples)
        place = replace(self.place, numbers=self.place.numbers[start:stop])
        return RawBatch(place, slice_chunk(self.chunk, start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive samples of one file, which `read` reads."""

    samples: int
    # Returns samples ``start..stop``, or fewer, but at least one. `start` rises from call to call.
    read: Callable[[int, int], RawBatch]


class Cursor:
    """A position in a log that only moves forward. Spans that are skipped are never read."""

    def __init__(self, spans: Generator[Span]) -> None:
        self._spans = spans
        self._span: Span | None = None
        self._used = 0  # Samples of the span that were read or skipped.

    def read(self, samples: int) -> RawBatch | None:
        """Return the next samples, at least one and at most `samples`; None at the end."""
        left = self._left()
        if self._span is None:
            return None
        batch = self._span.read(self._used, self._used + min(samples, left))
        self._used += batch.chunk.samples
        return batch

    def skip(self, samples: int) -> int:
        """Skip samples without reading; return how many were skipped, fewer at the log's end."""
        left = samples
        while left and (here := self._left()):
            step = min(left, here)
            self._used += step
            left -= step
        return samples - left

    def close(self) -> None:
        """Close open files."""
        self._spans.close()
        self._span = None

    def _left(self) -> int:
        """Return how many samples are left in the current span, or the next; 0 at the log's end."""
        while self._span is None or self._used == self._span.samples:
            self._span, self._used = None, 0  # Drop a span before making the next one.
            self._span = next(self._spans, None)
            if self._span is None:
                return 0
        return self._span.samples - self._used


class Source(ABC):
    """The files of a log. The columns are known; the ids are still raw."""

    files: Sequence[str]  # In order. For a log without files, its name.
    columns: Columns
    samples: int | None = None  # None if it is unknown before reading.
    notes: Sequence[str] = ()  # Messages for the user.
    # State of each file when reading began: a file that changes before the end is an error.
    before: Mapping[str, FileState] = MappingProxyType({})
    is_fixed: bool = False  # Whether the format fixes the columns.

    @property
    def of_ids_alone(self) -> "Source":
        """The source without its label and numeric columns, for counting ids."""
        other = copy(self)
        other.columns = replace(self.columns, dense=(), label=None)
        return other

    @abstractmethod
    def spans(self) -> Generator[Span]:
        """Yield all samples of the log. A span is invalid once the next one is yielded."""

    def id_ranges(self) -> Mapping[str, tuple[int, int]] | None:
        """Return the smallest and largest id of each integer feature, 0 included.

        They come from the files' statistics; None if the files have none.
        """
        return None

    def batches(self, samples: int) -> Iterator[Chunk]:
        """Yield all samples of the log, with keys as ids, at most `samples` at a time."""
        with closing(Cursor(self.spans())) as cursor:
            while (batch := cursor.read(samples)) is not None:
                yield batch.chunk

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return the identities of the log's files, in order."""
        return tuple(map(identify, self.files))
