"""Other placements of one table of a plan: other hot/cold splits, GPUs and sharding options."""

from collections.abc import Iterator

from cost_models import ShardingOption, TableShard
from solvers.analysis.planned_table import Alternative, PlannedTable
from solvers.model.instance import Placement
from solvers.model.knapsack import BYTES
from solvers.model.read_plan import is_one_of

_MOST_GPUS = 8
"""Other GPUs that a table is tried on, those with room and the least load first."""

_COLD_NAMES = {
    "staged": "staged",
    "uva": "cold rows read in place",
    "host": "cold rows pooled by the host",
    "cached": "cold rows through a cache",
}


def alternatives(planned: PlannedTable) -> tuple[Alternative, ...]:
    """List all rows in one tier, then other GPUs and sharding options, the best first."""
    splits = list(_other_splits(planned))
    others = (*_on_other_gpus(planned), *_other_options(planned))
    return (*splits, *sorted(others, key=_rank))


def _rank(one: Alternative) -> tuple[bool, float, float]:
    """Sort alternatives that fit first, then faster ones."""
    return bool(one.short_bytes), one.step_time_s, one.table_s


def _other_splits(planned: PlannedTable) -> Iterator[Alternative]:
    """Yield all rows in one tier, the shards where they are."""
    instance, placed = planned.instance, planned.placements
    curves = [instance.curve(p.shard, p.gpu) for p in placed]
    for name, end in (("all rows in HBM", -1), ("all rows in DRAM", 0)):
        moved = [
            Placement(p.shard, p.gpu, int(curve.hot_rows[end]))
            for p, curve in zip(placed, curves, strict=True)
        ]
        # Where constraints rule a tier out, the curve ends before all rows are in it.
        wanted = [
            len(range(*p.shard.rows(instance.rows(planned.number)))) if end else 0 for p in moved
        ]
        if moved != list(placed) and [p.hot_rows for p in moved] == wanted:
            yield from planned.costed(name, planned.placed(moved, planned.replica))


def _on_other_gpus(planned: PlannedTable) -> Iterator[Alternative]:
    """Yield the shard on the slowest GPU moved to other GPUs, which serve none of the table."""
    placed = planned.placements
    if not placed or planned.in_group:
        return
    times = planned.cost.gpu_s.tolist()
    slowest = max(placed, key=lambda p: (times[p.gpu], -p.gpu))
    taken = {p.gpu for p in placed}
    others = [gpu for gpu in _roomy_first(planned, slowest.shard) if gpu not in taken]
    ids = [gpu.id for gpu in planned.problem.topology.gpus]
    what = "" if len(placed) == 1 else f"shard of {ids[slowest.gpu]} "
    for gpu in others[:_MOST_GPUS]:
        pairs = [(p.shard, gpu if p is slowest else p.gpu) for p in placed]
        own = planned.filled(pairs, planned.replica)
        yield from planned.costed(f"{what}on {ids[gpu]}", own)


def _other_options(planned: PlannedTable) -> Iterator[Alternative]:
    """Yield other sharding options, the best of those with equally many row and column slices."""
    instance = planned.instance
    best: dict[tuple[object, ...], Alternative] = {}
    for option in instance.options_of(planned.number):
        if is_one_of(option, [planned.option]) or option.shard_count > instance.gpus:
            continue
        shards = instance.shards(planned.number, option)
        gpus = _roomy_first(planned, shards[0]) if shards else []
        if planned.in_group:  # It stays with its group.
            gpus = [placed.gpu for placed in planned.placements]
        if option.blocked:
            gpus = [shard.home_gpu for shard in shards if shard.home_gpu is not None]
        if len(gpus) < len(shards):
            continue
        name = _option_name(option, instance.rows(planned.number))
        own = planned.filled(
            list(zip(shards, gpus, strict=False)), instance.replica(planned.number, option)
        )
        # Options alike but for the widths of their column slices and the share in HBM.
        kind = option._replace(
            column_widths=(0,) * len(option.column_widths), share=0.0, first_gpu=0
        )
        for one in planned.costed(name, own):
            best[kind] = min(best.get(kind, one), one, key=_rank)
    yield from best.values()


def _roomy_first(planned: PlannedTable, shard: TableShard) -> list[int]:
    """Return GPUs that may serve a shard: first those with room for its buffers, then by load."""
    instance, gpu_s = planned.instance, planned.others_cost.gpu_s

    def lacks_room(gpu: int) -> bool:
        return planned.free_hbm[gpu] < float(instance.priced_costs(shard, gpu)[BYTES].min())

    return sorted(
        (gpu for gpu in range(instance.gpus) if instance.may_serve(shard, gpu)),
        key=lambda gpu: (lacks_room(gpu), gpu_s[gpu], gpu),
    )


def _option_name(option: ShardingOption, rows: int) -> str:
    if option.replicated_rows >= rows > 0:
        return "replicated on every GPU"
    words = []
    if option.row_slices > 1:
        words.append(f"{option.row_slices} {'blocks of rows' if option.blocked else 'row slices'}")
    if option.column_widths:
        widths = "+".join(map(str, option.column_widths))
        words.append(f"{len(option.column_widths)} column slices of {widths} columns")
    name = " x ".join(words) or "in one piece"
    if option.replicated_rows:
        name = f"{option.replicated_rows:,} hottest rows on every GPU, the others {name}"
    return name if option.cold == "staged" else f"{name}, {_COLD_NAMES[option.cold]}"
