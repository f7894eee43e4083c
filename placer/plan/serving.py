"""Make plans for inference: rows in host memory, and an HBM cache for a given hit rate."""

from dataclasses import replace

import numpy as np

from placer.errors import ProblemError, check_kinds
from placer.plan.fields import RowOrder, Shard, whole_table_shard
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.profile.profile import Profile
from placer.tables import DTYPE_BYTES, Table
from placer.topology.topology import Topology


def serving_plan(profile: Profile, topology: Topology, hit_rate: float) -> Plan:
    """Return a plan for one GPU that serves requests, with the smallest cache for a hit rate.

    Rows of all tables enter the cache in the order of lookups per byte, until they have `hit_rate`
    of the profile's lookups. CDFs are concave, so no smaller set of rows has as many lookups. The
    cache begins with these rows, and replaces them as requests drift. A table that fits in the
    cache whole is only in HBM. The plan has no room for optimizer state.

    Raises ProblemError if the hit rate is outside 0..1, or there are several GPUs. Raises
    CapacityError if the cache is larger than HBM, or the tables are larger than the host's memory.

    Parameters
    ----------
    profile : Profile
        Profile of the requests; use that of the training log if nothing better is known.
    topology : Topology
        One GPU and its host. Make one plan for each GPU that serves.
    hit_rate : float
        Share of lookups, 0 to 1, that HBM should serve.

    Examples
    --------
    >>> from placer import AccessCdf, Feature, Table, TableProfile
    >>> table = Table("item", rows=100_000, dim=64, features=(Feature("item"),))
    >>> profile = Profile((TableProfile(table, AccessCdf.zipf(100_000, 1.05)),))
    >>> plan = serving_plan(profile, Topology.parse("1xh100"), hit_rate=0.9)
    >>> plan.shards[0].lookup, plan.shards[0].cache_rows
    ('cached', 20303)
    """
    check_kinds(profile=(profile, Profile), topology=(topology, Topology))
    if not 0 <= hit_rate <= 1:
        raise ProblemError(f"hit_rate {hit_rate} must lie within 0..1")
    if len(topology.gpus) != 1:
        raise ProblemError(
            f"a plan for serving is for one GPU, and the topology has {len(topology.gpus)}; each "
            "answers requests by itself, with a plan of its own"
        )
    gpu = topology.gpus[0].id
    cached = _cached_rows(profile, hit_rate)
    shards, hot_ids = [], {}
    for one in profile:
        rows = cached[one.name]
        shards.append(_shard(one.table, gpu, rows))
        if one.counts is not None and 0 < rows < one.table.rows:
            hot_ids[one.name] = one.counts.hottest(rows)
    plan = Plan(
        tables=tuple(replace(one.table, optimizer="sgd") for one in profile),
        topology=topology,
        shards=tuple(shards),
        row_order={name: RowOrder("profile") for name in hot_ids},
        hot_ids=hot_ids,
    )
    verify(plan)
    return plan


def _cached_rows(profile: Profile, hit_rate: float) -> dict[str, int]:
    """Return how many of each table's hottest rows to cache for a share of all lookups."""
    tables = profile.tables
    # Of each segment of each CDF: its rows, and a sample's lookups in it.
    segments = [
        (one.cdf.widths, np.diff(one.cdf.shares) * one.table.lookups_per_sample) for one in tables
    ]
    of_table = np.repeat(np.arange(len(tables)), [rows.size for rows, _ in segments])
    rows = np.concatenate([rows for rows, _ in segments])
    lookups = np.concatenate([lookups for _, lookups in segments])
    row_bytes = np.array([each.table.dim * DTYPE_BYTES[each.table.dtype] for each in tables])
    order = np.argsort(-lookups / (rows * row_bytes[of_table]), kind="stable")
    own = lookups[order]
    # Slightly less, because sums in another order differ in the last bits.
    wanted = hit_rate * float(lookups.sum()) * (1 - 1e-12)
    left = wanted - np.append(0.0, np.cumsum(own)[:-1])
    # The share of each segment's rows to take: all, none, or some of the one that reaches it.
    share = np.divide(left, own, out=np.zeros_like(own), where=own > 0).clip(0, 1)
    counts = np.zeros(len(tables))
    np.add.at(counts, of_table[order], np.ceil(share * rows[order] - 1e-9))
    return {each.name: int(count) for each, count in zip(tables, counts, strict=True)}


def _shard(table: Table, gpu: str, cached_rows: int) -> Shard:
    if cached_rows >= table.rows:
        return whole_table_shard(table, gpu, "hbm", "device")
    if not cached_rows:
        return whole_table_shard(table, gpu, "dram", "uva")
    return replace(whole_table_shard(table, gpu, "dram", "cached"), cache_rows=cached_rows)
