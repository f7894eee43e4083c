"""Prove that no placement fits, and say what is short and by how much."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from cost_models import IN_DRAM
from placer.plan.fields import Memory
from placer.plan.memory import Shortage, drive_of, home_of, key_map_bytes
from placer.problem import Problem
from placer.topology.devices import Gpu, Host
from placer.units import counted, format_bytes, listed
from solvers.model.instance import Instance, ShardingOption
from solvers.result import Termination

_LEFT = "without what constraints reserve and dense layers take"

_LARGE = 2500
"""Look at all sharding options up to this many tables × GPUs."""


def impossible(instance: Instance) -> Termination | None:
    """Return a proof that nothing fits, or None if these tests do not find one.

    Every table needs buffers in HBM even without rows there, and all rows and buffers need room in
    HBM and DRAM together. If dividing a table makes neither smaller, only look at whole tables.
    """
    failure = _beyond_any_placement(instance)
    if failure:
        return failure
    hbm, dram = float(instance.hbm_bytes.sum()), float(instance.all_dram_bytes.sum())
    of_gpus = instance.all_hbm_bytes
    # A shard takes as many bytes of a server as of a GPU with all rows in HBM.
    whole_is_least = instance.sharding_overhead_s is not None
    needs = []
    for table in range(instance.tables):
        needs.append(_least_of(instance, table, instance.options_of(table)[0]))
        # Bounds need these curves next, so the cache should still have them.
        instance.priced_costs(instance.whole(table), instance.kinds[0])
    if math.fsum(n for n, _ in needs) <= hbm and math.fsum(n for _, n in needs) <= hbm + dram:
        return None  # If these options fit, so do the smallest ones.
    needs = [_least_bytes(instance, table, whole_is_least) for table in range(instance.tables)]
    least_hbm = math.fsum(need for need, _ in needs)
    if least_hbm > hbm:
        short = math.ceil(least_hbm - hbm)
        what, ruled = "every table in DRAM, the buffers", ""
        if instance.problem.constraints.tables:
            what = "as many rows in DRAM as constraints allow, the other rows and the buffers"
            ruled = ", or relax constraints"
        return _infeasible(
            Shortage("all GPUs", "hbm", short, "buffers of staged rows and exchanges"),
            f"even with {what} of a step of {counted(instance.problem.batch_size, 'sample')} per "
            f"GPU take {format_bytes(least_hbm)} of HBM; the GPUs have {format_bytes(of_gpus)} "
            + f"and hosts without GPUs {format_bytes(hbm - of_gpus)} " * (instance.servers > 0)
            + f"together, {_LEFT}. Lower --batch-size or raise --hbm{ruled}",
        )
    least = math.fsum(need for _, need in needs)
    if least > hbm + dram:
        short = math.ceil(least - hbm - dram)
        return _infeasible(
            Shortage("all hosts", "dram", short, "weights, optimizer state and buffers"),
            f"the tables take {format_bytes(least)} with optimizer state and buffers; HBM "
            f"({format_bytes(of_gpus)}) and DRAM ({format_bytes(hbm + dram - of_gpus)}), {_LEFT}, "
            f"together are short by {format_bytes(short)} ({short} bytes). Use more or larger "
            "machines, a smaller dim or dtype, or an optimizer with less state",
        )
    return None


def _beyond_any_placement(instance: Instance) -> Termination | None:
    """Prove that a device has no room for key maps, or all memories together none for rows.

    The place of key maps does not depend on the plan. Cost curves do not count bytes on drives, so
    rows are counted here if there are drives.
    """
    problem, topology = instance.problem, instance.problem.topology
    keys = key_map_bytes(topology, problem.growing)
    devices: tuple[Gpu | Host, ...] = (*topology.gpus, *topology.hosts)
    for device in devices:
        short = keys[device.id] - device.memory_bytes
        if short > 0:
            memory: Memory = "hbm" if isinstance(device, Gpu) else "dram"
            return _infeasible(
                Shortage(device.id, memory, short, "key maps"),
                f"the key maps of the tables that grow ({', '.join(problem.growing)}) take "
                f"{format_bytes(keys[device.id])} of {device.id}, which has "
                f"{format_bytes(device.memory_bytes)}: {short} bytes too many. Raise "
                f"--{memory}, or let tables grow to fewer rows",
            )
    if not any(host.drive for host in topology.hosts):
        return None
    least = sum(_least_row_bytes(instance, table) for table in range(instance.tables))
    room = sum(_room_bytes(problem).values())
    if least <= room:
        return None
    short = least - room
    return _infeasible(
        Shortage("all hosts", "ssd", short, "weights and optimizer state"),
        f"the rows take {format_bytes(least)} with optimizer state; HBM, DRAM and drives together "
        f"have {format_bytes(room)}: {format_bytes(short)} ({short} bytes) less. Raise --ssd or "
        "--dram, or take a smaller dim or dtype, or an optimizer with less state",
    )


def _least_row_bytes(instance: Instance, number: int, *, narrow: bool = True) -> int:
    table = instance.problem.profile.tables[number].table
    homes = {one.home for one in instance.options_of(number)} if narrow else {IN_DRAM}
    return table.rows * min(table.bytes_per_row(dtype=home.dtype or None) for home in homes)


def _room_bytes(problem: Problem) -> dict[tuple[Memory, str], int]:
    """Return what each memory has beside the key maps, by what it is and the device that has it."""
    topology = problem.topology
    keys = key_map_bytes(topology, problem.growing)
    room: dict[tuple[Memory, str], int] = {}
    room |= {("hbm", gpu.id): gpu.memory_bytes - keys[gpu.id] for gpu in topology.gpus}
    room |= {("dram", host.id): host.memory_bytes - keys[host.id] for host in topology.hosts}
    return room | {
        ("ssd", host.id): host.drive.memory_bytes for host in topology.hosts if host.drive
    }


def rows_beyond_their_memories(instance: Instance) -> Termination | None:
    """Return a proof that rows do not fit into the memories where constraints let them be.

    Tables that may be in the same memories share them with those that may be in some of these.
    Buffers are not counted.
    """
    problem, topology = instance.problem, instance.problem.topology
    room = {
        drive_of(device) if memory == "ssd" else device: (memory, size)
        for (memory, device), size in _room_bytes(problem).items()
    }
    homes_of: dict[tuple[str | None, bytes], frozenset[str]] = {}
    tables_in: dict[frozenset[str], dict[str, int]] = defaultdict(dict)
    for number, profile in enumerate(problem.profile):
        tier, allowed = problem.constraints.rule_of(profile.name).tier, instance.allowed(number)
        rule = tier, b"" if allowed is None else allowed.tobytes()
        if rule not in homes_of:
            memories: tuple[Memory, ...] = ("hbm", "dram", "ssd") if tier is None else (tier,)
            homes_of[rule] = frozenset(
                home_of(topology, device.id, memory)
                for place, device in enumerate(topology.serving)
                if allowed is None or allowed[place]
                for memory in memories
            ).intersection(room)
        size = _least_row_bytes(instance, number, narrow=tier != "hbm")
        tables_in[homes_of[rule]][profile.name] = size
    shortages: list[tuple[int, list[str], list[str]]] = [(0, [], [])]
    for homes in tables_in:
        inside = [sizes for others, sizes in tables_in.items() if others <= homes]
        needed = sum(sum(sizes.values()) for sizes in inside)
        has = sum(room[home][1] for home in homes)
        shortages.append((needed - has, sorted(homes), [name for of in inside for name in of]))
    short, homes_short, tables = max(shortages)
    if short <= 0:
        return None
    has = sum(room[home][1] for home in homes_short)
    devices = [home.removesuffix(" ssd") for home in homes_short]
    where = [f"the {room[n][0].upper()} of {d}" for n, d in zip(homes_short, devices, strict=True)]
    memory = min(room[home][0] for home in homes_short)  # DRAM, or HBM, or drives.
    advice = f"Raise --{memory}"
    if not any(topology.gpus_of(device) or device in topology.gpus_by_id for device in devices):
        advice = "Take hosts with more memory (--dram is of hosts with GPUs)"
    shortage = Shortage(listed(devices, 4), memory, short, "weights and optimizer state")
    return _infeasible(
        shortage,
        f"rows of {listed(tables, 4)} may only be in {listed(where, 4)}, and take "
        f"{format_bytes(short + has)} ({short + has} bytes) with optimizer state; there are "
        f"{format_bytes(has)} ({has} bytes), {_LEFT}. {advice}, or relax constraints",
    )


def memory_in_words(instance: Instance) -> str:
    """Say what rows take at least, and what memories have."""
    needed = sum(_least_row_bytes(instance, table) for table in range(instance.tables))
    sizes: Counter[Memory] = Counter()
    for (memory, _), size in _room_bytes(instance.problem).items():
        sizes[memory] += size
    has = ", ".join(f"{format_bytes(size)} of {memory.upper()}" for memory, size in sizes.items())
    return f"rows take {format_bytes(needed)} with optimizer state, beside buffers; there are {has}"


def usable_options(instance: Instance) -> list[list[ShardingOption]] | Termination:
    """Return the options of each table that some GPU has room for.

    A table that fits only as replicas is on every GPU, which leaves less room for other tables. For
    many tables on many GPUs, return all options.

    If a table has no such option, return a proof that nothing fits.
    """
    usable = [list(instance.options_of(table)) for table in range(instance.tables)]
    is_large = instance.tables * instance.gpus > _LARGE
    if is_large and instance.sharding_overhead_s is not None:
        return usable
    needs = [[_least_on_one(instance, t, option) for option in of] for t, of in enumerate(usable)]
    held_bytes = np.zeros(instance.tables)
    while True:
        before = held_bytes.copy()
        for table, of in enumerate(usable):
            others = float(before.sum() - before[table])
            gpus = instance.gpus - instance.servers
            room = instance.hbm_bytes[:gpus] - others
            of_servers = instance.hbm_bytes[gpus:].max(initial=0.0)
            fitting = [
                replicas <= room.min() and (replicas + shard <= room.max() or shard <= of_servers)
                for replicas, shard in needs[table]
            ]
            if not any(fitting):
                replicas, shard = min(needs[table], key=sum)
                return _fits_nowhere(instance, table, replicas, shard, others)
            usable[table] = [option for option, fits in zip(of, fitting, strict=True) if fits]
            needs[table] = [need for need, fits in zip(needs[table], fitting, strict=True) if fits]
            held_bytes[table] = min(replicas for replicas, _ in needs[table])
        if (held_bytes == before).all():
            return usable


def _least_on_one(instance: Instance, table: int, option: ShardingOption) -> tuple[float, float]:
    """Return the least HBM bytes of an option's replicas per GPU, and of its largest shard."""
    replicas, shards = (
        [float(instance.curve(shard, instance.kinds[0]).hbm_bytes.min()) for shard in every]
        for every in (instance.replicas(table, option), instance.shards(table, option))
    )
    return sum(replicas, 0.0), max(shards, default=0.0)


def _fits_nowhere(
    instance: Instance, table: int, replicas_bytes: float, shard_bytes: float, others_bytes: float
) -> Termination:
    name = instance.problem.profile.tables[table].table.name
    hbm_bytes = instance.hbm_bytes[: instance.gpus - instance.servers]
    least_bytes, hbm = replicas_bytes + shard_bytes, float(hbm_bytes.max())
    which, has = "one", f"has {format_bytes(hbm)} at most"
    if least_bytes + others_bytes <= hbm:  # Then a smaller GPU has no room for the replicas.
        least_bytes, hbm = replicas_bytes, float(hbm_bytes.min())
        which, has = "each", f"the smallest has {format_bytes(hbm)}"
    short = math.ceil(least_bytes + others_bytes - hbm)
    beside = (
        f", beside {format_bytes(others_bytes)} of other tables that have to be replicated"
        if others_bytes
        else ""
    )
    return _infeasible(
        Shortage("any GPU", "hbm", short, f"buffers and rows of table {name}"),
        f"table {name!r} fits no GPU however it is divided: {which} needs "
        f"{format_bytes(least_bytes)} of HBM for it{beside}, and {has}. Lower --batch-size, raise "
        "--hbm, or relax constraints",
    )


def nothing_fits(instance: Instance, short_bytes: Mapping[tuple[Memory, int], int]) -> Termination:
    """Say that no assignment fits, and which bytes an assignment lacks that lacks little.

    `short_bytes`: bytes that ``"hbm"`` of a GPU, or ``"dram"`` or ``"ssd"`` of a host, lacks there,
    if that is known.
    """
    topology = instance.problem.topology
    shortages = tuple(
        Shortage(
            topology.serving[number].id if kind == "hbm" else topology.hosts[number].id,
            "dram" if kind == "hbm" and number >= len(topology.gpus) else kind,
            short,
            "what the best assignment of shards to GPUs that was found lacks",
        )
        for (kind, number), short in sorted(short_bytes.items())
    )
    has = _room_bytes(instance.problem)
    words = " and ".join(
        f"{format_bytes(s.short_bytes)} ({s.short_bytes} bytes) of {s.resource.upper()} on "
        f"{s.device}, which has {format_bytes(has[s.resource, s.device])}"
        for s in shortages
    )
    return Termination(
        "infeasible",
        detail="no assignment of shards to GPUs fits: "
        + (f"the best one found lacks {words}" if words else memory_in_words(instance))
        + ". Use more or larger devices, lower --batch-size, or relax constraints",
        shortages=shortages,
    )


def _least_bytes(instance: Instance, table: int, whole_is_least: bool) -> tuple[float, float]:
    """Return the fewest bytes of a table in HBM, and in HBM and DRAM together."""
    options = instance.options_of(table)
    few = [o for o in options if not o.replicated_rows]
    few = [o for o in few if o.shard_count == 1 or not whole_is_least]
    # Replicas only add bytes, so count them only if nothing else is allowed.
    least_bytes = [_least_of(instance, table, option) for option in few or options]
    return min(need for need, _ in least_bytes), min(need for _, need in least_bytes)


def _least_of(instance: Instance, table: int, option: ShardingOption) -> tuple[float, float]:
    shards = instance.shards(table, option)
    shards = [*shards, *instance.replicas(table, option) * instance.gpus]
    curves = [instance.curve(shard, instance.kinds[0]) for shard in shards]
    return (
        math.fsum(float(curve.hbm_bytes.min()) for curve in curves),
        math.fsum(float((curve.hbm_bytes + curve.dram_bytes).min()) for curve in curves),
    )


def _infeasible(shortage: Shortage, detail: str) -> Termination:
    return Termination("infeasible", detail=detail, shortages=(shortage,))
