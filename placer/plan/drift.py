"""A profile as a plan sees it whose row order is another.

Cost models take the ranks of a shard for those of the profile: rank 0 is the hottest row. In a
plan that was made for other accesses, or that leaves rows where they are, rank 0 is whatever
row the plan's row order names.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placer.plan.order import Ranks, distinct
from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.workloads import workload_names

SPREAD_EVENLY = 4096
"""So many of the hottest rows, listed first, spread the load of strided slices evenly."""


_NAMED = 8
"""Tables that a sentence names."""


@dataclass(frozen=True, slots=True, eq=False)
class _CdfOverRanks(AccessCdf):
    """Shares of lookups over the ranks of any row order: rising, but not concave."""

    def __post_init__(self) -> None:
        """Nothing to check: made here alone."""


def in_plan_order(profile: Profile, plan: Plan) -> Profile:
    """Return the profile with the accesses of each table over the ranks of a plan's row order.

    Between two ranks that the plan tells apart, by where a shard starts or ends, rows count as
    if the hottest came first: caches hold the hottest. Rows of strided slices stay where they are:
    which slice a hot row falls in decides which GPU reads it. Tables whose ranks the plan has in
    the profile's order are left as they are, and so are those of caches alone, which find what is
    hot whatever its rank.
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
    # The hottest rows, one after the other, are what spreads a strided table's load.
    told_apart = max(int(edges[-1]), min(SPREAD_EVENLY, own.listed.size) if strided else 0)
    if not planned.listed.size and not own.listed.size:
        return profile
    if told_apart <= min(planned.listed.size, own.listed.size) and np.array_equal(
        planned.listed[:told_apart], own.listed[:told_apart]
    ):
        return profile
    # Runs of ids whose ranks are consecutive in both orders, and that are read equally often.
    starts = distinct(
        np.concatenate(
            [
                np.zeros(1, dtype=np.int64),
                *(ids for order in (planned, own) for ids in (order.listed, order.listed + 1)),
                own.unlisted_ids(cdf.ranks[(cdf.ranks >= own.listed.size) & (cdf.ranks < rows)]),
                planned.unlisted_ids(edges[edges >= planned.listed.size]),
            ]
        )
    )
    starts = starts[starts < rows]
    lengths = np.diff(starts, append=rows)
    segment = np.searchsorted(cdf.ranks, own.ranks(starts), side="right") - 1
    rank = planned.ranks(starts)
    between = np.searchsorted(edges, rank, side="right")
    weight = cdf.row_share[segment]
    order = np.argsort(rank) if strided else np.lexsort((-weight, between))
    lengths, weight, between = lengths[order], weight[order], between[order]
    last = np.append((np.diff(weight) != 0) | (np.diff(between) != 0), True)
    ranks = np.cumsum(lengths)[last]
    shares = np.cumsum(lengths * weight)[last]
    return replace(
        profile,
        cdf=_CdfOverRanks(
            np.concatenate(([0], ranks)).astype(np.int64), np.concatenate(([0.0], shares))
        ),
    )


def even_words(tables: Sequence[str]) -> str:
    """Return a sentence about tables of `assumed_even`."""
    names = ", ".join(tables[:_NAMED]) + (", …" if len(tables) > _NAMED else "")
    return (
        f"load is assumed even over the slices of {names}: they are strided over ids, and no "
        "counts of single ids are known here"
    )


def assumed_even(plan: Plan, profile: Profile | None = None) -> tuple[str, ...]:
    """Return tables of which it is assumed that all slices are read equally often.

    Their slices are strided over ids, and the profile has no counts of single ids; without a
    profile it may have some. Published workloads number rows by how hot they are.

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
