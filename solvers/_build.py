"""From placements of pieces to a plan, and from a plan to a result."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import placer
from placer.plan.buffers import shard_buffer_bytes
from placer.plan.plan import Plan, Provenance, RowOrder, Shard, SolverRecord
from placer.plan.verify import violations
from solvers._base import Limits, SolveResult, Termination
from solvers._instance import Instance, Placement
from solvers._packing import Packing

_REFILLS = 20

_LISTED_FOR_CUTS = 4096
"""Hot ids listed for a table that is cut but not split: enough to spread its head evenly."""


def build_plan(instance: Instance, placements: Sequence[Placement]) -> Plan:
    """The plan of placed pieces, with buffers and row orders, but no solver's record."""
    problem = instance.problem
    topology, samples = problem.topology, problem.global_batch_size
    shards: list[Shard] = []
    listed: dict[str, int] = {}
    for placed in sorted(placements, key=lambda p: p.piece):
        profile = problem.profile.tables[placed.piece.table]
        table, ways, index = profile.table, placed.piece.cut.ways, placed.piece.offset
        cols = instance.columns(placed.piece)
        edge = min(table.rows, index + placed.hot_rows * ways)
        hot = (index, max(index, edge), ways)
        first_cold = index + placed.hot_rows * ways
        cold = (min(first_cold, table.rows), table.rows, ways)
        device = topology.gpus[placed.gpu].id
        parts = []
        if len(range(*hot)):
            parts.append(Shard(table.name, hot, cols, (device,), "hbm", "device"))
        if len(range(*cold)) or not parts:
            parts.append(Shard(table.name, cold, cols, (device,), "dram", "staged"))
        for number, shard in enumerate(parts):
            size = shard_buffer_bytes(
                profile,
                shard.rows,
                shard.width,
                samples=samples,
                staged=shard.lookup == "staged",
                returns_bags=number == 0,
            )
            shards.append(replace(shard, buffer_bytes=size))
        if profile.counts is not None and (ways > 1 or len(parts) > 1):
            needed = edge if len(parts) > 1 else min(table.rows, _LISTED_FOR_CUTS)
            listed[table.name] = max(listed.get(table.name, 0), needed)
    hot_ids = {
        profile.name: profile.counts.hottest(listed[profile.name])
        for profile in problem.profile
        if profile.counts is not None and profile.name in listed
    }
    return Plan(
        tables=tuple(profile.table for profile in problem.profile),
        topology=topology,
        shards=tuple(shards),
        row_order={name: RowOrder("profile") for name in hot_ids},
        hot_ids=hot_ids,
        batch_size=problem.batch_size,
    )


def overfull(plan: Plan) -> dict[str, int]:
    """Bytes too many on each GPU and host that a plan overfills."""
    from placer.plan.memory import device_memory

    return {d: -m.free_bytes for d, m in device_memory(plan).items() if m.free_bytes < 0}


def fitted_plan(packing: Packing) -> Plan | None:
    """The plan of a packing, its GPUs filled a little less where that overfills them.

    Curves understate bytes a little: buffers between two of their points, parts of bytes,
    the row map of a strip of columns of which another strip is split. None where a device
    stays overfull.
    """
    topology = packing.instance.problem.topology
    spare = [0] * len(topology.gpus)
    trial: Packing | None = packing
    for attempt in range(_REFILLS):
        if trial is None:
            return None
        plan = build_plan(packing.instance, trial.placements())
        excess = overfull(plan)
        if not excess:
            return plan
        # Ever more, because a few bytes less may not make one row less.
        spare = [
            less + (excess.get(gpu.id, 0) << attempt)
            for less, gpu in zip(spare, topology.gpus, strict=True)
        ]
        trial = packing.with_spare_hbm(spare)
    return None


def finished(
    name: str,
    instance: Instance,
    plan: Plan,
    *,
    bound_s: float,
    limits: Limits,
    started: float,
    limit_hit: bool = False,
    detail: str = "",
    stats: dict[str, object] | None = None,
    search_space: str | None = None,
) -> SolveResult:
    """The result of a search that ended with `plan`; everything is recomputed from the plan.

    Raises
    ------
    AssertionError
        If the plan breaks a rule or beats the bound: a bug in the solver.
    """
    problem = instance.problem
    broken = violations(plan)
    assert not broken, f"{name} made an unsound plan: {broken[0].message}"
    report = instance.cost_model.evaluate(problem, plan)
    step_time_s = report.step_time_s
    assert step_time_s >= bound_s * (1 - 1e-6), f"{name} beat a bound: {step_time_s} < {bound_s}"
    bound_s = min(bound_s, step_time_s)
    optimal = step_time_s <= bound_s * (1 + limits.gap)
    seconds = time.monotonic() - started
    space = search_space or instance.search_space
    plan = replace(
        plan,
        solver=SolverRecord(
            name=name,
            status="optimal" if optimal else "feasible",
            step_time_s=step_time_s,
            bound_s=bound_s,
            seconds=round(seconds, 3),
            seed=limits.seed,
            cost_model=instance.cost_model.name,
            search_space=space,
        ),
        provenance=Provenance(
            problem_sha256=problem.sha256,
            placer_version=placer.__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            profile=problem.profile.source,
        ),
    )
    return SolveResult(
        plan,
        Termination(
            "optimal" if optimal else "feasible",
            "time" if limit_hit and not optimal else None,
            detail or f"waits for {report.bottleneck}",
        ),
        step_time_s,
        bound_s,
        {"seconds": seconds, "search_space": space, **(stats or {})},
    )
