"""From a plan to what one rank holds, sends and serves, step by step."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError, PlanMismatchError
from placer.executor.placed import PlacedEmbeddings
from placer.executor.ranks.canonical import Canonical
from placer.executor.ranks.channels import all_channels, channels_of
from placer.executor.ranks.comm import Communicator
from placer.executor.ranks.division import Target, divide
from placer.executor.ranks.exchange import InputExchange
from placer.executor.ranks.local import local_features, local_plan
from placer.executor.ranks.mapping import ranks_of_devices
from placer.executor.ranks.replicas import Bystander, ReplicaUpdates
from placer.executor.ranks.serve import Served
from placer.executor.ranks.table_map import table_maps
from placer.executor.ranks.whole_rows import RowTotals, row_groups
from placer.executor.step import FeatureRead
from placer.plan.plan import Plan
from placer.tables import OptimizerName


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """One rank's part of a plan, ready to train.

    Attributes
    ----------
    inputs : InputExchange
    served : Served
    canonical : Canonical
    targets : tuple of (Target, PlacedEmbeddings)
        What is held here.
    """

    inputs: InputExchange
    served: Served
    canonical: Canonical
    targets: tuple[tuple[Target, PlacedEmbeddings], ...]


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
        On every rank, if they have different plans, or the plan cannot be cut so.
    PlacerError
        If another rank could not hold its part.
    """
    _check_same(plan, optimizers, comm)
    ranks = ranks_of_devices(plan.topology, comm.world)
    division = divide(plan, ranks, optimizers)
    maps = table_maps(plan, division, device)
    targets = [
        target for strips in division.values() for strip in strips for target in strip.targets
    ]
    channels = channels_of(comm.rank, comm.world, targets, all_channels(features, maps))
    totals = None
    if any(target.peers and not target.replicated for target in targets):
        totals = _totals(targets, comm.rank, comm, device)
    modules: list[PlacedEmbeddings] = []
    failure: PlacerError | None = None
    try:
        for unit in channels.units:
            of_unit = _totals(unit.targets, comm.rank, None, device) if unit.replicated else totals
            poolings = {
                (channel.target.name, features[channel.feature].name): channel.pooling
                for channel in (channels.served[at] for at in unit.channels)
            }
            reads = [local_features(target, poolings) for target in unit.targets]
            own = local_plan(plan, unit.targets, reads, ranks, optimizers, comm.rank)
            modules.append(
                PlacedEmbeddings(
                    own, device=device, weights=_nothing(own), whole_rows=of_unit, **options
                )
            )
    except PlacerError as error:
        failure = error
    _check_all_built(failure, comm)
    held = {
        target.name: module
        for unit, module in zip(channels.units, modules, strict=True)
        for target in unit.targets
    }
    replicas: list[ReplicaUpdates | Bystander] = []
    for holders in sorted({target.holders for target in targets if target.replicated}):
        position = next((i for i, u in enumerate(channels.units) if u.holders == holders), -1)
        if position < 0:
            widths = tuple(target.width for target in targets if target.holders == holders)
            replicas.append(Bystander(comm, widths, device))
            continue
        unit = channels.units[position]
        read_by = tuple(channels.served[at] for at in unit.channels)
        replicas.append(ReplicaUpdates(position, unit, read_by, modules[position], comm))
    return Assembly(
        InputExchange(features, maps, channels, comm, device),
        Served(
            features,
            channels,
            tuple(modules),
            tuple(replicas),
            totals,
            comm,
            device,
            gradient_scale,
        ),
        Canonical(maps, held, comm, device),
        tuple((target, held[target.name]) for target in targets if target.name in held),
    )


def _totals(
    targets: Sequence[Target], rank: int, comm: Communicator | None, device: torch.device
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


def _nothing(plan: Plan) -> dict[str, Tensor]:
    """Zeros that take no memory, so that no weights are drawn that would be overwritten."""
    return {table.name: torch.zeros(1, 1).expand(table.rows, table.dim) for table in plan.tables}


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
