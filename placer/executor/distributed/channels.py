"""Compute what all ranks know of a plan: each rank's part, and who sends which lookups to whom.

`ShardedBatch` is a batch that they have exchanged.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.executor.distributed.division import (
    Target,
    divide,
    holders_of,
    meet,
    positions,
    ranks_of_devices,
    servers_of,
)
from placer.executor.distributed.table_routes import TableRoutes, table_routes
from placer.executor.growing_keys import KeyStep
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import Bags, FeatureRead
from placer.executor.lookups.steps import PreparedBatch
from placer.plan.fields import RowOrder, Shard
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Pooling, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

_GPU, _HOST = "gpu:0", "host:0"


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The plan of one process, and the origin of its shards."""

    plan: Plan
    # For each local shard: the index of its shard in the whole plan, and its rows there.
    origins: tuple[tuple[int, range], ...]


HeldShards = Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, Shard]]]
"""Shards and their indices in the plan, by table and by holding ranks."""


def shards_by_holders(plan: Plan, ranks: Mapping[str, int]) -> HeldShards:
    """Group a plan's shards by table and by the ranks that hold them."""
    held: dict[tuple[str, tuple[int, ...]], list[tuple[int, Shard]]] = defaultdict(list)
    for number, shard in enumerate(plan.shards):
        held[shard.table, holders_of(shard, ranks)].append((number, shard))
    return held


def local_plan(
    plan: Plan,
    targets: Sequence[Target],
    features: Mapping[str, Sequence[Feature]],
    shards: HeldShards,
    optimizers: Mapping[str, OptimizerName],
    gpus: Sequence[Gpu],
) -> LocalPlan:
    """Return a plan that holds `targets` on one GPU, which stands for all `gpus`, and one host.

    Targets with part of a table's rows have the order of their parts. Whole tables keep their row
    order. `features` has the features that read each target, by its name.
    """
    tables: list[Table] = []
    local: list[tuple[Shard, tuple[int, range]]] = []
    orders, hot_ids = {}, {}
    for target in targets:
        whole, read_by = target.table, tuple(features.get(target.name, ()))
        optimizer = optimizers[whole.name]
        table = Table(target.name, target.rows, target.width, whole.dtype, optimizer, read_by)
        tables.append(table)
        local += [
            (own, (number, rows))
            for number, shard in shards[whole.name, target.holders]
            for own, rows in _within(shard, target)
        ]
        if target.by_id and whole.name in plan.hot_ids:
            orders[target.name] = RowOrder(plan.order_of(whole.name).kind)
            hot_ids[target.name] = plan.hot_ids[whole.name]
    topology = _machine(plan.topology, gpus)
    own_shards = tuple(shard for shard, _ in local)
    own = Plan(tuple(tables), topology, own_shards, orders, hot_ids, plan.batch_size)
    return LocalPlan(own, tuple(origin for _, origin in local))


def _within(shard: Shard, target: Target) -> Iterator[tuple[Shard, range]]:
    """Yield a shard's parts in a target, numbered by the target; and their original rows."""
    first, last = max(shard.cols[0], target.cols[0]), min(shard.cols[1], target.cols[1])
    if first >= last:
        return
    for part, base in zip(target.parts, target.bases, strict=True):
        met = meet(part, range(*shard.rows))
        if not met:
            continue
        rows = positions(part, met)
        share = len(met) / shard.row_count
        local = replace(
            shard,
            table=target.name,
            rows=(base + rows.start, base + rows.stop, rows.step),
            cols=(first - target.cols[0], last - target.cols[0]),
            devices=(_GPU,),
            cache_rows=_share(shard.cache_rows, share, len(met), int(shard.cache_rows > 0)),
            staging_rows=_share(shard.staging_rows, share, len(met), 0),
            buffer_bytes=int(shard.buffer_bytes * share * (last - first) / shard.width),
        )
        yield local, met


def _share(rows: int, share: float, most: int, least: int) -> int:
    return max(least, min(most, int(rows * share)))


def _machine(topology: Topology, gpus: Sequence[Gpu]) -> Topology:
    """Return a topology of one GPU, with the memory of all `gpus`, and one host.

    The host has all hosts' memory, as capacities were checked for the whole plan.
    """
    model = gpus[0] if gpus else topology.gpus[0]
    dram_bytes = sum(host.memory_bytes for host in topology.hosts)
    # A host without a GPU keeps in DRAM what others keep in HBM, such as row maps.
    hbm_bytes = sum(gpu.memory_bytes for gpu in gpus) if gpus else dram_bytes
    gpu = Gpu(_GPU, _HOST, hbm_bytes, model.hbm_bytes_per_s, model.launch_s)
    drives = [host.drive for host in topology.hosts if host.drive is not None]
    drive = replace(drives[0], memory_bytes=sum(d.memory_bytes for d in drives)) if drives else None
    host = Host(_HOST, dram_bytes, topology.hosts[0].dram_bytes_per_s, drive)
    link = Link(_GPU, _HOST, "pcie", topology.host_link_bytes_per_s(model.id))
    return Topology(f"a rank of {topology.name}", (gpu,), (host,), (link,))


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


class NumberedBatch:
    """A batch's number for servers. They drop the batch when the trainer drops this object."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True, eq=False)
class UnitStep:
    """The lookups of all source ranks in one unit."""

    # The lookups of all sources' samples, channel by channel; None if only `prefetch` needed ids.
    batch: BagBatch | None
    weights: Tensor | None  # Of the batch's lookups, if any rank has weights.
    prepared: PreparedBatch | None  # The result of `prefetch`, if it was called.
    # Position of each lookup among the received lookups, int32; None if the order is the same, or
    # if no rank needs gradients of weights.
    source: Tensor | None
    bounds: tuple[int, ...]  # Lookups of channel c are ``bounds[c]..bounds[c + 1]``.


@dataclass(frozen=True, slots=True, eq=False)
class ShardedBatch:
    """A batch whose lookups have been sent to the ranks that hold their rows.

    `ShardedEmbeddings.prefetch` makes it for one forward pass.
    """

    bags: Bags  # The bags of this rank's own samples.
    weight_gradients: bool  # Whether any rank needs gradients of weights.
    # By feature and column slice: the feature's lookups sorted by target, int32; None with one
    # target, or if targets send sums.
    routes: tuple[tuple[Tensor | None, ...], ...]
    sent_rows: tuple[int, ...]  # Rows returned by each channel of `Channels.sent`.
    # Rows that each channel of `Channels.served` returns to each rank, shape (world, served).
    served_rows: npt.NDArray[np.int64]
    # Lookups sent to and received from each rank.
    sent_lookups: tuple[int, ...]
    served_lookups: tuple[int, ...]
    # Position in the batch of each lookup sent, in the order of sending. Empty if no rank needs
    # gradients of weights.
    lookups: Tensor
    units: tuple[UnitStep, ...]
    key_step: KeyStep | None = None  # The step of growing tables in which keys got rows.
    number: NumberedBatch | None = None  # The batch's number for servers.


def concatenated(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate vectors to one of this dtype, empty without vectors."""
    return torch.cat([*parts]).to(dtype) if parts else torch.empty(0, dtype=dtype, device=device)


def spans(starts: npt.ArrayLike, sizes: npt.ArrayLike, device: torch.device) -> Tensor:
    """Return ``starts[i]..starts[i] + sizes[i]`` for every i, concatenated; int32.

    It is a running sum of ones, with jumps where spans start, to need one array of this length.

    >>> spans([5, 0], [2, 3], torch.device("cpu")).tolist()
    [5, 6, 0, 1, 2]
    """
    first, size = (np.append(0, part).astype(np.int64) for part in (starts, sizes))
    jumps = torch.from_numpy(first[1:] - (first + size)[:-1]).int().to(device)
    places = torch.from_numpy(size.cumsum()[:-1]).to(device)
    counted = torch.ones(int(size.sum()) + 1, dtype=torch.int32, device=device)
    counted[:1] = 0
    counted.index_add_(0, places, jumps)
    return counted.cumsum_(0)[:-1]
