"""The counts that a task holds of its partition, in bounded memory."""

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.text_keys import Keys
from placer.data.vocabulary import DistinctKeys
from placer.profile.parts.counts import batches

_Int = npt.NDArray[np.int64]

_KEY_BYTES = 24
"""Of a listed row or key: itself, its count and where it came first."""
_SORTING = 4
"""Memory while a list is sorted and added up, as a multiple of its own."""


class PartitionTables:
    """Counts of all tables over one partition.

    When the lists are full, they are passed on, and begin anew: whoever adds parts up adds these
    too.

    Parameters
    ----------
    keyed : collection of str
        Those of them whose ids are counted as keys; of the others, as rows.
    """

    def __init__(self, tables: Iterable[str], keyed: Collection[str], memory_bytes: int) -> None:
        self._counts = {name: DistinctKeys() for name in tables}
        self._kinds = {name: "key" if name in keyed else "row" for name in self._counts}
        self._most_bytes = memory_bytes // _SORTING

    def add_rows(self, table: str, rows: _Int) -> None:
        """Count rows of a table."""
        distinct, counts = np.unique(rows.view(np.uint64), return_counts=True)
        self._counts[table].add_run(distinct, counts, np.zeros_like(counts))

    def add_keys(self, table: str, keys: Keys, places: _Int) -> None:
        """Count keys of a table, read at `places`."""
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            keys, places = keys[order], places[order]
        self._counts[table].add(keys, places)

    def overflow(self) -> Iterator[pa.RecordBatch]:
        """What has to be passed on for the lists to have room again."""
        if self._held_bytes() > self._most_bytes:
            for counts in self._counts.values():
                counts.merge()
            if self._held_bytes() > self._most_bytes // 2:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All that was not passed on."""
        for name, counts in self._counts.items():
            run = counts.merge()
            yield from batches(
                self._kinds[name], name, run.keys.view(np.int64), run.counts, run.first
            )
            self._counts[name] = DistinctKeys()

    def _held_bytes(self) -> int:
        return _KEY_BYTES * sum(counts.held for counts in self._counts.values())
