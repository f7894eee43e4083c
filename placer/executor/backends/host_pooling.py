"""Rows that the host pools and updates itself, for a device that has the others.

For large bags, sums are fewer bytes on the link than rows. Each step then waits twice: the device
for the host's sums, and the host for the device's gradients.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.steps import ArenaStep, HostReads
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.optimizers.rule import Rule
from placer.executor.streams import on_host, recorded, start_copy

if TYPE_CHECKING:
    from placer.executor.backends.backend import Backend

_BAGS = 1 << 14
"""Bags that are sent together: the device need not hold a copy of all their sums or gradients."""


class HostPooling:
    """Runs a CPU backend on the rows of tiered arenas whose lookup is ``host``."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend

    def reads(self, slots: Tensor, offsets: Tensor, first: int) -> HostReads:
        """Return the lookups of a step that the host has, from slot `first` on; start their copy.

        Waits for the device, which says how many lookups there are.
        """
        here = slots >= first
        before = torch.zeros(slots.numel() + 1, dtype=torch.int32, device=slots.device)
        torch.cumsum(here, 0, dtype=torch.int32, out=before[1:])
        lookups = torch.nonzero(here).squeeze(1).int()
        starts = before.index_select(0, offsets)
        del here, before
        bags = torch.nonzero(starts[1:] > starts[:-1]).squeeze(1).int()
        own = slots.index_select(0, lookups).sub_(first)
        # No lookup is between these bags: each one begins where the one before it has ended.
        starts = torch.cat([starts.index_select(0, bags), starts[-1:]])
        if slots.device.type != "cuda":
            return HostReads(own, starts, lookups, bags, None)
        return HostReads(start_copy(own), start_copy(starts), lookups, bags, recorded())

    def forward(self, arena: Arena, reads: HostReads, weights: Tensor | None, out: Tensor) -> None:
        """Add the sums of the bags' rows that the host has to `out`, on the device."""
        pooled = self._backend.forward(_host_arena(arena), _step(reads), _own(weights, reads))
        if out.device.type == "cuda":
            pooled = pooled.pin_memory()
        for bags, sums in _parts(reads.bags, pooled):
            out.index_add_(0, bags, sums.to(out.device, non_blocking=True))

    def update(
        self,
        arena: Arena,
        reads: HostReads,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        """Apply the rule to these rows."""
        if not reads.lookups.numel():
            return
        host_rule = replace(rule, lr=rule.lr.cpu(), updates=rule.updates.cpu())
        of_bags = _of_bags(gradients, reads)
        own = _own(weights, reads)
        self._backend.update(_host_arena(arena), _step(reads), of_bags, own, host_rule)

    def weight_gradients(
        self, arena: Arena, reads: HostReads, gradients: Tensor, out: Tensor
    ) -> None:
        """Add the gradients of the weights of these lookups to `out`, on the device."""
        of_bags = _of_bags(gradients, reads)
        own = self._backend.weight_gradients(_host_arena(arena), _step(reads), of_bags)
        out.index_add_(0, reads.lookups, own.to(out.device))


def _parts(bags: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """At most `_BAGS` bags at a time, and their rows."""
    return zip(torch.split(bags, _BAGS), torch.split(rows, _BAGS), strict=True)


def _step(reads: HostReads) -> ArenaStep:
    """Return the step of the host's rows alone, once they have been copied."""
    if reads.copied is not None:
        reads.copied.synchronize()
    places = reads.slots.long()
    return ArenaStep(ArenaReads(reads.offsets.long(), places.numel(), ()), places)


def _own(weights: Tensor | None, reads: HostReads) -> Tensor | None:
    """Return the weights of the host's lookups, in its memory."""
    if weights is None:
        return None
    return on_host(weights.detach().index_select(0, reads.lookups))


def _of_bags(gradients: Tensor, reads: HostReads) -> Tensor:
    """Return the gradients of the host's bags, in its memory."""
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
    """Return the host's rows as an arena of their own in one memory, sharing it."""

    def rows(of: TieredRows) -> TieredRows:
        own = of.dram[arena.spec.host_start - of.home - arena.spec.stored :]
        return TieredRows(own, own[:0], len(own))

    state = None if arena.state is None else rows(arena.state)
    return Arena(arena.spec, rows(arena.weights), state)
