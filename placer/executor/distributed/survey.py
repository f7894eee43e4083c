"""What every rank knows of a plan that all of them share."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from placer.errors import PlacerError, PlanMismatchError
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.channels import Channel, Channels, Unit, all_channels
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
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What every rank knows of a plan: it is the same on all of them.

    Attributes
    ----------
    ranks : mapping of device to rank
    channels : tuple of Channel
        Between any ranks.
    shards : mapping of (table name, ranks) to sequence of (int, Shard)
        See `shards_by_holders`.
    """

    plan: Plan
    features: tuple[FeatureRead, ...]
    optimizers: Mapping[str, OptimizerName]
    ranks: Mapping[str, int]
    targets: tuple[Target, ...]
    routes: Mapping[str, TableRoutes]
    channels: tuple[Channel, ...]
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
        """Divide a plan over so many ranks."""
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
        """Return the plan by which a rank holds one of its units."""
        features: dict[str, list[Feature]] = defaultdict(list)
        for channel in (channels.served[at] for at in unit.channels):
            own = Feature(channel.name, pooling=channel.pooling)
            features[channel.target.name].append(own)
        gpus = [gpu for gpu in self.plan.topology.gpus if self.ranks[gpu.id] == rank]
        return local_plan(
            self.plan, unit.targets, features, self.shards, self.optimizers, gpus
        ).plan


def check_same(
    plan: Plan,
    optimizers: Mapping[str, OptimizerName],
    growing: Mapping[str, Growing],
    comm: Communicator,
) -> None:
    """Check that all ranks have the same plan: others would wait for each other for ever."""
    options = sorted(optimizers.items()), sorted(growing.items(), key=lambda item: item[0])
    digest = hashlib.sha256(
        repr((plan.tables, plan.shards, plan.exchange_dtype, *options)).encode()
    )
    for name in sorted(plan.hot_ids):
        digest.update(name.encode() + plan.hot_ids[name].tobytes())
    number = int.from_bytes(digest.digest()[:7], "little")
    said = comm.numbers([number])
    other = [rank for rank, theirs in enumerate(said) if theirs != said[0]]
    if other:
        raise PlanMismatchError(
            f"ranks {other} have another plan than rank 0, or other growing tables; load the same "
            "file on all of them"
        )


def check_all_built(failure: PlacerError | None, comm: Communicator) -> None:
    """Raise on all ranks if one of them lacks the memory for its part, or what else it needs."""
    said = comm.numbers([int(failure is not None)])
    bad = [rank for rank, (failed,) in enumerate(said) if failed]
    if failure is not None:
        raise failure
    if bad:
        raise PlanMismatchError(
            f"ranks {bad} cannot hold their part of the plan; see what they say"
        )
