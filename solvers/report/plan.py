"""The report of `placer show`: a plan's placements, memory and times."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from cost_models import CostReport
from placer import __version__
from placer.constraints.unmet import kinds_of
from placer.dense import DenseLayers
from placer.plan.drift import even_words
from placer.plan.fields import Memory, Shard
from placer.plan.memory import MemoryUse, device_memory, record_bytes
from placer.plan.plan import Plan
from placer.report import section as form
from placer.report.section import (
    Column,
    Report,
    Row,
    Section,
    attributes,
    columns,
    grouped,
    table_of,
)
from placer.tables import Table
from placer.units import counted, format_bytes, format_seconds
from solvers.bounds.binding import Binding
from solvers.result import Termination, gap_of

MOST_TABLES = 40
"""Plans of more tables get a summary by kind of placement."""

MOST_DEVICES = 18


def plan_report(
    plan: Plan,
    cost: CostReport | None = None,
    *,
    top: int = 20,
    end: Termination | None = None,
    binds: Binding | None = None,
    even: Sequence[str] = (),
    problem_sha256: str = "",
) -> Report:
    """Report the memory and time of every device, and the placement of every table.

    Without `cost`, the report has only memory. If a plan has more than `MOST_TABLES` tables, list
    the `top` tables by time, or by size without times; JSON has all tables. `end` is the
    termination of the search that made the plan, and says what binds; without it, `binds` does.
    `even` names tables for `even_words`. `problem_sha256` is the hash of the problem that `cost` is
    of. If the plan was made for another one, or for another cost model, and its step time is
    another one there, the facts have no bound and no gap.
    """
    memory = device_memory(plan)
    sections = [_memory_section(memory)]
    if cost is not None:
        sections += [_time_section(cost), *([_phase_section(cost)] if cost.phase_s else [])]
    tables = _table_section(plan, cost)
    if len(plan.tables) > MOST_TABLES:
        sections.append(_kind_section(tables.rows))
        key, order = ("time_s", "slowest first") if cost else ("size_bytes", "largest first")
        rows = tuple(sorted(tables.rows, key=lambda row: -row[key]))
        tables = replace(tables, rows=rows, shown=top, order=order)
    sections.append(tables)
    facts = _facts(plan, cost, memory, problem_sha256)
    if end is not None:
        facts = {**facts, "limit": end.limit, "binding": end.detail}
    elif binds is not None:
        facts = {**facts, "binding": binds.words, "binds": binds.resource, "gain": binds.gain}
    title = f"{counted(len(plan.tables), 'table')} on {plan.topology.name}"
    return Report(title, tuple(sections), facts, _headline(plan, cost, facts, end, even))


def placement_kind(plan: Plan, table: str) -> str:
    """Return a table's kind of placement in words: ``HBM``, ``hot/cold, row-wise``, …

    ``replicated`` means that all rows are on several GPUs; ``hot rows replicated`` only some.
    """
    shards = plan.shards_by_table[table]
    if not shards:
        return "not placed"
    tiers = {shard.memory for shard in shards}
    if any(shard.lookup == "cached" for shard in shards):
        tier = "cached"
    elif len(tiers) > 1:
        memories = [m.upper() for m in ("hbm", "dram", "ssd") if m in tiers]
        tier = "hot/cold" if tiers == {"hbm", "dram"} else "/".join(memories)
    else:
        (tier,) = map(str.upper, tiers)
    widths = sorted({shard.dtype for shard in shards if shard.dtype})
    kinds = kinds_of(shards)
    shapes: list[str] = [kind for kind in ("row-wise", "column-wise") if kind in kinds]
    if "replicated" in kinds:
        everywhere = all(len(shard.devices) > 1 for shard in shards)
        shapes.insert(0, "replicated" if everywhere else "hot rows replicated")
    return ", ".join([tier, *widths, *shapes])


def short_names(devices: Iterable[str]) -> str:
    """Shorten a list of devices: ``gpu:0-3,7`` for gpu:0, gpu:1, gpu:2, gpu:3 and gpu:7."""
    numbers: dict[str, list[int]] = defaultdict(list)
    names = []
    for device in sorted(set(devices)):
        prefix, colon, suffix = device.rpartition(":")
        if colon and suffix.isdecimal():
            numbers[prefix].append(int(suffix))
        else:
            names.append(device)
    for prefix, values in numbers.items():
        parts = []
        # Within a run of neighbours, value minus position is constant.
        for _, run in itertools.groupby(enumerate(sorted(values)), lambda one: one[1] - one[0]):
            first, *rest = (value for _, value in run)
            parts.append(f"{first}-{rest[-1]}" if rest else str(first))
        names.append(f"{prefix}:{','.join(parts)}")
    return ", ".join(names)


def devices_of(plan: Plan, table: str) -> str:
    """Return the `short_names` of the devices that serve a table."""
    shards = plan.shards_by_table[table]
    return short_names(device for shard in shards for device in shard.devices)


def bound_holds(plan: Plan, problem_sha256: str, cost: CostReport) -> bool:
    """Return whether a plan's bound is for the problem and the cost model of a cost.

    A name such as ``calibrated:machine.json`` says nothing of the constants: the file may have been
    measured again. Other versions may have other constants, too. Then, and with another problem,
    only an equal step time shows that the bound is for it.
    """
    made_for = plan.provenance.problem_sha256, plan.solver.cost_model
    is_same = made_for == (problem_sha256, cost.cost_model)
    says_constants = ":" not in cost.cost_model and plan.provenance.placer_version == __version__
    return _is_recorded(plan, cost.step_time_s) or (is_same and says_constants)


def _is_recorded(plan: Plan, step_time_s: float) -> bool:
    """Return whether a step time is that of the plan's solver.

    Other accesses, another cost model and an edited plan have another step time than that.
    """
    found_s = plan.solver.step_time_s
    return found_s is not None and math.isclose(found_s, step_time_s, rel_tol=1e-6)


def _facts(
    plan: Plan, cost: CostReport | None, memory: dict[str, MemoryUse], problem_sha256: str
) -> Row:
    gpus, hosts = plan.topology.gpus_by_id, plan.topology.hosts_by_id
    on_drives = [
        use.total_bytes for name, use in memory.items() if name not in gpus and name not in hosts
    ]
    solver = plan.solver
    step_time_s, bound_s = solver.step_time_s, solver.bound_s
    if cost is not None:
        step_time_s = cost.step_time_s
        if not bound_holds(plan, problem_sha256, cost):
            bound_s = None

    def of_cost(name: str) -> Any:
        return getattr(cost, name, None)

    return {
        "topology": plan.topology.name,
        "emulated": plan.topology.emulated,
        "batch_size": plan.batch_size,
        "solver": solver.name,
        "status": solver.status,
        **attributes(solver if cost is None else cost, "cost_model", "step_time_s"),
        "dense_s": of_cost("dense_s"),
        "dense_bytes": plan.dense.reserved_bytes if isinstance(plan.dense, DenseLayers) else None,
        "pipeline": plan.pipeline,
        **({} if plan.exchange_dtype == "float32" else {"exchange_dtype": plan.exchange_dtype}),
        "relative_error": of_cost("relative_error"),
        "bound_s": bound_s,
        "gap": gap_of(step_time_s, bound_s),
        "search_space": solver.search_space,
        **{name: of_cost(name) for name in ("bottleneck", "balance", "hbm_lookup_share")},
        "hbm_used_bytes": sum(use.total_bytes for name, use in memory.items() if name in gpus),
        "dram_used_bytes": sum(use.total_bytes for name, use in memory.items() if name in hosts),
        **({"ssd_used_bytes": sum(on_drives)} if on_drives else {}),
        "profile": plan.provenance.profile,
        "problem_sha256": plan.provenance.problem_sha256,
    }


def _headline(
    plan: Plan, cost: CostReport | None, facts: Row, end: Termination | None, even: Sequence[str]
) -> tuple[str, ...]:
    lines = []
    if plan.topology.emulated:
        lines.append("The GPU is emulated: a part of host memory plays its memory.")
    on_drives = facts.get("ssd_used_bytes")
    lines.append(
        f"{format_bytes(facts['hbm_used_bytes'])} in HBM{',' if on_drives else ' and'} "
        f"{format_bytes(facts['dram_used_bytes'])} in DRAM"
        f"{f' and {format_bytes(on_drives)} on SSD' if on_drives else ''}, with buffers; "
        f"{counted(plan.batch_size, 'sample')} per GPU and step"
        + f"; pooled rows travel as {plan.exchange_dtype}"
        * (plan.exchange_dtype != "float32")
    )
    if isinstance(plan.dense, DenseLayers):
        lines.append(
            f"dense layers take {format_bytes(plan.dense.reserved_bytes)} of each GPU besides"
        )
    proof = f"solver {facts['solver']}: {end.summary if end else facts['status']}"
    found_s = plan.solver.step_time_s
    gap = gap_of(found_s, plan.solver.bound_s)
    if found_s is not None and gap is not None:
        proof += f", within {form.share(gap)} of the bound"
        if not _is_recorded(plan, facts["step_time_s"]):
            proof += f" at the step time of {format_seconds(found_s)} that it found"
    lines.append(proof)
    if facts["step_time_s"] is not None:
        line = f"step time {format_seconds(facts['step_time_s'])}"
        if facts["relative_error"] is not None:
            line += f" ± {form.share(facts['relative_error'])}"
        model = facts["cost_model"]
        if model == "roofline" and facts["relative_error"] is not None:
            model += ", no measurement of your machine: placer calibrate"
        if model.startswith("calibrated") and facts["relative_error"] is None:
            model += ", measured on a CPU: it says little of these GPUs"
        line += f" ({model})"
        if cost is not None:
            dense = "embeddings alone"
            if cost.dense_s is not None:
                dense = f"{format_seconds(cost.dense_s)} of it dense layers"
            waits = "" if "binding" in facts else f", waits for {cost.bottleneck}"
            line += (
                f", {dense}{waits}; balance {cost.balance:.2f}; "
                f"{form.share(cost.hbm_lookup_share)} of lookups from HBM"
            )
        lines.append(line)
    lines += filter(None, (facts.get("binding"), even_words(even) if even else ""))
    return tuple(lines)


def _memory_section(memory: dict[str, MemoryUse]) -> Section:
    def used(use: MemoryUse) -> float | None:
        return use.total_bytes / use.capacity_bytes if use.capacity_bytes else None

    uses = list(memory.values())
    if len(uses) > MOST_DEVICES:
        uses.sort(key=lambda use: -(used(use) or 0.0))
    return table_of(
        uses,
        "memory",
        "Memory by device",
        *columns(device="device", weight_bytes="weights"),
        Column("state_bytes", "state", spare=True),
        *columns(cache_bytes="cache", row_map_bytes="maps", buffer_bytes="buffers"),
        *columns(total_bytes="total", capacity_bytes="of"),
        Column("used_share", "used", of=used),
        shown=MOST_DEVICES,
        order="fullest first",
    )


def _time_section(cost: CostReport) -> Section:
    dram_s = {host.device: host.dram_s for host in cost.hosts}
    parts = "device", "hbm_s", "link_s", "communication_s", "launch_s"
    rows: list[tuple[Any, ...]] = [
        (*attributes(gpu, *parts).values(), dram_s.pop(gpu.device, None), gpu.total_s, busy_s)
        for gpu, busy_s in zip(cost.gpus, cost.gpu_s.tolist(), strict=True)
    ]
    # Hosts that serve no lookups.
    rows += [
        (host, None, None, None, None, busy_s, busy_s, busy_s) for host, busy_s in dram_s.items()
    ]
    slowest_s = max(busy_s for *_, busy_s in rows)
    if len(rows) > MOST_DEVICES:
        rows.sort(key=lambda row: -row[-1])
    hidden = "; copies and exchanges of ids may overlap" if len(cost.schedule.chains) > 1 else ""
    return table_of(
        ((*values, form.ratio(busy_s, slowest_s)) for *values, busy_s in rows),
        "time",
        f"Work of a step by device{hidden} ({cost.cost_model})",
        *columns(device="device", hbm_s="HBM", link_s="link", communication_s="comm."),
        *columns(launch_s="launches", dram_s="DRAM", total_s="total"),
        Column("of_slowest", "of slowest", form.share),
        shown=MOST_DEVICES,
        order="slowest first",
    )


def _phase_section(cost: CostReport) -> Section:
    names = ("name", "slowest", "slowest_s", "mean_s", "waits_s")
    rows: list[Row] = [attributes(one, *names) for one in cost.phases]
    at = next((at for at, row in enumerate(rows) if row["name"] == "gradients"), len(rows))
    dense_s = cost.dense_s if cost.has_dense_phase and at < len(rows) else None
    for place, name, seconds in ((at, "dense", dense_s), (len(rows) + 1, "other", cost.other_s)):
        if seconds:
            rows.insert(place, dict(zip(names, (name, None, seconds, seconds, None), strict=True)))
    shown = map(Column, names, ("phase", "slowest", "time", "mean", "mean wait"))
    return table_of(rows, "phases", "Phases of a step, one after the other", *shown)


def bytes_by_device(table: Table, shards: Iterable[Shard]) -> dict[str, dict[Memory, int]]:
    """Return a table's bytes by device that serves them and by memory; HBM includes caches."""
    used: dict[str, dict[Memory, int]] = {}
    for shard in shards:
        stored = shard.row_count * record_bytes(table, shard)
        for device in shard.devices:
            of = used.setdefault(device, {"hbm": 0, "dram": 0, "ssd": 0})
            of[shard.memory] += stored
            of["hbm"] += shard.cache_rows * table.bytes_per_row(shard.width)
    return used


def _hot_share(table: Table, shards: Iterable[Shard]) -> float | None:
    """Return the share of a table's weights in HBM or caches; replicas count once."""
    cells = sum(
        (shard.row_count if shard.memory == "hbm" else shard.cache_rows) * shard.width
        for shard in shards
    )
    return cells / (table.rows * table.dim) if table.rows else None


def _table_section(plan: Plan, cost: CostReport | None) -> Section:
    shards = plan.shards_by_table

    def own(name: str) -> Callable[[Table], float | None]:
        costs = {} if cost is None else cost.tables
        return lambda table: getattr(costs.get(table.name), name, None)

    used = {one.name: bytes_by_device(one, shards[one.name]).values() for one in plan.tables}

    def in_memory(memory: Memory) -> Callable[[Table], int]:
        return lambda table: sum(of[memory] for of in used[table.name])

    memories: list[Memory] = ["hbm", "dram"]
    if any(shard.memory == "ssd" for shard in plan.shards):
        memories.append("ssd")
    return table_of(
        plan.tables,
        "tables",
        "Tables (GPU time: of all GPUs, adds up to their totals)" if cost else "Tables",
        Column("table", "table", of=lambda table: table.name),
        Column("rows", "rows"),
        Column("dim", "dim", form.count, spare=True),
        Column("size_bytes", "size", of=lambda table: table.total_bytes),
        Column("lookups_per_sample", "lookups", form.count, spare=True),
        Column(
            "placement", "placement", wraps=True, of=lambda table: placement_kind(plan, table.name)
        ),
        Column("devices", "devices", wraps=True, of=lambda table: devices_of(plan, table.name)),
        Column("shards", of=lambda table: len(shards[table.name])),
        Column("hot_row_share", "in HBM", spare=True, of=lambda t: _hot_share(t, shards[t.name])),
        *(Column(f"{memory}_bytes", of=in_memory(memory)) for memory in memories),
        Column("hbm_lookup_share", "served", of=own("hbm_lookup_share")),
        Column("time_s", "GPU time", of=own("gpu_s")),
    )


def _kind_section(tables: Sequence[Row]) -> Section:
    def total(key: str, title: str, show: Callable[[Any], str] | None = None) -> Column:
        def of(kind: tuple[str, list[Row]]) -> float | None:
            values = [row[key] for row in kind[1] if row[key] is not None]
            return sum(values) if values else None

        return Column(key, title, show, of=of)

    kinds = grouped(tables, itemgetter("placement")).items()
    return table_of(
        sorted(kinds, key=lambda kind: -len(kind[1])),
        "placements",
        "Tables by placement",
        Column("placement", "placement"),
        Column("tables", "tables", form.count, of=lambda kind: len(kind[1])),
        *map(total, ("size_bytes", "hbm_bytes", "dram_bytes"), ("size", "in HBM", "in DRAM")),
        total("lookups_per_sample", "lookups", form.count),
        total("time_s", "GPU time"),
    )
