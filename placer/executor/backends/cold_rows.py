"""Move rows that are records between the store and the row cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.cold.cold_store import ColdStore
from placer.executor.lookups.steps import Ticket, Window
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.memory.directory import Moves


def exchange_records(store: ColdStore, matrices: Sequence[TieredRows], moves: Moves) -> None:
    """Move rows as `TorchKernels.exchange` does, for records; waits for the device.

    The host encodes rows that leave the cache, and decodes rows that enter it, with their state.
    """
    moved = torch.nonzero(moves.entries >= 0).squeeze(1)
    entries, incoming, outgoing = (
        part[moved].long() for part in (moves.entries, moves.incoming, moves.outgoing)
    )
    leaves, home = torch.nonzero(outgoing >= 0).squeeze(1), matrices[0].home
    if leaves.numel():
        leaving = [rows.hbm.index_select(0, entries[leaves] + home).cpu() for rows in matrices]
        store.write((outgoing[leaves] - home).cpu(), *leaving)
    if entries.numel():
        for rows, values in zip(matrices, store.read((incoming - home).cpu()), strict=False):
            if values is not None:
                rows.hbm.index_copy_(0, entries + home, values.to(rows.hbm.device))


def note_in_place(
    arena: Arena, store: ColdStore, entries: Tensor, ticket: Ticket, window: Window
) -> None:
    """Note if some records of a step got no entry; waits for the device."""
    if bool((entries < 0).any()):
        ticket.reads_stores.add(arena.spec)
    store.is_read_in_place = window.reads_store(arena.spec)
