"""The placement of an old plan, as it is, on a problem that has changed since."""

from dataclasses import replace

from cost_models import CostModel
from placer.constraints.unmet import unmet
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.plan.verify import violations
from placer.problem import Problem


def kept_plan(problem: Problem, cost_model: CostModel, old: Plan) -> tuple[Plan | None, str]:
    """Return the old placement on the new problem, or why it does not work there."""
    names = problem.profile.table_numbers
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
    shards = [shard for shard in old.shards if shard.table in names]
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
        widths=problem.widths,
        growing=dict(problem.growing),
        exchange_dtype=problem.exchange_dtype,
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
    """Shrink buffers to those of the old plan; rows without room are read in place.

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
    """Return the share of staged rows for which a plan has no room, and which are read in place."""
    needed = sum(shard.staging_rows for shard in _with_buffers(problem, cost_model, plan).shards)
    room = sum(shard.staging_rows for shard in plan.shards)
    return max(0.0, 1 - room / needed) if needed else 0.0


def read_in_place(plan: Plan) -> Plan:
    """Return the plan with staged rows read in place, one by one."""
    return replace(
        plan,
        shards=tuple(
            replace(shard, lookup="uva", staging_rows=0) if shard.lookup == "staged" else shard
            for shard in plan.shards
        ),
    )


def _with_buffers(problem: Problem, cost_model: CostModel, plan: Plan) -> Plan:
    """Return the plan with the buffers that its shards need for the accesses and batch of today."""
    ordered = problem.in_plan_order(plan)
    number = problem.profile.table_numbers
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
