"""Convert a profile to the row order of a plan that was made from other accesses.

Cost models assume that a shard's ranks are the profile's ranks, and rank 0 is the hottest row. In a
plan for other accesses, or with rows in id order, another row may have rank 0.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placer.plan.plan import Plan, Ranks, distinct
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.workloads import workload_names

SPREAD_EVENLY = 4096
"""Number of hottest rows that must come first, to balance the load of strided slices."""

_NAMED = 8
"""Most tables that a sentence names."""


@dataclass(frozen=True, eq=False)
class _CdfOverRanks(AccessCdf):
    """Cumulative shares of lookups over the ranks of any row order: rising, but not concave."""

    def __post_init__(self) -> None:
        """Check nothing, because only this module makes it."""


def in_plan_order(profile: Profile, plan: Plan) -> Profile:
    """Return the profile with each table's accesses over the ranks of the plan's row order.

    Between two ranks where shards start or end, rows count as if sorted by hotness, because caches
    hold the hottest rows. Rows of strided slices keep their ranks, because the slice of a hot row
    decides which GPU reads it. A table does not change if the plan has its ranks in the profile's
    order, or if all its shards are cached: caches find hot rows at any rank.
    """
    tables = tuple(_in_order(table, plan) for table in profile)
    if all(one is other for one, other in zip(tables, profile, strict=True)):
        return profile
    return replace(profile, tables=tables)


def _in_order(profile: TableProfile, plan: Plan) -> TableProfile:
    rows, cdf = profile.table.rows, profile.cdf
    shards = plan.shards_by_table.get(profile.name, ())
    ends = {end for shard in shards if shard.row_count for end in shard.rows[:2]}
    edges = np.array(sorted(end for end in ends if 0 < end < rows), dtype=np.int64)
    if not edges.size or all(shard.lookup == "cached" for shard in shards if shard.row_count):
        return profile
    planned = Ranks.in_plan(plan, profile.name)
    own = Ranks.of(() if profile.counts is None else profile.counts.hottest())
    strided = any(shard.rows[2] > 1 for shard in shards)
    # Strided slices balance their load if the hottest rows have the first ranks, in order.
    told_apart = max(int(edges[-1]), min(SPREAD_EVENLY, own.listed.size) if strided else 0)
    if not planned.listed.size and not own.listed.size:
        return profile
    if told_apart <= min(planned.listed.size, own.listed.size) and np.array_equal(
        planned.listed[:told_apart], own.listed[:told_apart]
    ):
        return profile
    # Begins of runs of ids with consecutive ranks in both orders and equal access counts.
    listed = [ids for order in (planned, own) for ids in (order.listed, order.listed + 1)]
    unlisted = (
        own.unlisted_ids(cdf.ranks[(cdf.ranks >= own.listed.size) & (cdf.ranks < rows)]),
        planned.unlisted_ids(edges[edges >= planned.listed.size]),
    )
    starts = distinct(np.concatenate([np.zeros(1, dtype=np.int64), *listed, *unlisted]))
    starts = starts[starts < rows]
    lengths = np.diff(starts, append=rows)
    segment = np.searchsorted(cdf.ranks, own.ranks(starts), side="right") - 1
    rank = planned.ranks(starts)
    between = np.searchsorted(edges, rank, side="right")
    weight = cdf.row_share[segment]
    order = np.argsort(rank) if strided else np.lexsort((-weight, between))
    lengths, weight, between = lengths[order], weight[order], between[order]
    last = np.append((np.diff(weight) != 0) | (np.diff(between) != 0), True)
    ranks = np.append(0, np.cumsum(lengths)[last])
    shares = np.append(0.0, np.cumsum(lengths * weight)[last])
    return replace(profile, cdf=_CdfOverRanks(ranks, shares))


def even_words(tables: Sequence[str]) -> str:
    """Return a sentence about the tables that `assumed_even` returned."""
    names = ", ".join(tables[:_NAMED]) + (", …" if len(tables) > _NAMED else "")
    return (
        f"load is assumed even over the slices of {names}: they are strided over ids, and no "
        "counts of single ids are known here"
    )


def assumed_even(plan: Plan, profile: Profile | None = None) -> tuple[str, ...]:
    """Return the tables for which cost models assume evenly loaded row slices.

    Their slices are strided over ids, and the profile has no counts of single ids. Without a
    profile, assume it has none. Tables of published workloads are left out, because their rows are
    numbered by hotness.

    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> problem = Problem(named_workload("random-3@1"), Topology.parse("2xt4"), batch_size=64)
    >>> assumed_even(solve(problem, "greedy-size").plan)
    ()
    """
    name = plan.provenance.profile or ""
    family = re.sub(r"-\d+(@\d+)?$", "-N[@seed]", name)
    if name.startswith("workload ") or not {name, family}.isdisjoint(workload_names()):
        return ()
    counted = set() if profile is None else {one.name for one in profile if one.counts is not None}
    strided = dict.fromkeys(shard.table for shard in plan.shards if shard.rows[2] > 1)
    return tuple(
        name for name in strided if name not in counted and plan.order_of(name).kind == "id"
    )
