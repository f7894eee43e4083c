"""Sums of row gradients over the ranks that hold the rows: a sparse all-reduce.

Each row has a holder that adds it up: all holders send it their sums, and it sends them the
totals. So a rank sends about twice what it touches however many ranks there are, as in an
all-reduce of these rows, and only rows that were touched are sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.distributed.collectives import Collectives
from placer.executor.optimizers.rule import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and a vector for each: float32 of shape (n, width)."""


def all_reduce_rows(
    comm: Collectives, holders: Sequence[int], widths: Sequence[int], sums: Sequence[RowSums]
) -> list[RowSums]:
    """Totals over the holders of each table's row sums; the same bits on each of them.

    Parameters
    ----------
    comm : Collectives
        All of its ranks must be here: those that hold none of the rows send and get nothing.
    holders : sequence of int
        Ranks that hold the rows.
    widths : sequence of int
        Columns of each table.
    sums : sequence of RowSums
        This rank's, by table; anything on other ranks.

    Returns
    -------
    list of RowSums
        By table; empty on ranks that hold none.
    """
    holds = comm.rank in holders
    split = [_dealt(rows, values, len(holders)) for rows, values in sums] if holds else []
    parts = [[table[place] for table in split] for place in range(len(holders))]
    counts = torch.tensor([[rows.numel() for rows, _ in to] for to in parts], dtype=torch.int64)
    arrived = _exchanged(comm, holders, widths, [part for to in parts for part in to], counts)
    own = [_added(rows, values) for rows, values in arrived]
    counts = torch.tensor([[rows.numel() for rows, _ in own]] * len(holders), dtype=torch.int64)
    return _exchanged(comm, holders, widths, own * len(holders), counts)


def _exchanged(
    comm: Collectives,
    holders: Sequence[int],
    widths: Sequence[int],
    parts: Sequence[RowSums],
    counts: Tensor,
) -> list[RowSums]:
    """What the holders sent here, by table and then by holder; counts are exchanged first.

    `parts` are by holder and table; so are their numbers of rows, shape (holders, tables).
    """
    tables, holds = len(widths), comm.rank in holders
    each = [tables if holds and rank in holders else 0 for rank in range(comm.world)]
    received_counts = comm.exchange("replica counts", counts.flatten(), each, each)
    came, width = received_counts.cpu().view(-1, tables), torch.tensor(widths)

    def sizes(numbers: Tensor) -> list[int]:
        by_holder = iter(numbers.sum(-1).tolist())
        return [next(by_holder) if size else 0 for size in each]

    rows = comm.exchange(
        "replicas",
        torch.cat([received_counts[:0], *(rows for rows, _ in parts)]),
        sizes(counts),
        sizes(came),
    )
    values = comm.exchange(
        "replicas",
        torch.cat([received_counts[:0].float(), *(sums.reshape(-1) for _, sums in parts)]),
        sizes(counts * width if holds else counts),
        sizes(came * width),
    )
    rows_of = torch.split(rows, came.flatten().tolist())
    values_of = torch.split(values, (came * width).flatten().tolist())
    return [
        (torch.cat(rows_of[table::tables]), torch.cat(values_of[table::tables]).view(-1, columns))
        for table, columns in enumerate(widths if holds else ())
    ]


def _dealt(rows: Tensor, values: Tensor, holders: int) -> list[RowSums]:
    """Sums by the holder that adds them up; holders take rows in turn."""
    owner = rows % holders
    order = torch.sort(owner, stable=True).indices
    counts = torch.bincount(owner, minlength=holders).tolist()
    return list(
        zip(torch.split(rows[order], counts), torch.split(values[order], counts), strict=True)
    )


def _added(rows: Tensor, values: Tensor) -> RowSums:
    """One sum a row, added in the order of the holders."""
    if not rows.numel():
        return rows, values
    order, distinct, starts = runs(rows)
    return distinct, row_sums(values, order, None, starts)
