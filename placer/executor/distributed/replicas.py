"""Rows that several ranks hold: each reads its own copy, and all copies get equal updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from placer.executor.distributed.placement.channels import Channel, Unit
from placer.executor.distributed.placement.local_plans import update_name
from placer.executor.distributed.row_sums import HeldSums
from placer.executor.distributed.sharded_batch import UnitStep
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.optimizers.rule import row_sums, runs


class Held(Protocol):
    """What ranks need of the `PlacedEmbeddings` that has a unit's rows."""

    device: torch.device

    def __call__(self, batch: Any, /) -> dict[str, Tensor]:
        """Outputs by feature; their gradients update the rows."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaUpdates:
    """Sums up the gradients of replicated rows here, and applies the totals over their holders.

    Each holder sums the gradients of the rows that its samples read. These sums are added up over
    the ranks, and every holder applies the totals as one lookup a row; so copies that were equal
    stay equal to the bit.

    Attributes
    ----------
    position : int
        Of the unit among this rank's.
    unit : Unit
    channels : tuple of Channel
        Of the unit.
    module : PlacedEmbeddings
        Or what else holds a unit's rows.
    """

    position: int
    unit: Unit
    channels: tuple[Channel, ...]
    module: Held

    def sums(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> HeldSums:
        """Of the gradients of the rows that were read here; `all_reduce_rows` adds them up."""
        targets = range(len(self.unit.targets))
        sums = [self._row_sums(unit_step, gradients, target) for target in targets]
        return HeldSums(self.unit.holders, sums)

    def apply(self, totals: HeldSums) -> None:
        """Update the rows with all holders' gradients."""
        batch = self._update_batch([rows for rows, _ in totals.sums])
        with torch.enable_grad():
            outputs = self.module(batch)
        names = [update_name(target) for target in self.unit.targets]
        torch.autograd.backward(
            [outputs[name] for name in names], [values for _, values in totals.sums]
        )

    def weight_gradients(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> Tensor:
        """Gradient of each lookup's weight, its row · its bag's gradient: shape (lookups,)."""
        rows = []
        for number in range(len(self.unit.targets)):
            rows.append(self._lookups(unit_step, number)[0])
        with torch.no_grad():
            read = self.module(self._update_batch(rows))
        result = torch.zeros(unit_step.bounds[-1], device=self.module.device)
        for number, target in enumerate(self.unit.targets):
            _, sources, places = self._lookups(unit_step, number)
            joined = self._joined(gradients, number)
            products = read[update_name(target)] * joined[sources]
            result[places] = products.sum(1)
        return result

    def _channels(self, number: int) -> list[int]:
        """Channels of one of the unit's targets."""
        return [place for target, place in self.unit.entries if target == number and place >= 0]

    def _joined(self, gradients: Sequence[Tensor], number: int) -> Tensor:
        """Gradients of all channels of a target."""
        empty = torch.empty((0, self.unit.targets[number].width), device=self.module.device)
        return torch.cat([empty, *(gradients[place] for place in self._channels(number))])

    def _lookups(self, unit_step: UnitStep, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a target's lookups, the gradient of each among its channels', and places."""
        batch, device = unit_step.batch, self.module.device
        assert batch is not None, "replicas' updates read its ids"
        rows, sources, places, first = [batch.ids[:0]], [batch.ids[:0]], [batch.ids[:0]], 0
        lengths = batch.offsets.diff()
        for place in self._channels(number):
            start, stop = unit_step.bounds[place], unit_step.bounds[place + 1]
            rows.append(batch.ids[start:stop])
            places.append(torch.arange(start, stop, device=device))
            if not self.channels[place].pooled:
                sources.append(torch.arange(first, first + stop - start, device=device))
                first += stop - start
                continue
            bag = self.unit.entries.index((number, place)) * batch.batch_size
            bags = torch.arange(first, first + batch.batch_size, device=device)
            own = lengths[bag : bag + batch.batch_size]
            sources.append(bags.repeat_interleave(own, output_size=stop - start))
            first += batch.batch_size
        return torch.cat(rows), torch.cat(sources), torch.cat(places)

    def _row_sums(
        self, unit_step: UnitStep, gradients: Sequence[Tensor], number: int
    ) -> tuple[Tensor, Tensor]:
        """Distinct rows of a target that were read here, and the sum of each one's gradients."""
        rows, sources, places = self._lookups(unit_step, number)
        joined = self._joined(gradients, number)
        if not rows.numel():
            return rows, joined.new_zeros((0, self.unit.targets[number].width))
        order, distinct, starts = runs(rows)
        weights = unit_step.weights
        if weights is not None:
            weights = weights.detach()[places][order]
        return distinct, row_sums(joined, sources[order], weights, starts)

    def _update_batch(self, rows: Sequence[Tensor]) -> BagBatch:
        """One sample that reads these rows of each target, and nothing else."""
        lengths = []
        for number, own in enumerate(rows):
            lengths += [0] * len(self._channels(number)) + [own.numel()]
        bounds = (0, *accumulate(lengths))
        device = self.module.device
        offsets = torch.tensor(bounds, dtype=torch.int64).to(device)
        return BagBatch(torch.cat([*rows]).to(device), offsets, 1, None, bounds)
