"""Sums of row gradients over the ranks that hold the rows: a sparse all-reduce.

Each row has a holder that adds it up: all holders send it their sums, and it sends them the
totals. So a rank sends about twice what it touches however many ranks there are, as in an
all-reduce of these rows, and only rows that were touched are sent.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.optimizers.rule import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and a vector for each: float32 of shape (n, width)."""

_WORDS_OF_ID = 2
"""Ids and vectors travel in one message, as words of 32 bits."""


def all_reduce_rows(
    comm: Communicator, holders: Sequence[Sequence[int]], sums: Sequence[Sequence[RowSums]]
) -> list[list[RowSums]]:
    """Totals over the holders of each table's row sums; the same bits on each of them.

    However many groups of ranks hold rows together, these are four collectives.

    Parameters
    ----------
    comm : Communicator
        All of its ranks must be here: those that hold no such rows send and get nothing.
    holders : sequence of sequence of int
        The ranks of each group that this rank is in, in their order.
    sums : sequence of sequence of RowSums
        Of this rank, by group and table.
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
