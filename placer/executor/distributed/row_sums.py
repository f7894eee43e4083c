"""Sum over ranks: gradients of replicated rows, and Σ g² of rows with columns on several ranks.

Gradients of replicated rows take a sparse all-reduce. For each row, all holders send their sums to
one of them, which adds them up and sends back the total. So a rank sends each row that it touched
about twice, for any number of ranks, and sends no other rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.division import Target
from placer.executor.optimizers import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and their vectors, float32 of shape (n, width)."""

_WORDS_OF_ID = 2
"""Words of 32 bits for an id. A message holds ids and vectors as such words."""


def all_reduce_rows(
    comm: Communicator, holders: Sequence[Sequence[int]], sums: Sequence[Sequence[RowSums]]
) -> list[list[RowSums]]:
    """Return each table's row sums added up over its holders, bit-equal on every holder.

    This takes four collectives of all ranks, for any number of groups of holders. Ranks without
    replicated rows send and get nothing. `holders` are the ordered ranks of each group that this
    rank is in, and `sums` are this rank's sums, by group and table.
    """
    dealt = [
        [_dealt(*one, len(ranks)) for one in own] for ranks, own in zip(holders, sums, strict=True)
    ]
    added = [[_added(*one) for one in own] for own in _exchanged(comm, holders, dealt)]
    to_all = [
        [[one] * len(ranks) for one in own] for ranks, own in zip(holders, added, strict=True)
    ]
    return _exchanged(comm, holders, to_all)


def _exchanged(
    comm: Communicator,
    holders: Sequence[Sequence[int]],
    parts: Sequence[Sequence[Sequence[RowSums]]],
) -> list[list[RowSums]]:
    """Exchange row sums between holders; return the received sums, joined in the holders' order.

    `parts` are by group of holders, table and receiving holder. Counts are exchanged first.
    """
    to: list[list[RowSums]] = [[] for _ in range(comm.world)]
    for ranks, tables in zip(holders, parts, strict=True):
        for place, rank in enumerate(ranks):
            to[rank] += [table[place] for table in tables]
    # Two ranks exchange the same tables in both directions.
    met = [len(theirs) for theirs in to]
    widths = [[values.shape[1] for _, values in theirs] for theirs in to]
    counts = [[rows.numel() for rows, _ in theirs] for theirs in to]
    flat = torch.tensor([count for theirs in counts for count in theirs], dtype=torch.int64)
    arrived = iter(comm.exchange("replica counts", flat, met, met).tolist())
    came = [[next(arrived) for _ in theirs] for theirs in to]
    words = [torch.empty(0, dtype=torch.int32)] if not any(met) else []
    for theirs in to:
        words += [rows.view(torch.int32) for rows, _ in theirs]
        words += [values.reshape(-1).view(torch.int32) for _, values in theirs]
    sizes = list(map(_words, came, widths))
    received = comm.exchange("replicas", torch.cat(words), list(map(_words, counts, widths)), sizes)
    from_rank = list(map(_unpacked, torch.split(received, sizes), came, widths))
    return [
        [_joined([next(from_rank[rank]) for rank in ranks]) for _ in tables]
        for ranks, tables in zip(holders, parts, strict=True)
    ]


def _words(counts: Sequence[int], widths: Sequence[int]) -> int:
    """Return the words of a message with `counts` rows of each table."""
    return sum(n * (_WORDS_OF_ID + width) for n, width in zip(counts, widths, strict=True))


def _unpacked(words: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Iterator[RowSums]:
    """Yield the tables of a message: first the ids of all of them, then their vectors."""
    ids = words[: _WORDS_OF_ID * sum(counts)].clone()  # A view may not be aligned to int64.
    rows = torch.split(ids.view(torch.int64), list(counts))
    sizes = [n * width for n, width in zip(counts, widths, strict=True)]
    values = torch.split(words[ids.numel() :].view(torch.float32), sizes)
    for own, vectors, n, width in zip(rows, values, counts, widths, strict=True):
        yield own, vectors.view(n, width)


def _joined(parts: Sequence[RowSums]) -> RowSums:
    rows, values = zip(*parts, strict=True)
    return torch.cat(rows), torch.cat(values)


def _dealt(rows: Tensor, values: Tensor, holders: int) -> list[RowSums]:
    """Divide sums by the holder that adds them up: row r goes to holder r modulo `holders`."""
    owner = rows % holders
    order = torch.sort(owner, stable=True).indices
    counts = torch.bincount(owner, minlength=holders).tolist()
    return list(
        zip(torch.split(rows[order], counts), torch.split(values[order], counts), strict=True)
    )


def _added(rows: Tensor, values: Tensor) -> RowSums:
    """Return one sum per row, added in the order of the holders."""
    if not rows.numel():
        return rows, values
    order, distinct, starts = runs(rows)
    return distinct, row_sums(values, order, None, starts)


@dataclass(slots=True, eq=False)
class RowTotals:
    """Adds Σ g² up over the ranks that hold columns of a row.

    The same lookups read all column slices of a row, so all ranks have the same rows in the same
    order. They add vectors elementwise in the order of ranks, so that every rank gets equal bits.
    """

    # For each set of rows: this rank's tables with column slices of it, from left to right, and
    # all ranks that hold such slices. Groups have the same order on all ranks.
    groups: tuple[tuple[tuple[str, ...], list[int]], ...]
    dims: Mapping[str, int]  # Columns of the whole row, by table.
    comm: Communicator | None  # None if all column slices are on this rank.
    device: torch.device

    @classmethod
    def of(
        cls,
        targets: Sequence[Target],
        rank: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> "RowTotals | None":
        """Make the totals of rows with one holder; without a communicator, of replicated rows.

        Every holder of replicated rows has all their columns, so it needs no other rank. Return
        None if no rows have several column slices.
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
        """Return Σ g² over whole rows, by table. Every rank must call this at the same point."""
        # If nobody read a group's rows, some of its tables are missing, and the others are empty.
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
        """Return each group's sum over its ranks."""
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
        sent = torch.cat(
            [
                torch.empty(0, dtype=torch.float32, device=self.device),
                *(own[group] for _, group in met),
            ]
        )
        received = torch.split(comm.exchange("rows", sent, sizes, sizes), [*lengths, 0])
        theirs = dict(zip(met, received, strict=False))
        return [
            torch.stack([theirs.get((other, group), own[group]) for other in ranks]).sum(0)
            for group, ranks in enumerate(holders)
        ]
