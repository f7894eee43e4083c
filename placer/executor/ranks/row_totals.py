"""Sums of row gradients over all ranks: a sparse all-reduce.

Each row has a rank that adds it up: everyone sends that rank its sums, and gets the totals of
all ranks. So a rank sends about twice what it touches however many ranks there are, as in an
all-reduce of these rows, and only rows that were touched are sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.ranks.comm import Communicator
from placer.executor.rule import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and a vector for each: float32 of shape (n, width)."""


def all_reduce_rows(
    comm: Communicator, widths: Sequence[int], sums: Sequence[RowSums]
) -> list[RowSums]:
    """Totals over the ranks of each table's row sums; the same bits on every rank.

    Parameters
    ----------
    comm : Communicator
        All of its ranks must be here, be it with nothing.
    widths : sequence of int
        Columns of each table.
    sums : sequence of RowSums
        This rank's, by table.
    """
    tables = len(widths)
    split = [_split(rows, values, comm.world) for rows, values in sums]
    sent = [[parts[rank][0].numel() for parts in split] for rank in range(comm.world)]
    told = torch.tensor(sent, dtype=torch.int64).flatten()
    each = [tables] * comm.world
    received = comm.exchange("replicas", told, each, each).view(comm.world, tables).tolist()
    arrived = comm.exchange(
        "replicas",
        _packed([parts[rank] for rank in range(comm.world) for parts in split]),
        [_size(counts, widths) for counts in sent],
        [_size(counts, widths) for counts in received],
    )
    own = [_added(parts) for parts in _unpacked(arrived, received, widths)]
    counts = comm.gather("replicas", torch.tensor([rows.numel() for rows, _ in own])).tolist()
    longest = max(_size(theirs, widths) for theirs in counts)
    flat = _packed(own)
    # Gathered vectors must be of one length.
    flat = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
    gathered = comm.gather("replicas", flat)
    kept = [gathered[rank, : _size(theirs, widths)] for rank, theirs in enumerate(counts)]
    return [
        (torch.cat([rows for rows, _ in parts]), torch.cat([values for _, values in parts]))
        for parts in _unpacked(torch.cat(kept), counts, widths)
    ]


def _split(rows: Tensor, values: Tensor, world: int) -> list[RowSums]:
    """Sums by the rank that adds them up: rows are dealt out in turn."""
    owner = rows % world
    order = torch.sort(owner, stable=True).indices
    counts = torch.bincount(owner, minlength=world).tolist()
    return list(
        zip(torch.split(rows[order], counts), torch.split(values[order], counts), strict=True)
    )


def _added(parts: Sequence[RowSums]) -> RowSums:
    """One sum a row, added in the order of ranks."""
    rows, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not rows.numel():
        return rows, values
    order, distinct, starts = runs(rows)
    return distinct, row_sums(values, order, None, starts)


def _size(counts: Sequence[int], widths: Sequence[int]) -> int:
    """float32 numbers that so many rows of each table are packed in."""
    return sum(count * (2 + width) for count, width in zip(counts, widths, strict=True))


def _packed(parts: Sequence[RowSums]) -> Tensor:
    """Rows and sums as one float32 vector: a row's int64 is the bits of two numbers."""
    flat = [part.reshape(-1) for rows, sums in parts for part in (rows.view(torch.float32), sums)]
    return torch.cat(flat)


def _unpacked(
    flat: Tensor, counts: Sequence[Sequence[int]], widths: Sequence[int]
) -> list[list[RowSums]]:
    """The parts of each table, rank by rank; `counts` are by rank and table."""
    found: list[list[RowSums]] = [[] for _ in widths]
    first = 0
    for theirs in counts:
        for table, (count, width) in enumerate(zip(theirs, widths, strict=True)):
            middle, last = first + 2 * count, first + (2 + width) * count
            rows = flat[first:middle].clone().view(torch.int64)  # Aligned to 8 bytes.
            found[table].append((rows, flat[middle:last].view(count, width)))
            first = last
    return found
