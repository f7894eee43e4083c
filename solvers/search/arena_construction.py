"""Construct first assignments of few arenas.

An arena's launches take as long for one shard as for a hundred. If they take much of a step, shards
of few widths are best, and moving a single shard saves no launch. So choose the widths of all
tables together. Wide tables may be cut into columns of a narrower table's width, which makes one
arena of two. Without, plans of the cost greedy were 4 to 14% slower on three of 32 problems.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from cost_models.arenas import Arena
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption
from solvers.model.knapsack import BYTES, GPU_S
from solvers.search.construction import packed, short_options

_LEAST_SHARE = 0.02
"""Do nothing if all arenas' launches take less than this share of a step."""

_TRIED = 4
"""Pack shards for this many choices of widths, the most promising ones."""

_FEW_OPTIONS = 1500
"""Try any one or two widths if all tables together have at most this many options."""

_COARSE = 2
"""Largest number of shards in a table's cheapest option, as a multiple of the fewest."""

Arenas = frozenset[Arena]


def assignments_by_arena(instance: Instance, bound: LagrangianBound) -> Iterator[Assignment]:
    """Yield assignments for a few choices of widths; none if launches cost little.

    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers.bounds.lagrangian import lagrangian_bound
    >>> problem = Problem(named_workload("random-12"), Topology.parse("8xh100"), 16)
    >>> instance = Instance(problem, Roofline())
    >>> found = list(assignments_by_arena(instance, lagrangian_bound(instance)))
    >>> min(max(len(instance.arenas(mine)) for mine in one.shards) for one in found)
    1
    """
    whole = _arenas_of_whole(instance)
    if min(instance.gpus, len(whole)) == 1 or _launches_share(instance, bound) < _LEAST_SHARE:
        return
    price = bound.price_s_per_byte
    candidates = _candidates(instance)
    mean_s: dict[tuple[ShardingOption, ...], float] = {}
    for arenas in _choices_of_arenas(whole, candidates):
        options = _options(instance, candidates, arenas, price)
        if options is not None and options not in mean_s:
            mean_s[options] = _mean_s(instance, options, price)
    for options in sorted(mean_s, key=mean_s.__getitem__)[:_TRIED]:
        assignment = packed(instance, options, price)
        if assignment is not None:
            yield assignment


def _mean_s(instance: Instance, options: Sequence[ShardingOption], price: float) -> float:
    """Return about the mean GPU's seconds, and its price of HBM, if each GPU has all arenas."""
    index, gpu = instance.price_index(price), instance.kinds[0]
    shards, replicas = instance.sharded(options)
    work_s = sum(
        float(instance.costs_at(shard, gpu, index)[[BYTES, GPU_S]] @ (price, 1.0))
        for shard in shards
    )
    arenas = instance.arenas([*shards, *replicas])
    return work_s / instance.gpus + len(arenas) * instance.launches_weighed_s(gpu)


def whole_tables(instance: Instance, bound: LagrangianBound) -> Assignment | None:
    """Return an assignment of whole tables; None if launches cost little or nothing fits."""
    if _launches_share(instance, bound) < _LEAST_SHARE:
        return None
    options = [instance.whole(table).option for table in range(instance.tables)]
    return packed(instance, options, bound.price_s_per_byte)


def _launches_share(instance: Instance, bound: LagrangianBound) -> float:
    """Return the time of all arenas' launches on a GPU, as a share of the bound of a step."""
    launch_s = max(instance.launches_weighed_s(gpu) for gpu in instance.kinds)
    step_s = bound.step_time_s + instance.fixed_s
    return launch_s * len(_arenas_of_whole(instance)) / step_s if step_s else 0.0


def _arenas_of_whole(instance: Instance) -> set[Arena]:
    return {instance.arena_of(instance.whole(table)) for table in range(instance.tables)}


def _candidates(instance: Instance) -> list[dict[ShardingOption, Arenas]]:
    """Return each table's options with their arenas, without replicas if a table has such options.

    Replicas would launch a kernel on every GPU.
    """
    candidates = []
    for table in range(instance.tables):
        usual = instance.options_of(table)[0].cold
        every = [each for each in instance.options_of(table) if each.cold == usual]
        alone = [each for each in every if not each.replicated_rows]
        candidates.append({each: _arenas_of(instance, table, each) for each in alone or every})
    return candidates


def _arenas_of(instance: Instance, table: int, option: ShardingOption) -> Arenas:
    replica = instance.replica(table, option)
    # Row slices of a column slice share its arena.
    columns = instance.shards(table, option)[:: option.row_slices]
    return frozenset(instance.arenas([*columns, *([replica] if replica else [])]))


def _choices_of_arenas(
    whole: set[Arena], candidates: Sequence[dict[ShardingOption, Arenas]]
) -> Iterator[Arenas]:
    """Yield sets of arenas: of whole tables up to a width, and of any one or two widths."""
    for width in sorted({arena[2] for arena in whole}):
        yield frozenset(arena for arena in whole if arena[2] <= width)
    if sum(map(len, candidates)) > _FEW_OPTIONS:
        return
    known = set().union(*(arenas for options in candidates for arenas in options.values()))
    widths = sorted({arena[2] for arena in known})
    for chosen in chain(combinations(widths, 1), combinations(widths, 2)):
        yield frozenset(arena for arena in known if arena[2] in chosen)


def _options(
    instance: Instance,
    candidates: Sequence[dict[ShardingOption, Arenas]],
    arenas: Arenas,
    price: float,
) -> tuple[ShardingOption, ...] | None:
    """Return each table's cheapest option whose shards are in these arenas.

    Options with shards that a phase would wait for give way to finer ones. A table without such an
    option may take any. Return None if few tables have one.
    """
    index, allowed, others = instance.price_index(price), [], 0
    for options in candidates:
        fitting = [option for option, needed in options.items() if needed <= arenas]
        others += not fitting
        allowed.append(fitting or list(options))
    if others > instance.tables // 2:
        return None

    def cost_s(table: int, option: ShardingOption) -> tuple[float, ShardingOption]:
        bytes_, time_s = instance.option_costs_at(table, option, index)
        return float(time_s + price * bytes_), option

    cheapest = [
        min(cost_s(table, option) for option in _coarse(options))[1]
        for table, options in enumerate(allowed)
    ]
    return tuple(short_options(instance, cheapest, price, 1.0, allowed))


def _coarse(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Return options with few shards."""
    most = _COARSE * min(option.shard_count for option in options)
    return [option for option in options if option.shard_count <= most]
