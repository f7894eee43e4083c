"""The placement of an old plan on a problem that has changed since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cost_models import CostModel, ShardingOption, TableShard
from placer.constraints.unmet import unmet
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.model.assignment import Assignment, total
from solvers.model.instance import Instance
from solvers.model.knapsack import least_times
from solvers.model.read_plan import is_one_of, read_shards
from solvers.search.moves import resharded


@dataclass(frozen=True, slots=True)
class OldTable:
    """How the old plan shards a table, and the id of the device of each shard."""

    option: ShardingOption
    shards: tuple[tuple[TableShard, str], ...]

    def has_option(self, option: ShardingOption) -> bool:
        """Whether a sharding option is the table's, however cold rows are read."""
        return option._replace(cold=self.option.cold) == self.option


def old_tables(instance: Instance, old: Plan) -> dict[int, OldTable]:
    """The tables of a problem, by number, that the old plan places in a way that is searched."""
    tables = {}
    for number in range(instance.tables):
        table = _old_table(instance, old, number)
        if table is not None:
            tables[number] = table
    return tables


def _old_table(instance: Instance, old: Plan, number: int) -> OldTable | None:
    """The old sharding of a table, as an option for the table's present rows."""
    table = instance.problem.profile.tables[number].table
    before = old.tables_by_name.get(table.name)
    if before is None or before.dim != table.dim:
        return None
    gpus = [gpu.id for gpu in old.topology.gpus]
    placement = read_shards(
        number, before, old.shards_by_table[table.name], gpus, instance.options_of(number)
    )
    if placement is None:
        return None
    replicated_rows = placement.option.replicated_rows
    whole = replicated_rows == before.rows
    option = placement.option._replace(
        replicated_rows=table.rows if whole else min(replicated_rows, table.rows)
    )
    shards = ((p.shard._replace(option=option), gpus[p.gpu]) for p in placement.placements)
    return OldTable(option, tuple(shards))


def kept_plan(problem: Problem, cost_model: CostModel, old: Plan) -> tuple[Plan | None, str]:
    """The old placement on the new problem, or why it does not work there."""
    names = problem.profile.table_names
    for profile in problem.profile:
        now, before = profile.table, old.tables_by_name.get(profile.name)
        if before is None:
            return None, f"the old plan has no table {profile.name!r}"
        if (before.rows, before.dim) != (now.rows, now.dim):
            return None, (
                f"table {profile.name!r} was {before.rows} × {before.dim} "
                f"and is {now.rows} × {now.dim}"
            )
    known = problem.topology.gpus_by_id.keys() | problem.topology.hosts_by_id.keys()
    shards = [shard for shard in old.shards if shard.table in set(names)]
    gone = sorted({device for shard in shards for device in shard.devices} - known)
    if gone:
        return None, f"the old plan uses {gone[0]}, which {problem.topology.name!r} lacks"
    plan = Plan(
        tables=tuple(profile.table for profile in problem.profile),
        topology=problem.topology,
        shards=tuple(shards),
        row_order={k: v for k, v in old.row_order.items() if k in names},
        hot_ids={k: v for k, v in old.hot_ids.items() if k in names},
        batch_size=problem.batch_size,
        pipeline=problem.pipeline,
        dense=problem.dense,
    )
    try:
        needed = _with_buffers(problem, cost_model, plan)
        cost_model.evaluate(problem, needed)
    except PlanMismatchError as error:
        return None, str(error)
    broken = violations(needed) + unmet(needed, problem.constraints)
    if not broken:
        return needed, ""
    as_before = _with_old_buffers(needed, old)
    if as_before is not None and not violations(as_before) + unmet(as_before, problem.constraints):
        return as_before, ""
    return None, broken[0].message


def _with_old_buffers(needed: Plan, old: Plan) -> Plan | None:
    """The plan with no more buffers than it had: rows for which there is no room stay in place.

    None where steps are larger than they were, for which buffers have to grow.
    """
    if needed.batch_size > old.batch_size or needed.topology != old.topology:
        return None
    before = {(one.table, one.rows, one.cols, one.devices): one for one in old.shards}
    shards = []
    for shard in needed.shards:
        had = before[shard.table, shard.rows, shard.cols, shard.devices]
        shards.append(
            replace(
                shard,
                staging_rows=min(shard.staging_rows, had.staging_rows),
                buffer_bytes=min(shard.buffer_bytes, had.buffer_bytes),
            )
        )
    return replace(needed, shards=tuple(shards))


def in_place_share(problem: Problem, cost_model: CostModel, plan: Plan) -> float:
    """The share of staged rows for which a plan has no room, and which are read in place."""
    needed = sum(shard.staging_rows for shard in _with_buffers(problem, cost_model, plan).shards)
    room = sum(shard.staging_rows for shard in plan.shards)
    return max(0.0, 1 - room / needed) if needed else 0.0


def read_in_place(plan: Plan) -> Plan:
    """The plan with staged rows read in place, one by one."""
    return replace(
        plan,
        shards=tuple(
            replace(shard, lookup="uva", staging_rows=0) if shard.lookup == "staged" else shard
            for shard in plan.shards
        ),
    )


def _with_buffers(problem: Problem, cost_model: CostModel, plan: Plan) -> Plan:
    """The plan with the buffers that its shards need for the accesses and batch of today."""
    ordered = problem.in_plan_order(plan)
    number = {name: at for at, name in enumerate(problem.profile.table_names)}
    returned: set[tuple[str, tuple[str, ...], tuple[int, int]]] = set()
    shards: list[Shard] = []
    for shard in plan.shards:
        if shard.devices[0] not in plan.topology.gpus_by_id:
            shards.append(shard)
            continue
        bags = (shard.table, shard.devices, shard.cols)
        shards.append(
            cost_model.with_buffers(
                ordered, number[shard.table], shard, returns_bags=bags not in returned
            )
        )
        returned.add(bags)
    return replace(plan, shards=tuple(shards))


def old_assignment(
    instance: Instance,
    tables: Mapping[int, OldTable],
    option_of_new: Callable[[int], ShardingOption],
) -> Assignment | None:
    """The old sharding options on the old GPUs, HBM filled anew; None if that does not fit.

    Shards that have lost their GPU go to the one that finishes first; new tables get the
    sharding option that `option_of_new` returns for their number.
    """
    gpu_of = {gpu.id: number for number, gpu in enumerate(instance.problem.topology.gpus)}
    homes: dict[TableShard, int | None] = {}
    replicas: list[TableShard] = []
    new_tables = []
    for number in range(instance.tables):
        was = tables.get(number)
        if was is not None and _is_usable(instance, number, was.option):
            homes |= {shard: gpu_of.get(device) for shard, device in was.shards}
            replica = instance.replica(number, was.option)
            replicas += [] if replica is None else [replica]
        elif instance.in_group(number):
            homes[TableShard(number, instance.options_of(number)[0])] = None
        else:
            new_tables.append(number)
    pairs, homeless = _housed(instance, homes)
    assignment = Assignment.of(instance, pairs, replicas)
    for block in homeless:
        assignment = assignment and _with_block(assignment, block)
    for number in new_tables:
        assignment = assignment and resharded(assignment, number, option_of_new(number))
    return assignment


def _housed(
    instance: Instance, homes: Mapping[TableShard, int | None]
) -> tuple[list[tuple[TableShard, int]], list[tuple[TableShard, ...]]]:
    """Shards with the GPUs that they keep, and the blocks of shards that have none.

    Shards that have to be on one GPU are a block; they keep the GPU that most of them had.
    """
    pairs: list[tuple[TableShard, int]] = []
    homeless: list[tuple[TableShard, ...]] = []
    for block in instance.blocks(homes):
        had = [gpu for shard in block if (gpu := homes[shard]) is not None]
        common = max(had, key=lambda gpu: (had.count(gpu), -gpu), default=None)
        if common is None or not all(instance.may_serve(shard, common) for shard in block):
            homeless.append(block)
        else:
            pairs += [(shard, common) for shard in block]
    return pairs, homeless


def _is_usable(instance: Instance, number: int, option: ShardingOption) -> bool:
    """Whether options of this kind are searched, and the cost model knows this one."""
    options = instance.options_of(number)
    if is_one_of(option, options):
        return True
    rows, allowed = instance.rows(number), instance.allowed(number)
    servers = instance.gpus if allowed is None else int(allowed.sum())
    kinds = {_kind(other, rows) for other in options}
    if option.shard_count > servers or _kind(option, rows) not in kinds:
        return False
    try:
        for shard in instance.shards(number, option)[:1]:
            instance.curve(shard, 0)
    except ProblemError:
        return False
    return True


def _kind(option: ShardingOption, rows: int) -> tuple[object, ...]:
    """The properties by which constraints and cost models distinguish sharding options."""
    replicated = "all" if option.replicated_rows >= rows > 0 else bool(option.replicated_rows)
    sliced = (option.row_slices > 1, bool(option.column_widths))
    return (*sliced, replicated, option.cold, option.blocked)


def _with_block(assignment: Assignment, block: tuple[TableShard, ...]) -> Assignment | None:
    """The assignment with more shards, all on that GPU that may serve them and finishes first."""
    instance = assignment.instance
    tables = {shard.table for shard in block}
    gpus = [
        gpu
        for gpu in range(instance.gpus)
        if all(instance.may_serve(shard, gpu) for shard in block)
        and not any(shard.table in tables for shard in assignment.shards[gpu])
    ]
    if not gpus:
        return None
    by_kind = {kind: total(instance, block, gpu) for kind, gpu in enumerate(instance.kinds)}
    added = np.array([by_kind[instance.kind_of_gpu[gpu]] for gpu in gpus])
    times = least_times(assignment.sums[gpus] + added, instance.hbm_bytes[gpus])
    for at in np.argsort(times, kind="stable").tolist():
        if np.isfinite(times[at]):
            shards = sorted([*assignment.shards[gpus[at]], *block])
            changed = assignment.changed({gpus[at]: shards})
            if changed is not None:
                return changed
    return None
