"""Record anew what the tests in this folder hold results to.

    python tests/golden/golden_record.py             everything
    python tests/golden/golden_record.py costs ...   of solvers, costs, simulator and drawn

Only a change that is meant to give other results may do so: the difference of the recorded files
is then part of that change.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]

import golden_costs as costs  # noqa: E402
import golden_drawn as drawn  # noqa: E402
import golden_problems as problems  # noqa: E402
import golden_replays as replays  # noqa: E402
from golden_store import record  # noqa: E402


def record_solvers() -> None:
    """Plans of every solver."""
    found: dict[str, dict[str, object]] = {case: {} for case in problems.SOLVER_CASES}
    for case, solver in problems.SOLVER_RUNS:
        found[case][solver] = problems.solved(case, solver)
    record("solvers", found, compress=True)


def record_costs() -> None:
    """Costs of random plans, the dense part and machines."""
    names = [(problem, model) for problem in costs.COST_PROBLEMS for model in problems.MODELS]
    record(
        "costs",
        {f"{p}/{m}": costs.costs_of_plans(p, m) for p, m in names},
        compress=True,
    )
    record("dense", costs.dense_record(), compress=True)
    record("machines", costs.machines_record())


def record_simulator() -> None:
    """Counts and times of replays."""
    with TemporaryDirectory() as folder:
        made = replays.make_replay_folder(Path(folder))
        record("simulator", {name: replays.replayed(made, name) for name in replays.REPLAYS},
               compress=True)  # fmt: skip


def record_drawn() -> None:
    """Costs and moves of drawn plans; bounds and plans of drawn problems."""
    record(
        "drawn",
        {
            "costs": {f"{name}/{model}": drawn.costs(name, model)
                      for name in drawn.problems() for model in drawn.MODELS},
            "options": drawn.options(),
            "placements": {name: drawn.placements(name) for name in drawn.problems()},
            "problems": {kind: [drawn.drawn(kind, seed) for seed in seeds]
                         for kind, seeds in drawn.SEEDS.items()},
        },
        compress=True,
    )  # fmt: skip


PARTS: dict[str, Callable[[], None]] = {
    "solvers": record_solvers,
    "costs": record_costs,
    "simulator": record_simulator,
    "drawn": record_drawn,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
