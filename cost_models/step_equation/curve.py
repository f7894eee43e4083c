"""Cost curves of the step equation: a shard's cost as a function of its rows in HBM."""

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
from placer.plan.fields import Lookup, Memory, Shard
from placer.plan.memory import (
    ROW_CACHE_ENTRY_BYTES,
    exchange_buffer_bytes,
    index_buffer_bytes,
    output_vectors,
    row_map_bytes,
    staging_buffer_bytes,
)
from placer.problem import Problem


def shard_curve(
    problem: Problem, shard: TableShard, gpu: int, costs: UnitCosts, shares: Float
) -> CostCurve:
    """Return the cost curve of a shard on a GPU, over the number of its hottest rows in HBM.

    Each point has the work of a hot and a cold shard in a plan, or of one shard with a cache if
    ``cached``; see `cost_models.step_equation.work`.
    """
    profile, option = problem.profile.tables[shard.table], shard.option
    spec, cold = profile.table, option.cold
    step_lookups = problem.global_batch_size * spec.lookups_per_sample
    # Costs of these kinds jump next to no hot rows and next to all.
    load = load_of(profile, shard.rows(spec.rows), step_lookups, cold in ("host", "cached"))
    all_lookups, all_unique = load.all_counts
    rows, (first, last) = int(load.hot_rows[-1]), shard.columns(spec.dim)
    width, row_bytes = last - first, spec.bytes_per_row(last - first)
    home_bytes = spec.bytes_per_row(width, option.home.dtype or None)
    sizes = float(spec.weight_bytes_per_row(width)), float(row_bytes), float(home_bytes)
    share = option.home.drive_share
    in_three, any_share = share not in (0, 1), share == ANY_SHARE
    edge = rows if any_share else option.home.first_on_drive(rows)
    if in_three:
        load = load.with_points([edge])
    hot = load.hot_rows
    # For each number of rows in HBM, the point at which the rows on the drive begin.
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
    seconds = _seconds(problem, shard, costs, sizes, shares, extras, load)
    drive_s = np.zeros_like(seconds)
    if share:
        row_s = drive_row_s(problem.topology, problem.topology.gpus[gpu].id, home_bytes)
        drive_s[COPIES] = row_s * load.counts[3]
        seconds += drive_s[:, driven]
    split = Extras()
    if cold != "cached":  # A cache is one shard with its rows, and finds rows by id.
        splits_map = not is_mapped and (in_three or profile.counts is not None)
        split = Extras(shards=1.0, mapped_lookups=all_lookups if splits_map else 0.0)
    split_phase_s = split.phase_s(costs)
    # If places depend on ranks that differ from ids, a map is needed. With replicated rows, every
    # GPU has this map anyway.
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
    """Return the cost of rows that are all in one memory, as a curve with one point.

    These are replicated rows, which each GPU reads for its own samples; or a shard on a host
    without GPUs, whose processors pool all rows for any `cold` of the option. Then `hbm_bytes` are
    bytes of the host's memory, and replicas cost nothing.
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
        gpu_s_of_phases=with_lanes(seconds[:HOST], problem.pipeline)[:, None],
        split_s_of_phases=with_lanes(np.zeros(ROWS), problem.pipeline),
    )


def _seconds(
    problem: Problem,
    shard: TableShard,
    costs: UnitCosts,
    sizes: tuple[float, float, float],
    shares: Float,
    extras: Extras,
    load: Load,
) -> Float:
    """Return the seconds of the phases and of the host's memory, shape (9, m)."""
    cold, hot, counts = shard.option.cold, load.hot_rows, load.counts

    def seconds_of(kind: ReadKind) -> Float:
        return read_matrix(costs, kind, sizes, shares)

    of_counts = np.zeros((HOST + 1, len(counts)))
    of_counts[:, :2] = seconds_of("hit" if cold == "cached" else "device")[:, :2]
    of_cold = seconds_of("miss" if cold == "cached" else cold)
    of_counts[:, 2:4] = of_cold[:, :2]
    always_s = of_counts[:HOST, 4] = extras.phase_s(costs)
    seconds: Float = of_counts @ counts
    if cold == "host":
        # With all rows in HBM, the host sends nothing. For a shard without rows, it sends empty
        # bags.
        sends = (hot < hot[-1]) | (hot[-1] == 0) | shard.is_stand_in
        seconds += sends * of_cold[:, 2:] * _host_vectors(problem, shard, counts[2])
        pooled = counts[2] if shard.is_stand_in else counts[0, -1] * (hot < hot[-1])
        seconds[:HOST] += Extras(pooled_lookups=1.0).phase_s(costs)[:, None] * pooled
    if cold == "cached":
        seconds[[LOOKUP, UPDATE]] += hot * costs.cache_row_s / 2
        # The ends of the curve have no cache: rows are read in place, or all rows are in HBM.
        ends: tuple[tuple[int, ReadKind], ...] = ((-1, "device"), (0, "uva"))
        for end, kind in ends:
            seconds[:, end] = seconds_of(kind)[:, :2] @ load.all_counts
            seconds[:HOST, end] += always_s
    return seconds


def _host_vectors(problem: Problem, shard: TableShard, cold_lookups: Float) -> Float:
    """Return the number of vectors that the host returns for cold rows, shape (m,)."""
    spec, samples = problem.profile.tables[shard.table].table, problem.global_batch_size
    total = float(cold_lookups[0])
    bags = output_vectors(spec, samples, 0.0)
    by_row = output_vectors(spec, samples, total) - bags
    return bags + by_row * (cold_lookups / total if total else np.zeros_like(cold_lookups))


def _buffer_bytes(problem: Problem, shard: TableShard, load: Load, on_drive: Float) -> Float:
    """Return bytes of a shard's buffers in HBM, (m,); `on_drive` rows in flight are on a drive."""
    spec, cold = problem.profile.tables[shard.table].table, shard.option.cold
    first, last = shard.columns(spec.dim)
    hot, (all_lookups, _) = load.hot_rows, load.all_counts
    fixed = exchange_buffer_bytes(spec, problem.global_batch_size, all_lookups, last - first)
    fixed += index_buffer_bytes(spec, all_lookups, last - first, problem.pipeline == "look-ahead")
    if cold not in ("staged", "cached"):
        return np.full(hot.size, fixed)
    # Rows in DRAM and rows on the drive are two shards, each with its own buffers.
    buffers = fixed + staging_buffer_bytes(spec, load.cold_in_flight - on_drive, last - first)
    buffers += staging_buffer_bytes(spec, on_drive, last - first)
    if cold == "cached":
        buffers[0] = fixed  # Without a cache, rows are read in place.
        buffers += np.where(hot < hot[-1], hot * ROW_CACHE_ENTRY_BYTES, 0)
    return buffers
