"""Every table of a plan and where its bytes are, compact enough for thousands of tables."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from placer.plan.memory import record_bytes
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.plain import plain
from placer.report.section import Section
from placer.tables import Table
from placer.units import format_bytes
from solvers.report.page.more_figures import curve
from solvers.report.plan import short_names


def table_map(
    plan: Plan, profile: Profile, tables: Section, reasons: Mapping[str, str]
) -> dict[str, Any]:
    """Return columns, rows, devices and access curves, as the page's script takes them.

    The profile is over the plan's row order; the rows and columns of `tables`, which is of
    `solvers.report.plan_report`, are the page's.

    Returns
    -------
    dict
        ``columns`` have key and title, ``rows`` a value and a text for each; ``strips`` are runs
        ``[first device, last device, HBM bytes, DRAM bytes]`` of each table, ``shards`` its
        shards in words, ``curve`` the number of its access curve in ``curves``.
    """
    devices = [gpu.id for gpu in plan.topology.gpus]
    number = {device: at for at, device in enumerate(devices)}
    number |= {host.id: len(devices) + at for at, host in enumerate(plan.topology.hosts)}
    hosts = [gpu.host for gpu in plan.topology.gpus]
    starts = [at for at, host in enumerate(hosts) if at == 0 or hosts[at - 1] != host]
    by_name = {one.name: one for one in profile}
    curves: dict[tuple[bytes, bytes], Any] = {}
    rows, strips, shards, used = [], [], [], []
    for row in tables.rows:
        table, own = plan.tables_by_name[row["table"]], plan.shards_by_table[row["table"]]
        values = (row[c.key] for c in tables.columns)
        safe = [plain(one) if isinstance(one, str) else one for one in values]
        rows.append([[one, c.cell(row)] for one, c in zip(safe, tables.columns, strict=True)])
        strips.append(_strip(table, own, number))
        shards.append(_shards(table, own))
        cdf = by_name[row["table"]].cdf
        key = cdf.ranks.tobytes(), cdf.shares.tobytes()
        if key not in curves:
            curves[key] = len(curves), curve(cdf)
        used.append(curves[key][0])
    return {
        "columns": [
            {"key": c.key, "title": c.title, "number": not c.is_text} for c in tables.columns
        ],
        "rows": rows,
        "strips": strips,
        "shards": shards,
        "curve": used,
        "curves": [points for _, points in curves.values()],
        "reasons": [reasons.get(row["table"], "") for row in tables.rows],
        "devices": [plain(device) for device in devices],
        "hosts": starts,  # The first GPU of each host.
    }


def _strip(table: Table, shards: Sequence[Shard], number: dict[str, int]) -> list[list[int]]:
    """Sum bytes by tier of the devices that serve a table, equal neighbours together."""
    used: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for shard in shards:
        row_bytes = table.bytes_per_row(shard.width)
        for device in shard.devices:
            tiers = used[number[device]]
            tiers[shard.memory != "hbm"] += shard.row_count * record_bytes(table, shard)
            tiers[0] += shard.cache_rows * row_bytes
    runs: list[list[int]] = []
    for at, tiers in sorted(used.items()):
        if runs and runs[-1][1] == at - 1 and runs[-1][2:] == tiers:
            runs[-1][1] = at
        else:
            runs.append([at, at, *tiers])
    return runs


def _shards(table: Table, shards: Sequence[Shard]) -> list[list[str]]:
    """Tier, devices, rows, columns, way to read and bytes of shards, those alike together."""
    alike: dict[tuple[str, str, int, int, int, int], list[str]] = defaultdict(list)
    for shard in shards:
        size = record_bytes(table, shard)
        key = shard.memory, shard.lookup, shard.row_count, shard.width, len(shard.devices), size
        alike[key].extend(shard.devices)
    return [
        [
            memory.upper(),
            plain(short_names(devices)),
            f"{len(devices) // copies} × {form.count(rows)}" if len(devices) > 1 else f"{rows:,}",
            str(width),
            lookup,
            format_bytes(rows * size * len(devices)),
        ]
        for (memory, lookup, rows, width, copies, size), devices in sorted(
            alike.items(), key=lambda item: (item[0][0] != "hbm", -item[0][2])
        )
    ]
