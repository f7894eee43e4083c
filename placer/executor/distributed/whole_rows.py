"""Σ g² over rows whose columns are on several ranks: what row-wise Adagrad needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.division import Target


@dataclass(slots=True, eq=False)
class RowTotals:
    """Adds Σ g² up over the ranks that hold the columns of a row.

    The same lookups read all column slices of a row, so peers find the same rows in the same order,
    and vectors are added elementwise: rank by rank, so that each gets the same bits.

    Attributes
    ----------
    groups : tuple of (tuple of str, list of int)
        The column slices of the same rows: tables here that hold some, from left to right; and
        everyone who holds one, in order. All ranks have the same order of groups.
    dims : mapping of table name to int
        Columns of the whole row.
    comm : Communicator or None
        None where all column slices are here.
    device : torch.device
    """

    groups: tuple[tuple[tuple[str, ...], list[int]], ...]
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
        row has columns apart.
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
                groups.append((own, [rank] if comm is None else ranks))
        dims = {target.name: target.table.dim for target in apart if rank in target.holders}
        return cls(tuple(groups), dims, comm, device)

    def total(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over whole rows; every rank must call it, whatever it read."""
        # Of rows that nobody read, some column slices are missing, and the others' are empty.
        read = [group for group in self.groups if all(name in squares for name in group[0])]
        totals = [torch.stack([squares[name] for name in names]).sum(0) for names, _ in read]
        if self.comm is not None:
            totals = self._over_ranks([ranks for _, ranks in read], totals, self.comm)
        return {
            name: total for (names, _), total in zip(read, totals, strict=True) for name in names
        }

    def _over_ranks(
        self, holders: Sequence[Sequence[int]], own: Sequence[Tensor], comm: Communicator
    ) -> list[Tensor]:
        """Return sums of each group over its ranks."""
        met = [
            (other, group)
            for other in range(comm.world)
            for group, ranks in enumerate(holders)
            if other in ranks and other != comm.rank
        ]
        lengths = [own[group].numel() for _, group in met]
        sizes = [0] * comm.world
        for (other, _), length in zip(met, lengths, strict=True):
            sizes[other] += length
        sent = torch.cat([torch.empty(0, device=self.device), *(own[group] for _, group in met)])
        received = torch.split(comm.exchange("rows", sent, sizes, sizes), [*lengths, 0])
        theirs = dict(zip(met, received, strict=False))
        return [
            torch.stack([theirs.get((other, group), own[group]) for other in ranks]).sum(0)
            for group, ranks in enumerate(holders)
        ]
