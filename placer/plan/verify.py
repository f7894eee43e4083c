"""Prove that a plan is sound, from the plan alone, without solvers and cost models."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import get_args

import numpy as np

from placer.errors import CapacityError, PlanError, PlanMismatchError
from placer.plan.fields import Lookup, Memory, Shard
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.tables import ColdDType, Table
from placer.units import format_bytes


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a plan breaks.

    `rule` is ``shard`` (a malformed shard), ``feature`` (a feature listed more than once),
    ``coverage``, ``row_order``, ``growing`` (a growing table with a wrong number of rows) or
    ``capacity``. `where` names the table, feature or device.
    """

    rule: str
    where: str
    message: str


def violations(plan: Plan) -> list[Violation]:
    """Return all violations of rules; an empty list proves that the plan is sound.

    The rules: every shard is well formed and on existing devices. Shards cover every row × column
    of every table exactly once, apart from replicas. Row orders list valid ids, each once. Tables
    that grow have the rows that their capacity needs. No device needs more bytes than it has,
    including buffers and maps.
    """
    names = [table.name for table in plan.tables]
    faults = [
        Violation("shard", name, f"table {name!r} is listed more than once")
        for name, times in sorted(Counter(names).items())
        if times > 1
    ]
    readers = Counter(feature.name for table in plan.tables for feature in table.features)
    for name, times in sorted(readers.items()):
        if times > 1:
            text = f"feature {name!r} is listed {times} times; it reads one table, once"
            faults.append(Violation("feature", name, text))
    for shard in plan.shards:
        faults.extend(_shard_violations(plan, shard))
    if faults:  # Further checks would fail on these faults or repeat them.
        return faults
    for table in plan.tables:
        message = coverage_fault(table, plan.shards_by_table[table.name])
        if message:
            faults.append(Violation("coverage", table.name, message))
        faults.extend(_row_order_violations(plan, table))
    faults.extend(_growing_violations(plan))
    for name in sorted(plan.row_order.keys() - plan.tables_by_name.keys()):
        message = f"table {name!r} has a row order but is not listed among the plan's tables"
        faults.append(Violation("row_order", name, message))
    for use in device_memory(plan).values():
        if use.free_bytes < 0:
            message = (
                f"{use.device} would hold {format_bytes(use.total_bytes)} "
                f"({use.total_bytes} bytes) but has {format_bytes(use.capacity_bytes)}: "
                f"{-use.free_bytes} bytes too many"
            )
            faults.append(Violation("capacity", use.device, message))
    return faults


def check_shards(plan: Plan) -> None:
    """Raise PlanError if a shard is malformed."""
    for shard in plan.shards:
        for violation in _shard_violations(plan, shard):
            raise PlanError(f"{violation.message}; `placer verify` lists all that is wrong")


def refuse_growing(plan: Plan, reader: str) -> None:
    """Raise PlanMismatchError if a table of the plan grows, because `reader` has no key map."""
    for name in plan.growing:
        raise PlanMismatchError(
            f"table {name!r} grows: its rows mean nothing without its key map, which {reader} does "
            "not have; train with `placer train`, `apply_plan` or `make_embeddings`"
        )


def verify(plan: Plan) -> None:
    """Raise if the plan breaks a rule.

    Raises CapacityError if the only fault is that a device lacks memory. Raises PlanError if any
    other rule is broken. The message lists the first violations.

    >>> from placer import Plan, Table, Topology
    >>> plan = Plan((Table("C3", 1000, 16),), Topology.parse("1xh100"), shards=())
    >>> verify(plan)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    placer.errors.PlanError: table 'C3', columns 0..16: rank 0 is covered 0 times; every row ...
    """
    faults = violations(plan)
    if not faults:
        return
    lines = [violation.message for violation in faults[:5]]
    if len(faults) > 5:
        lines.append(f"and {len(faults) - 5} more")
    kind = CapacityError if all(v.rule == "capacity" for v in faults) else PlanError
    raise kind("; ".join(lines))


def _shard_violations(plan: Plan, shard: Shard) -> Iterator[Violation]:
    def broken(message: str) -> Violation:
        return Violation("shard", shard.table, f"table {shard.table!r}: {message}")

    table = plan.tables_by_name.get(shard.table)
    if table is None:
        yield broken("it has a shard but is not listed among the plan's tables")
        return
    start, stop, step = shard.rows
    if not (0 <= start <= stop <= table.rows and step >= 1):
        yield broken(
            f"rows {list(shard.rows)} must be [start, stop, step] with "
            f"0 <= start <= stop <= {table.rows} and step >= 1"
        )
        return  # Later checks need the number of rows.
    first, last = shard.cols
    if not 0 <= first < last <= table.dim:
        yield broken(f"cols {list(shard.cols)} must lie within [0, {table.dim}] and not be empty")
    if not shard.devices or len(set(shard.devices)) != len(shard.devices):
        yield broken(f"devices {list(shard.devices)} must name at least one device, each once")
    hosts, gpus = plan.topology.hosts_by_id, plan.topology.gpus_by_id
    for device in shard.devices:
        if device in gpus and shard.memory != "ssd":  # The common case must be fast.
            continue
        gpu, attached = gpus.get(device), plan.topology.gpus_of(device)
        if gpu is None and device not in hosts:
            yield broken(f"device {device!r} is not in the topology {plan.topology.name!r}")
        elif attached:
            yield broken(f"{device} has GPUs, which serve its rows: name one, as {attached[0].id}")
        elif gpu is not None and shard.memory == "ssd" and hosts[gpu.host].drive is None:
            yield broken(f"its rows are on SSD, but the host of {device} has no drive")
        elif gpu is None and (shard.memory, shard.lookup) != ("dram", "host"):
            yield broken(
                f"{device} is a host without GPUs: it serves memory dram by lookup host, not "
                f"{shard.memory} by {shard.lookup}"
            )
    dtype = shard.dtype or table.dtype
    for word, kind in ((shard.memory, Memory), (shard.lookup, Lookup), (dtype, ColdDType)):
        if word not in get_args(kind):
            yield broken(f"{word!r} is none of {', '.join(get_args(kind))}")
            return
    if (shard.memory == "hbm") != (shard.lookup == "device"):
        yield broken(f"lookup {shard.lookup!r} does not go with memory {shard.memory!r}")
    if (shard.memory == "ssd" or shard.dtype) and shard.lookup not in ("staged", "cached"):
        what = "rows on SSD" if shard.memory == "ssd" else f"rows of {shard.dtype}"
        yield broken(f"{what} are staged or cached, not read by lookup {shard.lookup!r}")
    if shard.dtype not in (None, table.dtype) and table.dtype != "float32":
        yield broken(f"rows of {shard.dtype} are of tables of float32 alone, not of {table.dtype}")
    if (shard.lookup == "cached") != (shard.cache_rows > 0):
        yield broken(f"lookup {shard.lookup!r} with cache_rows {shard.cache_rows}")
    if shard.staging_rows and shard.lookup not in ("staged", "cached"):
        yield broken(
            f"lookup {shard.lookup!r} with staging_rows {shard.staging_rows}: only staged and "
            "cached rows are copied to HBM"
        )
    if not 0 <= shard.staging_rows <= shard.row_count:
        yield broken(f"staging_rows {shard.staging_rows} must lie within 0..{shard.row_count}")
    if shard.cache_rows > shard.row_count or shard.cache_rows < 0 or shard.buffer_bytes < 0:
        yield broken(
            f"cache_rows {shard.cache_rows} must lie within 0..{shard.row_count} "
            f"and buffer_bytes {shard.buffer_bytes} be at least 0"
        )


def _row_order_violations(plan: Plan, table: Table) -> Iterator[Violation]:
    order = plan.order_of(table.name)
    ids = plan.hot_ids.get(table.name)
    if order.kind == "id" and ids is None:
        return
    where = f"table {table.name!r}: row order"
    if ids is None:
        yield Violation("row_order", table.name, f"{where} of kind 'profile' lists no ids")
    elif ids.size and (ids.min() < 0 or ids.max() >= table.rows):
        bad = int(ids[(ids < 0) | (ids >= table.rows)][0])
        text = f"{where}: id {bad} is outside 0..{table.rows - 1}"
        yield Violation("row_order", table.name, text)
    elif np.unique(ids).size != ids.size:
        yield Violation("row_order", table.name, f"{where} lists an id more than once")


def _growing_violations(plan: Plan) -> Iterator[Violation]:
    for name, how in sorted(plan.growing.items()):
        table = plan.tables_by_name.get(name)
        if table is None:
            fault = "grows but is not listed among the plan's tables"
        elif table.rows != how.rows:
            fault = f"has {table.rows:,} rows; a capacity of {how.capacity:,} keys takes "
            fault += f"{how.rows:,}, as row 0 is of all other keys"
        else:
            continue
        yield Violation("growing", name, f"table {name!r} {fault}")


_MOST_SPAN = 50_000_000
"""Longest common period of strides to check, in row ranks."""
_MOST_WORK = 20_000_000
"""Most visits of shards to make, over all parts of a table."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The row ranks of low..high with a residue modulo `step`, in columns left..right."""

    low: int
    high: int
    left: int
    right: int
    step: int
    residue: int


def coverage_fault(table: Table, shards: Sequence[Shard]) -> str | None:
    """Return how well-formed shards fail to cover a table exactly once, or None if they do.

    Rows are not listed one by one. Divide the table at the columns where a shard begins or ends,
    and each part at such row ranks. Then one shard covers a part, or row slices share its ranks by
    strides. It takes n log n time for the n shards of a solver's plan.

    >>> halves = [Shard("t", (i, 10, 2), (0, 4), ("gpu:0",), "hbm", "device") for i in (0, 1)]
    >>> coverage_fault(Table("t", 10, 4), halves)
    >>> coverage_fault(Table("t", 10, 4), halves[:1])
    "table 't', columns 0..4: rank 1 is covered 0 times; every row must be covered once"
    """
    work = 0
    by_columns = _bands(_slices(shards, table.rows), "left", "right", table.dim)
    for left, right, columns in by_columns:
        for low, high, active in _bands(columns, "low", "high", table.rows):
            work += len(active) + 1
            if work > _MOST_WORK:
                words = "its shards lie over each other in too many ways to check"
                return f"table {table.name!r}: {words}"
            fault = _part_fault(active, low, high, f"columns {left}..{right}")
            if fault is not None:
                return f"table {table.name!r}, {fault}"
    return None


def _slices(shards: Sequence[Shard], rows: int) -> list[_Slice]:
    """Return shards as residue classes that begin and end at as few distinct row ranks as possible.

    An end may move freely between two members of its class. So strided slices that begin one rank
    after the other can all begin together.
    """
    held = [(shard, range(*shard.rows)) for shard in shards]
    held = [(shard, ranks) for shard, ranks in held if ranks]
    begins = [(max(ranks[0] - ranks.step + 1, 0), ranks[0]) for _, ranks in held]
    ends = [(ranks[-1] + 1, min(ranks[-1] + ranks.step, rows)) for _, ranks in held]
    place = _common_places([*begins, *ends])
    return [
        _Slice(place[begin], place[end], *shard.cols, ranks.step, ranks[0] % ranks.step)
        for (shard, ranks), begin, end in zip(held, begins, ends, strict=True)
    ]


def _common_places(ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return a number in each range, ends included, with as few distinct numbers as possible."""
    places: dict[tuple[int, int], int] = {}
    last = -1
    for first, end in sorted(set(ranges), key=lambda each: each[1]):
        if first > last:
            last = end
        places[first, end] = last
    return places


def _bands(
    slices: Sequence[_Slice], first: str, last: str, end: int
) -> Iterator[tuple[int, int, list[_Slice]]]:
    """Divide 0..end where a slice begins or ends; yield each part with the slices that cover it.

    `first` and `last` name the attributes of a slice's begin and end.
    """
    begins, ends = defaultdict(list), defaultdict(list)
    for one in slices:
        begins[getattr(one, first)].append(one)
        ends[getattr(one, last)].append(one)
    active: dict[int, _Slice] = {}
    for low, high in pairwise(sorted({0, end, *begins, *ends})):
        for one in ends.get(low, ()):
            del active[id(one)]
        active |= {id(one): one for one in begins.get(low, ())}
        yield low, high, list(active.values())


def _part_fault(active: Sequence[_Slice], low: int, high: int, columns: str) -> str | None:
    """Return how slices fail to cover each row rank of low..high once; None if they do."""
    if len(active) == 1 and active[0].step == 1:
        return None
    # Check one full period of the strides, or all ranks if they are fewer: each must have one
    # owner. The rest repeats.
    strides = {one.step for one in active}
    span = reduce(lambda period, step: min(math.lcm(period, step), high - low), strides, 1)
    if span > _MOST_SPAN:
        return f"strides {sorted(strides)[:9]} have too long a common period"
    owners = np.zeros(span, dtype=np.int32)
    for one in active:
        owners[(one.residue - low) % one.step :: one.step] += 1
    if (owners == 1).all():
        return None
    rank = int(np.flatnonzero(owners != 1)[0])
    times = f"rank {low + rank} is covered {owners[rank]} times"
    return f"{columns}: {times}; every row must be covered once"
