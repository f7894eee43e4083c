"""Plans of the library: short files, one for each planner and instance, and why there is none.

docs/instances.md describes them. Buffers are left out, as an instance and a shard determine them.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from check import load
from expand import HERE

from placer import Plan, Problem, Shard
from placer.files.atomic import write_bytes, write_text
from placer.plan.fields import Provenance, SolverRecord
from placer.plan.memory import with_buffers

PLANS = HERE / "plans"
_USUAL = {"cache_rows": 0}
_DETERMINED = ("buffer_bytes", "staging_rows")

Content = dict[str, Any]


def path_of(planner: str, instance: str) -> Path:
    """Where the plan of a planner for an instance is."""
    return PLANS / planner / f"{instance}.json.gz"


def planners() -> list[str]:
    """Planners of which there are plans, or reasons for none."""
    return sorted(path.name for path in PLANS.iterdir() if path.is_dir())


def read(planner: str, instance: str) -> Content | None:
    """A plan as JSON; None where there is none."""
    path = path_of(planner, instance)
    if not path.exists():
        return None
    content: Content = load(path)
    return content


def write(planner: str, instance: str, content: Mapping[str, Any]) -> None:
    """Write a plan; the same content gives the same bytes."""
    path = path_of(planner, instance)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"))
    write_bytes(path, gzip.compress(text.encode(), 9, mtime=0))


def without_plan(planner: str) -> dict[str, dict[str, Any]]:
    """Instances for which a planner has no plan: why, and with which options it was tried."""
    path = PLANS / planner / "none.json"
    found: dict[str, dict[str, Any]] = load(path) if path.exists() else {}
    return found


def write_none(planner: str, instance: str, reason: Mapping[str, Any] | None) -> None:
    """Note why a planner has no plan for an instance; None removes the note."""
    notes = without_plan(planner)
    if reason is None and instance not in notes:
        return
    notes.pop(instance, None)
    if reason is not None:
        notes[instance] = dict(reason)
    path = PLANS / planner / "none.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(notes, indent=1, sort_keys=True) + "\n")


def shards_json(plan: Plan) -> list[dict[str, Any]]:
    """Shards of a plan as short plans have them."""
    return short_shards([asdict(shard) for shard in plan.shards])


def short_shards(shards: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shards, as JSON, without what is usual or determined."""
    return [
        {k: list(v) if isinstance(v, tuple) else v for k, v in shard.items() if _is_told(k, v)}
        for shard in shards
    ]


def _is_told(key: str, value: Any) -> bool:
    return key not in _DETERMINED and _USUAL.get(key) != value


def to_plan(problem: Problem, content: Mapping[str, Any]) -> Plan:
    """A short plan as placer has plans, with its shards' buffers."""
    solver = SolverRecord(
        content["planner"],
        step_time_s=content["step_time_s"],
        bound_s=content.get("bound_s"),
        seconds=content.get("seconds", 0.0),
        cost_model="roofline",
    )
    made = Provenance(problem.sha256, content.get("version", ""), content["created"])
    return replace(plan_of(problem, content["shards"]), solver=solver, provenance=made)


def plan_of(problem: Problem, entries: Iterable[Mapping[str, Any]]) -> Plan:
    """The plan of shards as JSON, with their buffers."""
    profiles = {profile.name: profile for profile in problem.profile}
    seen: Counter[tuple[Any, ...]] = Counter()
    shards = []
    for entry in entries:
        fields = {key: tuple(entry[key]) for key in ("rows", "cols", "devices")}
        shard = Shard(**{**entry, **fields})
        group = (shard.table, shard.cols, shard.devices)
        samples = problem.global_batch_size // len(shard.devices)
        profile = profiles[shard.table]
        first = not seen[group]
        shards.append(with_buffers(profile, shard, samples=samples, returns_bags=first))
        seen[group] += 1
    return Plan(
        tuple(profile.table for profile in problem.profile),
        problem.topology,
        tuple(shards),
        batch_size=problem.batch_size,
        pipeline=problem.pipeline,
    )
