"""Count the lookups and distinct rows of each part of a table in a batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch

from placer.data.log import Bags
from placer.errors import DataError
from placer.executor.distributed.table_routes import Router
from placer.plan.plan import Ranks
from placer.simulator.counts import Int
from placer.simulator.parts import Arrangement

Selector = slice | npt.NDArray[np.intp]

_DENSE = 4
"""With at most this many rows per lookup, count in an array of all rows."""


def distinct_counts(
    ids: npt.NDArray[np.integer], rows: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Return distinct ids in ascending order, and their counts. Ids are within 0..rows − 1."""
    if rows <= _DENSE * ids.size:
        counts = np.bincount(ids, minlength=rows)
        distinct = np.flatnonzero(counts)
        return distinct, counts[distinct]
    # Sorting half as many bytes is about twice as fast.
    return np.unique(
        ids.astype(np.int32) if rows <= np.iinfo(np.int32).max else ids, return_counts=True
    )


class Slices:
    """Disjoint slices of a table's ranks, not empty. They need not cover all ranks.

    Raises PlanMismatchError if strides are so mixed that their pattern hardly repeats.
    """

    def __init__(self, slices: Sequence[tuple[int, int, int]], rows: int) -> None:
        self._ends = [end for start, stop, _ in slices for end in (start, stop)]
        self._router = None
        if any(step > 1 for _, _, step in slices):
            parts = [(range(*part), 0, 0) for part in slices]
            self._router = Router.of(rows, parts, torch.device("cpu"))

    def select(self, ascending: npt.NDArray[np.integer]) -> list[Selector]:
        """Return the places of each slice's members among ascending ranks."""
        if self._router is None:
            places = np.searchsorted(ascending, self._ends).tolist()
            return [slice(*places[at : at + 2]) for at in range(0, len(places), 2)]
        owners = self._router.slices_of(torch.tensor(ascending)).numpy()
        # NumPy's stable sort of 16-bit integers is a fast radix sort.
        count = len(self._ends) // 2
        kind = np.int16 if count < np.iinfo(np.int16).max else np.int32
        order = np.argsort(owners.astype(kind), kind="stable")
        places = np.searchsorted(owners[order], np.arange(count + 1)).tolist()
        return [order[low:high] for low, high in pairwise(places)]


AnyInt = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class PartRead:
    """Lookups and rows of one part in a batch."""

    part: int
    lookups: int
    rows: int
    # Shape (rows,): ascending slots in the row cache's range, and lookups of each. None for parts
    # without a row cache.
    slots: Int | None = None
    counts: Int | None = None
    # For a part that the host pools: bags, including empty ones, and lookups without pooling.
    vectors: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Distinct rows that some samples read, in ascending order of rank."""

    # Shape (rows,)
    ids: AnyInt
    ranks: AnyInt
    counts: AnyInt


@dataclass(frozen=True, slots=True, eq=False)
class TableRead:
    """Lookups and rows of one table in a batch."""

    parts: list[PartRead]
    by_source: Int  # Shape (features, processes): lookups of each process's samples.
    all: Distinct | None  # Rows that all samples read; None if all parts are replicated.
    # By module with replicas: rows that the module's own sources read.
    by_module: dict[int, Distinct]


_Group = tuple[Slices, Sequence[Sequence[int]]]
"""For each range of columns: disjoint slices of ranks, and the parts that have them."""


class TableReader:
    """Counts the lookups and rows of one table in each batch."""

    def __init__(self, arrangement: Arrangement, number: int) -> None:
        plan = arrangement.plan
        self.table = plan.tables[number]
        self._arrangement = arrangement
        self._parts = arrangement.parts_of.get(number, ())
        listed = plan.order_of(self.table.name).kind == "profile"
        self.order = Ranks.in_plan(plan, self.table.name) if listed else None
        # By module for replicated parts; None for all other parts.
        held = {
            part.module if part.replicated else None
            for part in map(arrangement.parts.__getitem__, self._parts)
        }
        self._groups = {
            module: self._groups_of(module)
            for module in sorted(held, key=lambda one: -1 if one is None else one)
        }

    def read(self, bags: Sequence[Bags], samples: int) -> TableRead:
        """Count the lookups of the table's features in a batch.

        Raises DataError if an id is no row of the table.
        """
        ends = self._arrangement.ends(samples)
        starts = np.array(
            [ends if one.offsets is None else one.offsets[ends] for one in bags], dtype=np.int64
        ).reshape(len(bags), len(ends))
        for one, feature in zip(bags, self.table.features, strict=True):
            self._check(one.ids, feature.name)
        reads: list[PartRead] = []
        distinct: dict[int | None, Distinct] = {}
        for module, groups in self._groups.items():
            own, ids = samples, [one.ids for one in bags]
            if module is not None:
                sources = self._arrangement.modules[module].sources
                own = sum(ends[source + 1] - ends[source] for source in sources)
                ids = [
                    np.concatenate(
                        [all_ids[:0], *(all_ids[edges[s] : edges[s + 1]] for s in sources)]
                    )
                    for all_ids, edges in zip(ids, starts, strict=True)
                ]
            distinct[module] = self._distinct(ids)
            reads += self._with_vectors(groups, self._parts_of(groups, distinct[module]), ids, own)
        every = distinct.pop(None, None)
        by_module = {module: one for module, one in distinct.items() if module is not None}
        return TableRead(reads, np.diff(starts, axis=1), every, by_module)

    def updates(self, read: TableRead) -> list[PartRead]:
        """Return replicated rows that any holder's samples read: each holder updates them all."""
        updates: list[PartRead] = []
        holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for module in read.by_module:
            holders[self._arrangement.modules[module].holders].append(module)
        for members in holders.values():
            rows = np.concatenate([read.by_module[module].ranks for module in members])
            ranks = distinct_counts(rows, self.table.rows)[0]
            union = Distinct(ranks, ranks, np.ones(ranks.size, dtype=np.int64))
            for module in members:
                updates += self._parts_of(self._groups[module], union)
        return updates

    def _groups_of(self, module: int | None) -> list[_Group]:
        """Group the parts of a module, or for None all that are not replicated, by columns."""
        by_cols: dict[tuple[int, int], list[int]] = defaultdict(list)
        for at in self._parts:
            part = self._arrangement.parts[at]
            if module == (part.module if part.replicated else None):
                by_cols[part.cols].append(at)
        by_rows: dict[tuple[tuple[int, int, int], ...], list[list[int]]] = defaultdict(list)
        for members in by_cols.values():
            by_rows[tuple(self._arrangement.parts[at].rows for at in members)].append(members)
        return [(Slices(rows, self.table.rows), alike) for rows, alike in by_rows.items()]

    def _distinct(self, ids: Sequence[AnyInt]) -> Distinct:
        joined = ids[0] if len(ids) == 1 else np.concatenate([*ids])
        distinct_ids, counts = distinct_counts(joined, self.table.rows)
        if self.order is None:
            return Distinct(distinct_ids, distinct_ids, counts)
        ranks = self.order.ranks(distinct_ids.astype(np.int64))
        order = np.argsort(ranks)
        return Distinct(distinct_ids[order], ranks[order], counts[order])

    def _parts_of(self, groups: Sequence[_Group], rows: Distinct) -> list[PartRead]:
        reads = []
        running = np.concatenate(([0], np.cumsum(rows.counts, dtype=np.int64)))
        for slices, alike in groups:
            selected = slices.select(rows.ranks)
            for at, here in zip(chain.from_iterable(alike), selected * len(alike), strict=True):
                part = self._arrangement.parts[at]
                if isinstance(here, slice):
                    lookups = int(running[here.stop] - running[here.start])
                    number = here.stop - here.start
                else:
                    lookups, number = int(rows.counts[here].sum()), here.size
                if part.slots is None:
                    reads.append(PartRead(at, lookups, number))
                    continue
                start, _, step = part.rows
                slots = (rows.ranks[here].astype(np.int64) - start) // step + part.slots.start
                counts = rows.counts[here].astype(np.int64)
                reads.append(PartRead(at, lookups, number, slots, counts))
        return reads

    def _with_vectors(
        self,
        groups: Sequence[_Group],
        reads: list[PartRead],
        ids: Sequence[AnyInt],
        samples: int,
    ) -> list[PartRead]:
        """Return the reads with `vectors` set for parts that the host pools."""
        if not any(self._arrangement.parts[one.part].lookup == "host" for one in reads):
            return reads
        bags = samples * sum(feature.pooling != "none" for feature in self.table.features)
        alone: dict[int, int] = defaultdict(int)
        for feature, own in zip(self.table.features, ids, strict=True):
            if feature.pooling == "none":
                for one in self._parts_of(groups, self._distinct([own])):
                    alone[one.part] += one.lookups
        return [
            replace(one, vectors=bags + alone[one.part])
            if self._arrangement.parts[one.part].lookup == "host"
            else one
            for one in reads
        ]

    def _check(self, ids: AnyInt, feature: str) -> None:
        if not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.table.rows:
            raise DataError(
                f"feature {feature!r}: id {low if low < 0 else high} is not a row of table "
                f"{self.table.name!r}, which has {self.table.rows} rows; open the log with the "
                "id mapping that the plan was made with"
            )
