"""Turn the sharding options of TorchRec's enumerator into arrays, with load factors of caches.

A candidate is a sharding option, with one load factor if the option leaves it free. Importing this
needs torchrec.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.types import PartitionByType
from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from cost_models.torchrec.estimates import LOAD_FACTORS, Many
from solvers.model.knapsack import Float
from solvers.search.candidates.placement import Group

Candidates = tuple[Float, Float, list[tuple[TorchRecOption, float | None]]]
"""Times, bytes and sources of candidates: the option and the load factor of each."""

TIERS = ("hbm", "ddr", "ssd")
"""TorchRec's names of the tiers of a rank's memory."""


def candidates_of(
    options: Sequence[TorchRecOption],
    estimate: Callable[[list[TorchRecOption]], None],
    ranks: int,
    local_ranks: int,
    memory: Float,
) -> dict[str, list[Group]]:
    """Return the candidates of each table, by its `fqn`, that some ranks have memory for.

    - `options`: options of an enumerator, with estimates.
    - `estimate`: writes times and bytes into options, such as the enumerator's
      `populate_estimates`.
    - `local_ranks`: number of ranks on a host.
    - `memory`, shape (ranks, tiers): bytes of each rank's memory, by tier.
    """
    tables: dict[str, list[TorchRecOption]] = {option.fqn: [] for option in options}
    for option in options:
        tables[option.fqn].append(option)
    # Of options that cost the same, `Group.worthwhile` keeps the first.
    ordered = [own for table in tables.values() for own in sorted(table, key=_simpler_first)]
    estimated = _with_factors([o for o in ordered if has_free_load_factor(o)], estimate)
    shapes: dict[tuple[Any, ...], list[Candidates]] = defaultdict(list)
    for option in ordered:
        placed = _units_of(option, ranks, local_ranks)
        if placed is not None:
            own = estimated.get(id(option), option)
            factors: list[float | None] = [None]
            if own is not option:
                factors = np.atleast_1d(np.asarray(own.cache_params.load_factor)).tolist()
            sources = [(option, factor) for factor in factors]
            shapes[option.fqn, *placed].append((*_arrays(option, own), sources))
    found: dict[str, list[Group]] = {name: [] for name in tables}
    for (name, span, units, same_host, distinct_ranks), several in shapes.items():
        seconds, tier_bytes = (
            np.concatenate(own) for own in zip(*(own[:2] for own in several), strict=True)
        )
        group = Group(
            span,
            same_host,
            distinct_ranks,
            seconds.reshape(-1, units, span),
            tier_bytes.reshape(-1, units, span, len(TIERS)),
            [source for *_, sources in several for source in sources],
        ).worthwhile(memory)
        if group is not None:
            found[name].append(group)
    return found


def has_free_load_factor(option: TorchRecOption) -> bool:
    """Return whether the search may choose the load factor of a cached option.

    Without statistics, TorchRec counts no misses, so the smallest cache would seem best.
    """
    params = option.cache_params
    return (
        option.compute_kernel == "fused_uvm_caching"
        and params is not None
        and params.load_factor is None
        and params.stats is not None
    )


def with_load_factor(option: TorchRecOption, factor: float | None) -> TorchRecOption:
    """Return a copy of an option, with a load factor unless it is None, without new estimates."""
    changed = copy.deepcopy(option)
    if factor is not None:
        changed.cache_params = replace(changed.cache_params, load_factor=factor)
    return changed


def _with_factors(
    options: list[TorchRecOption], estimate: Callable[[list[TorchRecOption]], None]
) -> dict[int, TorchRecOption]:
    """Return estimated copies with many load factors, by the `id` of the given options.

    TorchRec's own estimators accept all factors at once. If a user's estimator does not, estimate
    only TorchRec's default factor.
    """
    many = [_of_shards_of_each_size(option) for option in options]
    # Estimate one option of each sharding type with one factor as well, to check the array.
    checked = {
        option.sharding_type: (with_load_factor(option, float(LOAD_FACTORS[-1])), own)
        for option, own in zip(options, many, strict=True)
    }
    try:
        estimate(many)
        estimate([one for one, _ in checked.values()])
        agrees = all(
            np.allclose(ours[-1:], theirs)
            for one, own in checked.values()
            for ours, theirs in zip(_arrays(one, own), _arrays(one, one), strict=True)
        )
    except Exception:  # A user's estimator may raise anything for arrays.
        agrees = False
    if not agrees:
        many = [with_load_factor(option, UVM_CACHING_RATIO) for option in options]
        estimate(many)
    return dict(zip(map(id, options), many, strict=True))


def _of_shards_of_each_size(option: TorchRecOption) -> TorchRecOption:
    """Return a copy with many load factors and one shard of each size, as sizes cost the same."""
    changed = copy.copy(option)
    sizes = {tuple(shard.size): shard for shard in reversed(option.shards)}
    changed.shards = [TorchRecShard(size=s.size, offset=s.offset) for s in sizes.values()]
    changed.cache_params = replace(option.cache_params, load_factor=LOAD_FACTORS.view(Many))
    return changed


def _simpler_first(option: TorchRecOption) -> int:
    kinds = ["table_wise", "row_wise", "column_wise", option.sharding_type]
    return kinds.index(option.sharding_type)


def _units_of(
    option: TorchRecOption, ranks: int, local_ranks: int
) -> tuple[int, int, bool, bool] | None:
    """Return the ranks of a unit, the units, and two rules (see `Group`); None if none fit."""
    shards, by = len(option.shards), option.partition_by
    if by == PartitionByType.UNIFORM.value:
        return (ranks, 1, False, False) if shards == ranks else None
    if by == PartitionByType.MULTI_HOST.value or option.sharding_type == "table_row_wise":
        if shards % local_ranks or (shards != local_ranks and by == PartitionByType.HOST.value):
            return None
        return local_ranks, shards // local_ranks, False, False
    several = shards > 1
    distinct = (
        several and option.compute_kernel == "key_value" and option.sharding_type == "column_wise"
    )
    if distinct and shards > ranks:
        return None
    return 1, shards, several and by == PartitionByType.HOST.value, distinct


def _arrays(option: TorchRecOption, estimated: TorchRecOption) -> tuple[Float, Float]:
    """Return an option's times, (factors, shards), and bytes, (factors, shards, tiers).

    Shards take the estimates of the shard of `estimated` with the same size.
    """
    by_size = {tuple(shard.size): shard for shard in estimated.shards}
    own = estimated is option
    alike = option.shards if own else [by_size[tuple(shard.size)] for shard in option.shards]
    count = np.size(estimated.cache_params.load_factor) if estimated.cache_params else 1
    seconds = np.empty((count, len(alike)))
    tier_bytes = np.empty((count, len(alike), len(TIERS)))
    for number, shard in enumerate(alike):
        seconds[:, number] = shard.perf.total
        for tier, name in enumerate(TIERS):
            tier_bytes[:, number, tier] = getattr(shard.storage, name)
    return seconds, tier_bytes


def trainable(options: Sequence[TorchRecOption], *, replicate: bool = True) -> list[TorchRecOption]:
    """Return the options that TorchRec 1.8 trains correctly; all options of tables without any.

    TorchRec leaves replicas to the optimizer of the dense layers. So unless `replicate`, leave out
    replicas of tables with an optimizer in the backward pass.
    """

    def is_right(option: TorchRecOption) -> bool:
        return not is_trained_wrong(option) and (replicate or not is_replica_of_fused(option))

    tables = {option.fqn for option in options if is_right(option)}
    return [option for option in options if is_right(option) or option.fqn not in tables]


def is_trained_wrong(option: TorchRecOption) -> bool:
    """Return whether a shard has no rows.

    TorchRec's kernels fail on its rank, unless the rank also serves another table, which depends on
    the whole plan.
    """
    return any(not shard.size[0] for shard in option.shards)


def is_replica_of_fused(option: TorchRecOption) -> bool:
    """Return whether the option replicates a table with an optimizer in the backward pass."""
    classes = getattr(option.tensor, "_optimizer_classes", None) or [None]
    return option.sharding_type == "data_parallel" and classes[0] is not None
