"""Plans of the instance library, each judged by the equations that others minimise.

    python benchmarks/judges.py [--only NAME,...] [--output FILE]

The plans are those that `leaderboard.py` keeps, as their planners found them; to them comes one of
ours that minimises TorchRec's estimate (`PlacerPlanner`), made here. The judges:

library   the step time of benchmarks/instances/step_time.py
torchrec  TorchRec's own estimators: time of the slowest rank, by `benchmarks/torchrec_planner.py`.
          None where TorchRec has no such placement; marked where it says that a rank lacks memory
hugectr   what HugeCTR's planner levels: hotness × width + ρ × width of the GPU that has most, with
          the ratio that `other_hugectr.py` tells it. It knows neither host memory nor replicas:
          None where a plan has them

NeuroShard's networks have no judgement of their own here: its repository has no trained ones.
Without --only, all instances with plans of two families of planners or more. What the output file
says of other instances stays.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "instances"))

import plans
from _hugectr import hugectr_units
from _machine import RESULTS, versions
from expand import catalogue, document, recipe_of
from other_hugectr import WORK_RATIO
from other_torchrec import run as torchrec_planner
from others import Task
from step_time import StepTime
from torchrec_planner import PLACER, Contender, Rating, quiet

from placer import Plan, Problem
from placer.errors import PlacerError, PlanMismatchError
from placer.files.atomic import write_text

FAMILIES = ("auto", "hugectr", "neuroshard", "recshard", "torchrec")
JUDGES = ("library", "torchrec", "hugectr")
OURS_BY_TORCHREC = "placer, for TorchRec's estimate"

Judged = dict[str, float | bool | None]


def judged_instances() -> Iterator[str]:
    """Names of instances with plans of two families of planners or more."""
    for name in catalogue()["recipes"]:
        families = {one.partition("-")[0] for one in planners_of(name)}
        if len(families) > 1:
            yield name


def planners_of(instance: str) -> list[str]:
    """Planners of `FAMILIES` with a plan for an instance."""
    return [
        planner
        for planner in plans.planners()
        if planner.partition("-")[0] in FAMILIES and plans.path_of(planner, instance).exists()
    ]


def hugectr_cost(problem: Problem, plan: Plan) -> float | None:
    """Units of the GPU that has most, of one sample; None where its formula has no such plan."""
    if any(shard.memory != "hbm" or len(shard.devices) > 1 for shard in plan.shards):
        return None
    gpu = problem.topology.gpus[0]
    ratio = gpu.hbm_bytes_per_s * problem.topology.exchange_s(gpu.id, 1.0)
    case: Any = SimpleNamespace(
        profile=problem.profile,
        shards=plan.shards,
        batch_size=problem.batch_size,
        gpus=len(problem.topology.gpus),
    )
    return hugectr_units(case, ratio / WORK_RATIO) / problem.global_batch_size


def torchrec_rating(contender: Contender | None, plan: Plan) -> Rating | None:
    """TorchRec's estimate of a plan; None where it has no such placement."""
    if contender is None:
        return None
    try:
        return contender.rate_plan(plan)
    except PlanMismatchError:
        return None


def judged(problem: Problem, plan: Plan, library_s: float, rating: Rating | None) -> Judged:
    """What each judge says of a plan."""
    return {
        "library": library_s,
        "torchrec": None if rating is None else rating.step_time_s,
        "torchrec_fits": None if rating is None else rating.fits,
        "hugectr": hugectr_cost(problem, plan),
    }


def judge(name: str) -> dict[str, Judged]:
    """All plans of an instance, by planner."""
    recipe = recipe_of(name)
    problem = recipe.problem()
    try:
        contender: Contender | None = Contender(problem)
    except PlacerError as error:
        print(f"{name}: TorchRec cannot be told of it: {error}", file=sys.stderr)
        contender = None
    found: dict[str, Judged] = {}
    for planner in planners_of(name):
        content = plans.read(planner, name)
        assert content is not None, "of the planners that have one"
        plan = plans.plan_of(problem, content["shards"])
        rating = torchrec_rating(contender, plan)
        found[planner] = judged(problem, plan, content["step_time_s"], rating)
    if contender is not None:
        shards, _ = torchrec_planner(Task(recipe, problem, PLACER, 0.0, None))
        if shards is not None:
            seconds = StepTime(document(name, problem, catalogue()["constants"])).seconds(shards)
            plan = plans.plan_of(problem, shards)
            rating = torchrec_rating(contender, plan)
            found[OURS_BY_TORCHREC] = judged(problem, plan, seconds, rating)
    return found


def table(found: Mapping[str, Mapping[str, Judged]]) -> str:
    """Markdown: each plan's cost over the least of its instance, by each judge."""
    lines = [
        f"| instance | plan of | {' | '.join(JUDGES)} |",
        f"|---|---|{'---:|' * len(JUDGES)}",
    ]
    for name, by_planner in found.items():
        for planner, costs in by_planner.items():
            cells = [_ratio(by_planner, costs, by) for by in JUDGES]
            lines.append(f"| {name} | {planner} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(by_planner: Mapping[str, Judged], costs: Judged, by: str) -> str:
    every = [cost for one in by_planner.values() if (cost := one[by]) is not None]
    own = costs[by]
    if own is None:
        return "–"
    lacks = by == "torchrec" and not costs["torchrec_fits"]
    return f"{own / min(every):.3f}{' (lacks memory)' if lacks else ''}"


def main() -> None:
    """Judge, print the table, and write it beside the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,...", help="instances")
    parser.add_argument("--output", type=Path, default=RESULTS / "judges.json")
    options = parser.parse_args()
    quiet()
    names = options.only.split(",") if options.only else list(judged_instances())
    found: dict[str, dict[str, Judged]] = {}
    if options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))["instances"]
    for name in names:
        found[name] = judge(name)
        print(table({name: found[name]}), flush=True)
        report = {
            "benchmark": "judges",
            "versions": versions("embedding-placer", "torch", "torchrec"),
            "units": {"library": "s", "torchrec": "s", "hugectr": "columns per sample"},
            "instances": found,
        }
        write_text(options.output, json.dumps(report, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), table(found))


if __name__ == "__main__":
    main()
