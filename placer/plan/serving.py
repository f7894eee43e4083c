"""Plans for inference: rows in host memory, and a cache in HBM for a hit rate that is asked for."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from placer.errors import ProblemError
from placer.plan.fields import RowOrder
from placer.plan.plan import Plan
from placer.plan.shard import Shard, whole_table_shard
from placer.plan.verify import verify
from placer.profile.profile import Profile
from placer.tables import DTYPE_BYTES, Table
from placer.topology.topology import Topology


def serving_plan(profile: Profile, topology: Topology, hit_rate: float) -> Plan:
    """Return a plan for one GPU that answers requests, with the smallest cache for a hit rate.

    Rows are taken into the cache in the order of lookups per byte, over all tables, until they take
    `hit_rate` of all lookups of the profile: CDFs are concave, so no other rows take as many
    with fewer bytes. They start in the cache, and make room for others as requests drift. Tables
    that are cached whole are in HBM alone. There is no optimizer, so no state has room.

    Parameters
    ----------
    profile : Profile
        Of what will be asked for; that of the training log, if nothing better is known.
    topology : Topology
        One GPU and its host; GPUs that serve side by side have a plan of their own each.
    hit_rate : float
        Share of lookups, 0 to 1, whose row shall be in HBM already.

    Raises
    ------
    ProblemError
        If the hit rate lies outside 0..1, or there are several GPUs.
    CapacityError
        If the cache is larger than HBM, or the tables are larger than the host's memory.

    Examples
    --------
    >>> from placer import AccessCdf, Feature, Table, TableProfile
    >>> table = Table("item", rows=100_000, dim=64, features=(Feature("item"),))
    >>> profile = Profile((TableProfile(table, AccessCdf.zipf(100_000, 1.05)),))
    >>> plan = serving_plan(profile, Topology.parse("1xh100"), hit_rate=0.9)
    >>> plan.shards[0].lookup, plan.shards[0].cache_rows
    ('cached', 20303)
    """
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
    """Return rows of each table, the hottest first, that take a share of all lookups together."""
    tables = profile.tables
    segments = [_segments(each.table, each.cdf.ranks, each.cdf.shares) for each in tables]
    of_table = np.repeat(np.arange(len(tables)), [rows.size for rows, _ in segments])
    rows = np.concatenate([rows for rows, _ in segments])
    lookups = np.concatenate([lookups for _, lookups in segments])
    row_bytes = np.array([each.table.dim * DTYPE_BYTES[each.table.dtype] for each in tables])
    order = np.argsort(-lookups / (rows * row_bytes[of_table]), kind="stable")
    taken = np.cumsum(lookups[order])
    # Less than the last bits, as sums in another order differ in these.
    wanted = hit_rate * float(lookups.sum()) * (1 - 1e-12)
    last = int(np.searchsorted(taken, wanted, side="left"))
    counts = np.zeros(len(tables))
    np.add.at(counts, of_table[order[:last]], rows[order[:last]])
    if last < order.size:  # Of the segment that reaches it, as many rows as it takes.
        before = float(taken[last - 1]) if last else 0.0
        part = order[last]
        share = (wanted - before) / lookups[part] if lookups[part] else 0.0
        counts[of_table[part]] += np.ceil(share * rows[part] - 1e-9)
    return {each.name: int(count) for each, count in zip(tables, counts, strict=True)}


def _segments(
    table: Table, ranks: npt.ArrayLike, shares: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return rows of each segment of a CDF, and how many lookups a sample has in it."""
    return np.diff(np.asarray(ranks, dtype=np.float64)), np.diff(
        np.asarray(shares, dtype=np.float64)
    ) * table.lookups_per_sample


def _shard(table: Table, gpu: str, cached_rows: int) -> Shard:
    if cached_rows >= table.rows:
        return whole_table_shard(table, gpu, "hbm", "device")
    if not cached_rows:
        return whole_table_shard(table, gpu, "dram", "uva")
    return replace(whole_table_shard(table, gpu, "dram", "cached"), cache_rows=cached_rows)
