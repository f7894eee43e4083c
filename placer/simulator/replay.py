"""Replay batches under a plan, and count the work of every process.

Steps are those of the executor's training loop. With look-ahead, batch t + 1 gets its HBM entries
while batch t is open, so rows of both batches stay in HBM. Without it, a step ends before the next
begins.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from placer.data.log import Bags, Chunk
from placer.errors import PlacerError, PlanMismatchError
from placer.executor import Policy
from placer.executor.memory.layout import SlotRange
from placer.executor.memory.row_cache import RowCache
from placer.growing import KeyCounts, KeyMap
from placer.growing.hashes import parts_of
from placer.growing.options import OPEN_OVER_RANKS
from placer.plan.plan import Plan
from placer.simulator.counts import Int, PartCounts, Served, StepCounts, nothing_sent
from placer.simulator.parts import arrange
from placer.simulator.sent_bytes import ReplicaExchange, TableExchange
from placer.simulator.table_reads import PartRead, TableRead, TableReader
from placer.tables import DTYPE_BYTES, Table

_THREADS = 2
"""Number of tables that are counted at a time."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay."""

    # Training processes; by default one per GPU. Serving hosts get their own, unless it is 1.
    processes: int | None = None
    cache_policy: Policy = "lfu"  # Which rows stay in row caches.
    # Whether a batch's rows are copied to HBM while the batch before it trains. None: by the plan's
    # pipeline.
    look_ahead: bool | None = None

    def of_plan(self, plan: Plan) -> "ReplayOptions":
        """Return the options with `look_ahead` set by the plan if it is None."""
        if self.look_ahead is not None:
            return self
        return replace(self, look_ahead=plan.pipeline == "look-ahead")


class Simulator:
    """Replays batches under a plan.

    It remembers which rows have copies in HBM, so logs can be replayed one after another. `keys`
    has the key maps of growing tables, one for each process that trains. Raises PlanMismatchError
    if the plan is invalid. It does not check that the plan fits in memory: `placer.plan.verify`
    does.
    """

    def __init__(self, plan: Plan, options: ReplayOptions | None = None) -> None:
        self.options = (options or ReplayOptions()).of_plan(plan)
        self.arrangement = arrangement = arrange(plan, self.options.processes)
        parts = arrangement.trainers
        self.keys = {
            name: [KeyMap(how, part, parts) for part in range(parts)]
            for name, how in plan.growing.items()
        }
        self._readers = [TableReader(arrangement, number) for number in range(len(plan.tables))]
        self._exchanges = [TableExchange(arrangement, number) for number in range(len(plan.tables))]
        self._replicas = ReplicaExchange(arrangement)
        policy = self.options.cache_policy
        if policy not in get_args(Policy):
            raise PlacerError(
                f"no cache policy is called {policy!r}; choose from {', '.join(get_args(Policy))}"
            )
        self._row_caches = {
            arena: ArenaRowCache(
                [slots for at in members if (slots := arrangement.parts[at].slots)], policy
            )
            for arena, members in arrangement.row_caches.items()
        }
        # By module: numbers of the next steps, and of open steps, whose rows stay in place.
        self._numbers = [itertools.count() for _ in arrangement.modules]
        self._open: list[list[int]] = [[] for _ in arrangement.modules]
        self._module_of = {part.arena: part.module for part in arrangement.parts}
        self._members: dict[int, list[int]] = {}
        for at, part in enumerate(arrangement.parts):
            self._members.setdefault(part.arena, []).append(at)

    @property
    def cache_entries(self) -> Int:
        """HBM entries for copies of rows; int64, shape (row caches,)."""
        return np.array(
            [row_cache.entries for row_cache in self._row_caches.values()], dtype=np.int64
        )

    def key_counts(self) -> dict[str, KeyCounts]:
        """Return the key counters of each growing table, summed over processes."""
        return {
            name: KeyCounts(*np.sum([own.counts for own in maps], 0).tolist())
            for name, maps in self.keys.items()
        }

    def run(self, batches: Iterable[Chunk]) -> Iterator[StepCounts]:
        """Yield the counts of each batch, in order. Hold at most two batches at a time.

        Raises PlanMismatchError if a batch lacks a feature that the plan reads. Raises DataError if
        an id is not a row of its table.
        """
        ahead = self.options.look_ahead
        waiting: _Step | None = None
        with ThreadPoolExecutor(_THREADS) as threads:
            for chunk in batches:
                step = self._begin(chunk, threads)
                if waiting is not None:
                    yield self._finish(waiting, threads)
                waiting = step if ahead else None
                if not ahead:
                    yield self._finish(step, threads)
            if waiting is not None:
                yield self._finish(waiting, threads)

    def _begin(self, chunk: Chunk, threads: ThreadPoolExecutor) -> "_Step":
        """Count a batch's lookups, and give its rows HBM entries."""
        plan, processes = self.arrangement.plan, self.arrangement.processes
        ends = self.arrangement.ends(chunk.samples)
        bags = {
            number: self._rows_of(table.name, _bags_of(chunk, table), ends)
            for number, table in enumerate(plan.tables)
            if table.features
        }
        read_from = [number for number in bags if plan.tables[number].rows]
        counted = threads.map(
            lambda number: self._readers[number].read(bags[number], chunk.samples), read_from
        )
        reads = dict(zip(read_from, counted, strict=True))
        ahead = self.options.look_ahead

        def updates(module: int) -> bool:
            # Copies of replicated rows are updated in another pass. With look-ahead, the executor
            # treats every prepared batch as one that trains.
            return ahead or not self.arrangement.modules[module].replicated

        parts = (part for read in reads.values() for part in read.parts)
        tickets, counts, needed = self._resolve(parts, range(len(self._open)), updates, threads)
        sent = nothing_sent(processes)
        if plan.exchange_dtype == "float16":  # Each message also has the scale of its numbers.
            for kind in ("outputs", "gradients"):
                sent[kind] += DTYPE_BYTES["float16"]
        served = Served.zeros(len(plan.tables), processes)
        for number, read in reads.items():
            self._exchanges[number].add(sent, served, bags[number], chunk.samples, read)
        self._replicas.add(sent, served, reads)
        held = np.array([row_cache.held for row_cache in self._row_caches.values()], dtype=np.int64)
        return _Step(StepCounts(chunk.samples, counts, held, needed, served, sent), tickets, reads)

    def _rows_of(self, table: str, bags: list[Bags], samples: Sequence[int]) -> list[Bags]:
        """Return bags with rows instead of keys, if the table grows. Rows are as in training.

        The process that has a key gives its row. It reads keys in the order of the processes that
        have the samples.
        """
        maps = self.keys.get(table)
        if maps is None:
            return bags
        keys = np.concatenate([one.ids for one in bags])
        places = (samples if one.offsets is None else one.offsets[samples] for one in bags)
        sources = [np.arange(len(samples) - 1).repeat(np.diff(own)) for own in places]
        order = np.concatenate(sources).argsort(kind="stable")
        owners, rows = parts_of(keys[order], len(maps)), np.empty_like(keys)
        open_steps = OPEN_OVER_RANKS if self.arrangement.processes > 1 else 1
        for part, own in enumerate(maps):
            here = order[owners == part]
            rows[here] = own.read(keys[here], open_steps).rows
        ends = np.cumsum([one.ids.size for one in bags])
        parts = np.split(rows, ends[:-1])
        return [replace(one, ids=part) for one, part in zip(bags, parts, strict=True)]

    def _finish(self, step: "_Step", threads: ThreadPoolExecutor) -> StepCounts:
        """Update the rows of a batch. Afterwards the rows may move."""
        replicated = [m for m, module in enumerate(self.arrangement.modules) if module.replicated]
        self._close(step.tickets)
        if replicated:
            updates = (
                part
                for number, read in step.reads.items()
                for part in self._readers[number].updates(read)
            )
            tickets, own, _ = self._resolve(updates, replicated, lambda module: True, threads)
            parts = step.counts.parts
            parts.update_rows[:], parts.update_hit_rows[:] = own.rows, own.hit_rows
            for name in ("staged_rows", "in_place_rows", "in_place_lookups", "written_back_rows"):
                getattr(parts, name)[:] += getattr(own, name)
            self._close(tickets)
        return step.counts

    def _close(self, tickets: Mapping[int, int]) -> None:
        """End a step of each module in `tickets`: its rows may move."""
        for module, ticket in tickets.items():
            self._open[module].remove(ticket)
        for arena, row_cache in self._row_caches.items():
            if self._module_of[arena] in tickets:
                row_cache.close(tickets[self._module_of[arena]])

    def _resolve(
        self,
        reads: Iterable[PartRead],
        modules: Iterable[int],
        updates: Callable[[int], bool],
        threads: ThreadPoolExecutor,
    ) -> tuple[dict[int, int], PartCounts, Int]:
        """Open a step of some modules, and give HBM entries to the rows that it reads.

        Return the step's number in each module, the counts of each part, and the distinct rows of
        the open steps for each row cache.
        """
        counts = PartCounts.zeros(len(self.arrangement.parts))
        by_part = {one.part: one for one in reads}
        for at, one in by_part.items():
            counts.lookups[at], counts.rows[at] = one.lookups, one.rows
            counts.vectors[at] = one.vectors
        tickets = {module: next(self._numbers[module]) for module in modules}
        for module, ticket in tickets.items():
            self._open[module].append(ticket)
        needed = np.zeros(len(self._row_caches), dtype=np.int64)

        def resolve(number: int, arena: int) -> None:
            module = self._module_of[arena]
            # A row cache does not change if nothing is read from its arena.
            if module not in tickets or not any(counts.lookups[at] for at in self._members[arena]):
                return
            members = np.array(self.arrangement.row_caches[arena])
            reads = [by_part[at] for at in members if at in by_part]
            slots = np.concatenate([_NONE, *(r.slots for r in reads if r.slots is not None)])
            times = np.concatenate([_NONE, *(r.counts for r in reads if r.counts is not None)])
            oldest = self._open[module][0]
            needed[number], resolved = self._row_caches[arena].resolve(
                slots, times, tickets[module], oldest, updates=updates(module)
            )
            for name, values in resolved.items():
                getattr(counts, name)[members] = values

        list(threads.map(resolve, itertools.count(), self._row_caches))
        return tickets, counts, needed


_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A batch with its rows resolved, but not updated yet."""

    counts: StepCounts
    tickets: dict[int, int]
    reads: dict[int, TableRead]  # By the number of the table.


def _bags_of(chunk: Chunk, table: Table) -> list[Bags]:
    names = [feature.name for feature in table.features]
    missing = [name for name in names if name not in chunk.features]
    if missing:
        raise PlanMismatchError(
            f"the log lacks features {missing}; it has {', '.join(chunk.features)}"
        )
    return [chunk.features[name] for name in names]


class ArenaRowCache:
    """The row cache of an arena's parts, given by their slots in order.

    It uses the executor's own directory (`RowCache`), without any rows. It resolves the same steps
    in the same order, so ties are decided alike, and counts are exact.
    """

    def __init__(self, ranges: Sequence[SlotRange], policy: Policy) -> None:
        starts = [part.start for part in ranges]
        self._starts = np.array([*starts, ranges[-1].stop], dtype=np.int64)
        self._row_cache = RowCache(ranges, 0, "cpu", policy)
        self._kind = np.int32 if self._starts[-1] < np.iinfo(np.int32).max else np.int64
        self.entries = self._row_cache.entries
        self.held = sum(part.cache_rows for part in ranges)
        """Number of entries that hold a row."""
        # By open step: its slots, and the slots that it reads in place.
        self._open: dict[int, tuple[Int, Int]] = {}

    def resolve(
        self, slots: Int, times: Int, ticket: int, oldest: int, *, updates: bool
    ) -> tuple[int, dict[str, Int]]:
        """Give entries to the rows of a step.

        `slots` are distinct and ascending, and `times` are the lookups of each. `ticket` is the
        number of the step, and `oldest` of the oldest open step. `updates` says whether the step
        updates its copies. Return the number of distinct rows of the open steps; and for each part
        the step's hits, copies and reads in place, by their names in `PartCounts`.
        """
        needed = slots.size + sum(
            slots.size and theirs.size - _common(theirs, slots) for theirs, _ in self._open.values()
        )
        barred = None
        kept = [theirs for _, theirs in self._open.values() if theirs.size]
        if kept:
            barred = torch.from_numpy(np.logical_or.reduce([_among(slots, one) for one in kept]))
        rows = torch.from_numpy(slots.astype(self._kind))
        hit = (self._row_cache.find(rows) >= 0).numpy()
        entries, moves = self._row_cache.resolve(
            rows, torch.from_numpy(times.astype(np.int32)), ticket, oldest, barred
        )
        outgoing = moves.outgoing.numpy()
        in_place = (entries < 0).numpy()
        self.held = min(self.entries, self.held + int(moves.count))
        if updates:
            self._row_cache.mark_dirty(entries)
        self._open[ticket] = slots, slots[in_place]
        edges = np.searchsorted(slots, self._starts)
        hit_rows, in_place_rows = _sums(hit, edges), _sums(in_place, edges)
        written = np.searchsorted(np.sort(outgoing[outgoing >= 0]), self._starts)
        return int(needed), {
            "hit_lookups": _sums(np.where(hit, times, 0), edges),
            "hit_rows": hit_rows,
            "staged_rows": np.diff(edges) - hit_rows - in_place_rows,
            "in_place_lookups": _sums(np.where(in_place, times, 0), edges),
            "in_place_rows": in_place_rows,
            "written_back_rows": np.diff(written),
        }

    def close(self, ticket: int) -> None:
        """End a step: its rows may move."""
        self._open.pop(ticket, None)


def _sums(values: npt.NDArray[np.generic], edges: npt.NDArray[np.integer]) -> Int:
    """Return the sums of values between edges, shape (edges − 1,)."""
    running = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: Int = np.diff(running[edges])
    return sums


def _among(values: Int, sorted_others: Int) -> npt.NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(sorted_others, values), sorted_others.size - 1)
    return np.asarray(sorted_others[place] == values)


def _common(ascending: Int, others: Int) -> int:
    """Return the number of members that two sorted sets share."""
    if not ascending.size or not others.size:
        return 0
    return int(np.count_nonzero(_among(others, ascending)))
