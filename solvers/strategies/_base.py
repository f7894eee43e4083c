"""Base classes of strategies: they keep the time, make the bound and the result."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import numpy as np

import placer
from cost_models import CostModel
from placer.constraints.unmet import unmet
from placer.plan.fields import Provenance, SolverRecord
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.bounds.binding import binding
from solvers.bounds.feasibility import impossible, memory_in_words
from solvers.model.assignment import Assignment
from solvers.model.build_plan import fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SolveResult, Termination
from solvers.strategies._search import Search, first_instance, unreplicated, weighed

_FINISH_BOUNDS, _FINISH_S_PER_TABLE, _FINISH_S_PER_PLACE = 0.9, 1e-3, 1e-6
"""Time kept for building, verifying, writing and showing the plan: this many seconds for each table
and for each table × GPU, but at most this multiple of the first bound's time."""

_ALONE_SHARE = 0.25
"""Share of the time for plans without rows on servers, if tables fit without them."""

_IDLE_ROUNDS = 2
"""Stop after this many rounds of all stages without a gain. Each round has another seed."""


class Strategy(ABC):
    """A solver. Subclasses place the tables; this class does the rest."""

    name: str
    no_plan: ClassVar[str] = (
        "no placement was found: every GPU needs room for the buffers of its shards, every host "
        "for their cold rows; raise --hbm, lower --batch-size, or search for longer"
    )
    """The message of a result without a plan."""

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Servers that hold rows take part in all exchanges, which adds latency to each step. So if
        tables fit without servers, some of the time goes to plans without rows on servers.
        """
        self.prepare(limits)
        # Use the model once before the time limit starts: importing TorchRec takes seconds.
        cost_model.sharding_options(problem, 0)
        begin_s, alone = time.monotonic(), _without_servers(problem)
        if alone is None:
            return self._search(problem, cost_model, limits)
        if Instance(problem, cost_model).needs_servers:  # Tables hardly fit without servers.
            served = self._search(problem, cost_model, limits)
            bound_s = max(0.0, (served.bound_s or 0.0) - _server_latency_s(problem, cost_model))
            return _joined(problem, limits, served, replace(_NOT_SEARCHED, bound_s=bound_s))
        part_s = limits.spent_s + _ALONE_SHARE * (limits.time_limit_s - limits.spent_s)
        without = self._search(alone, cost_model, replace(limits, time_limit_s=part_s))
        spent_s = limits.spent_s + time.monotonic() - begin_s
        served = self._search(problem, cost_model, replace(limits, spent_s=spent_s))
        return _joined(problem, limits, served, without)

    def _search(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search for plans of a machine whose servers, if any, have a part in all exchanges."""
        clock = Clock.start(limits)
        instance = first_instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        search = Search.start(instance, clock)
        places = instance.tables * instance.gpus
        enough_s = _FINISH_S_PER_TABLE * instance.tables + _FINISH_S_PER_PLACE * places
        clock.reserve(min(_FINISH_BOUNDS * search.bounded_in_s, enough_s))
        search = unreplicated(weighed(search))
        search.tell(self.name)
        outcome = self.place(search)
        if isinstance(outcome, Termination):
            return SolveResult(None, outcome, bound_s=search.proven_s, stats=search.stats)
        return _result(self.name, search, outcome)

    def prepare(self, limits: Limits) -> None:  # noqa: B027
        """Do what all searches need once, such as compiling, before the time limit starts."""

    def place(self, search: Search) -> Plan | Termination:
        """Return the plan of the first of `assignments` that fits, or why none does."""
        for assignment in self.assignments(search):
            plan = fitted_plan(assignment)
            if plan is not None:
                return plan
        fitting = search.first_fit()
        plan = None if fitting is None else fitted_plan(fitting)
        if plan is not None:
            return plan
        detail = f"{self.no_plan}; {memory_in_words(search.instance)}"
        return search.failure or Termination("no_plan", search.clock.limit_hit, detail)

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Search for assignments; yield them, the fastest first."""
        raise NotImplementedError


Stage = Callable[[Search], Assignment | None]
"""One step of a strategy: it takes a search and may find an assignment."""


class StagedStrategy(Strategy):
    """A strategy that is a list of stages; the best assignment goes from one to the next."""

    @abstractmethod
    def stages(self, instance: Instance) -> dict[str, Stage]:
        """Return named stages: the first runs once, the others in turn until nothing is gained."""

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Run the stages."""
        first, *others = self.stages(search.instance).items()
        self._run(*first, search)
        if search.best is None:
            self._run("room", Search.first_fit, search)
        idle = 0
        while others and idle < _IDLE_ROUNDS and search.is_open and search.failure is None:
            before = search.bound_s, search.best
            for stage in others:
                if search.is_open:
                    self._run(*stage, search)
            idle = idle + 1 if before == (search.bound_s, search.best) else 0
        if search.best is not None:
            search.stats["moves"] = search.best.moves
            yield search.best
            yield from reversed(search.earlier)

    def _run(self, name: str, stage: Stage, search: Search) -> None:
        search.tell(name)
        assignment = stage(search)
        if assignment is not None:
            search.stats[f"{name}_s"] = assignment.step_time_s
            search.keep(assignment)


def _result(name: str, search: Search, plan: Plan) -> SolveResult:
    """Return the result of a search that ended with `plan`; all is computed from the plan."""
    instance, limits, bound_s = search.instance, search.clock.limits, search.proven_s
    broken = violations(plan) + unmet(plan, instance.problem.constraints)
    assert not broken, f"{name} made an unsound plan: {broken[0].message}"
    report = instance.cost_model.evaluate(instance.problem, plan)
    step_time_s = report.step_time_s
    bound_s = max(bound_s, min(search.weighed_bound_s, search.others_s))
    latency_s = _server_latency_s(instance.problem, instance.cost_model)
    assert step_time_s + latency_s >= bound_s * (1 - 1e-6), (
        f"{name} beat a bound: {step_time_s} < {bound_s}"
    )
    bound_s = min(bound_s, step_time_s)
    optimal = step_time_s <= bound_s * (1 + limits.gap)
    seconds = search.clock.spent_s
    plan = recorded(
        plan,
        instance,
        name=name,
        status="optimal" if optimal else "feasible",
        step_time_s=step_time_s,
        bound_s=bound_s,
        seconds=round(seconds, 3),
        seed=limits.seed,
    )
    return SolveResult(
        plan,
        Termination(
            plan.solver.status,
            None if optimal else search.clock.limit_hit or ("time" if search.lacks_time else None),
            binding(instance.problem, plan, instance.cost_model, report, instance).words,
        ),
        step_time_s,
        bound_s,
        {"seconds": seconds, "search_space": plan.solver.search_space, **search.stats},
    )


_NOT_SEARCHED = SolveResult(None, Termination("no_plan"))


def _without_servers(problem: Problem) -> Problem | None:
    """Return the problem without its servers; None if it has none, or if rules need them."""
    topology = problem.topology
    servers = {server.id for server in topology.servers}
    left = [
        (table, rule, rule.devices and tuple(one for one in rule.devices if one not in servers))
        for table, rule in problem.constraints.tables
    ]
    if not servers or any(devices == () for *_, devices in left):
        return None
    rules = tuple((table, replace(rule, devices=devices)) for table, rule, devices in left)
    hosts = tuple(host for host in topology.hosts if host.id not in servers)
    links = tuple(link for link in topology.links if not servers & {link.a, link.b})
    return replace(
        problem,
        topology=replace(topology, hosts=hosts, links=links),
        constraints=replace(problem.constraints, tables=rules),
    )


def _server_latency_s(problem: Problem, cost_model: CostModel) -> float:
    """Return the most seconds that a step takes longer if servers take part in exchanges."""
    if not problem.topology.servers:
        return 0.0
    both = (cost_model.schedule(problem, with_servers=has).fixed for has in (True, False))
    return float(np.subtract(*both).max())


def _joined(
    problem: Problem, limits: Limits, served: SolveResult, without: SolveResult
) -> SolveResult:
    """Return the better of a search with servers and one without, and a bound of both."""
    best = min(without, served, key=lambda one: one.step_time_s or np.inf)
    if best.plan is None or best.step_time_s is None:
        return served
    several = (one for one in (served, without) if one.termination.reason != "infeasible")
    bound_s = min(best.step_time_s, *(one.bound_s or 0.0 for one in several))
    is_optimal = best.step_time_s <= bound_s * (1 + limits.gap)
    status: Literal["optimal", "feasible"] = "optimal" if is_optimal else "feasible"
    limit = None if is_optimal else served.termination.limit or best.termination.limit
    seconds = sum(one.stats.get("seconds", 0.0) for one in (served, without))
    record = replace(best.plan.solver, status=status, bound_s=bound_s, seconds=round(seconds, 3))
    origin = provenance_of(problem)
    plan = replace(best.plan, topology=problem.topology, solver=record, provenance=origin)
    end = replace(best.termination, reason=status, limit=limit)
    stats = best.stats | {"seconds": seconds}
    return replace(best, plan=plan, termination=end, bound_s=bound_s, stats=stats)


def recorded(plan: Plan, instance: Instance, **record: Any) -> Plan:
    """Return a plan with fields of its solver's record, and with its provenance, made now."""
    problem, space = instance.problem, instance.search_space
    solver = SolverRecord(**record, cost_model=instance.cost_model.name, search_space=space)
    return replace(plan, solver=solver, provenance=provenance_of(problem))


def provenance_of(problem: Problem) -> Provenance:
    """Return where a plan of a problem comes from, made now."""
    return Provenance(
        problem_sha256=problem.sha256,
        placer_version=placer.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profile=problem.profile.reference,
        ids_sha256=problem.profile.ids_sha256,
    )
