"""Compute what all ranks know of a plan: who holds what, and who sends which lookups to whom."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from placer.executor.distributed.placement.division import (
    Target,
    divide,
    ranks_of_devices,
    servers_of,
)
from placer.executor.distributed.placement.local_plans import (
    HeldShards,
    local_plan,
    shards_by_holders,
)
from placer.executor.distributed.placement.table_routes import TableRoutes, table_routes
from placer.executor.lookups.batch_reads import FeatureRead
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Pooling


@dataclass(frozen=True, slots=True)
class Channel:
    """The lookups of one feature in one target."""

    name: str  # Of the feature at the holder, where the target is a separate table.
    # Indices of the feature, of the column slice in its table, and of the target in the slice.
    feature: int
    columns: int
    position: int
    target: Target
    pooling: Pooling  # The holder returns sums, maxima, or (none) a row per lookup.

    @property
    def pooled(self) -> bool:
        """Whether the holder returns one row per bag instead of one per lookup."""
        return self.pooling != "none"


@dataclass(frozen=True, slots=True)
class Unit:
    """The targets on one rank with the same holders."""

    holders: tuple[int, ...]
    targets: tuple[Target, ...]
    # Positions in `Channels.served`, in the order of targets and of their features.
    channels: tuple[int, ...]
    sources: tuple[int, ...]  # Ranks whose lookups this rank serves.

    @property
    def replicated(self) -> bool:
        """Whether other ranks hold the same rows."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The channels that a rank sends and serves."""

    # Each with its destination rank, ordered by destination.
    sent: tuple[tuple[int, Channel], ...]
    served: tuple[Channel, ...]
    # Whether each rank sends each channel of `served`, shape (world, served).
    serves: npt.NDArray[np.bool_]
    widths: npt.NDArray[np.int64]  # Columns of each channel of `served`.
    # Units with one holder come first, then replicas, in the same order on all ranks.
    units: tuple[Unit, ...]


def all_channels(
    features: Sequence[FeatureRead], maps: Mapping[str, TableRoutes]
) -> tuple[Channel, ...]:
    """Return all channels between any ranks, ordered by table, column slice, target and feature."""
    channels = []
    readers: dict[str, list[int]] = defaultdict(list)
    for index, feature in enumerate(features):
        readers[feature.table].append(index)
    for name, table in maps.items():
        for number, columns in enumerate(table.column_slices):
            for position, target in enumerate(columns.targets):
                for index in readers[name]:
                    alone = len(columns.targets) == 1 and not target.replicated
                    pooling = channel_pooling(features[index].pooling, alone)
                    own = f"{features[index].name} of {target.name}"
                    channels.append(Channel(own, index, number, position, target, pooling))
    return tuple(channels)


def channel_pooling(pooling: Pooling, alone: bool) -> Pooling:
    """Return the pooling at a holder: sum also for mean, and max only if it has all rows."""
    if pooling in ("sum", "mean"):
        return "sum"
    return "max" if pooling == "max" and alone else "none"


def channels_of(
    rank: int, world: int, targets: Sequence[Target], channels: Sequence[Channel]
) -> Channels:
    """Return the channels that a rank sends and serves."""
    to = [(channel.target.holder_for(rank), channel) for channel in channels]
    sent = tuple(sorted(to, key=lambda pair: pair[0]))
    served = tuple(channel for channel in channels if rank in channel.target.holders)
    serves = np.ones((world, len(served)), dtype=bool)
    for at, channel in enumerate(served):
        if channel.target.replicated:
            serves[:, at] = [channel.target.holder_for(source) == rank for source in range(world)]
    widths = np.array([channel.target.width for channel in served], dtype=np.int64)
    held: dict[tuple[int, ...], list[Target]] = defaultdict(list)
    for target in targets:
        if rank in target.holders:
            held[target.holders].append(target)
    reads: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, channel in enumerate(served):
        reads[channel.target.holders].append(at)
    groups = sorted(held, key=lambda ranks: (len(ranks) > 1, ranks))
    units = []
    for holders in groups:
        sources = tuple(s for s in range(world) if held[holders][0].holder_for(s) == rank)
        units.append(Unit(holders, tuple(held[holders]), tuple(reads[holders]), sources))
    return Channels(sent, served, serves, widths, tuple(units))


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """The division of a plan and its channels, equal on all ranks."""

    plan: Plan
    features: tuple[FeatureRead, ...]
    optimizers: Mapping[str, OptimizerName]
    ranks: Mapping[str, int]  # By device.
    targets: tuple[Target, ...]
    routes: Mapping[str, TableRoutes]
    channels: tuple[Channel, ...]  # Between any ranks.
    shards: HeldShards

    @classmethod
    def of(
        cls,
        plan: Plan,
        features: tuple[FeatureRead, ...],
        optimizers: Mapping[str, OptimizerName],
        world: int,
        device: torch.device,
    ) -> "Survey":
        """Divide a plan over `world` ranks."""
        ranks = ranks_of_devices(plan.topology, world, servers_of(plan))
        division = divide(plan, ranks, optimizers)
        routes = table_routes(plan, division, device)
        return cls(
            plan,
            features,
            optimizers,
            ranks,
            tuple(t for slices in division.values() for part in slices for t in part.targets),
            routes,
            all_channels(features, routes),
            shards_by_holders(plan, ranks),
        )

    def plan_of(self, unit: Unit, channels: Channels, rank: int) -> Plan:
        """Return the local plan for one of a rank's units."""
        features: dict[str, list[Feature]] = defaultdict(list)
        for channel in (channels.served[at] for at in unit.channels):
            own = Feature(channel.name, pooling=channel.pooling)
            features[channel.target.name].append(own)
        gpus = [gpu for gpu in self.plan.topology.gpus if self.ranks[gpu.id] == rank]
        return local_plan(
            self.plan, unit.targets, features, self.shards, self.optimizers, gpus
        ).plan
