"""How much work a plan asks of each GPU in a step: what unit costs are multiplied with."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cost_models.base import require_match
from cost_models.step_equation.exchanged_bytes import (
    ID_BYTES,
    length_bytes,
    output_bytes,
    replica_bytes,
    returned_vectors,
    row_sum_bytes,
    rows_together,
    strip_counts,
    with_own_part,
)
from cost_models.step_equation.slice_load import slice_load
from cost_models.step_equation.unit_costs import ReadKind, UnitCosts
from placer.plan.buffers import cache_slices, output_vectors
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Shard
from placer.problem import Problem
from placer.tables import Table


class Seconds(NamedTuple):
    """Time by what is waited for."""

    hbm_s: float
    link_s: float
    dram_s: float
    exchange_s: float
    launch_s: float


Group = tuple[str, str, tuple[int, int], tuple[str, ...]]
"""Shards that pool into one output: a table, a GPU, columns, and all devices that hold them."""


def group_of(shard: Shard, device: str) -> Group:
    """The shards of its table and columns that it shares an output with, replicas aside."""
    return shard.table, device, shard.cols, shard.devices


class Charges(NamedTuple):
    """What the shards of a group are charged together: 1 where it is due, else 0."""

    groups: float
    strips: float
    pools: float
    splits: float

    def seconds(self, costs: UnitCosts) -> float:
        """Time of the GPU."""
        time = self.groups * costs.piece_s + self.strips * costs.strip_s
        return time + self.pools * costs.pool_s + self.splits * costs.split_s


NO_CHARGES = Charges(0.0, 0.0, 0.0, 0.0)


def charges_of_groups(plan: Plan) -> dict[Group, Charges]:
    """The charges of every group of a plan."""
    row_slices: dict[Group, set[Lookup]] = defaultdict(set)
    strips: dict[Group, bool] = {}
    dims = {table.name: table.dim for table in plan.tables}
    for shard in plan.shards:
        for device in shard.devices:
            group = group_of(shard, device)
            strips[group] = shard.width < dims[shard.table]
            row_slices[group] |= {shard.lookup} if shard.row_count else set()
    return {
        group: Charges(
            1.0,
            float(column_slice),
            float(not row_slices[group].isdisjoint(("staged", "cached"))),
            float(len(row_slices[group]) > 1),
        )
        for group, column_slice in strips.items()
    }


@dataclass(frozen=True, slots=True)
class Work:
    """What one shard, or the hits or misses of one, asks of one device in a step.

    Attributes
    ----------
    table : int
        Number of the table in the problem's profile.
    gpu : int or None
        Number of the GPU; None where `host` serves the shard by itself, to all its GPUs.
    host : str
        The host whose memory holds the rows.
    kind : ReadKind
    weight_bytes, row_bytes : float
        Bytes of weights, and of weights and state, of one row of the shard.
    lookups, rows, vectors : float
        Lookups of a step, distinct rows among them, and vectors that they are pooled into.
    output_vectors, output_bytes : float
        Vectors that the GPU returns and their bytes; 0 but for one shard of those of a table
        with the same columns on a GPU.
    exchanged_bytes : float
        All that the GPU sends and receives for the shard, spread evenly over all GPUs.
    together : Charges
        What is charged for all shards of its group; nothing but for the first of them.
    shards : float
        1 where `UnitCosts.shard_s` is due; else 0.
    split_lookups : float
        Lookups for which `UnitCosts.split_lookup_s` is due.
    cache_rows : float
        Rows that the shard's cache has room for.
    """

    table: int
    gpu: int | None
    host: str
    kind: ReadKind
    weight_bytes: float
    row_bytes: float
    lookups: float
    rows: float
    vectors: float
    output_vectors: float = 0.0
    output_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    together: Charges = NO_CHARGES
    shards: float = 0.0
    split_lookups: float = 0.0
    cache_rows: float = 0.0

    def seconds(self, costs: UnitCosts) -> Seconds:
        """Time of the device for it."""
        read = costs.read(self.kind)
        hbm_s, link_s, dram_s = (
            float(
                rates.of(self.weight_bytes, self.row_bytes, self.weight_bytes).seconds(
                    self.lookups, self.rows, self.vectors
                )
            )
            for rates in (read.hbm, read.link, read.dram)
        )
        returned = self.output_vectors * costs.output_vector_s
        returned += self.output_bytes * costs.output_byte_s
        return Seconds(
            hbm_s + returned + self.cache_rows * costs.cache_row_s,
            link_s,
            dram_s,
            self.exchanged_bytes * costs.exchange_byte_s,
            self.together.seconds(costs)
            + self.split_lookups * costs.split_lookup_s
            + self.shards * costs.shard_s,
        )


def work_of(problem: Problem, plan: Plan) -> tuple[Work, ...]:
    """The work of all shards of a plan, in their order.

    Raises
    ------
    PlanMismatchError
        If the plan's shards are of tables or on devices that the problem does not have.
    """
    require_match(problem, plan)
    together, strips = rows_together(plan), strip_counts(plan)
    groups: dict[Group, list[int]] = defaultdict(list)
    numbers = {profile.name: number for number, profile in enumerate(problem.profile)}
    gpus = {gpu.id: number for number, gpu in enumerate(problem.topology.gpus)}
    found: list[Work] = []
    for shard in plan.shards:
        table = numbers[shard.table]
        parts = tuple(_reads(problem, table, shard))
        rows = problem.profile.tables[table].table.rows
        alone = together[shard.table, shard.cols, shard.devices] == rows
        for device in shard.devices:
            if device not in gpus:
                found += [replace(part, host=device) for part in parts]
                continue
            group = group_of(shard, device)
            first = group not in groups
            gpu, host = gpus[device], problem.topology.gpus_by_id[device].host
            served = _returned(problem, table, shard, parts, first, alone, strips[shard.table])
            here = [replace(part, gpu=gpu, host=host) for part in (served, *parts[1:])]
            groups[group] += range(len(found), len(found) + len(here))
            found += here
    charges = charges_of_groups(plan)
    for group, members in groups.items():
        lookups = sum(found[at].lookups for at in members)
        found[members[0]] = replace(
            found[members[0]],
            together=charges[group],
            split_lookups=charges[group].splits * lookups,
        )
    return tuple(found)


def hbm_lookup_share(problem: Problem, plan: Plan) -> float:
    """Share of all lookups that rows in HBM serve, those of caches included; 1 of none."""
    hot = total = 0.0
    numbers = {profile.name: number for number, profile in enumerate(problem.profile)}
    for shard in plan.shards:
        table = numbers[shard.table]
        weight = shard.width / problem.profile.tables[table].table.dim * len(shard.devices)
        for part in _reads(problem, table, shard):
            hot += part.lookups * weight if part.kind in ("device", "hit") else 0.0
            total += part.lookups * weight
    return hot / total if total else 1.0


def _reads(problem: Problem, number: int, shard: Shard) -> Iterator[Work]:
    """The reads of a shard on any device; hits and misses apart."""
    profile = problem.profile.tables[number]
    table: Table = profile.table
    samples = problem.global_batch_size // len(shard.devices)
    step_lookups = samples * table.lookups_per_sample
    lookups, rows = slice_load(profile, shard.rows, step_lookups)
    work = Work(
        number,
        None,
        "",
        "device",
        table.weight_bytes_per_row(shard.width),
        table.bytes_per_row(shard.width),
        lookups,
        rows,
        output_vectors(table, samples, lookups),
    )
    if shard.lookup == "cached":
        hits, hit_rows = slice_load(profile, cache_slices(shard)[0], step_lookups)
        room = float(shard.cache_rows)
        yield replace(work, kind="hit", lookups=hits, rows=hit_rows, cache_rows=room)
        yield replace(work, kind="miss", lookups=lookups - hits, rows=rows - hit_rows)
    else:
        yield replace(work, kind=shard.lookup)


def _returned(
    problem: Problem,
    number: int,
    shard: Shard,
    parts: tuple[Work, ...],
    first: bool,
    alone: bool,
    strips: int,
) -> Work:
    """The first of a shard's reads, with what a GPU that serves it returns and exchanges.

    `first`: the GPU has no other shard of these columns before this one. `alone`: the strip's
    rows are all on the same GPUs.
    """
    profile = problem.profile.tables[number]
    table, replicas, gpus = profile.table, len(shard.devices), len(problem.topology.gpus)
    samples = problem.global_batch_size // replicas
    lookups, rows = (sum(part.lookups for part in parts), sum(part.rows for part in parts))
    vectors = returned_vectors(table, samples if first else 0, lookups, alone=alone)
    output = output_bytes(vectors, shard.width)
    received = lookups * ID_BYTES + length_bytes(table, samples if first else 0)
    if replicas == 1:
        exchanged = received + 2 * output + row_sum_bytes(table, rows, strips, gpus)
    else:
        global_lookups = problem.global_batch_size * table.lookups_per_sample
        touched = slice_load(profile, shard.rows, global_lookups)[1]
        # Where not every GPU has a replica, some serve others' samples too.
        others = with_own_part(1 - replicas / gpus, gpus)
        exchanged = others * (received + 2 * output)
        exchanged += replica_bytes(shard.width, rows, touched, replicas, gpus)
    return replace(
        parts[0],
        output_vectors=vectors,
        output_bytes=output,
        exchanged_bytes=exchanged,
        shards=1.0,
    )
