"""Replicated rows: each rank reads its own copy, and all copies get equal updates."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from placer.executor.distributed.placement.channels import Channel, Unit
from placer.executor.distributed.row_sums import RowSums
from placer.executor.distributed.sharded_batch import UnitStep, spans
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.optimizers import row_sums, runs


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """A unit's targets of one width, with consecutive row numbers, so that one pass serves all."""

    width: int
    targets: tuple[int, ...]  # Their indices in the unit.
    bases: tuple[int, ...]  # First row number of each, a multiple of the holders.
    channels: tuple[int, ...]  # The unit's channels that read them, target by target.
    owners: tuple[int, ...]  # For each channel, the index in `targets` of its target.


def _alike(unit: Unit, channels: Sequence[Channel]) -> Iterator[_Alike]:
    by_width: dict[int, list[int]] = defaultdict(list)
    for number, target in enumerate(unit.targets):
        by_width[target.width].append(number)
    holders = len(unit.holders)
    for width, members in by_width.items():
        sizes = [-(-unit.targets[number].rows // holders) * holders for number in members]
        owners = {unit.targets[number].name: at for at, number in enumerate(members)}
        reads = [
            (place, owners[channel.target.name])
            for place, channel in enumerate(channels)
            if channel.target.name in owners
        ]
        yield _Alike(
            width,
            tuple(members),
            (0, *accumulate(sizes))[:-1],
            tuple(place for place, _ in reads),
            tuple(at for _, at in reads),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Lookups:
    """Lookups of targets of one width."""

    rows: Tensor  # Target by target.
    counts: list[int]  # Lookups of each target.
    sources: Tensor  # Each lookup's row in `gradients`.
    places: Tensor  # Each lookup's position among the unit's lookups.
    gradients: Tensor  # Gradients of all channels' bags, shape (bags, width).


class ReplicaUpdates:
    """Sums this rank's gradients of replicated rows, and applies the totals of all holders.

    Each holder sums the gradients of the rows that its samples read. `all_reduce_rows` adds these
    sums over ranks. Every holder applies the totals as one lookup per row, so copies stay equal to
    the bit. `position` is the unit's index on this rank.
    """

    def __init__(
        self, position: int, unit: Unit, channels: Sequence[Channel], module: PlacedEmbeddings
    ) -> None:
        self.position, self._module, self.holders = position, module.by_row(), unit.holders
        self._pooled = [channel.pooled for channel in channels]
        self._alike = tuple(_alike(unit, channels))
        self._names = [target.name for target in unit.targets]

    def sums(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> list[RowSums]:
        """Return the summed gradients of rows read on this rank, for `all_reduce_rows`."""
        return [self._row_sums(unit_step, gradients, alike) for alike in self._alike]

    def apply(self, totals: Sequence[RowSums]) -> None:
        """Update the rows with all holders' gradients."""
        rows: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for alike, (numbers, sums) in zip(self._alike, totals, strict=True):
            numbers, order = torch.sort(numbers)
            bases = torch.tensor(alike.bases, device=numbers.device)
            ends = [*torch.searchsorted(numbers, bases[1:]).tolist(), numbers.numel()]
            counts = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
            own = numbers - _repeated(bases, counts)
            rows.update(zip(alike.targets, torch.split(own, counts), strict=True))
            values.update(zip(alike.targets, torch.split(sums[order], counts), strict=True))
        with torch.enable_grad():
            outputs = self._module(self._update_batch(rows))
        torch.autograd.backward(
            [outputs[name] for name in self._names], [values[at] for at in range(len(values))]
        )

    def weight_gradients(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients of lookups' weights, row · gradient of the bag: shape (lookups,)."""
        lookups = [self._lookups(unit_step, gradients, alike) for alike in self._alike]
        rows: dict[int, Tensor] = {}
        for alike, own in zip(self._alike, lookups, strict=True):
            rows.update(zip(alike.targets, torch.split(own.rows, own.counts), strict=True))
        with torch.no_grad():
            read = self._module(self._update_batch(rows))
        result = torch.zeros(unit_step.bounds[-1], dtype=torch.float32, device=self._module.device)
        for alike, own in zip(self._alike, lookups, strict=True):
            vectors = torch.cat([read[self._names[number]] for number in alike.targets])
            result[own.places] = (vectors * own.gradients[own.sources]).sum(1)
        return result

    def _lookups(self, unit_step: UnitStep, gradients: Sequence[Tensor], alike: _Alike) -> _Lookups:
        batch, bounds, device = unit_step.batch, unit_step.bounds, self._module.device
        assert batch is not None, "replicas' updates read its ids"
        starts = [bounds[place] for place in alike.channels]
        sizes = [bounds[place + 1] - bounds[place] for place in alike.channels]
        counts = [0] * len(alike.targets)
        for at, size in zip(alike.owners, sizes, strict=True):
            counts[at] += size
        places = spans(starts, sizes, device)
        lengths = batch.offsets.diff().view(len(self._pooled), batch.batch_size)
        if all(self._pooled[place] for place in alike.channels):
            of_bags = lengths[torch.tensor(alike.channels, dtype=torch.int64, device=device)]
        else:
            of_bags = torch.cat(
                [
                    lengths[place] if self._pooled[place] else lengths.new_ones(size)
                    for place, size in zip(alike.channels, sizes, strict=True)
                ]
            )
        of_bags = of_bags.flatten()
        own = [gradients[place] for place in alike.channels]
        bags = torch.arange(of_bags.numel(), device=device)
        return _Lookups(
            batch.ids.index_select(0, places).long(),
            counts,
            bags.repeat_interleave(of_bags, output_size=sum(sizes)),
            places,
            # If no feature reads these rows, there is no channel.
            torch.cat([torch.empty(0, alike.width, dtype=torch.float32, device=device), *own]),
        )

    def _row_sums(self, unit_step: UnitStep, gradients: Sequence[Tensor], alike: _Alike) -> RowSums:
        """Return the numbers of the distinct rows read here, and their summed gradients."""
        own = self._lookups(unit_step, gradients, alike)
        bases = torch.tensor(alike.bases, device=self._module.device)
        numbers = own.rows + _repeated(bases, own.counts)
        if not numbers.numel():
            return numbers, own.gradients[:0]
        order, distinct, starts = runs(numbers)
        weights = unit_step.weights
        if weights is not None:
            weights = weights.detach()[own.places][order]
        return distinct, row_sums(own.gradients, own.sources[order], weights, starts)

    def _update_batch(self, rows: dict[int, Tensor]) -> BagBatch:
        """Return a batch of one sample that reads these rows of each target."""
        each = [rows[number] for number in range(len(rows))]
        bounds = (0, *accumulate(own.numel() for own in each))
        device = self._module.device
        offsets = torch.tensor(bounds, dtype=torch.int64).to(device)
        return BagBatch(torch.cat(each).to(device), offsets, 1, None, bounds)


def _repeated(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Repeat each value by its count."""
    times = torch.tensor(counts, device=values.device)
    return values.repeat_interleave(times, output_size=sum(counts))
