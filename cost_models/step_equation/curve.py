"""The step equation as a function of how many rows of a shard are in HBM."""

import numpy as np

from cost_models.base import ANY_SHARE, CostCurve, Float, TableShard
from cost_models.step_equation.loads import Load, load_of
from cost_models.step_equation.phases import (
    COPIES,
    HOST,
    LOOKUP,
    ROWS,
    UPDATE,
    ReadKind,
    UnitCosts,
    read_matrix,
    with_lanes,
)
from cost_models.step_equation.work import Extras, drive_row_s, exchange_of, works_anywhere
from placer.plan.buffers import (
    exchange_buffer_bytes,
    index_buffer_bytes,
    output_vectors,
    staging_buffer_bytes,
)
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, row_map_bytes
from placer.plan.shard import Lookup, Memory, Shard
from placer.problem import Problem


def shard_curve(
    problem: Problem, shard: TableShard, gpu: int, costs: UnitCosts, shares: Float
) -> CostCurve:
    """Return the cost of a shard on a GPU, with each number of its hottest rows in HBM.

    The work of each point is that of a plan with a hot and a cold shard (for ``cached`` ones, of
    one shard with a cache); see `cost_models.step_equation.work`.
    """
    profile, option = problem.profile.tables[shard.table], shard.option
    spec, cold = profile.table, option.cold
    step_lookups = problem.global_batch_size * spec.lookups_per_sample
    # Costs of some jump beside none and all.
    load = load_of(profile, shard.rows(spec.rows), step_lookups, cold in ("host", "cached"))
    all_lookups, all_unique = load.all_counts
    rows, (first, last) = int(load.hot_rows[-1]), shard.columns(spec.dim)
    width, row_bytes = last - first, spec.bytes_per_row(last - first)
    home_bytes = spec.bytes_per_row(width, option.home.dtype or None)
    share = option.home.drive_share
    in_three, any_share = share not in (0, 1), share == ANY_SHARE
    edge = rows if any_share else option.home.first_on_drive(rows)
    if in_three:
        load = load.with_points([edge])
    hot = load.hot_rows
    # Where the rows of the drive begin, for each number of rows in HBM.
    driven = np.maximum(np.arange(hot.size), np.searchsorted(hot, edge))
    all_rows, slices = option.row_slices == 1, max(1, len(option.column_widths))
    all_rows = all_rows and not option.replicated_rows
    counts = width, all_lookups, all_unique
    exchange = exchange_of(problem, shard.table, *counts, all_rows=all_rows, column_slices=slices)
    is_slice, by_rank = width < spec.dim, option.row_slices > 1 and not option.blocked
    is_mapped = by_rank or (in_three and profile.counts is not None)
    extras = Extras(
        **exchange,
        column_slices=float(is_slice),
        shards=1.0 + in_three,
        mapped_lookups=is_mapped * all_lookups,
        sliced_row_bytes=is_slice * all_unique * row_bytes,
    )
    seconds = _seconds(problem, shard, costs, shares, extras, load)
    drive_s = np.zeros_like(seconds)
    if share:
        row_s = drive_row_s(problem.topology, problem.topology.gpus[gpu].id, home_bytes)
        drive_s[COPIES] = row_s * load.counts[3]
        seconds += drive_s[:, driven]
    split = Extras()
    if cold != "cached":  # A cache and the rows behind it are one shard, and know them by id.
        splits_map = not is_mapped and (in_three or profile.counts is not None)
        split = Extras(shards=1.0, mapped_lookups=all_lookups if splits_map else 0.0)
    split_phase_s = split.phase_s(costs)
    # Ranks differ from ids, and so need a map, where they decide what is read where. With
    # replicated rows every GPU has that map anyway.
    has_map = profile.counts is not None and not option.replicated_rows
    map_bytes = row_map_bytes(spec) if has_map else 0
    buffers = _buffer_bytes(problem, shard, load, load.cold_in_flight[driven])
    in_dram = ((hot[driven] - hot) * home_bytes).astype(np.float64)
    if cold == "cached":
        in_dram = np.where(hot < rows, float(rows * row_bytes), 0.0)
    return CostCurve(
        hot_rows=hot,
        gpu_s=seconds[:HOST].sum(axis=0),
        dram_s=seconds[HOST].copy(),
        hbm_bytes=hot * row_bytes + buffers + (map_bytes if by_rank or in_three else 0),
        dram_bytes=in_dram,
        split_s=float(split_phase_s.sum()),
        split_hbm_bytes=0.0 if by_rank or in_three or cold == "cached" else float(map_bytes),
        gpu_s_of_phases=with_lanes(seconds[:HOST], problem.pipeline),
        split_s_of_phases=with_lanes(split_phase_s, problem.pipeline),
        drive_s=drive_s[:HOST].sum(axis=0) if any_share else None,
        drive_s_of_phases=with_lanes(drive_s[:HOST], problem.pipeline) if any_share else None,
    )


def point_curve(
    problem: Problem, shard: TableShard, costs: UnitCosts, shares: Float, server: str = ""
) -> CostCurve:
    """Return the cost of what is in one memory, however rows are divided there: it has one point.

    That is of rows that every GPU holds, for its own samples; or, on a host without GPUs, of a
    shard, all of whose rows its processors pool, however the option has cold rows read on GPUs.
    What solvers take for HBM is the memory of the host. Replicas cost nothing there.
    """
    profile, option = problem.profile.tables[shard.table], shard.option
    spec, rows = profile.table, shard.rows(profile.table.rows)
    first, last = shard.columns(spec.dim)
    count, width = len(range(*rows)), last - first
    seconds, size = np.zeros(HOST + 1), 0.0
    if not (server and shard.is_replica):
        devices = (server,) if server else tuple(problem.topology.gpu_numbers)
        memory: tuple[Memory, Lookup] = ("dram", "host") if server else ("hbm", "device")
        placed = Shard(spec.name, rows, (first, last), devices, *memory)
        slices = max(1, len(option.column_widths))
        ((work,),) = works_anywhere(problem, shard.table, [placed], column_slices=slices)
        seconds = work.seconds(costs, shares)
        samples = problem.global_batch_size // len(devices)
        size = exchange_buffer_bytes(spec, samples, work.lookups, width)
        size += index_buffer_bytes(spec, work.lookups, width, problem.pipeline == "look-ahead")
        size = (np.ceil(size) if server else size) + count * spec.bytes_per_row(width)
        by_rank = option.replicated_rows or (option.row_slices > 1 and not option.blocked)
        by_rank = count < spec.rows if shard.is_replica else by_rank
        if profile.counts is not None and by_rank:
            size += row_map_bytes(spec)
    return CostCurve(
        hot_rows=np.array([count if shard.is_replica else 0]),
        gpu_s=np.array([seconds[:HOST].sum()]),
        dram_s=seconds[HOST:],
        hbm_bytes=np.array([size]),
        dram_bytes=np.zeros(1),
        split_s=0.0,
        split_hbm_bytes=0.0,
        gpu_s_of_phases=with_lanes(seconds[:HOST], problem.pipeline)[:, None],
        split_s_of_phases=with_lanes(np.zeros(ROWS), problem.pipeline),
    )


def _seconds(
    problem: Problem, shard: TableShard, costs: UnitCosts, shares: Float, extras: Extras, load: Load
) -> Float:
    """Return seconds of the phases, and of the host's memory, shape (9, m)."""
    spec, cold = problem.profile.tables[shard.table].table, shard.option.cold
    hot, counts = load.hot_rows, load.counts
    first, last = shard.columns(spec.dim)
    weight_bytes, row_bytes = (
        float(of(last - first)) for of in (spec.weight_bytes_per_row, spec.bytes_per_row)
    )
    dtype = shard.option.home.dtype
    home_bytes = float(spec.bytes_per_row(last - first, dtype)) if dtype else 0.0

    def seconds_of(kind: ReadKind) -> Float:
        return read_matrix(costs, kind, (weight_bytes, row_bytes, home_bytes), shares)

    of_counts = np.zeros((HOST + 1, len(counts)))
    of_counts[:, :2] = seconds_of("hit" if cold == "cached" else "device")[:, :2]
    of_cold = seconds_of("miss" if cold == "cached" else cold)
    of_counts[:, 2:4] = of_cold[:, :2]
    always_s = of_counts[:HOST, 4] = extras.phase_s(costs)
    seconds: Float = of_counts @ counts
    if cold == "host":
        # With all rows in HBM there is nothing for the host to send; without any row it sends
        # empty bags.
        sends = (hot < hot[-1]) | (hot[-1] == 0) | shard.is_stand_in
        seconds += sends * of_cold[:, 2:] * _host_vectors(problem, shard, counts[2])
        pooled = counts[2] if shard.is_stand_in else counts[0, -1] * (hot < hot[-1])
        seconds[:HOST] += Extras(pooled_lookups=1.0).phase_s(costs)[:, None] * pooled
    if cold == "cached":
        seconds[[LOOKUP, UPDATE]] += hot * costs.cache_row_s / 2
        # Ends of a cache's curve are shards without one: in place, or just in HBM.
        ends: tuple[tuple[int, ReadKind], ...] = ((-1, "device"), (0, "uva"))
        for end, kind in ends:
            seconds[:, end] = seconds_of(kind)[:, :2] @ load.all_counts
            seconds[:HOST, end] += always_s
    return seconds


def _host_vectors(problem: Problem, shard: TableShard, cold_lookups: Float) -> Float:
    """Return vectors that the host returns of a shard's cold rows, shape (m,)."""
    spec, samples = problem.profile.tables[shard.table].table, problem.global_batch_size
    total = float(cold_lookups[0])
    bags = output_vectors(spec, samples, 0.0)
    by_row = output_vectors(spec, samples, total) - bags
    return bags + by_row * (cold_lookups / total if total else np.zeros_like(cold_lookups))


def _buffer_bytes(problem: Problem, shard: TableShard, load: Load, on_drive: Float) -> Float:
    """Return buffers of a shard in HBM, shape (m,); `on_drive` of its rows in flight lie there."""
    spec, cold = problem.profile.tables[shard.table].table, shard.option.cold
    first, last = shard.columns(spec.dim)
    hot, (all_lookups, _) = load.hot_rows, load.all_counts
    fixed = exchange_buffer_bytes(spec, problem.global_batch_size, all_lookups, last - first)
    fixed += index_buffer_bytes(spec, all_lookups, last - first, problem.pipeline == "look-ahead")
    if cold not in ("staged", "cached"):
        return np.full(hot.size, fixed)
    # Rows in DRAM and on the drive are shards with buffers of their own.
    buffers = fixed + staging_buffer_bytes(spec, load.cold_in_flight - on_drive, last - first)
    buffers += staging_buffer_bytes(spec, on_drive, last - first)
    if cold == "cached":
        buffers[0] = fixed  # Without a cache, rows are read in place.
        buffers += np.where(hot < hot[-1], hot * ROW_CACHE_ENTRY_BYTES, 0)
    return buffers
