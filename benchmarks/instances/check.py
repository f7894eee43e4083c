"""Check a claimed plan against an instance: every rule, memory to the byte, and the step time.

    python benchmarks/instances/check.py INSTANCE PLAN [--format json]

INSTANCE is a name of the library (benchmarks/instances/instances.json), or the JSON that
`expand.py` wrote for it; PLAN a plan file of placer's (docs/plan-format.md) or a short one
(docs/instances.md), as it is or compressed by gzip. Prints the step time and the fullest device, or
every reason for which the plan is refused; then the exit status is 1. Whatever the two files hold,
the answer is one of these.

Written from docs/plan-format.md, docs/constraints.md and docs/cost-model.md alone. Plain NumPy: no
solver and no cost model takes part.
"""

import argparse
import gzip
import json
import math
import os
import reprlib
import stat
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from step_time import Machine, Shard, StepTime, Table, row_count

SAME = 1e-9
"""Relative difference up to which a claimed step time is the plan's."""

MOST_BYTES = 1 << 30
MOST = 1 << 53
"""Numbers of a plan are smaller: no table has so many rows, and no device so many bytes."""
ENTRY_BYTES, ROW_MAP_BYTES, SORT_BYTES = 52, 4, 8
LOOKUPS = {"device": "hbm", "staged": "dram", "uva": "dram", "cached": "dram", "host": "dram"}
NEEDED = {"table", "rows", "cols", "devices", "memory", "lookup"}
PARTS = {"tables": list, "topology": dict, "row_order": dict, "solver": dict}
COUNTS = ("cache_rows", "staging_rows", "buffer_bytes")


@dataclass(frozen=True)
class Fault:
    """A reason to refuse a plan: its kind, and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """What a plan is: its step time and its devices' bytes, or why it is refused."""

    faults: tuple[Fault, ...]
    step_time_s: float | None = None
    used_bytes: dict[str, int] | None = None


def check(instance: dict[str, Any], plan: dict[str, Any]) -> Verdict:
    """Check a plan, as JSON, against an instance, as JSON."""
    work = StepTime(instance)
    shards = plan.get("shards") if isinstance(plan, dict) else None
    if not isinstance(shards, list):
        return Verdict((Fault("format", "the plan has no list of shards"),))
    # Each check relies on those before it.
    for found in (
        _misshapen(plan),
        _other_problem(instance, plan),
        (fault for shard in shards for fault in _malformed(work, shard)),
        _uncovered(work, shards),
        chain(_unmet(instance, work, shards), _too_little(work, shards)),
    ):
        faults = tuple(found)
        if faults:
            return Verdict(faults)
    used = used_bytes(work, plan)
    faults = tuple(
        Fault("memory", f"{device} would hold {used[device]} bytes but has {bytes_}")
        for device, bytes_ in work.machine.memory.items()
        if used[device] > bytes_
    )
    step_time_s = work.seconds(shards)
    claimed = plan.get("step_time_s", plan.get("solver", {}).get("step_time_s"))
    if claimed is not None and not _is_same(claimed, step_time_s):
        said = f"the plan says that a step takes {shown(claimed)} s; it takes {step_time_s!r} s"
        faults += (Fault("claim", said),)
    return Verdict(faults, step_time_s, used)


def _is_same(claimed: Any, step_time_s: float) -> bool:
    """Whether a claimed time is that of the plan; what is no number is not."""
    known = type(claimed) is float or (type(claimed) is int and abs(claimed) < MOST)
    return known and abs(claimed - step_time_s) <= SAME * step_time_s


def shown(value: Any) -> str:
    """A value for a message: short, however long or deep it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # A whole number of thousands of digits.
        return "a number that is too long"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring = 3, 8, 12, 100


def _misshapen(plan: dict[str, Any]) -> Iterator[Fault]:
    """Parts of a plan of another kind than the format has, where they are there."""
    for key, kind in PARTS.items():
        if not isinstance(plan.get(key, kind()), kind):
            yield Fault("format", f"{key} of the plan is no {kind.__name__}: {shown(plan[key])}")
            return
    devices = plan.get("topology", {}).get("devices", [])
    if not isinstance(devices, list):
        yield Fault("format", f"devices of the plan is no list: {shown(devices)}")
        return
    for key, entries, needed in (
        ("tables", plan.get("tables", []), ("name",)),
        ("devices", devices, ("id", "memory_bytes")),
    ):
        for entry in entries:
            if not isinstance(entry, dict) or not entry.keys() >= set(needed):
                yield Fault("format", f"an entry of {key} has no {needed}: {shown(entry)}")
            elif not isinstance(entry[needed[0]], str):
                yield Fault("format", f"an entry of {key} is named {shown(entry[needed[0]])}")
    for name, order in plan.get("row_order", {}).items():
        if not isinstance(order, dict):
            yield Fault("format", f"row_order of {shown(name)} is no dict: {shown(order)}")


def _other_problem(instance: dict[str, Any], plan: dict[str, Any]) -> Iterator[Fault]:
    """Where the plan says what it is for, and it is not this instance."""
    for key, expected in (("instance", instance["name"]), ("instance_sha256", None)):
        expected = expected or instance.get("sha256")
        if key in plan and expected and plan[key] != expected:
            yield Fault("problem", f"the plan is for {key} {shown(plan[key])}, not {expected!r}")
    for key, usual in (("batch_size", None), ("pipeline", "look-ahead")):
        said = plan.get(key, usual if "tables" in plan else instance[key])
        if said not in (None, instance[key]):
            yield Fault(
                "problem", f"the plan's {key} is {shown(said)}, the instance's {instance[key]}"
            )
    if plan.get("dense") is not None:
        yield Fault("problem", "the plan counts dense layers, which the instance has not")
    if "tables" in plan:
        facts = ("name", "rows", "dim", "dtype", "optimizer", "features")
        ours, theirs = (
            {table["name"]: [table.get(fact) for fact in facts] for table in tables}
            for tables in (instance["tables"], plan["tables"])
        )
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                told = shown(theirs.get(name))
                yield Fault("problem", f"table {shown(name)} is not the instance's: {told}")
                return
    if "topology" in plan:
        theirs = plan["topology"].get("devices", [])
        memory = {d["id"]: d["memory_bytes"] for d in theirs}
        own = {d["id"]: d["memory_bytes"] for d in instance["gpus"] + instance["hosts"]}
        if memory != own:
            yield Fault("problem", "the plan's devices or their memory are not the instance's")


def _malformed(work: StepTime, shard: Any) -> Iterator[Fault]:
    """What is wrong with a shard by itself."""
    if not isinstance(shard, dict) or not shard.keys() >= NEEDED:
        yield Fault("shard", f"a shard needs {', '.join(sorted(NEEDED))}: {shown(shard)}")
        return
    told = (f"{key} {shown(shard[key])}" for key in ("table", "rows", "cols"))
    where = ", ".join(told)
    lists = [shard[key] for key in ("rows", "cols", "devices")]
    names = [shard[key] for key in ("table", "memory", "lookup")]
    if not all(isinstance(one, list) for one in lists) or not all(
        isinstance(n, str) for n in names
    ):
        yield Fault("shard", f"{where}: rows, cols and devices are lists, the others names")
        return
    table = work.tables.get(shard["table"])
    if table is None:
        yield Fault("shard", f"the instance has no table {shown(shard['table'])}")
        return
    numbers = [*shard["rows"], *shard["cols"], *(shard.get(key, 0) for key in COUNTS)]
    sizes = (len(shard["rows"]), len(shard["cols"]))
    if sizes != (3, 2) or any(type(one) is not int or not 0 <= one < MOST for one in numbers):
        yield Fault("shard", f"{where}: three and two whole numbers, none below 0 or above 2^53")
        return
    start, stop, step = shard["rows"]
    if not (start <= stop <= table.rows and step >= 1):
        yield Fault("shard", f"{where}: rows must be a slice within 0..{table.rows}")
        return
    if not shard["cols"][0] < shard["cols"][1] <= table.dim:
        yield Fault("shard", f"{where}: columns must lie within 0..{table.dim}")
    devices, gpus = shard["devices"], work.machine.gpus
    are_names = all(isinstance(device, str) for device in devices)
    if not devices or not are_names or len(set(devices)) < len(devices):
        yield Fault("shard", f"{where}: devices must be named, each once")
        return
    for device in devices:
        if device not in work.machine.memory:
            yield Fault("device", f"{where}: the instance has no device {shown(device)}")
        elif device not in gpus and shard["lookup"] != "host":
            yield Fault("lookup", f"{where}: {device} is a host; it serves lookup host alone")
    if LOOKUPS.get(shard["lookup"]) != shard["memory"]:
        both = f"lookup {shown(shard['lookup'])} does not go with memory {shown(shard['memory'])}"
        yield Fault("lookup", f"{where}: {both}")
    cache, staging = shard.get("cache_rows", 0), shard.get("staging_rows", 0)
    if (shard["lookup"] == "cached") != (cache > 0) or cache > row_count(shard):
        yield Fault("lookup", f"{where}: {cache} cache_rows with lookup {shown(shard['lookup'])}")
    if staging and shard["lookup"] not in ("staged", "cached"):
        yield Fault("lookup", f"{where}: staging_rows with lookup {shown(shard['lookup'])}")


def _uncovered(work: StepTime, shards: Sequence[Shard]) -> Iterator[Fault]:
    """Rows × columns that are in no shard, or in two."""
    by_table = defaultdict(list)
    for shard in shards:
        if row_count(shard):
            by_table[shard["table"]].append(shard)
    for name, table in work.tables.items():
        own = by_table[name]
        edges = {0, table.dim, *(edge for shard in own for edge in shard["cols"])}
        for left, right in pairwise(sorted(edges) if table.rows else ()):
            here = [s for s in own if s["cols"][0] <= left and right <= s["cols"][1]]
            where = f"table {name!r}, columns {left}..{right}"
            twice = _common_rank([tuple(shard["rows"]) for shard in here])
            if twice is not None:
                yield Fault("covered twice", f"{where}: rank {twice} is in two shards")
                break
            missing = table.rows - sum(row_count(shard) for shard in here)
            if missing:
                yield Fault("row missing", f"{where}: {missing} rows are in no shard")
                break


def _common_rank(slices: list[Any]) -> int | None:
    """A rank that is in two of these slices, none of them empty."""
    ranges = [range(*rows) for rows in slices]
    steps = defaultdict(list)
    for ranks in ranges:
        steps[ranks.step].append((ranks[0] % ranks.step, ranks[0], ranks[-1]))
    for alike in steps.values():
        for one, other in pairwise(sorted(alike)):
            if one[0] == other[0] and other[1] <= one[2]:
                return other[1]
    for (step, some), (wider, others) in combinations(sorted(steps.items()), 2):
        first, last = (np.array([each[at] for each in others]) for at in (1, 2))
        common = math.gcd(step, wider)
        for _, start, end in some:
            met = (np.maximum(first, start) <= np.minimum(last, end)) & (
                (first - start) % common == 0
            )
            for at in np.flatnonzero(met).tolist():
                # The first rank of both, by the Chinese remainder theorem.
                inverse = pow(wider // common, -1, step // common) if step > common else 0
                turns = (start - int(first[at])) // common * inverse % (step // common)
                rank, period = int(first[at]) + turns * wider, step * wider // common
                rank += max(0, -((rank - start) // period)) * period
                if rank <= min(end, int(last[at])):
                    return rank
    return None


def _unmet(instance: dict[str, Any], work: StepTime, shards: Sequence[Shard]) -> Iterator[Fault]:
    """Constraints that a plan breaks; docs/constraints.md says what each means."""
    asked = instance.get("constraints") or {}
    by_table = defaultdict(list)
    for shard in shards:
        if row_count(shard):
            by_table[shard["table"]].append(shard)
    for name, rule in asked.get("tables", {}).items():
        own = by_table[name]
        for device in sorted({d for shard in own for d in shard["devices"]}):
            if rule["devices"] is not None and device not in rule["devices"]:
                yield Fault("constraint", f"table {name!r} is pinned, but served by {device}")
        if rule["tier"] and any(shard["memory"] != rule["tier"] for shard in own):
            yield Fault("constraint", f"table {name!r} is to be in {rule['tier']} alone")
        for kind in sorted(ways(own) & set(rule["forbid"])):
            yield Fault("constraint", f"table {name!r} is placed {kind}, which is forbidden")
    for group in asked.get("together", ()):
        for name in group:
            for kind in sorted(ways(by_table[name]) & {"row-wise", "column-wise", "replicated"}):
                yield Fault("constraint", f"table {name!r} of a group is {kind}, not whole")
        served = {device for name in group for s in by_table[name] for device in s["devices"]}
        if len(served) > 1:
            yield Fault("constraint", f"{group} are to share one device: {sorted(served)}")


def ways(shards: Sequence[Shard]) -> set[str]:
    """The ways to place a table that constraints may forbid, as its shards use them."""
    found = {shard["lookup"] for shard in shards} - {"device"}
    edges = sorted({edge for shard in shards for edge in shard["cols"]})
    if len(edges) > 2:
        found.add("column-wise")
    if any(len(shard["devices"]) > 1 for shard in shards):
        found.add("replicated")
    for left, right in pairwise(edges):
        here = [s for s in shards if s["cols"][0] <= left and right <= s["cols"][1]]
        for replicated in (False, True):
            part = [shard for shard in here if (len(shard["devices"]) > 1) == replicated]
            pairs = _hot_cold_pairs(part)
            if pairs:
                found.add("split")
            if len(part) - pairs > 1:
                found.add("row-wise")
    return found


def _hot_cold_pairs(shards: Sequence[Shard]) -> int:
    """Slices whose hot part is in HBM and whose cold part is in DRAM, on the same devices."""
    cold = [shard for shard in shards if shard["memory"] == "dram"]
    pairs = 0
    for hot in (shard for shard in shards if shard["memory"] == "hbm"):
        for other in cold:
            common = math.gcd(hot["rows"][2], other["rows"][2])
            same = set(hot["devices"]) == set(other["devices"])
            if same and (hot["rows"][0] - other["rows"][0]) % common == 0:
                cold.remove(other)
                pairs += 1
                break
    return pairs


def _buffers(work: StepTime, shard: Shard, first: bool) -> tuple[float, int]:
    """Bytes of buffers and rows of staging that reading a shard needs; `first` of its group."""
    table: Table = work.tables[shard["table"]]
    samples, width = work.batch // len(shard["devices"]), shard["cols"][1] - shard["cols"][0]
    start, stop, step = shard["rows"]
    looked_up = samples * table.lookups
    lookups = table.loads((start, stop, step), looked_up)[0]
    vectors = (samples * table.bags if first else 0) + lookups * table.unpooled_share
    # Lookups are sorted in the room of outputs and their gradients, 8 bytes each more than updates.
    each = table.bags / table.lookups + table.unpooled_share if table.lookups else 1.0
    passing = 8 + max(4.0, width / 16) + max(0.0, SORT_BYTES - 8 * each * width)
    size = 2 * vectors * width * 4 + lookups * ((16 if work.serial else 32) + passing)
    if shard["lookup"] not in ("staged", "cached"):
        return size, 0
    start = min(stop, start + shard.get("cache_rows", 0) * step)
    distinct = table.loads((start, stop, step), 2 * looked_up)[1]
    rows = distinct + 4 * math.sqrt(distinct)
    size += rows * (table.row_bytes(width) + ENTRY_BYTES)
    return size, min(len(range(start, stop, step)), math.floor(rows))


def _grouped(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards of a table with the same columns on the same devices."""
    groups = defaultdict(list)
    for shard in shards:
        groups[shard["table"], *shard["cols"], *shard["devices"]].append(shard)
    return list(groups.values())


def _too_little(work: StepTime, shards: Sequence[Shard]) -> Iterator[Fault]:
    """Shards that say they need fewer buffers than they do."""
    for group in _grouped(shards):
        name, needed = group[0]["table"], 0.0
        for shard in group:
            size, staging = _buffers(work, shard, shard is group[0])
            needed += size
            if shard.get("staging_rows", staging) < staging * (1 - SAME) - 1:
                told = f"{shard['staging_rows']} staging_rows, but needs {staging}"
                yield Fault("buffers", f"table {name!r}, rows {shard['rows']} has {told}")
        said = [shard["buffer_bytes"] for shard in group if "buffer_bytes" in shard]
        if said and sum(said) < needed * (1 - SAME):
            told = f"{sum(said)} buffer_bytes on {group[0]['devices']}, but needs {needed:.0f}"
            yield Fault("buffers", f"table {name!r}, columns {group[0]['cols']} has {told}")


def used_bytes(work: StepTime, plan: dict[str, Any]) -> dict[str, int]:
    """Bytes on each device: weights, optimizer state, caches, buffers and row maps."""
    machine: Machine = work.machine
    used = dict.fromkeys(machine.memory, 0)
    orders = plan.get("row_order") or {}
    mapped: set[tuple[str, str]] = set()
    for group in _grouped(plan["shards"]):
        claimed = any("buffer_bytes" in shard for shard in group)
        for shard in group:
            table, width = work.tables[shard["table"]], shard["cols"][1] - shard["cols"][0]
            buffers = shard.get("buffer_bytes", 0)
            if not claimed:
                buffers = math.ceil(_buffers(work, shard, shard is group[0])[0])
            cache = shard.get("cache_rows", 0) * (table.row_bytes(width) + ENTRY_BYTES)
            for device in shard["devices"]:
                on_gpu = device in machine.gpus and shard["memory"] == "dram"
                home = machine.host_of[machine.gpus[device]] if on_gpu else device
                used[home] += row_count(shard) * table.row_bytes(width)
                used[device] += buffers + cache
                if orders.get(table.name, {}).get("kind") == "profile":
                    mapped.add((table.name, device))
    for name, device in mapped:
        used[device] += ROW_MAP_BYTES * work.tables[name].rows
    return used


def load(path: str | Path) -> Any:
    """A JSON file, compressed by gzip or not.

    Raises
    ------
    ValueError
        If it cannot be read, for whatever reason.
    """
    try:
        # A pipe that nobody writes would never be opened else.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is a device, a pipe or a folder, and no file")
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if packed else file as plain:
                content = plain.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        return json.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def instance_of(name: str) -> dict[str, Any]:
    """The instance of a file, or of a name of the library.

    Raises
    ------
    ValueError
        If a file is no instance. An unknown name ends the program with what there is.
    """
    if not os.access(name, os.F_OK):
        from expand import document_of  # Makes the instance from its recipe, with placer.

        return document_of(name)
    instance = load(name)
    try:
        check(instance, {"shards": []})
        _ = [instance["name"], instance["batch_size"], instance["pipeline"]]
    except Exception as error:
        raise ValueError(f"it is no instance ({type(error).__name__}: {error})") from error
    return instance


def _print(text: str) -> None:
    """Print a line; what a terminal would take for a command is written out."""
    print("".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text))


def main() -> None:
    """Check one plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("instance", help="a name of the library, or an expanded instance's file")
    parser.add_argument("plan", help="a plan file")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args()
    try:
        instance = instance_of(options.instance)
    except ValueError as error:
        sys.exit(f"cannot read the instance {shown(options.instance)}: {error}")
    try:
        plan = load(options.plan)
    except ValueError as error:
        sys.exit(f"cannot read the plan {shown(options.plan)}: {error}")
    verdict = check(instance, plan)
    if options.format == "json":
        faults = [{"kind": fault.kind, "message": fault.message} for fault in verdict.faults]
        print(json.dumps({"step_time_s": verdict.step_time_s, "faults": faults}))
    else:
        for fault in verdict.faults:
            _print(f"refused, {fault.kind}: {fault.message}")
        if not verdict.faults and verdict.used_bytes is not None:
            has = {d["id"]: d["memory_bytes"] for d in instance["gpus"] + instance["hosts"]}
            fullest = max(has, key=lambda device: verdict.used_bytes[device] / max(1, has[device]))
            _print(f"sound: {instance['name']} takes {verdict.step_time_s!r} s a step; {fullest} ")
            _print(f"is fullest, with {verdict.used_bytes[fullest]} of {has[fullest]} bytes")
    sys.exit(1 if verdict.faults else 0)


if __name__ == "__main__":
    main()
