"""The leaderboard of the instance library: run planners, check their plans, write the page.

    python benchmarks/leaderboard.py                      check all plans, write the page
    python benchmarks/leaderboard.py --run auto,greedy-cost [--time-limit 10] [--only NAME,...]
                                     [--seconds 1200] [--seed 0] [--places 2000000] [--again]
    python benchmarks/leaderboard.py --add PLAN --as NAME [--to INSTANCE]

--run goes over the instances, smallest tables × GPUs first, and leaves out those on which the
planner was run with as much time before, unless --again. A better plan takes the place of a worse
one, never the other way round, and a higher bound that of a lower one; --seconds ends the run after
so much processor time, and the next one goes on. Planners of others want a checkout of theirs:
`--run hugectr --checkout FOLDER`; docs/instances.md lists them.

Each plan is checked by benchmarks/instances/check.py before it is kept, and all of them again
before the page, benchmarks/instances/LEADERBOARD.md, is written.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "instances"))

import others
import ours
import plans
from check import check, load
from expand import Recipe, catalogue, document, recipe_of
from outcome import Outcome
from page import write_page


def chosen(only: str | None, most_places: int) -> Iterator[Recipe]:
    """The instances that are asked for, smallest tables × GPUs first."""
    names = list(catalogue()["recipes"]) if only is None else only.split(",")
    recipes = [recipe_of(name) for name in names]
    for recipe in sorted(recipes, key=lambda one: one.tables * one.gpus):
        if recipe.tables * recipe.gpus <= most_places:
            yield recipe


def run(options: argparse.Namespace) -> None:
    """Run planners over instances until their time is up."""
    wanted = options.run.split(",")
    started = time.process_time()
    for recipe in chosen(options.only, options.places):
        pending = [one for one in wanted if options.again or not _done(one, recipe, options)]
        if not pending:
            continue
        problem = recipe.problem()
        instance = document(recipe.name, problem, catalogue()["constants"])
        for planner in pending:
            if time.process_time() - started > options.seconds:
                print("time is up; the same command goes on from here")
                return
            if planner in ours.SOLVERS:
                outcome = ours.run(planner, recipe, problem, options.time_limit, options.seed)
            else:
                limit_s, checkout = options.time_limit, options.checkout
                outcome = others.run(planner, recipe, problem, limit_s, checkout)
            print(f"{recipe.name}: {planner}: {keep(planner, instance, outcome)}", flush=True)


def _done(planner: str, recipe: Recipe, options: argparse.Namespace) -> bool:
    """Whether a planner has been run on an instance with as much time."""
    known = plans.read(planner, recipe.name) or plans.without_plan(planner).get(recipe.name)
    if known is not None and planner not in ours.SOLVERS:
        return True
    if known is None:
        return False
    proven = known.get("status") in ("optimal", "infeasible")
    return proven or known.get("tried_s", 0.0) >= options.time_limit


def keep(planner: str, instance: dict[str, Any], outcome: Outcome) -> str:
    """Check a planner's answer, and keep it if it is better than the one before; in words."""
    name = instance["name"]
    facts = {"version": version("embedding-placer")} | outcome.facts
    facts["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    before = plans.read(planner, name)
    limit_s = facts["options"].get("time_limit_s", 1e9)
    facts["tried_s"] = max(limit_s, before["tried_s"]) if before else limit_s
    if outcome.shards is None:
        if before is None:
            plans.write_none(planner, name, facts)
        return f"no plan: {facts['reason']}"
    plan = {"instance": name, "instance_sha256": instance["sha256"], "planner": planner, **facts}
    claim = {} if outcome.step_time_s is None else {"step_time_s": outcome.step_time_s}
    verdict = check(instance, {**plan, **claim, "shards": outcome.shards})
    if verdict.faults:
        reason = "; ".join(f"{one.kind}: {one.message}" for one in verdict.faults[:3])
        if before is None:
            plans.write_none(planner, name, {**facts, "reason": f"plan refused: {reason}"})
        return f"plan refused: {reason}"
    assert verdict.step_time_s is not None, "of a sound plan"
    plan["step_time_s"] = verdict.step_time_s
    bounds = [one.get("bound_s") for one in (plan, before or {}) if one.get("bound_s")]
    if before is not None and before["step_time_s"] <= verdict.step_time_s:
        plan = {**before, "tried_s": facts["tried_s"]}
        outcome = Outcome(before["shards"], {})
    plan["bound_s"] = max(bounds, default=None)
    plans.write(planner, name, {**plan, "shards": outcome.shards})
    plans.write_none(planner, name, None)
    return f"{verdict.step_time_s:.6g} s, bound {plan['bound_s']}"


def add(options: argparse.Namespace) -> None:
    """Keep a submitted plan under a planner's name."""
    try:
        submitted = load(options.add)
    except ValueError as error:
        sys.exit(f"cannot read the plan {options.add}: {error}")
    name = options.to or (submitted.get("instance") if isinstance(submitted, dict) else None)
    if not isinstance(name, str):
        sys.exit("the plan does not say for which instance it is; give --to INSTANCE")
    recipe = recipe_of(name)
    instance = document(name, recipe.problem(), catalogue()["constants"])
    verdict = check(instance, submitted)
    if verdict.faults:
        sys.exit("\n".join(f"refused, {one.kind}: {one.message}" for one in verdict.faults))
    facts = {"options": submitted.get("options", {}), "seed": submitted.get("seed", 0)}
    facts["version"] = submitted.get("version", "")
    shards = plans.short_shards(submitted["shards"])
    print(keep(options.as_, instance, Outcome(shards, facts, verdict.step_time_s)))


def main() -> None:
    """Run or add what is asked for, then write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", metavar="PLANNER,...", help="run these planners first")
    parser.add_argument("--only", metavar="NAME,...", help="instances (all)")
    parser.add_argument("--places", type=int, default=1 << 30, help="most tables × GPUs")
    parser.add_argument("--time-limit", type=float, default=5.0, help="of a run, in seconds")
    parser.add_argument("--seconds", type=float, default=1e9, help="of processor time in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="also what was run before")
    parser.add_argument("--checkout", type=Path, help="of another's planner")
    parser.add_argument("--add", metavar="PLAN", type=Path, help="a plan to submit")
    parser.add_argument("--as", dest="as_", metavar="NAME", default="submitted")
    parser.add_argument("--to", metavar="INSTANCE")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    options = parser.parse_args()
    if options.run:
        run(options)
    if options.add:
        add(options)
    if not options.no_page:
        write_page()


if __name__ == "__main__":
    main()
