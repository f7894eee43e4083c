"""Σ g² over rows whose columns are on several ranks: what row-wise Adagrad needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.division import Target


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The column slices of the same rows.

    Attributes
    ----------
    own : tuple of str
        Tables here that hold column slices of them, from left to right.
    ranks : tuple of int
        Everyone who holds one, in order.
    """

    own: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RowTotals:
    """Adds Σ g² up over the ranks that hold the columns of a row.

    The same lookups read all column slices of a row, so peers find the same rows in the same order,
    and vectors are added elementwise: rank by rank, so that each gets the same bits.

    Attributes
    ----------
    groups : tuple of RowGroup
    dims : mapping of table name to int
        Columns of the whole row.
    comm : Communicator or None
        None where all column slices are here.
    device : torch.device
    """

    groups: tuple[RowGroup, ...]
    dims: Mapping[str, int]
    comm: Communicator | None
    device: torch.device

    @classmethod
    def of(
        cls,
        targets: Sequence[Target],
        rank: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> "RowTotals | None":
        """Of rows held alone, across ranks; or, without a communicator, of replicated ones.

        Of replicated rows every holder has all columns, so each needs only itself. None where no
        row has columns apart. Groups are in an order that all ranks share.
        """
        apart = [t for t in targets if t.peers and t.replicated == (comm is None)]
        if not apart:
            return None
        by_peers: dict[str, list[Target]] = {}
        for target in apart:
            by_peers.setdefault(target.peers, []).append(target)
        groups = []
        for members in by_peers.values():
            own = tuple(target.name for target in members if rank in target.holders)
            ranks = sorted({holder for target in members for holder in target.holders})
            if own:
                groups.append(RowGroup(own, (rank,) if comm is None else tuple(ranks)))
        dims = {target.name: target.table.dim for target in apart if rank in target.holders}
        return cls(tuple(groups), dims, comm, device)

    def total(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over whole rows; every rank must call it, whatever it read."""
        # What was not read by one column slice was not read by the others.
        read = [group for group in self.groups if group.own[0] in squares]
        own = [torch.stack([squares[name] for name in group.own]).sum(0) for group in read]
        if self.comm is None:
            return _by_table(read, own)
        rank, world = self.comm.rank, self.comm.world
        peers = [
            [i for i, group in enumerate(read) if other in group.ranks] for other in range(world)
        ]
        peers[rank] = []
        sizes = [sum(own[i].numel() for i in here) for here in peers]
        parts = [own[i] for here in peers for i in here]
        sent = torch.cat(parts) if parts else torch.empty(0, device=self.device)
        received = self.comm.exchange("rows", sent, sizes, sizes)
        theirs: dict[tuple[int, int], Tensor] = {}
        first = 0
        for other, here in enumerate(peers):
            for i in here:
                last = first + own[i].numel()
                theirs[other, i] = received[first:last]
                first = last
        totals = [
            torch.stack([theirs.get((other, i), own[i]) for other in group.ranks]).sum(0)
            for i, group in enumerate(read)
        ]
        return _by_table(read, totals)


def _by_table(groups: Sequence[RowGroup], totals: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: total for group, total in zip(groups, totals, strict=True) for name in group.own}
