"""The map of tables on a page: where each table is, its shards, and how its rows are read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from placer.plan.fields import Shard
from placer.plan.memory import record_bytes
from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.report.section import Section, columns, grouped, table_of
from placer.tables import Table
from placer.units import plain
from solvers.report.plan import bytes_by_device, short_names

CURVE_POINTS = 40

_SHARD = columns(
    tier="tier", devices="devices", shards="shards", rows="rows of each", columns="columns",
    lookup="read", size_bytes="bytes",
)  # fmt: skip


def table_map(plan: Plan, profile: Profile, tables: Section) -> dict[str, Any]:
    """Return columns, rows, devices and access curves for the page's script.

    The profile is over the plan's row order. `tables` is the section of tables of
    `solvers.report.plan_report`, which gives the page's rows and columns.

    ``columns`` have a key and a title, and ``rows`` a value and a text for each column. Of each
    table, ``strips`` has runs ``[first device, last device, HBM bytes, DRAM bytes]``, ``shards``
    its shards as texts, and ``curve`` the index of its access curve in ``curves``.
    """
    gpus, hosts = plan.topology.gpus, plan.topology.hosts
    devices = [*(gpu.id for gpu in gpus), *(host.id for host in hosts)]
    numbers = {device: number for number, device in enumerate(devices)}
    by_name = {one.name: one for one in profile}
    names = [row["table"] for row in tables.rows]
    points = [curve(by_name[name].cdf) for name in names]
    curves = {one: place for place, one in enumerate(dict.fromkeys(points))}
    known = [(plan.tables_by_name[name], plan.shards_by_table[name]) for name in names]
    return {
        "columns": [
            {"key": c.key, "title": c.title, "number": not c.is_text} for c in tables.columns
        ],
        "rows": [[[row[c.key], c.cell(row)] for c in tables.columns] for row in tables.rows],
        "strips": [_strip(table, shards, numbers) for table, shards in known],
        "shards": [
            [[column.cell(row) for column in _SHARD] for row in _shards(table, shards).rows]
            for table, shards in known
        ],
        "heads": [column.title for column in _SHARD],
        "curve": [curves[one] for one in points],
        "curves": list(curves),
        "devices": [plain(gpu.id) for gpu in gpus],
        # The first GPU of each host.
        "hosts": [n for n, gpu in enumerate(gpus) if not n or gpus[n - 1].host != gpu.host],
    }


def curve(cdf: AccessCdf) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shares of rows and of lookups at a few points, even on a logarithmic axis."""
    ranks = cdf.ranks[1:]
    if not ranks.size:
        return (), ()
    at = np.searchsorted(ranks, np.geomspace(ranks[0], ranks[-1], CURVE_POINTS))
    chosen = np.unique(np.minimum(at, ranks.size - 1)) + 1
    rows, lookups = cdf.ranks[chosen] / cdf.rows, cdf.shares[chosen]
    return tuple(float(f"{one:.5g}") for one in rows), tuple(float(f"{one:.5g}") for one in lookups)


def _shards(table: Table, shards: Sequence[Shard]) -> Section:
    """Return the table of a table's shards; equal shards are one row."""

    def alike(shard: Shard) -> tuple[str, str, int, int, int]:
        size = record_bytes(table, shard)
        return shard.memory.upper(), shard.lookup, shard.row_count, shard.width, size

    rows = []
    for (tier, lookup, count, width, size), same in grouped(shards, alike).items():
        devices = [device for shard in same for device in shard.devices]
        names, size_bytes = short_names(devices), size * count * len(devices)
        rows.append((tier, names, len(same), count, width, lookup, size_bytes))
    return table_of(rows, "shards", "Shards", *_SHARD)


def _strip(table: Table, shards: Sequence[Shard], numbers: Mapping[str, int]) -> list[list[int]]:
    """Return runs of neighbouring devices with equal bytes of a table in HBM and elsewhere."""
    runs: list[list[int]] = []
    used = bytes_by_device(table, shards)
    for number, of in sorted((numbers[device], of) for device, of in used.items()):
        tiers = [of["hbm"], of["dram"] + of["ssd"]]
        if runs and runs[-1][1] == number - 1 and runs[-1][2:] == tiers:
            runs[-1][1] = number
        else:
            runs.append([number, number, *tiers])
    return runs
