"""From a plan to what one rank holds, sends and serves, step by step."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placer.errors import PlacerError, PlanMismatchError
from placer.executor.distributed.collectives import Collectives, Communicator
from placer.executor.distributed.distributed_id_order import DistributedIdOrder
from placer.executor.distributed.input_exchange import InputExchange
from placer.executor.distributed.placement.channels import (
    Channel,
    Channels,
    Unit,
    all_channels,
    channels_of,
)
from placer.executor.distributed.placement.devices import ranks_of_devices
from placer.executor.distributed.placement.division import Target, divide
from placer.executor.distributed.placement.local_plans import (
    HeldShards,
    channel_name,
    local_features,
    local_plan,
    shards_by_holders,
)
from placer.executor.distributed.placement.table_routes import TableRoutes, table_routes
from placer.executor.distributed.replicas import Held, ReplicaUpdates
from placer.executor.distributed.serving import Served
from placer.executor.distributed.whole_rows import RowTotals, row_groups
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.batch_reads import FeatureRead
from placer.plan.plan import Plan
from placer.tables import OptimizerName

Build = Callable[[Plan, RowTotals | None], Held]
"""Builds what holds a rank's own part of a plan, from that part and what adds up Σ g²."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What every rank knows of a plan: it is the same on all of them.

    Attributes
    ----------
    plan : Plan
    features : tuple of FeatureRead
    optimizers : mapping of table name to optimizer
    ranks : mapping of device to rank
    targets : tuple of Target
    maps : mapping of table name to TableRoutes
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
    maps: Mapping[str, TableRoutes]
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
        """Divide a plan over so many ranks.

        Raises
        ------
        PlanMismatchError
            If it cannot be divided so.
        """
        ranks = ranks_of_devices(plan.topology, world)
        division = divide(plan, ranks, optimizers)
        maps = table_routes(plan, division, device)
        return cls(
            plan,
            features,
            optimizers,
            ranks,
            tuple(
                t
                for column_slices in division.values()
                for columns in column_slices
                for t in columns.targets
            ),
            maps,
            all_channels(features, maps),
            shards_by_holders(plan, ranks),
        )


def own_channels(survey: Survey, comm: Collectives) -> Channels:
    """What this rank sends and serves."""
    return channels_of(comm.rank, comm.world, survey.targets, survey.channels)


def _unit_plan(survey: Survey, channels: Channels, unit: Unit, rank: int) -> Plan:
    """The plan by which a rank holds one of its units."""
    poolings = {
        (channel.target.name, survey.features[channel.feature].name): channel.pooling
        for channel in (channels.served[at] for at in unit.channels)
    }
    features = [local_features(target, poolings) for target in unit.targets]
    gpus = [gpu for gpu in survey.plan.topology.gpus if survey.ranks[gpu.id] == rank]
    return local_plan(
        survey.plan, unit.targets, features, survey.shards, survey.optimizers, gpus
    ).plan


def serving(
    survey: Survey,
    channels: Channels,
    comm: Collectives,
    device: torch.device,
    gradient_scale: float,
    build: Build,
) -> Served:
    """What a rank holds, each unit made by `build`, and whom it takes part in updates with."""
    targets, totals = survey.targets, None
    if any(target.peers and not target.replicated for target in targets):
        totals = _totals(targets, comm.rank, comm, device)
    modules: list[Held] = []
    for unit in channels.units:
        own = _unit_plan(survey, channels, unit, comm.rank)
        of_unit = _totals(unit.targets, comm.rank, None, device) if unit.replicated else totals
        modules.append(build(own, of_unit))
    # Replicas come last among the units, by their holders.
    replicas = [
        ReplicaUpdates(
            position, unit, tuple(channels.served[at] for at in unit.channels), modules[position]
        )
        for position, unit in enumerate(channels.units)
        if unit.replicated
    ]
    names = tuple(
        tuple(
            channel_name(channel.target, survey.features[channel.feature].name)
            for channel in (channels.served[at] for at in unit.channels)
        )
        for unit in channels.units
    )
    return Served(
        channels,
        names,
        tuple(modules),
        tuple(replicas),
        any(target.replicated for target in targets),
        totals,
        comm,
        device,
        gradient_scale,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """One rank's part of a plan, ready to train.

    Attributes
    ----------
    inputs : InputExchange
    served : Served
    held : mapping of target name to PlacedEmbeddings
        What this rank holds; one of them has all targets of a unit.
    id_order : DistributedIdOrder
    """

    inputs: InputExchange
    served: Served
    held: Mapping[str, PlacedEmbeddings]
    id_order: DistributedIdOrder

    @property
    def modules(self) -> tuple[PlacedEmbeddings, ...]:
        """Of the rank's units."""
        return tuple({id(module): module for module in self.held.values()}.values())

    def part(self, plan: Plan, features: tuple[FeatureRead, ...]) -> "Assembly":
        """Some of the tables, in the same memory and over the same connections.

        Every rank must make it of the same tables; nothing is exchanged for that.
        """
        order, device = self.id_order, self.inputs.device
        optimizers = {table.name: order.optimizers[table.name] for table in plan.tables}
        survey = Survey.of(plan, features, optimizers, order.world, device)

        def build(own: Plan, totals: RowTotals | None) -> PlacedEmbeddings:
            return self.held[own.tables[0].name].part(own, totals)

        scale = self.served.gradient_scale
        return _connected(survey, order.comm, device, scale, order.counts_updates, build)


def assemble(
    plan: Plan,
    features: tuple[FeatureRead, ...],
    optimizers: Mapping[str, OptimizerName],
    comm: Communicator,
    device: torch.device,
    gradient_scale: float,
    options: Mapping[str, Any],
) -> Assembly:
    """Build what this rank needs; all ranks must do so together.

    Raises
    ------
    PlanMismatchError
        On every rank, if they have different plans, or the plan cannot be divided so.
    PlacerError
        If another rank could not hold its part.
    """
    # 1. Ranks that had different plans would wait for each other for ever.
    _check_same(plan, optimizers, comm)
    # 2. Divide the tables: who holds which rows of which columns. Every rank finds the same.
    survey = Survey.of(plan, features, optimizers, comm.world, device)
    # 3. Build what this rank holds, zeros at first, and what it sends. A rank may lack the memory,
    #    and all must know then.
    counts = options.get("rounding") == "stochastic" or "adam" in optimizers.values()

    def build(own: Plan, totals: RowTotals | None) -> PlacedEmbeddings:
        return PlacedEmbeddings(own, device=device, seed=None, whole_rows=totals, **options)

    assembly, failure = None, None
    try:
        assembly = _connected(survey, comm, device, gradient_scale, counts, build)
    except PlacerError as error:
        failure = error
    _check_all_built(failure, comm)
    assert assembly is not None, "or there was a failure"
    return assembly


def _connected(
    survey: Survey,
    comm: Communicator,
    device: torch.device,
    gradient_scale: float,
    counts_updates: bool,
    build: Callable[[Plan, RowTotals | None], PlacedEmbeddings],
) -> Assembly:
    """What a rank holds, sends and serves, and its tables by id."""
    channels = own_channels(survey, comm)
    modules: list[PlacedEmbeddings] = []

    def kept(own: Plan, totals: RowTotals | None) -> PlacedEmbeddings:
        modules.append(build(own, totals))
        return modules[-1]

    served = serving(survey, channels, comm, device, gradient_scale, kept)
    held = {
        target.name: module
        for unit, module in zip(channels.units, modules, strict=True)
        for target in unit.targets
    }
    return Assembly(
        InputExchange(survey.features, survey.maps, channels, comm, device),
        served,
        held,
        DistributedIdOrder(
            survey.plan,
            survey.optimizers,
            counts_updates,
            survey.maps,
            {name: module.id_order() for name, module in held.items()},
            comm,
            device,
        ),
    )


def _totals(
    targets: Sequence[Target], rank: int, comm: Collectives | None, device: torch.device
) -> RowTotals | None:
    """Of rows held alone, across ranks; or, without a communicator, of replicated ones."""
    groups = row_groups(targets, rank, replicated=comm is None)
    if comm is None and not groups:
        return None
    dims = {
        target.name: target.table.dim
        for target in targets
        if target.peers and rank in target.holders and target.replicated == (comm is None)
    }
    return RowTotals(groups, dims, comm, device)


def _check_same(plan: Plan, optimizers: Mapping[str, OptimizerName], comm: Communicator) -> None:
    digest = hashlib.sha256(repr((plan.tables, plan.shards, sorted(optimizers.items()))).encode())
    for name in sorted(plan.hot_ids):
        digest.update(name.encode() + plan.hot_ids[name].tobytes())
    number = int.from_bytes(digest.digest()[:7], "little")
    said = comm.gather("header", torch.tensor([number])).flatten().tolist()
    other = [rank for rank, theirs in enumerate(said) if theirs != said[0]]
    if other:
        raise PlanMismatchError(
            f"ranks {other} have another plan than rank 0; load the same file on all of them"
        )


def _check_all_built(failure: PlacerError | None, comm: Communicator) -> None:
    said = comm.gather("header", torch.tensor([int(failure is not None)])).flatten().tolist()
    if failure is not None:
        raise failure
    if any(said):
        bad = [rank for rank, failed in enumerate(said) if failed]
        raise PlanMismatchError(
            f"ranks {bad} cannot hold their part of the plan; see what they say"
        )
