"""Who sends which feature's lookups to whom: the same on every rank, from the plan alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placer.executor.distributed.placement.division import Target
from placer.executor.distributed.placement.table_routes import TableRoutes
from placer.executor.lookups.batch_reads import FeatureRead
from placer.tables import Pooling


@dataclass(frozen=True, slots=True)
class Channel:
    """Lookups of one feature in one target.

    Attributes
    ----------
    name : str
        Of the feature where it reads the target, which is a table of its own there.
    feature : int
    columns : int
        Of the feature's table.
    position : int
        Of the target within its column slice.
    target : Target
    pooling : {"sum", "max", "none"}
        What the holder gives back: a row for each bag, or for each lookup.
    """

    name: str
    feature: int
    columns: int
    position: int
    target: Target
    pooling: Pooling

    @property
    def pooled(self) -> bool:
        """Whether the holder gives back a row for each bag."""
        return self.pooling != "none"


@dataclass(frozen=True, slots=True)
class Unit:
    """Targets that one rank holds together with the same others, or alone.

    Attributes
    ----------
    holders : tuple of int
    targets : tuple of Target
    channels : tuple of int
        Positions in `Channels.served`, in the order of targets and of their features.
    sources : tuple of int
        Ranks whose lookups come here.
    """

    holders: tuple[int, ...]
    targets: tuple[Target, ...]
    channels: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def replicated(self) -> bool:
        """Whether other ranks hold the same rows."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """What a rank sends and serves.

    Attributes
    ----------
    sent : tuple of (rank, Channel)
        In the order of sending: by destination.
    served : tuple of Channel
    serves : bool, shape (world, served)
        Which of `served` come from each rank: of replicated rows, not all.
    widths : int64, shape (served,)
        Columns that each of `served` gives back.
    units : tuple of Unit
        What this rank holds alone comes first; then replicas, in an order that all share.
    """

    sent: tuple[tuple[int, Channel], ...]
    served: tuple[Channel, ...]
    serves: npt.NDArray[np.bool_]
    widths: npt.NDArray[np.int64]
    units: tuple[Unit, ...]


def all_channels(
    features: Sequence[FeatureRead], maps: Mapping[str, TableRoutes]
) -> tuple[Channel, ...]:
    """Return every channel between any ranks: by table, column slice, target and feature."""
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
    """Return how a holder pools: it sums for means of longer bags; a maximum needs all rows."""
    if pooling in ("sum", "mean"):
        return "sum"
    return "max" if pooling == "max" and alone else "none"


def channels_of(
    rank: int, world: int, targets: Sequence[Target], channels: Sequence[Channel]
) -> Channels:
    """Return what one of the ranks sends and serves."""
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
