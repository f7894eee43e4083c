"""Turn an instance's options and curves into candidates, and the found state into shards."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Bool, Float, costs_of
from solvers.search.candidates.placement import Group, ranks_of
from solvers.search.candidates.search import search

_ROUNDING_BYTES = 1.0
"""Spare bytes of each shard: bytes of curves are not whole numbers."""


class _Placed(NamedTuple):
    """Shards, and the rows of `costs_of` of each, shape (shards, rows)."""

    shards: Sequence[TableShard]
    costs: Float


def assigned(instance: Instance, clock: Clock) -> tuple[Assignment | None, float]:
    """Return the best assignment found, and a lower bound of the step time.

    All shards of a table have the same share of their rows in HBM. As in TorchRec, each GPU has an
    equal part of its host's memory.
    """
    hosts = np.array(instance.host_of_gpu)
    peers = np.bincount(hosts)
    memory = np.stack((instance.hbm_bytes, instance.all_dram_bytes[hosts]), axis=1)
    tables = []
    for block in instance.blocks(TableShard(table) for table in range(instance.tables)):
        groups = (group.worthwhile(memory) for group in _groups(instance, block))
        tables.append([group for group in groups if group is not None])
    if not all(tables):
        return None, 0.0
    memory[:, 1] /= peers[hosts]
    found = search(tables, [(n,) for n in range(len(tables))], memory, int(peers.max()), clock)
    if found.state is None:
        return None, found.limit_s
    pairs, fixed, replicas = [], {}, []
    for table, place in found.state.places.items():
        group = found.state.group(table)
        shards, costs = group.sources[place.candidate]
        if shards[0].is_replica:
            replicas.append(shards[0])
            continue
        gpus = np.resize(ranks_of(group, place.slots), len(shards)).tolist()
        for shard, own, gpu in zip(shards, costs, gpus, strict=True):
            first = gpus[0] if shard.option.blocked else 0
            placed = shard._replace(option=shard.option._replace(first_gpu=first))
            pairs.append((placed, gpu))
            fixed[placed] = own[:, None]
    return Assignment.of(instance, pairs, replicas, fixed=fixed), found.limit_s


def _groups(instance: Instance, block: Sequence[TableShard]) -> Iterator[Group]:
    """Yield the candidates of a table, or of tables that one GPU serves."""
    tables = [shard.table for shard in block]
    allowed = instance.allowed(tables[0])
    if len(tables) > 1:
        whole = [instance.whole(table) for table in tables]
        # The cheapest option at each price, for all tables together.
        priced = np.array([instance.priced_costs(shard, 0) for shard in whole])
        yield _group(whole, priced, 1, priced.sum(axis=0)[None], allowed)
        return
    for option in instance.options_of(tables[0]):
        if option.first_gpu:  # The same shards on the GPUs of another host.
            continue
        replicas = [*instance.replicas(tables[0], option)] * instance.gpus
        shards = replicas or instance.shards(tables[0], option)
        span = len(shards) if replicas or option.blocked else 1
        costs = _at_common_shares(instance, shards)
        yield _group(shards, costs, span, costs, allowed if span == 1 else None)


def _group(
    shards: Sequence[TableShard], costs: Float, span: int, summed: Float, allowed: Bool | None
) -> Group:
    """Return candidates from costs of shards, and from costs of units that are placed as one.

    Both have shape (shards, rows, candidates). Shards of a table go to different GPUs.
    """
    units = summed.transpose(2, 0, 1).reshape(summed.shape[2], -1, span, summed.shape[1])
    return Group(
        span,
        same_host=False,
        distinct=len(shards) > 1,
        seconds=units[..., GPU_S],
        tier_bytes=units[..., [BYTES, DRAM_BYTES]] + _ROUNDING_BYTES,
        sources=[_Placed(shards, own) for own in costs.transpose(2, 0, 1)],
        allowed=allowed,
    )


def _at_common_shares(instance: Instance, shards: Sequence[TableShard]) -> Float:
    """Return costs at each point of the largest shard's curve, shape (shards, rows, points)."""
    curves = [instance.curve(shard, 0) for shard in shards]
    rows = [len(range(*shard.rows(instance.rows(shard.table)))) for shard in shards]
    largest = rows.index(max(rows))
    shares = curves[largest].hot_rows / max(1, rows[largest])
    return np.array(
        [
            [np.interp(np.rint(shares * n), curve.hot_rows, of) for of in costs_of(curve)]
            for curve, n in zip(curves, rows, strict=True)
        ]
    )
