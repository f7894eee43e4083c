"""The rows that a step reads from each arena, and where they are until it ends."""

import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from placer.errors import BackendError
from placer.executor.growing_keys import KeyStep
from placer.executor.lookups.batch_reads import ArenaReads, Bags
from placer.executor.memory.layout import ArenaSpec

Moved: TypeAlias = "torch.cuda.Event | Future[torch.cuda.Event | None] | None"

CHUNK = 128
"""Lookups that one program sums at most. Smaller chunks balance the programs better, and need
more memory for the chunks' sums: two rows for each `CHUNK` lookups."""

MOST_STEPS = (1 << 31) - 1


class Ticket:
    """A step from the time its rows are located until they are updated.

    Rows that an open step reads must stay where they were then.
    """

    __slots__ = ("__weakref__", "number", "reads_stores", "resolved")

    def __init__(self, number: int) -> None:
        self.number = number  # In the order in which steps' rows are located.
        # For steps that open before it ends: which staged and cached rows it reads, and where.
        self.resolved: dict[ArenaSpec, Any] = {}
        # Arenas of which it reads records where they are, as rows of it got no entry.
        self.reads_stores: set[ArenaSpec] = set()


class Window:
    """The steps that are open.

    A step ends with its backward pass; one that never has any ends when nothing refers to it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()

    def open(self) -> Ticket:
        """Return the ticket of a new step."""
        if self._count == MOST_STEPS:
            raise BackendError(
                f"row caches count no more than {MOST_STEPS} steps; save a checkpoint, and go on "
                "from it in a new process"
            )
        ticket = Ticket(self._count)
        self._count += 1
        self._tickets.add(ticket)
        return ticket

    def is_open(self, ticket: Ticket | None) -> bool:
        """Return whether a step has been opened and not been closed."""
        return ticket is not None and ticket in self._tickets

    def close(self, ticket: Ticket) -> None:
        """The step's rows may move."""
        self._tickets.discard(ticket)
        ticket.resolved.clear()

    @property
    def oldest(self) -> int:
        """Number of the oldest open step."""
        return min((ticket.number for ticket in self._tickets), default=self._count)

    def reads_store(self, arena: ArenaSpec) -> bool:
        """Return whether an open step reads records of an arena where they are."""
        return any(arena in ticket.reads_stores for ticket in self._tickets)

    def others(self, arena: ArenaSpec, ticket: Ticket) -> list[Any]:
        """Return what is kept of the staged and cached rows that the other open steps read."""
        return [
            other.resolved[arena]
            for other in self._tickets
            if other is not ticket and arena in other.resolved
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The lookups of a step grouped by row, as a fused update reads them: 8 bytes a lookup.

    Sorted by slot, the lookups of one row are a *run*, which gets one update. A run may be most of
    a batch. So that one program never sums more than `CHUNK` lookups, runs longer than that are
    *long* and divided into chunks counted from their own start. Which lookups are summed together
    thus depends on their order in the batch alone, never on where rows are: sums are bit-equal
    between placements.

    Triton's kernels write arrays of fixed sizes, as how many runs there are is known on the device
    alone. Plain PyTorch waits for that number, and has no chunks. All are int32.
    """

    order: Tensor  # Which lookup is at each sorted position. Equal slots keep the batch's order.
    # Sorted position where each run starts, (runs + 1,) or (lookups + 1,); the run after the last
    # starts at the end. Beyond that the values mean nothing.
    starts: Tensor
    count: Tensor  # Number of runs, on the device, (1,).
    # Of each block b of `CHUNK` positions, the run that holds position ``b · CHUNK``, and the long
    # run that begins there, at most one, or −1. There are no blocks where no run is divided.
    covering: Tensor
    long_runs: Tensor

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return self.order.numel()

    @property
    def blocks(self) -> int:
        """Number of blocks of `CHUNK` sorted positions."""
        return self.covering.numel()

    @property
    def firsts(self) -> Tensor:
        """Sorted position of each run's first lookup, int32; beyond the last run, any."""
        return self.starts[:-1].clamp(0, max(self.lookups - 1, 0))


@dataclass(frozen=True, slots=True, eq=False)
class HostReads:
    """The lookups of an arena whose rows the host pools, and the bags that they are in."""

    # In the host's memory: slots, counted from the first that the host pools, int32 or int64,
    # (lookups,); and where each of these bags begins among them, int32, (bags + 1,).
    slots: Tensor
    offsets: Tensor
    # On the device, int32: which of the arena's lookups and bags they are. No bag is empty.
    lookups: Tensor
    bags: Tensor
    copied: "torch.cuda.Event | None"  # When slots and offsets are there, where that takes time.


@dataclass(frozen=True, slots=True, eq=False)
class ArenaStep:
    """What one step reads from one arena, and where that is during the step.

    Tensors are of shape (lookups,).
    """

    reads: ArenaReads
    # Bag i sums the rows at ``places[offsets[i]:offsets[i + 1]]``, see
    # `placer.executor.memory.arena`; −1 where the host pools. int32 or int64.
    places: Tensor
    kept_slots: Tensor | None = None  # Where rows have several column slices; else the places.
    ticket: Ticket | None = None  # None where rows stay where they are.
    runs: Runs | None = None  # The lookups by row, where they have been sorted already.
    run_places: Tensor | None = None  # The place of each run.
    host: HostReads | None = None  # For the rows that the host pools.
    moved: Moved = None  # When staged and cached rows are at their places, where that takes time.
    # The bag of each lookup in the order of `runs`, int32, where it is known before the update.
    sources: Tensor | None = None

    def wait_for_rows(self, device: torch.device) -> None:
        """Let the host, or the device's current stream, wait until all rows are at their places."""
        moved = self.moved.result() if isinstance(self.moved, Future) else self.moved
        if moved is not None:
            torch.cuda.current_stream(device).wait_event(moved)

    @property
    def slots(self) -> Tensor:
        """Slots of the lookups."""
        return self.places if self.kept_slots is None else self.kept_slots


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch whose rows are located; staged ones are on their way to HBM.

    Made by `PlacedEmbeddings.prefetch`, and used up by one forward pass.
    """

    bags: Bags  # On the computing device.
    # The forward pass takes them out, so that a batch that is still referred to keeps no memory.
    steps: list[ArenaStep]
    key_step: KeyStep | None = None  # Of tables that grow, where keys got rows.
    # When all this is there, if it was made on a stream of its own.
    ready: "torch.cuda.Event | None" = None
