"""How fast the learned cost model answers: cost curves, and solvers beside the roofline.

    python benchmarks/learned_speed.py [MODEL]

MODEL is a file that `placer calibrate --learn` wrote; without one, networks at random over
constants of 1 ns answer, which takes as long. One thread. Writes results/learned_speed_*.json.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from _machine import RESULTS, machine, slug, versions

from cost_models import CostModel, Roofline, TableShard, shards_of
from cost_models.calibrated.calibration import TERMS, Calibration, Constant
from cost_models.learned import Learned
from cost_models.learned.file import LearnedFile
from cost_models.learned.network import NOT_NEGATIVE, Networks, shapes
from cost_models.learned.parts import PARTS
from placer import Problem, Topology
from placer.workloads import named_workload
from solvers import solve

SHARDS = 2_000
REPEATS = 5
SOLVERS = (("greedy-cost", None), ("auto", 10.0))


def at_random() -> Learned:
    """A model of the usual size that nothing was learned for."""
    rng = np.random.default_rng(0)
    found = {n: 0.1 * rng.normal(size=size) for n, size in shapes(5, len(PARTS)).items()}
    found |= {name: np.abs(found[name]) for name in (*NOT_NEGATIVE, "scale")}
    found["scale"] += 1.0
    networks = Networks(**{name: values.astype(np.float32) for name, values in found.items()})
    constants = {term: Constant(1e-9, 1e-9, 1e-9) for term in TERMS}
    return Learned(LearnedFile(networks, Calibration(constants), 0.1, 0.1))


def random_shards(problem: Problem, model: CostModel, seed: int = 0) -> list[TableShard]:
    """Shards of random tables and sharding options."""
    rng = np.random.default_rng(seed)
    profiles = problem.profile.tables
    options = [model.sharding_options(problem, table) for table in range(len(profiles))]
    shards = []
    while len(shards) < SHARDS:
        table = int(rng.integers(len(profiles)))
        option = options[table][rng.integers(len(options[table]))]
        of_table = shards_of(table, option, profiles[table].table.rows)
        if of_table:
            shards.append(of_table[rng.integers(len(of_table))])
    return shards


def seconds(work: Callable[[], object]) -> float:
    """Median time of a few runs, the first of which warms up."""
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def solving(problem: Problem, model: CostModel, solver: str, limit_s: float | None) -> object:
    """Time of one search, and what it found."""
    begun = time.perf_counter()
    result = solve(problem, solver=solver, cost_model=model, time_limit_s=limit_s or 60, seed=0)
    return {"seconds": time.perf_counter() - begun, "gap": result.gap}


def main() -> None:
    """Measure and write."""
    model = Learned.load(sys.argv[1]) if len(sys.argv) > 1 else at_random()
    problem = Problem(
        named_workload("recshard-rm1"), Topology.parse("2x8xa100-40"), batch_size=4096
    )
    begun = time.perf_counter()
    for table in range(len(problem.profile)):
        model.unit_costs(problem, table, 0)
    prepared_s = time.perf_counter() - begun
    shards = random_shards(problem, model)
    curves_s = seconds(lambda: [model.cost_curve(problem, shard, 0) for shard in shards])
    results = {
        "machine": machine(),
        "versions": versions("numpy"),
        "model": sys.argv[1] if len(sys.argv) > 1 else "random networks",
        "tables": len(problem.profile),
        "prepared_s": prepared_s,
        "curves_per_s": SHARDS / curves_s,
        "solvers": {
            solver: {
                cost_model.name.partition(":")[0]: solving(problem, cost_model, solver, limit_s)
                for cost_model in (Roofline(), model)
            }
            for solver, limit_s in SOLVERS
        },
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"learned_speed_{slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
