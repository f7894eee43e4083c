"""The counts that a task holds of its partition, in bounded memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.text_keys import Keys
from placer.data.vocabulary import DistinctKeys
from placer.profile.count import DenseCounts
from placer.profile.parts.counts import batches

_Int = npt.NDArray[np.int64]

_DENSE_FROM = 8
"""A table is counted in an array of its rows once it had one lookup for so many rows: from then
on that takes less time and memory than lists of rows that are sorted."""
_ROW_BYTES, _KEY_BYTES = 16, 24
"""Of a listed row (row, count) and of a key (key, count, first)."""
_SORTING = 4
"""Memory while a list is sorted and added up, as a multiple of its own."""
_BLOCK_ROWS = 1 << 18


class PartitionTables:
    """Counts of all tables over one partition.

    Half of the memory is for arrays with one count a row, of the tables that are read often
    enough; the other half is for lists, and for sorting them. When the lists are full, they are
    passed on, and begin anew: whoever adds parts up adds these too.

    Parameters
    ----------
    rows : mapping of table name to int
        Rows of the tables whose ids are counted as rows.
    keyed : iterable of str
        The tables whose ids are counted as keys.
    memory_bytes : int
    """

    def __init__(self, rows: Mapping[str, int], keyed: Iterable[str], memory_bytes: int) -> None:
        self._rows = {name: _Rows(count) for name, count in rows.items()}
        self._keys = {name: DistinctKeys() for name in keyed}
        self._dense_bytes = memory_bytes // 2
        self._most_bytes = memory_bytes // 2 // _SORTING

    def add_rows(self, table: str, rows: _Int) -> None:
        """Count rows of a table."""
        counted = self._rows[table]
        counted.lookups += rows.size
        if counted.dense is None and counted.lookups * _DENSE_FROM >= counted.rows:
            needed = 4 * counted.rows
            if needed <= self._dense_bytes:
                self._dense_bytes -= needed
                counted.dense = DenseCounts(counted.rows)
        if counted.dense is not None:
            counted.dense.add(rows)
        else:
            counted.listed.append(rows)
            counted.listed_rows += rows.size

    def add_keys(self, table: str, keys: Keys, places: _Int) -> None:
        """Count keys of a table, read at `places`."""
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            keys, places = keys[order], places[order]
        self._keys[table].add(keys, places)

    def overflow(self) -> Iterator[pa.RecordBatch]:
        """What has to be passed on for the lists to have room again."""
        if self._held_bytes() <= self._most_bytes:
            return
        for rows in self._rows.values():
            rows.add_up()
        for keys in self._keys.values():
            keys.merge()
        if self._held_bytes() > self._most_bytes // 2:
            yield from self._lists()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """All that was not passed on."""
        yield from self._lists()
        for name, rows in self._rows.items():
            if rows.dense is None:
                continue
            values = rows.dense.values
            for start in range(0, values.size, _BLOCK_ROWS):
                block = values[start : start + _BLOCK_ROWS]
                read = np.flatnonzero(block)
                yield from batches("row", name, read + start, block[read].astype(np.int64))

    def _lists(self) -> Iterator[pa.RecordBatch]:
        for name, rows in self._rows.items():
            rows.add_up()
            yield from batches("row", name, rows.ids, rows.counts)
            rows.clear()
        for name, keys in self._keys.items():
            run = keys.merge()
            yield from batches("key", name, run.keys.view(np.int64), run.counts, run.first)
            self._keys[name] = DistinctKeys()

    def _held_bytes(self) -> int:
        listed = sum(rows.listed_rows + rows.ids.size for rows in self._rows.values())
        keyed = sum(keys.held for keys in self._keys.values())
        return listed * _ROW_BYTES + keyed * _KEY_BYTES


def _none() -> _Int:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class _Rows:
    """Counts of a table's rows: an array, or a list of rows and of lookups not yet added up."""

    rows: int
    lookups: int = 0
    dense: DenseCounts | None = None
    listed: list[_Int] = field(default_factory=list)
    listed_rows: int = 0
    ids: _Int = field(default_factory=_none)
    counts: _Int = field(default_factory=_none)

    def add_up(self) -> None:
        """List each row once."""
        if not self.listed:
            return
        ids, counts = np.unique(np.concatenate(self.listed), return_counts=True)
        self.listed, self.listed_rows = [], 0
        if self.ids.size:
            both = np.concatenate([self.ids, ids])
            order = np.argsort(both, kind="stable")
            both = both[order]
            starts = np.flatnonzero(np.append(True, both[1:] != both[:-1]))
            counts = np.add.reduceat(np.concatenate([self.counts, counts])[order], starts)
            ids = both[starts]
        self.ids, self.counts = ids, counts

    def clear(self) -> None:
        """Forget the lists."""
        self.ids, self.counts = _none(), _none()
