"""Pool and update rows of lookup kind ``host`` on the CPU, and move rows that are records.

For large bags, sums are fewer bytes on the link than rows. In each step the device waits for the
host's sums, and the host for the device's gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placer.executor.cold_store import ColdStore
from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.steps import ArenaStep, HostReads
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.memory.row_cache import Moves
from placer.executor.optimizers import Rule
from placer.executor.streams import on_host, recorded, start_copy

if TYPE_CHECKING:
    from placer.executor.backends.backend import Backend


_BAGS = 1 << 14
"""Bags that are sent at once, so that the device needs no copy of all sums or gradients."""


def reads(slots: Tensor, offsets: Tensor, first: int) -> HostReads:
    """Return a step's lookups of slots from `first` on, and start to copy them to the host.

    It waits for the device to get the number of lookups.
    """
    here = slots >= first
    before = torch.zeros(slots.numel() + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(here, 0, dtype=torch.int32, out=before[1:])
    lookups = torch.nonzero(here).squeeze(1).int()
    starts = before.index_select(0, offsets)
    del here, before
    bags = torch.nonzero(starts[1:] > starts[:-1]).squeeze(1).int()
    own = slots.index_select(0, lookups).sub_(first)
    # Other bags have no lookups here, so each bag begins where the one before it ends.
    starts = torch.cat([starts.index_select(0, bags), starts[-1:]])
    if slots.device.type != "cuda":
        return HostReads(own, starts, lookups, bags, None)
    return HostReads(start_copy(own), start_copy(starts), lookups, bags, recorded())


def add_sums(
    host: "Backend", arena: Arena, reads: HostReads, weights: Tensor | None, out: Tensor
) -> None:
    """Add the sums of the host's rows to the bags in `out`, on the device."""
    pooled = host.forward(_host_arena(arena), _step(reads), _own(weights, reads))
    if out.device.type == "cuda":
        pooled = pooled.pin_memory()
    for bags, sums in _parts(reads.bags, pooled):
        out.index_add_(0, bags, sums.to(out.device, non_blocking=True))


def update(
    host: "Backend",
    arena: Arena,
    reads: HostReads,
    gradients: Tensor,
    weights: Tensor | None,
    rule: Rule,
) -> None:
    """Apply the rule to the host's rows."""
    if not reads.lookups.numel():
        return
    rule = replace(rule, lr=rule.lr.cpu(), updates=rule.updates.cpu())
    of_bags, own = _of_bags(gradients, reads), _own(weights, reads)
    host.update(_host_arena(arena), _step(reads), of_bags, own, rule)


def add_weight_gradients(
    host: "Backend", arena: Arena, reads: HostReads, gradients: Tensor, out: Tensor
) -> None:
    """Add the gradients of the weights of the host's lookups to `out`, on the device."""
    own = host.weight_gradients(_host_arena(arena), _step(reads), _of_bags(gradients, reads))
    out.index_add_(0, reads.lookups, own.to(out.device))


def _parts(bags: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield up to `_BAGS` bags at a time, and their rows."""
    return zip(torch.split(bags, _BAGS), torch.split(rows, _BAGS), strict=True)


def _step(reads: HostReads) -> ArenaStep:
    """Wait for the copy of the lookups, and return them as a step of the host's rows only."""
    if reads.copied is not None:
        reads.copied.synchronize()
    places = reads.slots.long()
    return ArenaStep(ArenaReads(reads.offsets.long(), places.numel(), ()), places, places)


def _own(weights: Tensor | None, reads: HostReads) -> Tensor | None:
    """Return the weights of the host's lookups, in host memory."""
    if weights is None:
        return None
    return on_host(weights.detach().index_select(0, reads.lookups))


def _of_bags(gradients: Tensor, reads: HostReads) -> Tensor:
    """Return the gradients of the host's bags, in host memory."""
    if gradients.device.type != "cuda":
        return gradients.index_select(0, reads.bags)
    result = torch.empty(
        (reads.bags.numel(), gradients.shape[1]), dtype=torch.float32, pin_memory=True
    )
    for bags, rows in _parts(reads.bags, result):
        rows.copy_(gradients.index_select(0, bags), non_blocking=True)
    recorded().synchronize()
    return result


def _host_arena(arena: Arena) -> Arena:
    """Return an arena of the host's rows only, which shares their memory."""

    def rows(of: TieredRows) -> TieredRows:
        own = of.dram[arena.spec.host_start - of.home - arena.spec.stored :]
        return TieredRows(own, own[:0], len(own))

    state = None if arena.state is None else rows(arena.state)
    return Arena(arena.spec, rows(arena.weights), state)


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
