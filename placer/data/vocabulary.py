"""Vocabularies: which raw ids a log has, in the order in which they first appear."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placer.data.encoding import Vocabulary
from placer.data.source import Progress, Source, samples_of
from placer.data.text_keys import Keys

_Int = npt.NDArray[np.int64]
_CHUNK_SAMPLES = 16384
_MIN_MERGE = 1 << 20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
KEPT_HASHES = 16384
"""The standard error of an estimate is 1 / √16,384 = 0.8%."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Distinct keys, ascending, how often each was read and where it was read first."""

    keys: Keys
    counts: _Int
    first: _Int


@dataclass(slots=True)
class DistinctKeys:
    """The distinct keys of one table.

    Runs are merged only when the new ones outweigh the old, so that n lookups of d
    distinct keys cost O(n log d), not a merge of everything per chunk.
    """

    merged: Run | None = None
    pending: list[Run] = field(default_factory=list)
    pending_keys: int = 0

    def add(self, keys: Keys, places: _Int) -> None:
        """Count `keys`, read at `places`, which must ascend from call to call."""
        distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
        self.add_run(distinct, counts, places[first])

    def add_run(self, keys: Keys, counts: _Int, first: _Int) -> None:
        """Add counts of keys, which may repeat, and where each was read first."""
        self.pending.append(Run(keys, counts, first))
        self.pending_keys += keys.size
        old = 0 if self.merged is None else self.merged.keys.size
        if self.pending_keys > max(old, _MIN_MERGE):
            self.merge()

    @property
    def held(self) -> int:
        """Keys that are listed, those among them that are listed again included."""
        return self.pending_keys + (0 if self.merged is None else self.merged.keys.size)

    def merge(self) -> Run:
        """Return all keys so far, as one run."""
        runs = ([] if self.merged is None else [self.merged]) + self.pending
        self.pending, self.pending_keys = [], 0
        if self.merged is None or len(runs) > 1:
            empty = np.zeros(0, dtype=np.int64)
            keys = np.concatenate([np.zeros(0, np.uint64), *(run.keys for run in runs)])
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: keys.size])
            counts = np.concatenate([empty, *(run.counts for run in runs)])[order]
            first = np.concatenate([empty, *(run.first for run in runs)])[order]
            if starts.size:
                counts = np.add.reduceat(counts, starts)
                first = np.minimum.reduceat(first, starts)
            runs = [Run(keys[starts], counts, first)]
        self.merged = runs[0]
        return self.merged


def build_vocabularies(
    source: Source,
    feature_tables: Mapping[str, str],
    *,
    min_count: int | Mapping[str, int] = 1,
    rows: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> dict[str, Vocabulary]:
    """Vocabularies of the tables that `feature_tables` names, from one pass over a log.

    Keys keep the order in which they first appear: sample by sample, within a sample feature by
    feature, within a bag by key. Those that are read less often than `min_count` share row 0. Of a
    table with `rows`, row 0 included, the most read keys are kept (ties to the one that appeared
    first). Memory grows with the distinct ids.
    """
    distinct = {table: DistinctKeys() for table in feature_tables.values()}
    feature_count = len(feature_tables)
    start = 0
    for batch in source.batches(_CHUNK_SAMPLES):
        for position, (feature, table) in enumerate(feature_tables.items()):
            bags = batch.features[feature]
            places = (start + samples_of(bags, batch.samples)) * feature_count + position
            distinct[table].add(bags.keys, places)
        start += batch.samples
        if progress is not None:
            progress(start, source.samples)
    limits = rows or {}
    least = min_count if isinstance(min_count, Mapping) else dict.fromkeys(distinct, min_count)
    return {
        table: vocabulary_of(keys.merge(), least.get(table, 1), limits.get(table))
        for table, keys in distinct.items()
    }


def vocabulary_of(run: Run, min_count: int, rows: int | None) -> Vocabulary:
    """Return the vocabulary of a table whose distinct keys are `run`; see `build_vocabularies`."""
    kept: Sequence[int] | _Int = np.flatnonzero(run.counts >= min_count)
    if rows is not None and len(kept) > rows - 1:
        by_count = np.lexsort((run.first[kept], -run.counts[kept]))
        kept = np.asarray(kept)[by_count[: rows - 1]]
    # Keys of one bag share a place and keep their order, as the sort is stable.
    order = np.argsort(run.first[kept], kind="stable")
    return Vocabulary(run.keys[kept][order])


class UnknownKeys:
    """How many different keys a vocabulary does not list, in memory that does not grow with them.

    Of n different hashes within 0..1 the k-th smallest is near k / n, so that (k − 1) / it is an
    unbiased estimate of n. Z. Bar-Yossef et al., "Counting Distinct Elements in a Data Stream",
    RANDOM 2002, doi:10.1007/3-540-45726-7_1. Up to `KEPT_HASHES` keys the number is exact.

    >>> seen = UnknownKeys()
    >>> seen.add(np.array([3, 5, 3], dtype=np.uint64))
    >>> seen.estimate()
    2
    """

    def __init__(self) -> None:
        self._smallest = np.zeros(0, dtype=np.uint64)

    def add(self, keys: Keys) -> None:
        """Count keys, which may have been counted before."""
        if keys.size:
            joined = np.concatenate((self._smallest, mixed_bits(np.unique(keys) + _GOLDEN)))
            self._smallest = np.unique(joined)[:KEPT_HASHES]

    def estimate(self) -> int:
        """Different keys so far."""
        if self._smallest.size < KEPT_HASHES:
            return int(self._smallest.size)
        largest = float(self._smallest[-1]) / 2.0**64
        return round((KEPT_HASHES - 1) / largest)


def mixed_bits(keys: Keys) -> Keys:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195)."""
    bits = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))
