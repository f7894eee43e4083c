"""The rows that a step reads from each arena, and their places while the step is open."""

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from placer.errors import BackendError
from placer.executor.growing_keys import KeyStep
from placer.executor.lookups.batch_reads import ArenaReads, Bags
from placer.executor.memory.layout import ArenaSpec

Moved: TypeAlias = "torch.cuda.Event | Future[torch.cuda.Event | None] | None"

CHUNK = 128
"""Most lookups that one kernel program sums. Smaller chunks balance programs better, but need more
memory for the chunks' sums: two rows for each `CHUNK` lookups."""

MOST_STEPS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Ticket:
    """A step that is open: its rows are located, and not yet updated.

    Rows that an open step reads must stay at their places.
    """

    number: int  # Counts steps in the order in which their rows are located.
    # Staged and cached rows that this step reads, and their places, for steps that open later.
    resolved: dict[ArenaSpec, Any] = field(default_factory=dict)
    # Arenas whose cold records this step reads in place, as some rows got no cache entry.
    reads_stores: set[ArenaSpec] = field(default_factory=set)


class Window:
    """The set of open steps.

    A step ends with its backward pass, or, if it never has one, when nothing refers to it.
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
        """Return whether a step is open."""
        return ticket is not None and ticket in self._tickets

    def close(self, ticket: Ticket) -> None:
        """Close a step: its rows may move now."""
        self._tickets.discard(ticket)
        ticket.resolved.clear()

    @property
    def oldest(self) -> int:
        """Number of the oldest open step, or of the next step if none is open."""
        return min((ticket.number for ticket in self._tickets), default=self._count)

    def reads_store(self, arena: ArenaSpec, ticket: Ticket, entries: Tensor) -> bool:
        """Return whether an open step reads cold records of an arena in place.

        `entries` are those of this step's records, −1 for none; waits for the device.
        """
        if bool((entries < 0).any()):
            ticket.reads_stores.add(arena)
        return any(arena in other.reads_stores for other in self._tickets)

    def others(self, arena: ArenaSpec, ticket: Ticket) -> list[Any]:
        """Return the other open steps' entries of `Ticket.resolved` for an arena."""
        return [
            other.resolved[arena]
            for other in self._tickets
            if other is not ticket and arena in other.resolved
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The lookups of a step grouped by row, as a fused update reads them: 8 bytes a lookup.

    Sorted by slot, the lookups of one row are a *run*, which gets one update. A run may be most of
    a batch. Runs longer than `CHUNK` lookups are *long*: they are divided into chunks, counted from
    the run's start, so that one program sums at most `CHUNK` lookups. Chunks depend only on the
    order of lookups in the batch, never on where rows are, so sums are bit-equal between
    placements.

    Triton's kernels write arrays of fixed sizes, because only the device knows the number of runs.
    Plain PyTorch waits for that number, and has no chunks. All tensors are int32.
    """

    order: Tensor  # The lookup at each sorted position. Equal slots keep the batch's order.
    # Sorted position where each run starts, then the end of the last run: (runs + 1,) or
    # (lookups + 1,). Later values mean nothing.
    starts: Tensor
    count: Tensor  # Number of runs, on the device, (1,).
    # For each block b of `CHUNK` positions: the run at position ``b · CHUNK``, and the long run
    # that begins in the block, or −1. There are no blocks if no run is divided.
    covering: Tensor
    long_runs: Tensor

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return self.order.numel()

    @property
    def firsts(self) -> Tensor:
        """Sorted position of each run's first lookup, int32; arbitrary after the last run."""
        return self.starts[:-1].clamp(0, max(self.lookups - 1, 0))


@dataclass(frozen=True, slots=True, eq=False)
class HostReads:
    """The lookups of an arena that the host pools, and their bags."""

    # In the host's memory: slots, counted from the first slot that the host pools, int32 or
    # int64, (lookups,); and the start of each bag in them, int32, (bags + 1,).
    slots: Tensor
    offsets: Tensor
    # On the device, int32: their numbers among the arena's lookups and bags. No bag is empty.
    lookups: Tensor
    bags: Tensor
    copied: "torch.cuda.Event | None"  # Completes when slots and offsets are copied.


@dataclass(frozen=True, slots=True, eq=False)
class ArenaStep:
    """One step's reads from one arena, and the places of the rows during the step.

    Tensors have shape (lookups,).
    """

    reads: ArenaReads
    # Bag i sums the rows at ``places[offsets[i]:offsets[i + 1]]`` of the arena, see
    # `placer.executor.memory.arena`; −1 if the host pools. int32 or int64.
    places: Tensor
    slots: Tensor  # Slots of rows with several column slices; otherwise they may be left out.
    ticket: Ticket | None = None  # None if rows never move.
    runs: Runs | None = None  # The lookups grouped by row, if they are sorted already.
    run_places: Tensor | None = None  # The place of each run.
    host: HostReads | None = None  # For the rows that the host pools.
    moved: Moved = None  # Completes when staged and cached rows are at their places.
    # The bag of each lookup in the order of `runs`, int32, if known before the update.
    sources: Tensor | None = None

    def wait_for_rows(self, device: torch.device) -> None:
        """Make the host, or the device's current stream, wait until rows are at their places."""
        moved = self.moved.result() if isinstance(self.moved, Future) else self.moved
        if moved is not None:
            torch.cuda.current_stream(device).wait_event(moved)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch whose rows are located, while its staged rows are copied to HBM.

    `PlacedEmbeddings.prefetch` makes it for one forward pass.
    """

    bags: Bags  # On the computing device.
    # The forward pass empties this list, so that a batch kept by the user holds no memory.
    steps: list[ArenaStep]
    key_step: KeyStep | None = None  # The step of growing tables in which keys got rows.
    # Completes when the batch is prepared, if that runs on its own stream.
    ready: "torch.cuda.Event | None" = None
