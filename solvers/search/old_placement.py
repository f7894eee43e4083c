"""Keep an old plan's sharding options and GPUs on a problem that has changed since."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cost_models import ShardingOption, TableShard
from placer.errors import ProblemError
from placer.plan.plan import Plan
from solvers.model.assignment import Assignment, Change
from solvers.model.instance import Block, Instance
from solvers.model.knapsack import phases_at
from solvers.model.read_plan import is_one_of, read_shards
from solvers.model.shared_costs import total
from solvers.search.moves import make, resharded


@dataclass(frozen=True, slots=True)
class OldTable:
    """The old plan's sharding option of a table, and the device id of each shard."""

    option: ShardingOption
    shards: tuple[tuple[TableShard, str], ...]

    def has_option(self, option: ShardingOption) -> bool:
        """Return whether an option is the old one, apart from how cold rows are looked up."""
        now = self.option
        return option._replace(cold=now.cold, home=now.home) == now


def old_tables(instance: Instance, old: Plan) -> dict[int, OldTable]:
    """Return the tables, by number, whose old placement the search can express."""
    tables = {}
    for number in range(instance.tables):
        table = _old_table(instance, old, number)
        if table is not None:
            tables[number] = table
    return tables


def _old_table(instance: Instance, old: Plan, number: int) -> OldTable | None:
    """Return a table's old sharding as an option for its present rows."""
    table = instance.problem.profile.tables[number].table
    before = old.tables_by_name.get(table.name)
    if before is None or before.dim != table.dim:
        return None
    gpus = old.topology.serving
    placement = read_shards(
        number,
        before,
        old.shards_by_table[table.name],
        old.topology,
        instance.options_of(number),
    )
    if placement is None:
        return None
    replicated_rows = placement.option.replicated_rows
    whole = replicated_rows == before.rows
    option = placement.option._replace(
        replicated_rows=table.rows if whole else min(replicated_rows, table.rows)
    )
    shards = ((p.shard._replace(option=option), gpus[p.gpu].id) for p in placement.placements)
    return OldTable(option, tuple(shards))


def old_assignment(
    instance: Instance,
    tables: Mapping[int, OldTable],
    option_of_new: Callable[[int], ShardingOption],
) -> Assignment | None:
    """Return the old options on the old GPUs with HBM filled again; None if that does not fit.

    Shards that lost their GPU go to the one that finishes first. New tables take the option that
    `option_of_new` returns for their number.
    """
    gpu_of = instance.problem.topology.serving_numbers
    homes: dict[TableShard, int | None] = {}
    replicas: list[TableShard] = []
    new_tables = []
    for number in range(instance.tables):
        was = tables.get(number)
        if was is not None and _is_usable(instance, number, was.option):
            homes |= {shard: gpu_of.get(device) for shard, device in was.shards}
            replicas += instance.replicas(number, was.option)
        elif instance.in_group(number):
            homes[TableShard(number, instance.options_of(number)[0])] = None
        else:
            new_tables.append(number)
    pairs, homeless = _housed(instance, homes)
    assignment = Assignment.of(instance, pairs, replicas)
    if assignment and homeless:
        assignment = _with_blocks(assignment, homeless)
    for number in new_tables:
        assignment = assignment and resharded(assignment, number, option_of_new(number))
    return assignment


def _housed(
    instance: Instance, homes: Mapping[TableShard, int | None]
) -> tuple[list[tuple[TableShard, int]], list[tuple[TableShard, ...]]]:
    """Return shards with the GPUs that they keep, and blocks of shards without a GPU.

    Shards that must share a GPU form a block, which keeps the GPU that most of its shards had.
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
    """Return whether options of this kind are searched and the cost model supports this one."""
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
    """Return what constraints and cost models distinguish sharding options by."""
    replicated = "all" if option.replicated_rows >= rows > 0 else bool(option.replicated_rows)
    sliced = (option.row_slices > 1, bool(option.column_widths))
    return (*sliced, replicated, option.cold, option.home, option.blocked)


def _with_blocks(assignment: Assignment, blocks: Sequence[Block]) -> Assignment | None:
    """Return the assignment with more shards, each on the GPU that finishes first, with room.

    HBM is filled once for all blocks. If they do not fit then, it is filled more often.
    """
    changes = [_spread(assignment, blocks)] if len(blocks) > 1 else _ways(assignment, blocks[0])
    for change in changes:
        changed = assignment.copy()
        if change and make(changed, change, assignment.replicas, np.inf):
            return changed
    half = len(blocks) // 2
    first = _with_blocks(assignment, blocks[:half]) if half else None
    return first and _with_blocks(first, blocks[half:])


def _ways(assignment: Assignment, block: Block) -> Iterator[Change]:
    """Yield the block on each GPU that may serve it, the one that finishes first, first."""
    for gpu in np.argsort(assignment.times_s, kind="stable").tolist():
        if _may_add(assignment.instance, assignment.shards[gpu], block, gpu):
            yield {gpu: sorted([*assignment.shards[gpu], *block])}


def _spread(assignment: Assignment, blocks: Sequence[Block]) -> Change | None:
    """Return all blocks on GPUs, by estimates of when these finish; None if one has no room."""
    instance, sums = assignment.instance, assignment.sums.copy()
    weights, hbm_bytes = instance.objective.weights, instance.hbm_bytes
    time_s = phases_at(sums, hbm_bytes) @ weights
    change: Change = {}
    for block in blocks:
        for gpu in np.argsort(time_s, kind="stable").tolist():
            held = change.get(gpu, assignment.shards[gpu])
            summed = sums[gpu] + total(instance, block, gpu)
            phase_s = phases_at(summed, hbm_bytes[gpu])
            if np.isfinite(phase_s).all() and _may_add(instance, held, block, gpu):
                change[gpu] = [*held, *block]
                sums[gpu], time_s[gpu] = summed, phase_s @ weights
                break
        else:
            return None
    return {gpu: sorted(shards) for gpu, shards in change.items()}


def _may_add(instance: Instance, held: Sequence[TableShard], block: Block, gpu: int) -> bool:
    """Return whether a GPU that holds some shards may serve a block of other tables, too."""
    tables = {shard.table for shard in block}
    return all(instance.may_serve(shard, gpu) for shard in block) and not any(
        shard.table in tables for shard in held
    )
