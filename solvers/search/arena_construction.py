"""Construct first assignments whose GPUs serve few arenas each.

An arena's launches take as long for one shard as for a hundred. If they take much of a step, divide
GPUs among arenas first, then pack each shard on the GPUs of its arena ("Construction" in
docs/solvers.md). On two problems of small batches, plans were 2 and 5% slower without.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from cost_models.arenas import Arena
from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption
from solvers.model.knapsack import BYTES, GPU_S, Bool, Float, Int
from solvers.search.construction import Homes, packed, short_options

_LEAST_SHARE = 0.02
"""Do nothing if all arenas' launches take less than this share of a step."""

_TRIED = 4
"""Pack shards for this many choices of widths, the most promising ones."""

_FEW_OPTIONS = 1500
"""Try any one or two widths if all tables together have at most this many options."""

_COARSE = 2
"""Largest number of shards in a table's cheapest option, as a multiple of the fewest."""

_MOST_SETS = 6
"""Divide at most this many sets of arenas among GPUs in every way; small arenas share one set."""

Arenas = frozenset[Arena]


class _Choice(NamedTuple):
    """Each table's sharding option, each arena's GPUs, and about the slowest GPU's time."""

    slowest_s: float
    options: tuple[ShardingOption, ...]
    homes: Homes


def assignments_by_arena(instance: Instance, bound: LagrangianBound) -> Iterator[Assignment]:
    """Yield assignments for a few choices of widths; none if launches cost little."""
    whole = _arenas_of_whole(instance)
    if min(instance.gpus, len(whole)) == 1 or _launches_share(instance, bound) < _LEAST_SHARE:
        return
    price = bound.price_s_per_byte
    candidates = _candidates(instance)
    choices = {}
    for arenas in _choices_of_arenas(whole, candidates):
        options = _options(instance, candidates, arenas, price)
        if options is not None and options not in choices:
            choices[options] = _choice(instance, options, price)
    known = [choice for choice in choices.values() if choice is not None]
    for choice in sorted(known, key=lambda choice: choice.slowest_s)[:_TRIED]:
        assignment = packed(instance, choice.options, price, choice.homes)
        if assignment is not None:
            yield assignment


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
    # Row slices of a column slice share its arena.
    columns = instance.shards(table, option)[:: option.row_slices]
    return frozenset(instance.arenas([*columns, *instance.replicas(table, option)]))


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


def _choice(
    instance: Instance, options: tuple[ShardingOption, ...], price: float
) -> _Choice | None:
    """Return GPUs for each arena so that none is slow; None if there are too few GPUs."""
    index, gpu = instance.price_index(price), instance.kinds[0]
    shards, replicas = instance.sharded(options)
    work_s: dict[Arena, float] = defaultdict(float)
    least: dict[Arena, int] = defaultdict(int)
    for shard in shards:
        arena = instance.arena_of(shard)
        bytes_, time_s = instance.costs_at(shard, gpu, index)[[BYTES, GPU_S]]
        work_s[arena] += float(time_s + price * bytes_)
        least[arena] = max(least[arena], shard.option.shard_count)
    everywhere = instance.arenas(replicas)
    launch_s = instance.launches_weighed_s(gpu)
    by_work = sorted(work_s, key=lambda arena: (-work_s[arena], arena))
    units = [frozenset([arena]) for arena in by_work[:_MOST_SETS]]
    if rest := by_work[_MOST_SETS:]:
        units[-1] |= frozenset(rest)
    best: tuple[float, list[tuple[Arenas, int]]] = math.inf, []
    for sets in _partitions(units):
        arenas = [frozenset().union(*each) for each in sets]
        if len(arenas) > instance.gpus:
            continue
        fixed_s = np.array([launch_s * len(each - everywhere) for each in arenas])
        total_s = np.array([math.fsum(work_s[arena] for arena in each) for each in arenas])
        at_least = np.array([max(least[arena] for arena in each) for each in arenas])
        shared = _shared(instance.gpus, fixed_s, total_s, at_least)
        if shared is not None and shared[0] < best[0]:
            best = shared[0], list(zip(arenas, shared[1], strict=True))
    if not best[1]:
        return None
    order, first = _spread_over_hosts(instance), 0
    homes: dict[Arena, Bool] = {}
    for arenas_of_set, count in best[1]:
        served = np.zeros(instance.gpus, dtype=bool)
        served[order[first : first + count]] = True
        homes |= dict.fromkeys(arenas_of_set, served)
        first += count
    return _Choice(best[0], options, homes)


def _shared(gpus: int, fixed_s: Float, work_s: Float, least: Int) -> tuple[float, list[int]] | None:
    """Return the slowest GPU's time and each set's number of GPUs; None if there are too few GPUs.

    `fixed_s`, `work_s`, shape (sets,): seconds of each GPU of a set, and seconds that the GPUs of
    the set share. `least`, int64, shape (sets,): least number of GPUs of a set.
    """
    counts = least.copy()
    if counts.sum() > gpus:
        return None
    for _ in range(gpus - int(counts.sum())):
        counts[int((fixed_s + work_s / counts).argmax())] += 1
    return float((fixed_s + work_s / counts).max()), counts.tolist()


def _partitions(units: Sequence[Arenas]) -> Iterator[list[list[Arenas]]]:
    """Yield all ways to divide units into sets."""
    if not units:
        yield []
        return
    for rest in _partitions(units[1:]):
        yield [[units[0]], *rest]
        for number, mine in enumerate(rest):
            yield [*rest[:number], [units[0], *mine], *rest[number + 1 :]]


def _spread_over_hosts(instance: Instance) -> list[int]:
    """Return GPUs in the order first GPU of each host, second GPU of each host, and so on."""
    seen: dict[int, int] = defaultdict(int)
    places = []
    for gpu, host in enumerate(instance.host_of_gpu):
        places.append((seen[host], gpu))
        seen[host] += 1
    return [gpu for _, gpu in sorted(places)]
