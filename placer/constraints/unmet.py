"""Find the constraints that a plan breaks, from the plan alone, without solvers."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from placer.constraints.constraints import Constraints
from placer.constraints.file import KINDS, Kind, TableRule
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.plan.verify import Violation

_NOT_WHOLE: tuple[Kind, ...] = ("row-wise", "column-wise", "replicated")


def unmet(plan: Plan, constraints: Constraints) -> list[Violation]:
    """Return all constraints that a well-formed plan breaks, as violations of rule ``constraint``.

    `Constraints.reserve` is not checked, because a plan's topology only has the memory that was
    left.

    Raises ProblemError if the constraints name tables or devices that the plan lacks.
    """
    applied = constraints.on(plan.topology, list(plan.tables_by_name))
    kinds: dict[str, dict[Kind, str]] = {}
    broken: list[Violation] = []
    for name, shards in plan.shards_by_table.items():
        kinds[name] = kinds_of(shards)
        messages = _broken(applied.rule_of(name), shards, kinds[name])
        broken += [Violation("constraint", name, f"table {name!r} {words}") for words in messages]
    for group in applied.together:
        for name in group:
            parts = [how for kind, how in kinds[name].items() if kind in _NOT_WHOLE]
            needed = f"has to be whole, together with {', '.join(n for n in group if n != name)}"
            words = [f"table {name!r} {how}, but {needed}" for how in parts]
            broken += [Violation("constraint", name, message) for message in words]
        served = {name: _servers(plan.shards_by_table[name]) for name in group}
        if len({device for devices in served.values() for device in devices}) > 1:
            homes = ", ".join(f"{name!r} by {', '.join(d)}" for name, d in served.items())
            message = f"tables that one GPU has to serve are served by several: {homes}"
            broken.append(Violation("constraint", ", ".join(group), message))
    return broken


def kinds_of(shards: Sequence[Shard]) -> dict[Kind, str]:
    """Return the kinds of placement that a table's shards use, each with a phrase for messages.

    ``row-wise`` means several row slices. The hot and the cold part of a slice count as one slice.
    Replicas of the hottest rows do not add to the other rows' slices. ``split`` means a slice with
    rows in both HBM and DRAM.
    """
    filled = [shard for shard in shards if shard.row_count]
    kinds: dict[Kind, str] = {}
    edges = sorted({edge for shard in filled for edge in shard.cols})
    slices, split = _row_slices(filled, edges)
    if slices > 1:
        kinds["row-wise"] = f"is sharded into {slices} row slices"
    if len(edges) > 2:
        kinds["column-wise"] = f"is sharded into {len(edges) - 1} column slices"
    replicas = max((len(shard.devices) for shard in filled), default=0)
    if replicas > 1:
        kinds["replicated"] = f"has rows on {replicas} devices at once"
    if split:
        kinds["split"] = "is split hot/cold between HBM and DRAM"
    for shard in filled:
        if shard.lookup != "device":
            kinds.setdefault(shard.lookup, f"has rows that are read {shard.lookup}")
        if shard.memory == "ssd":
            kinds["ssd"] = "has rows on SSD"
        if shard.dtype:
            kinds["narrow"] = f"has rows of {shard.dtype}"
    return kinds


def _row_slices(shards: Sequence[Shard], edges: Sequence[int]) -> tuple[int, bool]:
    """Return the largest number of row slices in a column slice, and whether any is split."""
    slices, split = 0, False
    for left, right in pairwise(edges):
        here = [s for s in shards if s.cols[0] <= left and right <= s.cols[1]]
        for part in (
            [shard for shard in here if len(shard.devices) == 1],
            [shard for shard in here if len(shard.devices) > 1],
        ):
            pairs = _hot_cold_pairs(part)
            split = split or pairs > 0
            slices = max(slices, len(part) - pairs)
    return slices, split


def _broken(rule: TableRule, shards: Sequence[Shard], kinds: dict[Kind, str]) -> Iterator[str]:
    """Yield, in words, how a table's shards break its rule."""
    others = [d for d in _servers(shards) if rule.devices is not None and d not in rule.devices]
    if others:
        pinned = ", ".join(rule.devices or ())
        yield f"is served by {', '.join(others)}, but pinned to {pinned}"
    strays = {s.memory for s in shards if s.row_count} - {rule.tier}
    if rule.tier is not None and strays:
        yield f"has rows in {strays.pop()}, but all are to be in {rule.tier}"
    for kind in KINDS:
        if kind in rule.forbid and kind in kinds:
            yield f"{kinds[kind]}, but {kind} is forbidden"


def _servers(shards: Sequence[Shard]) -> list[str]:
    return list(dict.fromkeys(device for shard in shards for device in shard.devices))


def _hot_cold_pairs(shards: Sequence[Shard]) -> int:
    """Count shards that hold the colder part of a row slice with another part in faster memory.

    Parts of one slice are on the same devices, and their strides share a residue. Strides without a
    common residue belong to different slices.
    """
    homes: dict[frozenset[str], list[Shard]] = {}
    for shard in shards:
        homes.setdefault(frozenset(shard.devices), []).append(shard)
    pairs = 0
    for held in homes.values():
        slices = [shard for shard in held if shard.memory == "hbm"]
        for memory in ("dram", "ssd"):
            left = [shard for shard in held if shard.memory == memory]
            for start, _, step in [shard.rows for shard in slices]:
                other = next(
                    (s for s in left if (start - s.rows[0]) % math.gcd(step, s.rows[2]) == 0), None
                )
                if other is not None:
                    left.remove(other)
                    pairs += 1
            slices += left
    return pairs
