"""Where a step's rows are, in backends whose tiers have memory of their own."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.errors import BackendError
from placer.executor.lookups.row_runs import Runs
from placer.executor.memory.layout import ArenaSpec

MOST_STEPS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """The staged and cached rows of a step: some of its runs, one after the other.

    Attributes
    ----------
    run_places : int32 or int64, shape (lookups,)
        The place of each run.
    first, last : int32, shape ()
        The runs ``first..last`` are of staged and cached rows.
    most : int
        How many they can be.
    """

    run_places: Tensor
    first: Tensor
    last: Tensor
    most: int

    def runs(self) -> Tensor:
        """Numbers of so many runs from the first on, int32; shape (most,)."""
        return torch.arange(self.most, dtype=torch.int32, device=self.first.device) + self.first


class Ticket:
    """A step from the time its rows are located until they are updated.

    Rows that an open step reads must stay where they were then.

    Attributes
    ----------
    number : int
        Steps are counted in the order in which their rows are located.
    resolved : dict of ArenaSpec to Resolved
        Its staged and cached rows.
    """

    __slots__ = ("__weakref__", "number", "open", "resolved")

    def __init__(self, number: int) -> None:
        self.number = number
        self.open = True
        self.resolved: dict[ArenaSpec, Resolved] = {}

    def close(self) -> None:
        """The step's rows may move."""
        self.open = False
        self.resolved.clear()


class Window:
    """The steps that are open.

    A step ends with its backward pass; one that never has any ends when nothing refers to it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Ticket]:
        return iter([ticket for ticket in self._tickets if ticket.open])

    def open(self) -> Ticket:
        """The ticket of a new step.

        Raises
        ------
        BackendError
            If there were 2³¹ − 1 before: row caches note steps in 32 bits.
        """
        if self._count == MOST_STEPS:
            raise BackendError(
                f"row caches count no more than {MOST_STEPS} steps; save a checkpoint, and go on "
                "from it in a new process"
            )
        ticket = Ticket(self._count)
        self._count += 1
        self._tickets.add(ticket)
        return ticket

    @property
    def oldest(self) -> int:
        """Number of the oldest open step."""
        return min((ticket.number for ticket in self), default=self._count)

    def others(self, arena: ArenaSpec, ticket: Ticket) -> list[Resolved]:
        """The staged and cached rows of an arena that the other open steps read."""
        read = [other.resolved.get(arena) for other in self if other is not ticket]
        return [resolved for resolved in read if resolved is not None]


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
class Access:
    """Where the rows of one arena's lookups are during a step.

    Attributes
    ----------
    ticket : Ticket
    places : int32 or int64, shape (lookups,)
        See `placer.executor.memory.tiers`; −1 where the host pools.
    runs : Runs or None
        The lookups by row. None in evaluation, and where rows have several column slices: their
        tables are sorted one by one.
    run_places : shape (lookups,), or None
        The place of each run.
    host : HostReads or None
        For the rows that the host pools.
    moved : Event or None
        When staged and cached rows are at their places, where that takes time.
    """

    ticket: Ticket
    places: Tensor
    runs: Runs | None
    run_places: Tensor | None
    host: HostReads | None
    moved: "torch.cuda.Event | None" = None
