"""The kept plan of the most similar problem, as a search's warm start."""

import math

from placer.plan.plan import Plan
from placer.problem import Problem
from solvers.cache.folder import PlanCache

_LEAST_COMMON = 0.5
"""Share of all tables that both problems must have."""

_CANDIDATES = 8
"""Plans of the same GPUs that are looked at, the latest first."""


def nearest(cache: PlanCache, problem: Problem) -> Plan | None:
    """The kept plan whose problem is most like this one; None if none is much like it.

    Of plans for GPUs and hosts of the same names, that with most tables in common, by name, rows
    and width; of several, that with the most similar batch and HBM, and the latest of these.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> problem = Problem(named_workload("random-3@7"), Topology.parse("2xh100"), batch_size=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(nearest(PlanCache(Path(folder)), problem))
    None
    """
    best: tuple[tuple[float, float], Plan] | None = None
    for entry in cache.like(problem.topology, _CANDIDATES):
        plan = entry.result.plan
        assert plan is not None, "others are not kept"
        distance = _distance(problem, plan)
        if distance[0] <= 1 - _LEAST_COMMON and (best is None or distance < best[0]):
            best = distance, plan
    return None if best is None else best[1]


def _distance(problem: Problem, plan: Plan) -> tuple[float, float]:
    """The share of tables that are not the same, and how much batch and HBM differ."""
    here = {(one.table.name, one.table.rows, one.table.dim) for one in problem.profile}
    there = {(table.name, table.rows, table.dim) for table in plan.tables}
    ratios = [problem.batch_size / plan.batch_size]
    ratios += [
        max(1, one.memory_bytes) / max(1, other.memory_bytes)
        for one, other in zip(problem.topology.gpus, plan.topology.gpus, strict=True)
    ]
    return 1 - len(here & there) / max(1, len(here | there)), sum(abs(math.log(r)) for r in ratios)
