"""Where a step's rows are, in backends whose tiers have memory of their own."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.row_runs import Runs


class Ticket:
    """A step from the time its rows are located until they are updated.

    Rows that an open step reads must stay where they were then.

    Attributes
    ----------
    number : int
        Steps are counted in the order in which their rows are located.
    resolved : dict of arena index to (slots, entries)
        Its staged and cached rows: sorted slots, and the row cache's entry of each, −1
        where it is read in place.
    """

    __slots__ = ("__weakref__", "number", "open", "resolved")

    def __init__(self, number: int) -> None:
        self.number = number
        self.open = True
        self.resolved: dict[int, tuple[Tensor, Tensor]] = {}

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
        """The ticket of a new step."""
        ticket = Ticket(self._count)
        self._count += 1
        self._tickets.add(ticket)
        return ticket

    @property
    def oldest(self) -> int:
        """Number of the oldest open step."""
        return min((ticket.number for ticket in self), default=self._count)

    def in_place(self, arena: int, slots: Tensor, before: Ticket) -> Tensor | None:
        """Which slots an earlier open step reads in place; None where there is no such step.

        They have to stay there: that step will update the row in host memory, and a copy made
        before would be old.
        """
        in_place: Tensor | None = None
        for ticket in self:
            if ticket is before or arena not in ticket.resolved:
                continue
            theirs, entries = ticket.resolved[arena]
            if not theirs.numel():
                continue
            place = torch.searchsorted(theirs, slots).clamp_(max=theirs.numel() - 1)
            here = (theirs[place] == slots) & (entries[place] < 0)
            in_place = here if in_place is None else in_place | here
        return in_place


@dataclass(frozen=True, slots=True, eq=False)
class HostReads:
    """Slots and offsets of an arena's lookups in the host's memory, for rows that it pools."""

    slots: Tensor
    offsets: Tensor
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
    """

    ticket: Ticket
    places: Tensor
    runs: Runs | None
    run_places: Tensor | None
    host: HostReads | None
