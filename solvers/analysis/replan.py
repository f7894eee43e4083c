"""A plan for accesses or a machine that have changed since the old one, weighed against the move.

Four kinds of candidates, from the cheapest move to the best plan:

1. the old placement as it is, every row where it was;
2. the old cuts and GPUs, HBM filled anew for what is hot now; what has lost its GPU goes to
   the one that is done first;
3. that, improved by a few steps of local search: 1, 2, 4, …;
4. a plan from scratch, on those of equal GPUs that have most of its rows already.

Each costs its step times a horizon, plus the time to get there from the old plan. The cost
of a step is that of the rows that a plan really has in HBM (`placer.plan.drift`), not of the
hottest ones of the new profile.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

import placer
from cost_models import CostModel, ShardingOption, TableShard
from placer.constraints.unmet import unmet
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.diff import PlanDiff, diff
from placer.plan.fields import Provenance, SolverRecord
from placer.plan.migration import migration
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.analysis.kept_rows import OldTable, kept_slices, relabelled, with_steady_rows
from solvers.model.assignment import Assignment, time_with, total
from solvers.model.build_plan import build_plan, fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.model.read_plan import TablePlacement, is_one_of, placements_of, read_shards
from solvers.registry import solver as solver_called
from solvers.result import Limits, SolveResult
from solvers.search.moves import improve, resharded

HORIZON_STEPS = 100_000
"""Steps that a new plan is trained with, by default."""

KEEP = "keep"
"""Name of the candidate that leaves everything as it is."""

_MOST_STEPS = 1 << 12
_FRESH_SHARE = 0.6
"""Share of the time that the plan from scratch may take."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that could follow the old one.

    Attributes
    ----------
    name : str
        For people.
    plan : Plan
    step_time_s : float
        With the rows that are in HBM under the plan's row order.
    moved_bytes, migration_s, waits_for
        See `placer.plan.migration.Migration`.
    cost_s : float
        Steps of the horizon, and the migration.
    break_even_steps : float or None
        Steps after which the migration has paid for itself, against the old placement; 0
        where nothing moves. None if it never does, or the old placement does not work.
    on_front : bool
        Whether no other candidate moves as little and is as fast.
    """

    name: str
    plan: Plan
    step_time_s: float
    moved_bytes: int
    migration_s: float
    waits_for: str
    cost_s: float
    break_even_steps: float | None
    on_front: bool


@dataclass(frozen=True, slots=True)
class Replanned:
    """What could follow an old plan, and what should.

    Attributes
    ----------
    horizon_steps : int
    candidates : tuple of Candidate
        Fewest bytes first; none if nothing fits.
    chosen : Candidate or None
        The one of least cost over the horizon; of equal ones the one that moves least.
    old_step_time_s : float or None
        Of the old placement on the new problem.
    old_refused : str
        Why the old placement does not work any more, if it does not.
    fresh : SolveResult
        Of the plan from scratch, its bound included.
    moves : PlanDiff or None
        From the old plan to the chosen one.
    """

    horizon_steps: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    old_step_time_s: float | None
    old_refused: str
    fresh: SolveResult
    moves: PlanDiff | None


def replan(
    problem: Problem,
    cost_model: CostModel,
    old: Plan,
    limits: Limits | None = None,
    *,
    horizon_steps: int = HORIZON_STEPS,
    solver: str = "greedy-cost",
    on_candidate: Callable[[str], None] = lambda name: None,
) -> Replanned:
    """The plan that should follow `old` on a changed problem.

    Parameters
    ----------
    problem : Problem
        Tables, accesses and machine as they are now. Devices and tables are known by name.
    limits : Limits, optional
        Of the whole call.
    horizon_steps : int
        Steps until the next change, over which a migration has to pay.
    solver : str
        Makes the plan from scratch.
    on_candidate : callable
        Told the name of each candidate when it is found.

    Raises
    ------
    PlanError
        If `old` does not cover a table exactly once.
    ProblemError
        If the horizon is negative.
    """
    if horizon_steps < 0:
        raise ProblemError(f"the horizon must be 0 steps or more, not {horizon_steps}")
    limits = limits or Limits()
    asked = _Question(problem, cost_model, old, limits)
    kept, refused = asked.kept()
    plans = {} if kept is None else {KEEP: kept}
    fresh = solver_called(solver).solve(
        problem, cost_model, replace(limits, time_limit_s=limits.time_limit_s * _FRESH_SHARE)
    )
    asked.fresh = fresh.plan
    for name, plan in (*asked.refilled(), *asked.anew(f"from scratch, {solver}")):
        on_candidate(name)
        plans.setdefault(name, plan)
    costed = {name: made for name, plan in plans.items() if (made := asked.costed(plan))}
    old_step_s = costed[KEEP][0] if KEEP in costed else None
    candidates = _compared(costed, old_step_s, horizon_steps)
    chosen = min(candidates, key=lambda c: (c.cost_s, c.moved_bytes, c.step_time_s), default=None)
    if chosen is not None:
        chosen = replace(chosen, plan=asked.recorded(chosen, fresh))
        candidates = tuple(chosen if c.name == chosen.name else c for c in candidates)
    return Replanned(
        horizon_steps,
        candidates,
        chosen,
        old_step_s,
        refused,
        fresh,
        None if chosen is None else diff(old, chosen.plan),
    )


def _compared(
    costed: dict[str, tuple[float, Plan, PlanDiff]], old_step_s: float | None, horizon_steps: int
) -> tuple[Candidate, ...]:
    """Candidates by the bytes that they move, those on the front marked."""
    found = []
    for name, (step_time_s, plan, moves) in costed.items():
        effort = migration(moves)
        saved_s = 0.0 if old_step_s is None else old_step_s - step_time_s
        break_even: float | None = None
        if old_step_s is not None and not effort.moved_bytes:
            break_even = 0.0
        elif saved_s > 0:
            break_even = effort.seconds / saved_s
        found.append(
            Candidate(
                name,
                plan,
                step_time_s,
                effort.moved_bytes,
                effort.seconds,
                effort.waits_for,
                step_time_s * horizon_steps + effort.seconds,
                break_even,
                on_front=False,
            )
        )
    found.sort(key=lambda c: (c.moved_bytes, c.step_time_s))
    fastest, marked = float("inf"), []
    for one in found:
        marked.append(replace(one, on_front=one.step_time_s < fastest))
        fastest = min(fastest, one.step_time_s)
    return tuple(marked)


class _Question:
    """The old plan, and what there is of it in the new problem."""

    def __init__(self, problem: Problem, cost_model: CostModel, old: Plan, limits: Limits) -> None:
        self.problem, self.cost_model, self.old, self.limits = problem, cost_model, old, limits
        self.started, self.clock = time.monotonic(), Clock.start(limits)
        self.instance = Instance(problem, cost_model)
        self.devices = [gpu.id for gpu in problem.topology.gpus]
        self.fresh: Plan | None = None
        # With the plans themselves, as the identity of one that is gone may come again.
        self._costed: dict[int, tuple[Plan, tuple[float, Plan, PlanDiff] | None]] = {}
        self.was = {
            number: table
            for number in range(self.instance.tables)
            if (table := self._old_table(number)) is not None
        }

    def _old_table(self, number: int) -> OldTable | None:
        """How a table was cut, as the same cut of its rows of today."""
        table = self.problem.profile.tables[number].table
        before = self.old.tables_by_name.get(table.name)
        if before is None or before.dim != table.dim:
            return None
        found = read_shards(
            number,
            before,
            self.old.shards_by_table[table.name],
            [gpu.id for gpu in self.old.topology.gpus],
            self.instance.options_of(number),
        )
        if found is None:
            return None
        whole = found.option.replicated_rows == before.rows
        option = found.option._replace(
            replicated_rows=table.rows if whole else min(found.option.replicated_rows, table.rows)
        )
        shards = tuple(
            (placed.shard._replace(option=option), self.old.topology.gpus[placed.gpu].id)
            for placed in found.placements
        )
        return OldTable(option, shards)

    def kept(self) -> tuple[Plan | None, str]:
        """The old placement on the new problem, or why it does not work there."""
        problem, old = self.problem, self.old
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
        )
        try:
            plan = self._with_buffers(plan)
            self.cost_model.evaluate(problem, plan)
        except PlanMismatchError as error:
            return None, str(error)
        broken = violations(plan) + unmet(plan, problem.constraints)
        return (None, broken[0].message) if broken else (plan, "")

    def _with_buffers(self, plan: Plan) -> Plan:
        """The plan with the buffers that its shards need for the accesses and batch of today."""
        ordered = self.problem.in_plan_order(plan)
        number = {name: at for at, name in enumerate(self.problem.profile.table_names)}
        seen: set[tuple[str, tuple[str, ...], tuple[int, int]]] = set()
        shards: list[Shard] = []
        for shard in plan.shards:
            if shard.devices[0] not in plan.topology.gpus_by_id:
                shards.append(shard)
                continue
            pooled = (shard.table, shard.devices, shard.cols)
            shards.append(
                self.cost_model.with_buffers(
                    ordered, number[shard.table], shard, returns_bags=pooled not in seen
                )
            )
            seen.add(pooled)
        return replace(plan, shards=tuple(shards))

    def refilled(self) -> Iterator[tuple[str, Plan]]:
        """The old cuts and GPUs, filled anew, and what a few steps of search make of that."""
        assignment = self._old_assignment()
        if assignment is None:
            return
        yield from self._built("refill HBM", assignment)
        steps = 0
        while steps < _MOST_STEPS and not self.clock.spent:
            before = assignment.moves
            improve(assignment, replace(self.clock, steps_left=max(1, steps)))
            if assignment.moves == before:
                return
            steps += assignment.moves - before
            yield from self._built(f"{steps} step{'s' if steps > 1 else ''} of search", assignment)

    def _built(self, name: str, assignment: Assignment) -> Iterator[tuple[str, Plan]]:
        plan = fitted_plan(assignment)
        if plan is None:
            return
        every = (*assignment.replicas, *(shard for mine in assignment.shards for shard in mine))
        options = {shard.table: shard.option for shard in every}
        yield name, self._steady(plan, [options[n] for n in range(self.instance.tables)])

    def _steady(self, plan: Plan, options: list[ShardingOption]) -> Plan:
        return with_steady_rows(self.instance, plan, self.old, self.was, options)

    def _old_assignment(self) -> Assignment | None:
        """The old cuts on the old GPUs; None if that does not fit.

        What has no GPU any more goes where it is done first, new tables as the plan from
        scratch cuts them.
        """
        instance = self.instance
        gpu_of = {device: gpu for gpu, device in enumerate(self.devices)}
        homes: dict[TableShard, int | None] = {}
        replicas, anew = [], []
        for number in range(instance.tables):
            was = self.was.get(number)
            if was is not None and self._is_usable(number, was.option):
                homes |= {shard: gpu_of.get(device) for shard, device in was.shards}
                if was.option.replicated_rows:
                    replicas.append(instance.replica(number, was.option))
            elif instance.in_group(number):
                homes[TableShard(number, instance.options_of(number)[0])] = None
            else:
                anew.append(number)
        pairs: list[tuple[TableShard, int]] = []
        homeless: list[tuple[TableShard, ...]] = []
        for block in instance.blocks(homes):
            had = [gpu for shard in block if (gpu := homes[shard]) is not None]
            common = max(had, key=lambda gpu: (had.count(gpu), -gpu), default=None)
            if common is None or not all(instance.may_serve(shard, common) for shard in block):
                homeless.append(block)
            else:
                pairs += [(shard, common) for shard in block]
        assignment = Assignment.of(
            instance, pairs, [shard for shard in replicas if shard is not None]
        )
        for block in homeless:
            assignment = None if assignment is None else _with_block(assignment, block)
        for number in anew:
            assignment = (
                None
                if assignment is None
                else resharded(assignment, number, self._new_option(number))
            )
        return assignment

    def _is_usable(self, number: int, option: ShardingOption) -> bool:
        """Whether a cut of this kind is searched, and the cost model knows the cut itself."""
        instance, options = self.instance, self.instance.options_of(number)
        if is_one_of(option, options):
            return True
        rows, allowed = instance.rows(number), instance.allowed(number)
        servers = instance.gpus if allowed is None else int(allowed.sum())
        if option.shard_count > servers or _kind(option, rows) not in {
            _kind(other, rows) for other in options
        }:
            return False
        try:
            for shard in instance.shards(number, option)[:1]:
                instance.curve(shard, 0)
        except ProblemError:
            return False
        return True

    def _new_option(self, number: int) -> ShardingOption:
        """The cut of a table by the plan from scratch, or without one the simplest."""
        name = self.problem.profile.table_names[number]
        found = self.fresh and placements_of(self.instance, self.fresh, name)
        return found.option if found else self.instance.options_of(number)[0]

    def anew(self, name: str) -> Iterator[tuple[str, Plan]]:
        """The plan from scratch on the GPUs that have most of it, if there is one."""
        if self.fresh is None:
            return
        for plan in (*self._anew(self.fresh), self.fresh):
            if self.costed(plan) is not None:
                yield name, plan
                return

    def _anew(self, fresh: Plan) -> Iterator[Plan]:
        instance, tables = self.instance, range(self.instance.tables)
        names = self.problem.profile.table_names
        found = [f for n in tables if (f := placements_of(instance, fresh, names[n])) is not None]
        if len(found) < len(tables):
            return
        plays = relabelled(instance, fresh, self.old, found, self.was)
        played = [
            replace(f, placements=tuple(replace(p, gpu=plays[p.gpu]) for p in f.placements))
            for f in found
        ]
        for sliced in (True, False):
            parts = [
                kept_slices(f, self.was.get(n), self.devices, instance.rows(n)) if sliced else f
                for n, f in enumerate(played)
            ]
            yield self._steady(self._plan_of(parts), [part.option for part in parts])

    def _plan_of(self, parts: list[TablePlacement]) -> Plan:
        placements = [placed for part in parts for placed in part.placements]
        replicas = [shard for part in parts for shard in part.replicas]
        return build_plan(self.instance, placements, replicas)

    def costed(self, plan: Plan) -> tuple[float, Plan, PlanDiff] | None:
        """A plan's step time and what moves from the old one; None if it is not sound."""
        if id(plan) not in self._costed:
            self._costed[id(plan)] = plan, self._cost(plan)
        return self._costed[id(plan)][1]

    def _cost(self, plan: Plan) -> tuple[float, Plan, PlanDiff] | None:
        if violations(plan) or unmet(plan, self.problem.constraints):
            return None
        try:
            report = self.cost_model.evaluate(self.problem.in_plan_order(plan), plan)
        except PlanMismatchError:
            return None
        return report.step_time_s, plan, diff(self.old, plan)

    def recorded(self, chosen: Candidate, fresh: SolveResult) -> Plan:
        """The chosen plan, with what is known of it."""
        bound_s = fresh.bound_s
        if bound_s is not None and bound_s > chosen.step_time_s:
            bound_s = None  # The old placement is outside of the search space.
        return replace(
            chosen.plan,
            solver=SolverRecord(
                name="replan",
                status="feasible",
                step_time_s=chosen.step_time_s,
                bound_s=bound_s,
                seconds=round(time.monotonic() - self.started, 3),
                seed=self.limits.seed,
                cost_model=self.cost_model.name,
                search_space=self.instance.search_space,
            ),
            provenance=Provenance(
                problem_sha256=self.problem.sha256,
                placer_version=placer.__version__,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                profile=self.problem.profile.source,
            ),
        )


def _kind(option: ShardingOption, rows: int) -> tuple[object, ...]:
    """What constraints and cost models tell cuts apart by."""
    replicated_rows = "all" if option.replicated_rows >= rows > 0 else bool(option.replicated_rows)
    return (
        option.row_slices > 1,
        bool(option.column_widths),
        replicated_rows,
        option.cold,
        option.blocked,
    )


def _with_block(assignment: Assignment, block: tuple[TableShard, ...]) -> Assignment | None:
    """A packing with more pieces, on the GPU of those that may have them that is done first."""
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
    times = time_with(instance, assignment.sums[gpus], gpus, added)
    for at in np.argsort(times, kind="stable").tolist():
        if np.isfinite(times[at]):
            mine = sorted([*assignment.shards[gpus[at]], *block])
            changed = assignment.changed({gpus[at]: mine})
            if changed is not None:
                return changed
    return None
