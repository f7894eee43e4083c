"""Choose the capacity of tables that grow: rows go where they save most misses per byte.

"Capacities that the plan chooses" in docs/growing.md has the argument. The best number of bytes is
found by making plans.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from cost_models import CostModel
from placer.errors import ProblemError
from placer.problem import Problem
from placer.profile.growing_tables import hit_rate_for, most_capacity
from solvers.registry import solver
from solvers.result import Limits

_OCTAVES = 8
"""Number of halvings of the bytes to try, before amounts around the best."""
_ROUNDS = 4
_POINTS = 16
"""Number of capacities in each doubling of the capacity; rows are added in steps between them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of rows that a table gets at once."""

    table: str
    capacity: int  # Rows of the table after the step.
    nbytes: float  # Bytes of the new rows and their part of the key map.
    hits: float  # Hits per sample that the rows add.


def choose_capacities(
    problem: Problem,
    names: Sequence[str],
    cost_model: CostModel,
    miss_price_s: float | None = None,
    limits: Limits | None = None,
) -> Problem:
    """Return the problem with new capacities for some of the tables that grow.

    Without a price, these tables get all memory beside the other tables, as far as a plan exists.
    With a price, minimize the step time plus the price of misses (docs/growing.md). Try all bytes,
    then halves down to 1/256, then amounts around the best, so that bytes are right within 5%.

    Raises ProblemError if the profile has no hit rates of a table, or no row of it is read twice.

    Parameters
    ----------
    problem : Problem
        A problem with any capacities of these tables.
    miss_price_s : float, optional
        Seconds of a step that 1% more hits of these tables' lookups are worth.
    limits : Limits, optional
        Limits of each plan.
    """
    strategy, limits = solver("greedy-cost"), limits or Limits()
    steps = steps_of(problem, names)
    ranks = len(problem.topology.gpus)
    least = {name: replace(problem.growing[name], capacity=ranks) for name in names}
    profiles = [problem.profile[name] for name in names]
    lookups = sum(one.table.lookups_per_sample for one in profiles)
    fixed = sum(one.table.total_bytes for one in problem.profile if one.name not in names)
    memory = sum(gpu.memory_bytes for gpu in problem.topology.gpus)
    memory += sum(host.memory_bytes for host in problem.topology.hosts)
    most = min(memory - fixed, sum(step.nbytes for step in steps))
    tried: dict[float, tuple[float, Problem]] = {}

    def cost(octave: float) -> float:
        """Return the value to minimize with 2**-octave of the bytes; infinite if nothing fits."""
        if octave not in tried:
            sizes = divide(steps, most * 2.0**-octave)
            grows = {
                name: replace(how, capacity=sizes.get(name, ranks)) for name, how in least.items()
            }
            now = replace(problem, growing={**problem.growing, **grows})
            step_s = strategy.solve(now, cost_model, limits).step_time_s
            hits = sum(
                one.table.lookups_per_sample * hit_rate_for(one, grows[one.name].capacity)
                for one in profiles
            )
            missed = 100 * (1 - hits / lookups)
            value = missed if miss_price_s is None else (step_s or 0) + miss_price_s * missed
            tried[octave] = math.inf if step_s is None else value, now
        return tried[octave][0]

    best = 0.0
    for octave in range(_OCTAVES + 1):
        best = min(best, float(octave), key=cost)
        if miss_price_s is None and math.isfinite(cost(octave)):
            break  # Fewer rows only miss more.
    for halving in range(1, _ROUNDS + 1):
        around = (best, best - 0.5**halving, best + 0.5**halving)
        best = min((one for one in around if one >= 0), key=cost)
    return tried[best if math.isfinite(cost(best)) else _OCTAVES][1]


def steps_of(problem: Problem, names: Sequence[str]) -> list[Step]:
    """Return the steps in which tables get rows, with the most saved misses per byte first.

    The steps of a table follow the upper envelope of its hits over bytes.
    """
    ranks = len(problem.topology.gpus)
    steps = []
    for name in names:
        profile, how = problem.profile[name], problem.growing[name]
        most = most_capacity(profile)
        count = 2 + int(_POINTS * math.log2(max(2, most / ranks)))
        grid = np.unique(np.geomspace(ranks, max(ranks, most), count).round().astype(int))
        hits = [profile.table.lookups_per_sample * hit_rate_for(profile, int(c)) for c in grid]
        if hits[-1] <= 0:
            raise ProblemError(
                f"no number of rows saves misses of table {name!r}: all of its lookups in the log "
                f"read an id for the first time; give a number of keys, as {name}=100000"
            )
        # Bytes of a row, its part of the key map, and the map's copy on a GPU.
        many = replace(how, capacity=2**20)
        keys = many.nbytes + many.copy_nbytes * (len(problem.topology.serving) == 1)
        row_bytes = profile.table.bytes_per_row() + keys / many.capacity
        for (less, had), (capacity, gain) in pairwise(_envelope(grid.tolist(), hits)):
            if gain > had:
                steps.append(Step(name, capacity, (capacity - less) * row_bytes, gain - had))
    return sorted(steps, key=lambda step: -step.hits / step.nbytes)


def divide(steps: Sequence[Step], nbytes: float) -> Mapping[str, int]:
    """Return each table's capacity within `nbytes`, taking steps in their order.

    If a step does not fit, its table gets no more rows, and other tables continue. The loss is less
    than the hits of the first step that does not fit.

    >>> steps = [Step("a", 10, 10, 5.0), Step("b", 40, 40, 8.0), Step("a", 30, 20, 2.0)]
    >>> divide(steps, 30)
    {'a': 30}
    """
    capacities: dict[str, int] = {}
    full = set()
    for step in steps:
        if step.nbytes > nbytes:
            full.add(step.table)
        elif step.table not in full:
            capacities[step.table] = step.capacity
            nbytes -= step.nbytes
    return capacities


def _envelope(xs: Sequence[int], ys: Sequence[float]) -> list[tuple[int, float]]:
    """Return the corners of the upper concave envelope of points, starting at (0, 0)."""
    corners = [(0, 0.0)]
    for point in zip(xs, ys, strict=True):
        while len(corners) > 1 and _slope(corners[-2], point) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(point)
    return corners


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
