"""Sums over the ranks that hold rows: gradients of replicas, and Σ g² of columns apart.

Gradients of replicated rows take a sparse all-reduce: each row has a holder that adds it up, to
which all holders send their sums, and which sends them the totals. So a rank sends about twice what
it touches however many ranks there are, and only rows that were touched are sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.division import Target
from placer.executor.optimizers.rule import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and a vector for each: float32 of shape (n, width)."""

_WORDS_OF_ID = 2
"""Ids and vectors travel in one message, as words of 32 bits."""


def all_reduce_rows(
    comm: Communicator, holders: Sequence[Sequence[int]], sums: Sequence[Sequence[RowSums]]
) -> list[list[RowSums]]:
    """Totals over the holders of each table's row sums; the same bits on each of them.

    However many groups of ranks hold rows together, these are four collectives, of all ranks:
    those that hold no such rows send and get nothing. `holders` are the ranks of each group that
    this rank is in, in their order, and `sums` are this rank's, by group and table.
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
    """Return what the holders sent here, joined in their order; counts are exchanged first.

    `parts` are by group of holders, table and holder that gets them.
    """
    to: list[list[RowSums]] = [[] for _ in range(comm.world)]
    for ranks, tables in zip(holders, parts, strict=True):
        for place, rank in enumerate(ranks):
            to[rank] += [table[place] for table in tables]
    # Two ranks have the same tables in common, whichever of them sends.
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
    """Size of a message with so many rows of each table."""
    return sum(n * (_WORDS_OF_ID + width) for n, width in zip(counts, widths, strict=True))


def _unpacked(words: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Iterator[RowSums]:
    """Yield the tables of a message: first the ids of all of them, then their vectors."""
    ids = words[: _WORDS_OF_ID * sum(counts)].clone()  # Where it starts need not suit an int64.
    rows = torch.split(ids.view(torch.int64), list(counts))
    sizes = [n * width for n, width in zip(counts, widths, strict=True)]
    values = torch.split(words[ids.numel() :].view(torch.float32), sizes)
    for own, vectors, n, width in zip(rows, values, counts, widths, strict=True):
        yield own, vectors.view(n, width)


def _joined(parts: Sequence[RowSums]) -> RowSums:
    rows, values = zip(*parts, strict=True)
    return torch.cat(rows), torch.cat(values)


def _dealt(rows: Tensor, values: Tensor, holders: int) -> list[RowSums]:
    """Return sums by the holder that adds them up; holders take rows in turn."""
    owner = rows % holders
    order = torch.sort(owner, stable=True).indices
    counts = torch.bincount(owner, minlength=holders).tolist()
    return list(
        zip(torch.split(rows[order], counts), torch.split(values[order], counts), strict=True)
    )


def _added(rows: Tensor, values: Tensor) -> RowSums:
    """Return one sum a row, added in the order of the holders."""
    if not rows.numel():
        return rows, values
    order, distinct, starts = runs(rows)
    return distinct, row_sums(values, order, None, starts)


@dataclass(slots=True, eq=False)
class RowTotals:
    """Adds Σ g² up over the ranks that hold the columns of a row.

    The same lookups read all column slices of a row, so peers find the same rows in the same order,
    and vectors are added elementwise: rank by rank, so that each gets the same bits.
    """

    # The column slices of the same rows: tables here that hold some, from left to right; and
    # everyone who holds one, in order. All ranks have the same order of groups.
    groups: tuple[tuple[tuple[str, ...], list[int]], ...]
    dims: Mapping[str, int]  # Columns of the whole row, by table.
    comm: Communicator | None  # None where all column slices are here.
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
