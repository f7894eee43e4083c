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
from placer.executor.lookups.row_runs import Runs
from placer.executor.memory.layout import ArenaSpec

Moved: TypeAlias = "torch.cuda.Event | Future[torch.cuda.Event | None] | None"

MOST_STEPS = (1 << 31) - 1


class Ticket:
    """A step from the time its rows are located until they are updated.

    Rows that an open step reads must stay where they were then.

    Attributes
    ----------
    number : int
        Steps are counted in the order in which their rows are located.
    resolved : dict of ArenaSpec to what the backend keeps
        For steps that open before it ends: which staged and cached rows it reads, and where.
    reads_stores : set of ArenaSpec
        Arenas of which it reads records where they are, as rows of it got no entry.
    """

    __slots__ = ("__weakref__", "number", "reads_stores", "resolved")

    def __init__(self, number: int) -> None:
        self.number = number
        self.resolved: dict[ArenaSpec, Any] = {}
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
class HostReads:
    """The lookups of an arena whose rows the host pools, and the bags that they are in.

    Attributes
    ----------
    slots : int32 or int64, shape (lookups,)
        Counted from the first that the host pools, in the host's memory.
    offsets : int32, shape (bags + 1,)
        Where each of these bags begins among the slots, in the host's memory.
    lookups : int32, shape (lookups,)
        Which of the arena's lookups they are, on the device.
    bags : int32, shape (bags,)
        Which of the arena's bags, on the device. No bag is empty.
    copied : Event or None
        When slots and offsets have arrived, where that takes time.
    """

    slots: Tensor
    offsets: Tensor
    lookups: Tensor
    bags: Tensor
    copied: "torch.cuda.Event | None"


@dataclass(frozen=True, slots=True, eq=False)
class ArenaStep:
    """What one step reads from one arena, and where that is during the step.

    Attributes
    ----------
    reads : ArenaReads
    places : int32 or int64, shape (lookups,)
        Bag i sums the rows at ``places[offsets[i]:offsets[i + 1]]``; see
        `placer.executor.memory.arena`. −1 where the host pools.
    kept_slots : int32 or int64, shape (lookups,), or None
        Slots of the lookups, where rows have several column slices. None where they are the places.
    ticket : Ticket or None
        None where rows stay where they are.
    runs : Runs or None
        The lookups by row, where they have been sorted already.
    run_places : shape (lookups,), or None
        The place of each run.
    host : HostReads or None
        For the rows that the host pools.
    moved : Event, Future of one or of None, or None
        When staged and cached rows are at their places, where that takes time.
    sources : int32, shape (lookups,), or None
        The bag of each lookup in the order of `runs`, where it is known before the update.
    """

    reads: ArenaReads
    places: Tensor
    kept_slots: Tensor | None = None
    ticket: Ticket | None = None
    runs: Runs | None = None
    run_places: Tensor | None = None
    host: HostReads | None = None
    moved: Moved = None
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

    Attributes
    ----------
    bags : Bags
        On the computing device.
    steps : list of ArenaStep
        The forward pass takes them out, so that a batch that is still referred to keeps no memory.
    key_step : KeyStep or None
        Of tables that grow, where keys got rows.
    ready : torch.cuda.Event or None
        When all this is there, if it was made on a stream of its own.
    """

    bags: Bags
    steps: list[ArenaStep]
    key_step: KeyStep | None = None
    ready: "torch.cuda.Event | None" = None
