"""Choose how many rows tables that grow get: rows go where they save most misses per byte.

Of a table with capacity c, h(c) is the share of its lookups that find their row (`hit_rate_for`),
and L the lookups of a sample. Within so many bytes, Σ L·h(c) is largest where the next row of each
table saves as many misses per byte; how many bytes is found by making plans.
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
"""Halvings of the bytes that are tried, before those around the best."""
_ROUNDS = 4
_POINTS = 16
"""Capacities in each doubling of the capacity, between which rows are given all at once."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that a table gets at once."""

    table: str
    capacity: int  # What it has with them.
    nbytes: float  # Of these rows, with their part of the key map.
    hits: float  # That they add in a sample.


def choose_capacities(
    problem: Problem,
    names: Sequence[str],
    cost_model: CostModel,
    miss_price_s: float | None = None,
    limits: Limits | None = None,
) -> Problem:
    """Return the problem with capacities for some of the tables that grow.

    Without a price all memory that is left beside the other tables is for their rows, as far as
    there is a plan. With one the sum of step time and price is least,

        T(c) + price · 100 · Σ L·(1 − h(c)) / Σ L,

    where T is the step time of a plan by ``greedy-cost``. Bytes are tried from all down to the
    256th part by halves, then around the best, so that they are right within 5%.

    Parameters
    ----------
    problem : Problem
        With any capacities of these tables.
    names : sequence of str
    cost_model : CostModel
    miss_price_s : float, optional
        Seconds of a step that one more percent of these tables' lookups is worth as hits.
    limits : Limits, optional
        Of each plan that is made.

    Raises
    ------
    ProblemError
        If the profile has no hit rates of a table, or says that no row of it is read twice.
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
        """Return what is to be least, with a part of the bytes; infinite where nothing fits."""
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
            break  # Fewer rows miss more.
    for halving in range(1, _ROUNDS + 1):
        around = (best, best - 0.5**halving, best + 0.5**halving)
        best = min((one for one in around if one >= 0), key=cost)
    return tried[best if math.isfinite(cost(best)) else _OCTAVES][1]


def steps_of(problem: Problem, names: Sequence[str]) -> list[Step]:
    """Return the steps in which tables get rows, those that save most misses per byte first.

    Of each table they lead along the upper envelope of its hits over bytes.
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
        # Of a row and its part of the key map, and of the map's copy on a GPU.
        many = replace(how, capacity=2**20)
        keys = many.nbytes + many.copy_nbytes * (len(problem.topology.serving) == 1)
        row_bytes = profile.table.bytes_per_row() + keys / many.capacity
        for (less, had), (capacity, gain) in pairwise(_envelope(grid.tolist(), hits)):
            if gain > had:
                steps.append(Step(name, capacity, (capacity - less) * row_bytes, gain - had))
    return sorted(steps, key=lambda step: -step.hits / step.nbytes)


def divide(steps: Sequence[Step], nbytes: float) -> Mapping[str, int]:
    """Give rows to tables within so many bytes, those that save most misses per byte first.

    Where a step does not fit, its table gets no more rows, and the others go on. Lost is less than
    the hits of the first step that did not fit.

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
    """Return the corners of the upper concave envelope from (0, 0) on."""
    corners = [(0, 0.0)]
    for point in zip(xs, ys, strict=True):
        while len(corners) > 1 and _slope(corners[-2], point) >= _slope(corners[-2], corners[-1]):
            corners.pop()
        corners.append(point)
    return corners


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
