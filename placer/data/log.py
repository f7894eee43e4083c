"""Chunks of samples: what the reader of a training log yields, in every format."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
"""Raw ids; `placer.data.keys` says how they are made."""
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """The bags of one feature over the samples of a chunk, in sample order."""

    # Shape (lookups,): rows of the feature's table, 0..rows-1.
    ids: npt.NDArray[np.int64]
    # Shape (samples + 1,): bag i is ``ids[offsets[i]:offsets[i + 1]]``. None if every sample has
    # one id.
    offsets: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None  # Shape (lookups,): per-sample weights.

    @property
    def keys(self) -> Keys:
        """The ids as keys: before ids are mapped to rows, they are raw."""
        return self.ids.view(np.uint64)

    @property
    def samples(self) -> int:
        """Number of samples, including samples with an empty bag."""
        return self.ids.size if self.offsets is None else self.offsets.size - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lookups of each sample, shape (samples,)."""
        return np.ones(self.ids.size, np.int64) if self.offsets is None else np.diff(self.offsets)

    @property
    def samples_of_lookups(self) -> npt.NDArray[np.int64]:
        """The sample of each lookup, shape (lookups,)."""
        every = np.arange(self.samples, dtype=np.int64)
        return every if self.offsets is None else np.repeat(every, self.lengths)

    @property
    def filled(self) -> int:
        """Number of samples whose bag is not empty."""
        return self.samples if self.offsets is None else int(np.count_nonzero(self.lengths))

    def of_samples(self, kept: slice | npt.NDArray[np.bool_]) -> "Bags":
        """Return the bags of the samples that a slice or a mask selects."""
        lookups, offsets = kept, self.offsets
        if offsets is None:
            pass  # One lookup a sample.
        elif isinstance(kept, slice):
            offsets = offsets[kept.start : kept.stop + 1]
            lookups, offsets = slice(int(offsets[0]), int(offsets[-1])), offsets - offsets[0]
        else:
            lookups = np.repeat(kept, self.lengths)
            offsets = np.append(0, np.cumsum(self.lengths[kept]))
        weights = None if self.weights is None else self.weights[lookups]
        return Bags(self.ids[lookups], offsets, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive samples of a log."""

    samples: int
    features: Mapping[str, Bags]  # The same features, in the same order, in every chunk of a log.
    # Shape (samples, columns): numeric features as the log has them, NaN where missing.
    dense: npt.NDArray[np.float32]
    # Shape (samples,): NaN where missing. Profiling needs no label; training leaves out samples
    # without one.
    labels: npt.NDArray[np.float32] | None = None


@runtime_checkable
class Log(Protocol):
    """A training log that can be read from its start any number of times."""

    @property
    def tables(self) -> Mapping[str, int]:
        """Rows of each table, by table name."""
        ...

    @property
    def feature_tables(self) -> Mapping[str, str]:
        """The table that each feature reads, by feature name, in the log's order."""
        ...

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the numeric columns."""
        ...

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        """Return chunks of at most `samples` samples, without the log's first `skip` samples.

        Raises DataError if the log is empty, a column is missing, a line is ragged or an id is out
        of range; the message names the file and the place.
        """
        ...


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Concatenate chunks of one log."""
    first, *more = chunks
    if not more:
        return first
    labels = [chunk.labels for chunk in chunks if chunk.labels is not None]
    return Chunk(
        sum(chunk.samples for chunk in chunks),
        {name: _joined_bags([chunk.features[name] for chunk in chunks]) for name in first.features},
        np.concatenate([chunk.dense for chunk in chunks]),
        np.concatenate(labels) if labels else None,
    )


def weights_of(parts: Sequence[Bags]) -> npt.NDArray[np.float32] | None:
    """Concatenate the weights of bags: 1 for bags without weights, None if no bags have any."""
    if all(bags.weights is None for bags in parts):
        return None
    return np.concatenate(
        [
            np.ones(bags.ids.size, np.float32) if bags.weights is None else bags.weights
            for bags in parts
        ]
    )


def _joined_bags(parts: Sequence[Bags]) -> Bags:
    ids, weights = np.concatenate([bags.ids for bags in parts]), weights_of(parts)
    if all(bags.offsets is None for bags in parts):
        return Bags(ids, None, weights)
    lengths = np.concatenate([bags.lengths for bags in parts])
    return Bags(ids, np.append(0, np.cumsum(lengths)), weights)


def slice_chunk(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Return samples ``start..stop`` of a chunk, as views if possible."""
    return samples_of(chunk, stop - start, slice(start, stop))


def samples_of(chunk: Chunk, samples: int, kept: slice | npt.NDArray[np.bool_]) -> Chunk:
    """Return the `samples` samples of a chunk that a slice or a mask selects."""
    features = {name: bags.of_samples(kept) for name, bags in chunk.features.items()}
    labels = None if chunk.labels is None else chunk.labels[kept]
    return Chunk(samples, features, chunk.dense[kept], labels)
