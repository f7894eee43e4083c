"""LEADERBOARD.md and best_known.json, from the plans of the library, each checked again."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plans
from check import check
from expand import HERE, Recipe, catalogue, document_of

from placer.files.atomic import write_text
from placer.units import format_seconds

PAGE, BEST_KNOWN = HERE / "LEADERBOARD.md", HERE / "best_known.json"
OURS = ("auto", "greedy-cost", "greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")
CONTENDERS = OURS[:2]
"""Ours that are meant to be first; the others are the classic greedies, as everybody has them."""

SAME = 1e-9
FOUND = ("version", "options", "seed", "seconds", "created", "status")


@dataclass
class Row:
    """An instance: checked step times by planner, and the tightest bound."""

    recipe: Recipe
    times_s: dict[str, float] = field(default_factory=dict)
    plans: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    bound_s: float | None = None

    @property
    def best(self) -> str | None:
        """The planner of the best plan; of equal ones ours, then the quickest to find it."""
        if not self.times_s:
            return None
        least = min(self.times_s.values()) * (1 + SAME)
        first = [name for name, time_s in self.times_s.items() if time_s <= least]
        known = self.plans
        return min(first, key=lambda n: (n not in CONTENDERS, known[n].get("seconds", 0.0), n))

    @property
    def best_s(self) -> float | None:
        """The best known step time."""
        return None if self.best is None else self.times_s[self.best]

    def ratio(self, planner: str) -> float | None:
        """A planner's step time over the best known."""
        return self.times_s[planner] / self.best_s if planner in self.times_s else None

    @property
    def gap(self) -> float | None:
        """Of the best known step time, to the bound."""
        if self.best_s is None or not self.bound_s:
            return None
        return self.best_s / self.bound_s - 1


def rows() -> list[Row]:
    """All instances with their plans, each plan checked.

    Raises
    ------
    SystemExit
        If the checker refuses a plan of the library.
    """
    found = []
    for name, recipe in catalogue()["recipes"].items():
        row, instance = Row(recipe), None
        for planner in plans.planners():
            plan = plans.read(planner, name)
            if plan is None:
                why = plans.without_plan(planner).get(name)
                if why is not None:
                    row.reasons[planner] = why["reason"]
                continue
            instance = instance or document_of(name)
            verdict = check(instance, plan)
            if verdict.faults or verdict.step_time_s is None:
                told = "; ".join(one.message for one in verdict.faults[:3])
                raise SystemExit(f"{plans.path_of(planner, name)}: {told}")
            row.times_s[planner] = verdict.step_time_s
            row.plans[planner] = {key: plan.get(key) for key in (*FOUND, "bound_s")}
        bounds = [one["bound_s"] for n, one in row.plans.items() if n in OURS and one["bound_s"]]
        row.bound_s = max(bounds, default=None)
        found.append(row)
    return found


def write_page() -> None:
    """Check all plans and write both files."""
    found = rows()
    known = [_best_json(row) for row in found if row.best is not None]
    lines = ",\n".join(f"  {json.dumps(one)}" for one in known)
    write_text(
        BEST_KNOWN, f'{{"version": {catalogue()["version"]}, "best_known": [\n{lines}\n]}}\n'
    )
    write_text(PAGE, page(found))
    print(f"{len(known)} of {len(found)} instances have plans; wrote {PAGE.name}")


def _best_json(row: Row) -> dict[str, Any]:
    best = row.best
    assert best is not None, "has a plan"
    return {
        "instance": row.recipe.name,
        "step_time_s": row.times_s[best],
        "bound_s": row.bound_s,
        "planner": best,
        "plan": f"plans/{best}/{row.recipe.name}.json.gz",
    } | {key: value for key, value in row.plans[best].items() if key in FOUND}


def page(found: Sequence[Row]) -> str:
    """The page's text."""
    planners = [name for name in OURS if any(name in row.times_s for row in found)]
    planners += [name for name in plans.planners() if name not in OURS]
    behind = [row for row in found if row.best is not None and row.best not in CONTENDERS]
    solved = [row for row in found if row.best is not None]
    gaps = [row.gap for row in solved if row.gap is not None]
    text = [
        "# Leaderboard",
        "",
        "Written by `python benchmarks/leaderboard.py`, which checks every plan with "
        "`benchmarks/instances/check.py`;",
        "[docs/instances.md](../../docs/instances.md) says what instances, plans and bounds are "
        "and how to submit one.",
        "",
        f"{len(found)} instances, {len(solved)} with a plan, {sum(len(r.times_s) for r in found)} "
        f"plans checked. Gap of the best known plan to the bound: {statistics.median(gaps):.2%} "
        f"in the median; at most 1% on {_within(gaps, 0.01)} instances, 5% on "
        f"{_within(gaps, 0.05)}, 10% on {_within(gaps, 0.1)}, 100% on {_within(gaps, 1.0)}.",
        "",
        _behind(behind),
        "",
        "## Planners",
        "",
        "Step time over the best known, geometric mean and greatest, where the planner has a plan.",
        "",
        "| planner | plans | best known | mean ratio | greatest | no plan |",
        "|---|---:|---:|---:|---:|---:|",
        *(_planner_line(name, found) for name in planners),
        "",
        "## Instances",
        "",
        "Ratios are to the best known step time; – is no plan, and nothing stands where a planner "
        "was not run.",
        "",
        "| instance | tables | GPUs | best known | bound | gap | by | "
        + " | ".join(planners)
        + " |",
        "|---|---:|---:|---:|---:|---:|---|" + "---:|" * len(planners),
        *(_instance_line(row, planners) for row in found),
        "",
        *_notes(found, planners),
    ]
    return "\n".join(text)


def _behind(behind: Sequence[Row]) -> str:
    if not behind:
        return "No planner of others has a better plan than ours on any instance."
    told = [
        f"{row.recipe.name} ({row.best}; ours takes {_ours(row):.4f} times as long)"
        for row in behind
    ]
    return "Ours is not first on " + ", ".join(told) + "."


def _within(gaps: Sequence[float], most: float) -> int:
    return sum(gap <= most for gap in gaps)


def _ours(row: Row) -> float:
    return min((row.ratio(name) or float("inf") for name in CONTENDERS), default=float("inf"))


def _planner_line(name: str, found: Sequence[Row]) -> str:
    ratios = [ratio for row in found if (ratio := row.ratio(name)) is not None]
    none = sum(name in row.reasons for row in found)
    if not ratios:
        return f"| {name} | 0 | 0 | – | – | {none} |"
    first = sum(ratio <= 1 + SAME for ratio in ratios)
    mean = statistics.geometric_mean(ratios)
    return f"| {name} | {len(ratios)} | {first} | {mean:.4f} | {max(ratios):.3f} | {none} |"


def _instance_line(row: Row, planners: Sequence[str]) -> str:
    recipe = row.recipe
    cells = [recipe.name, f"{recipe.tables:,}", f"{recipe.gpus:,}"]
    cells.append("–" if row.best_s is None else format_seconds(row.best_s))
    cells.append("–" if not row.bound_s else format_seconds(row.bound_s))
    cells.append("–" if row.gap is None else f"{row.gap:.2%}")
    cells.append(row.best or "–")
    for name in planners:
        ratio = row.ratio(name)
        cells.append("–" if name in row.reasons and ratio is None else _shown(ratio))
    return f"| {' | '.join(cells)} |"


def _shown(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.4f}" if ratio < 10 else f"{ratio:.1f}"


def _notes(found: Sequence[Row], planners: Sequence[str]) -> list[str]:
    """Why planners have no plan, the same reasons together."""
    lines = []
    for name in planners:
        reasons: dict[str, list[str]] = {}
        for row in found:
            if name in row.reasons and name not in row.times_s:
                reasons.setdefault(row.reasons[name], []).append(row.recipe.name)
        for reason, names in reasons.items():
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"- {name}: {reason} ({some})")
    return ["## No plan", "", *lines, ""] if lines else []
