"""Rows that the host pools and updates itself, for a device that has the others.

For large bags this sends fewer bytes over the link than their rows are. The host takes part in
each step, so that it waits for the device's gradients and the device for its sums.
"""

import torch
from torch import Tensor

from placer.executor.backends.base import Backend
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep
from placer.executor.memory.access import HostReads
from placer.executor.memory.arena import AnyRows, Arena, FlatRows
from placer.executor.memory.tiers import TieredRows
from placer.executor.optimizers.rule import Rule
from placer.executor.streams import recorded, start_copy


class HostPooling:
    """Runs a CPU backend on the rows of tiered arenas whose lookup is ``host``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reads(self, slots: Tensor, offsets: Tensor) -> HostReads:
        """Start to copy what a step reads to the host."""
        if slots.device.type != "cuda":
            return HostReads(slots, offsets, None)
        return HostReads(start_copy(slots), start_copy(offsets), recorded())

    def forward(self, arena: Arena, reads: HostReads, weights: Tensor | None) -> Tensor:
        """Sums of the bags' rows that the host has: float32, (bags, width), on the device."""
        step, kept = _own(arena, reads)
        device = _device(arena)
        pooled = self._backend.forward(_host_arena(arena), step, _select(weights, kept))
        return pooled.to(device, non_blocking=True)

    def update(
        self,
        arena: Arena,
        reads: HostReads,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        """Apply the rule to these rows."""
        step, kept = _own(arena, reads)
        if step.reads.lookups:
            host_rule = Rule(
                rule.optimizer,
                rule.lr.cpu(),
                rule.eps,
                rule.updates.cpu(),
                rule.beta1,
                rule.beta2,
                rule.stochastic,
            )
            own_weights = _select(weights, kept)
            self._backend.update(_host_arena(arena), step, gradients.cpu(), own_weights, host_rule)

    def weight_gradients(self, arena: Arena, reads: HostReads, gradients: Tensor) -> Tensor:
        """Gradients of the weights of these lookups; zero at the others."""
        step, kept = _own(arena, reads)
        own = self._backend.weight_gradients(_host_arena(arena), step, gradients.cpu())
        return torch.zeros(reads.slots.numel()).index_copy_(0, kept, own).to(_device(arena))


def _own(arena: Arena, reads: HostReads) -> tuple[ArenaStep, Tensor]:
    """The step of the host's rows alone, and the positions of their lookups."""
    if reads.copied is not None:
        reads.copied.synchronize()
    first = arena.spec.host_start
    here = reads.slots >= first
    kept = torch.nonzero(here).squeeze(1)
    offsets = torch.nn.functional.pad(here.cumsum(0), (1, 0))[reads.offsets]
    slots = reads.slots[kept].long() - first
    return ArenaStep(ArenaReads(offsets, slots.numel(), ()), slots), kept


def _host_arena(arena: Arena) -> Arena:
    """The host's rows as a flat arena of their own, sharing memory."""

    def rows(of: AnyRows) -> FlatRows:
        assert isinstance(of, TieredRows), "arenas of this backend are in tiers"
        return FlatRows(of.dram[arena.spec.host_start - of.home :])

    state = None if arena.state is None else rows(arena.state)
    return Arena(arena.spec, rows(arena.weights), state)


def _device(arena: Arena) -> torch.device:
    assert isinstance(arena.weights, TieredRows), "arenas of this backend are in tiers"
    return arena.weights.hbm.device


def _select(weights: Tensor | None, kept: Tensor) -> Tensor | None:
    return None if weights is None else weights.detach().cpu()[kept]
