"""Read placed shards from a plan: the inverse of `solvers.model.build_plan`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cost_models import IN_DRAM, Cold, ShardingOption, TableShard, shards_of
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.tables import Table
from placer.topology.topology import Topology
from solvers.model.drive_rows import at_drive_share
from solvers.model.instance import Block, Instance, Placement

_COLDS: tuple[Cold, ...] = ("staged", "uva", "host", "cached")


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """A table's shards with their GPUs and hot rows, and the rows that every GPU holds."""

    option: ShardingOption  # If all rows are in HBM, the lookup of cold rows is a guess.
    placements: tuple[Placement, ...]  # In the order of shards; empty for a data-parallel table.
    replicas: Block  # One shard, or none.


def placements_of(instance: Instance, plan: Plan, table: str) -> TablePlacement | None:
    """Return a table's placement in a plan; None if no option or GPU matches.

    If shards match several options, prefer an option of the search space.
    """
    number = instance.problem.profile.table_numbers[table]
    return read_shards(
        number,
        instance.problem.profile.tables[number].table,
        plan.shards_by_table[table],
        instance.problem.topology,
        instance.options_of(number),
    )


def is_one_of(option: ShardingOption, options: Iterable[ShardingOption]) -> bool:
    """Return whether an option is one of others, whatever the order of its column slices."""
    return _sorted(option) in map(_sorted, options)


def _sorted(option: ShardingOption) -> ShardingOption:
    """Return a sharding option whatever its column slices' order."""
    return option._replace(column_widths=tuple(sorted(option.column_widths)))


def read_shards(
    number: int,
    table: Table,
    shards: Sequence[Shard],
    topology: Topology,
    options: Sequence[ShardingOption],
) -> TablePlacement | None:
    """Return the placement of table number `number` with these shards, on this machine's GPUs.

    Prefer `options` if shards match several.
    """
    at = topology.serving_numbers
    if not shards or any(device not in at for shard in shards for device in shard.devices):
        return None
    everywhere = [shard for shard in shards if len(shard.devices) > 1]
    replicated_rows = _head_of(table, everywhere, topology.gpus_by_id.keys())
    if replicated_rows is None:
        return None
    by_gpu: dict[int, list[Shard]] = {}
    for shard in shards:
        if len(shard.devices) == 1:
            by_gpu.setdefault(at[shard.devices[0]], []).append(shard)
    searched = set(map(_sorted, options))
    for option in sorted(
        _options_of(table, replicated_rows, by_gpu, options, len(topology.gpus)),
        key=lambda option: _sorted(option) not in searched,
    ):
        placements = _matched(number, table, option, by_gpu, len(topology.gpus))
        if placements is not None:
            replicas = (TableShard.replica(number, option),) if replicated_rows else ()
            return TablePlacement(option, tuple(placements), replicas)
    return None


def _head_of(table: Table, replicated: Sequence[Shard], gpus: Iterable[str]) -> int | None:
    """Return how many of the hottest rows every GPU has; None if other rows are replicated."""
    if not replicated:
        return 0
    first = replicated[0]
    everywhere = len(replicated) == 1 and set(first.devices) == set(gpus)
    hottest = range(*first.rows) == range(first.row_count)
    whole_rows = first.cols == (0, table.dim) and first.lookup == "device"
    return first.row_count if everywhere and hottest and whole_rows else None


def _options_of(
    table: Table,
    replicated_rows: int,
    by_gpu: dict[int, list[Shard]],
    searched: Sequence[ShardingOption],
    gpus: int,
) -> list[ShardingOption]:
    """Return the sharding options that match the shards' outlines.

    Servers, numbered from `gpus` on, pool rows in one way whatever the option says.
    """
    mine = [shard for part in by_gpu.values() for shard in part]
    on_gpus = [shard for gpu, part in by_gpu.items() for shard in part if gpu < gpus]
    filled = [shard for shard in on_gpus if shard.row_count]
    lookups = {shard.lookup for shard in filled or on_gpus} - {"device"}
    colds: tuple[Cold, ...] = {
        frozenset[str](): _COLDS,
        frozenset({"staged"}): ("staged",),
        # A cache without rows reads all rows in place.
        frozenset({"uva"}): ("uva", "cached"),
        frozenset({"host"}): ("host",),
        frozenset({"cached"}): ("cached",),
        frozenset({"cached", "uva"}): ("cached",),
    }.get(frozenset(lookups), ())
    column_ranges = sorted({shard.cols for shard in mine}) or [(0, table.dim)]
    if [0, *(last for _, last in column_ranges)] != [
        *(first for first, _ in column_ranges),
        table.dim,
    ]:
        return []
    column_widths = (
        tuple(last - first for first, last in column_ranges) if len(column_ranges) > 1 else ()
    )
    slices = max(1, len(by_gpu) // len(column_ranges))
    steps = {1} if not mine else {max(shard.rows[2] for shard in mine), slices}
    shapes = [ShardingOption(row_slices, column_widths) for row_slices in sorted(steps)]
    if slices > 1:
        shapes.append(ShardingOption(slices, column_widths, blocked=True, first_gpu=min(by_gpu)))
    dtypes = {shard.dtype or "" for shard in filled if shard.lookup != "device"} or {""}
    on_drive = any(shard.memory == "ssd" for shard in filled)
    homes = {IN_DRAM} if not on_drive and dtypes == {""} else {o.home for o in searched}
    return [
        shape._replace(replicated_rows=replicated_rows, cold=cold, home=home)
        for cold in colds
        for shape in shapes
        for home in sorted(homes, reverse=True)  # An open share on the drive comes last.
        if {home.dtype} == dtypes and (home.drive_share != 0) == on_drive
    ]


def _matched(
    number: int, table: Table, option: ShardingOption, by_gpu: dict[int, list[Shard]], gpus: int
) -> list[Placement] | None:
    """Return placements of an option's shards, if each GPU's shards are among them."""
    shards = shards_of(number, option, table.rows)
    if len(shards) != len(by_gpu):
        return None
    known: dict[tuple[tuple[int, int], int], TableShard] = {}
    empty: dict[tuple[int, int], list[TableShard]] = {}
    for table_shard in shards:
        rows, columns = range(*table_shard.rows(table.rows)), table_shard.columns(table.dim)
        if rows:
            known[columns, rows[0]] = table_shard
        else:
            empty.setdefault(columns, []).append(table_shard)
    placements = []
    for gpu, mine in sorted(by_gpu.items()):
        filled = [shard for shard in mine if shard.row_count]
        columns = (filled or mine)[0].cols
        if any(shard.cols != columns for shard in filled):
            return None
        if not filled:
            if not empty.get(columns):
                return None
            placements.append(Placement(empty[columns].pop(0), gpu, 0))
            continue
        filled_shard = known.pop((columns, min(shard.rows[0] for shard in filled)), None)
        hot = (
            None
            if filled_shard is None
            else _hot_rows(range(*filled_shard.rows(table.rows)), filled, option, gpu < gpus)
        )
        if filled_shard is None or hot is None:
            return None
        on_drive = sum(shard.row_count for shard in filled if shard.memory == "ssd")
        members = len(range(*filled_shard.rows(table.rows)))
        filled_shard = at_drive_share(filled_shard, on_drive, members)
        placements.append(Placement(filled_shard, gpu, hot))
    return sorted(placements, key=lambda placed: placed.shard)


def _hot_rows(
    rows: range, shards: Sequence[Shard], option: ShardingOption, is_gpu: bool
) -> int | None:
    """Return a shard's rows in HBM or a cache in the plan; None if rows do not match."""
    if not is_gpu:
        return 0 if [range(*shard.rows) for shard in shards] == [rows] else None
    cold = option.cold
    hot, in_dram, driven = ([s for s in shards if s.memory == m] for m in ("hbm", "dram", "ssd"))
    rest, count = in_dram + driven, sum(shard.row_count for shard in hot)
    edge = len(rows) - sum(shard.row_count for shard in driven)
    if option.home.drive_share == 1 and edge > count:
        return None
    parts = [part for part in (rows[:count], rows[count:edge], rows[edge:]) if part]
    if [range(*shard.rows) for shard in (*hot, *rest)] != parts:
        return None
    if cold != "cached":
        return count if all(shard.lookup == cold for shard in rest) else None
    if len(parts) > 1:
        return None
    cached = rest[0].cache_rows if rest else count
    # Plans write a cache of all rows as rows in HBM.
    return cached if cached < len(rows) or hot else None
