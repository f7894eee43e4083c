"""What a file format has to provide: raw samples, read or skipped in order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from placer.data.files.opening import FileIdentity, FileState, identify
from placer.data.files.stores import shown
from placer.data.layout import Columns
from placer.data.log import Keys, Offsets

# Called with the samples that are done and those that there are, None if unknown.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class RawBags:
    """Keys of one feature; bag i is ``keys[offsets[i]:offsets[i + 1]]``, or key i alone."""

    keys: Keys
    offsets: Offsets | None = None

    def slice(self, start: int, stop: int) -> "RawBags":
        """Return the bags of samples start..stop."""
        if self.offsets is None:
            return RawBags(self.keys[start:stop])
        offsets = self.offsets[start : stop + 1]
        return RawBags(self.keys[offsets[0] : offsets[-1]], offsets - offsets[0])


def samples_of(bags: RawBags, samples: int) -> Offsets:
    """Return the sample that each lookup belongs to."""
    every = np.arange(samples, dtype=np.int64)
    return every if bags.offsets is None else np.repeat(every, np.diff(bags.offsets))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where consecutive samples are."""

    file: str
    first: int  # Place in the file of the first sample.
    unit: str = "row"  # What `first` counts: ``line`` (from 1), ``row`` or ``sample`` (from 0).
    # Shape (samples,), or None: the line of each sample, where a sample may take several.
    lines: npt.NDArray[np.int64] | None = None

    def of(self, sample: int) -> str:
        """Return the place of a sample, for a message."""
        place = self.first + sample if self.lines is None else int(self.lines[sample])
        return f"{shown(self.file)}, {self.unit} {place}"


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """Consecutive samples of one file, with the place that they come from."""

    place: Place
    samples: int
    features: Mapping[str, RawBags]
    dense: npt.NDArray[np.float32]  # Shape (samples, columns)
    labels: npt.NDArray[np.float32] | None  # Shape (samples,), or None

    def slice(self, start: int, stop: int) -> "RawBatch":
        """Return samples start..stop of the batch."""
        stop = min(stop, self.samples)
        if start == 0 and stop == self.samples:
            return self
        at = self.place
        lines = None if at.lines is None else at.lines[start:stop]
        return RawBatch(
            Place(at.file, at.first + start, at.unit, lines),
            samples=stop - start,
            features={name: bags.slice(start, stop) for name, bags in self.features.items()},
            dense=self.dense[start:stop],
            labels=None if self.labels is None else self.labels[start:stop],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive samples of one file, which are read when they are asked for."""

    samples: int
    # Returns samples ``start..stop`` or the first of them, at least one; `start` only ever rises.
    read: Callable[[int, int], RawBatch]


class Cursor:
    """A place in a log that only moves forward; spans that are skipped are never read."""

    def __init__(self, spans: Generator[Span]) -> None:
        self._spans = spans
        self._span: Span | None = None
        self._used = 0  # Samples of the span that are behind us.

    def read(self, samples: int) -> RawBatch | None:
        """Return the next samples, at least one and at most `samples`; None at the end."""
        left = self._left()
        if self._span is None:
            return None
        batch = self._span.read(self._used, self._used + min(samples, left))
        self._used += batch.samples
        return batch

    def skip(self, samples: int) -> int:
        """Move on without reading; how many samples were there to skip."""
        left = samples
        while left and (here := self._left()):
            step = min(left, here)
            self._used += step
            left -= step
        return samples - left

    def close(self) -> None:
        """Let go of open files."""
        self._spans.close()
        self._span = None

    def _left(self) -> int:
        """Return samples of the span with the next one, from there on; 0 at the log's end."""
        while self._span is None or self._used == self._span.samples:
            self._span, self._used = None, 0  # Before the next is made: one is held at a time.
            self._span = next(self._spans, None)
            if self._span is None:
                return 0
        return self._span.samples - self._used


class Source(ABC):
    """The files of a log, whose columns are known and whose ids are still raw."""

    files: Sequence[str]  # In order; the name of a log that has none.
    columns: Columns
    samples: int | None = None  # Where that is known without reading.
    notes: Sequence[str] = ()  # What else the user should hear.
    # What the files were when reading began: one that changes in or between passes is an error.
    before: Mapping[str, FileState] = MappingProxyType({})
    is_fixed: bool = False  # Whether the format says what the columns are.

    @abstractmethod
    def spans(self) -> Generator[Span]:
        """Yield all samples of the log; what a span holds is lost when the next is asked for."""

    def open(self) -> Cursor:
        """Return a cursor at the log's start."""
        return Cursor(self.spans())

    def id_ranges(self) -> Mapping[str, tuple[int, int]] | None:
        """Return the smallest and largest id of each integer feature, 0 included, by statistics.

        None where the files keep none.
        """
        return None

    def batches(self, samples: int) -> Iterator[RawBatch]:
        """Yield all samples of the log, at most `samples` at a time."""
        with closing(self.open()) as cursor:
            while (batch := cursor.read(samples)) is not None:
                yield batch

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return what the log's files are known by, in order."""
        return identify(self.files)
