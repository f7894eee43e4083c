"""Reports of inputs: profiles, workloads, memory of tables, and machines."""

from collections.abc import Callable, Iterator, Mapping

from placer.growing.options import OPEN_OVER_RANKS
from placer.growing.working_set import SHARES, WorkingSet
from placer.problem import Problem
from placer.profile.growing_tables import hit_rate_for, hit_rates_of_windows
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, columns, table_of
from placer.topology.devices import Gpu, Host
from placer.topology.topology import Topology
from placer.units import counted, format_bytes
from placer.workloads import named_workload, workload_titles

MOST_TABLES, MOST_DEVICES = 60, 18
_MANY_TIMES, _MANY_ROWS = 10, 1000
"""A table is wasteful with more than this many rows per row that is read, and in total."""


def profile_report(
    profile: Profile, batch_size: int = 8192, *, ids_in_use: Mapping[str, WorkingSet] | None = None
) -> Report:
    """Report a row for each table: its size, its lookups, and their skew.

    Unique rows are counted for a step of `batch_size` samples. `ids_in_use` has the working set of
    each table, from windows of the log.
    """
    tables = list(profile)
    shown = None if len(tables) <= MOST_TABLES else MOST_TABLES
    if shown:
        tables.sort(key=lambda table: -table.table.total_bytes)
    sampled = f", {form.share(profile.sampling)} of the log" if profile.sampling < 1 else ""
    headline = (
        f"{format_bytes(profile.total_bytes)} of weights and optimizer state, "
        f"{counted(sum(one.table.rows for one in profile), 'row')}, "
        f"{form.count(sum(one.table.lookups_per_sample for one in profile))} lookups per sample",
        f"from {counted(profile.samples, 'sample')}{sampled}" if profile.samples else "",
        profile.source,
        unknown_words(profile),
        unread_words(profile),
    )
    shown_columns = (
        *columns(table="table", rows="rows"),
        Column("dim", "dim", form.count, spare=True),
        Column("size_bytes", "size"),
        Column("lookups_per_sample", "lookups", form.count),
        Column("pooling_factor", "pooling", form.number, spare=True),
        Column("coverage", "coverage", form.share, spare=True),
        Column("rows_read", "rows read", form.count, spare=True),
        *columns(top_1_percent_share="top 1%", top_10_percent_share="top 10%"),
        Column("unique_rows", "distinct"),
        Column("unique_rows_of_draws", "if drawn", form.count, spare=True),
        Column("unknown_share", "unknown"),
        Column("unknown_id_share", "unknown ids", spare=True),
        Column("zipf_exponent", "Zipf", form.number),
    )
    title = f"Tables (distinct rows: per step of {batch_size:,} samples)"
    rows = tuple(_table_row(table, batch_size) for table in tables)
    section = Section("tables", title, shown_columns, rows, shown, "largest first")
    return Report(
        f"Profile of {counted(len(profile), 'table')}",
        (section, *(() if ids_in_use is None else (_ids_in_use(ids_in_use),))),
        {
            **form.attributes(profile, "source", "samples", "sampling"),
            "size_bytes": profile.total_bytes,
            "batch_size": batch_size,
        },
        tuple(line for line in headline if line),
    )


def unknown_words(profile: Profile) -> str:
    """Return a sentence on lookups with ids that vocabularies do not know, or ""."""
    shares = {table.name: table.unknown_share or 0.0 for table in profile}
    worst = sorted((name for name in shares if shares[name]), key=lambda name: -shares[name])
    if not worst:
        return ""
    named, more = [f"{form.share(shares[name])} of {name}" for name in worst[:3]], len(worst) - 3
    others = f" and less of {more} more" if more > 0 else ""
    return (
        f"lookups of ids that the vocabularies lack: {', '.join(named)}{others}; all such ids of a "
        "table share row 0, which looks hot though no one of them is"
    )


def unread_words(profile: Profile) -> str:
    """Return a sentence on tables with ids as rows, most of which are never read, or ""."""
    kinds = {} if profile.encoding is None else profile.encoding.mappings
    found = []
    for table in profile:
        read = 0 if table.counts is None else table.counts.ids.size
        is_identity = table.name in kinds and kinds[table.name].kind == "identity"
        if is_identity and read and table.table.rows > max(_MANY_ROWS, _MANY_TIMES * read):
            found.append((table.table.rows, read, table.name))
    if not found or profile.sampling < 1:
        return ""
    found.sort(reverse=True)
    named = [f"{name} has {rows:,} rows for {read:,} ids" for rows, read, name in found[:3]]
    more = f", and {len(found) - 3} more tables are so" if len(found) > 3 else ""
    return (
        f"rows that nothing reads: {', '.join(named)}{more}; --id-mapping {found[0][2]}=vocabulary "
        f"makes one row for each id (hash with --rows {found[0][2]}=N makes N)"
    )


def _table_row(profile: TableProfile, batch_size: int) -> Row:
    table, cdf = profile.table, profile.cdf
    lookups = table.lookups_per_sample
    covered = sum(feature.coverage for feature in table.features)
    return {
        "table": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "size_bytes": table.total_bytes,
        "features": len(table.features),
        "lookups_per_sample": lookups,
        # Averages over all bags of all features that read the table.
        "pooling_factor": form.ratio(lookups, covered),
        "coverage": form.ratio(covered, len(table.features)),
        "rows_read": None if profile.counts is None else int(profile.counts.ids.size),
        "top_1_percent_share": float(cdf.share(max(1.0, 0.01 * table.rows))) if lookups else None,
        "top_10_percent_share": float(cdf.share(max(1.0, 0.1 * table.rows))) if lookups else None,
        "unique_rows": profile.expected_unique(batch_size),
        # For comparison with measured windows: what independent draws would read.
        "unique_rows_of_draws": cdf.unique(batch_size * lookups) if profile.locality else None,
        "unknown_share": profile.unknown_share,
        "unknown_id_share": profile.unknown_id_share,
        "zipf_exponent": profile.zipf_exponent,
    }


def _ids_in_use(working_sets: Mapping[str, WorkingSet]) -> Section:
    """Report the distinct ids of windows, and hit rates with fewer rows."""
    rows: list[Row] = []
    for name, found in working_sets.items():  # `SHARES` come first; other hit rates are for plans.
        # Leave out an incomplete window, which reads fewer ids, unless it is the only one.
        read = found.distinct_of_windows[: max(1, found.whole_windows)]
        later = found.unknown_of_windows[1 : max(2, found.whole_windows)]
        rates = zip(SHARES * 2, found.hit_rates, strict=False)
        rows.append(
            {
                "table": name,
                "ids": found.distinct,
                "ids_of_window": sum(read) / len(read),
                "new_share": form.ratio(sum(later), len(later)),
                **{
                    f"{rate.eviction}_hit_rate_{share:.0%}{of}": value
                    for share, rate in rates
                    for of, value in (("", rate.hit_rate), ("_of_windows", rate.of_windows))
                },
            }
        )
    hits = []
    for share in SHARES:
        key = f"lfu_hit_rate_{share:.0%}"
        hits.append(Column(key, f"hits {share:.0%}", form.share))
        hits.append(Column(f"{key}_of_windows", f"{share:.0%} range", _range))
    lru = (
        Column(f"lru_hit_rate_{share:.0%}", f"LRU {share:.0%}", form.share, spare=True)
        for share in SHARES
    )
    known = columns(form.count, ids="ids", ids_of_window="a window")
    return Section(
        "ids_in_use",
        "Ids in use (new: share of a window's lookups; hits: share served by so many of the rows; "
        "range: the least and the most of it in one window)",
        (Column("table", "table"), *known, Column("new_share", "new"), *hits, *lru),
        tuple(rows),
    )


def _range(rates: tuple[float, float]) -> str:
    return f"{100 * rates[0]:.1f}–{rates[1]:.1%}"


def growing_words(profile: Profile, problem: Problem) -> Iterator[str]:
    """Yield a sentence on each growing table: its capacity, and its predicted hit rate.

    Another sentence says so if steps of this batch size read more ids than the table has rows.
    `profile` has the accesses of the log's ids, and `problem` those of the rows.
    """
    # Rows stay while a step is open: the current step, and those before it that count as open.
    steps = 1 + (OPEN_OVER_RANKS if len(problem.topology.gpus) > 1 else 1)
    for name, how in problem.growing.items():
        predicted = ""
        if profile[name].hit_rates:
            share = form.share(hit_rate_for(profile[name], how.capacity))
            predicted = f", for a predicted hit rate of {share}"
            if rates := hit_rates_of_windows(profile[name], how.capacity):
                predicted += f" ({_range(rates)} in windows of the log)"
            if how.eviction != "lfu" or how.admission > 1:
                predicted += ", with lfu and admit=1"
        yield f"{name} grows: a row for each of {counted(how.capacity, 'key')}{predicted}"
        ids = profile[name].expected_unique(steps * problem.global_batch_size)
        if ids > how.capacity:
            yield (
                f"{name}: {steps} steps read about {form.count(ids)} ids, more than it has rows; "
                "rows keep their ids while a step is open, so other new ids read row 0, and fewer "
                "lookups may be hits than predicted; give it more rows, or make steps smaller"
            )


def workloads_report() -> Report:
    """Report the named workloads with their sizes."""
    rows = []
    for name, title in workload_titles().items():
        # A name with a parameter stands for a family, which has no size.
        tables = [] if "[" in name else [one.table for one in named_workload(name)]
        sizes = (
            len(tables),
            sum(one.rows for one in tables),
            sum(one.total_bytes for one in tables),
            sum(one.lookups_per_sample for one in tables),
        )
        rows.append((name, *(size or None for size in sizes), title))
    workloads = table_of(
        rows,
        "workloads",
        "float32 weights and row-wise Adagrad; docs/workloads.md has the sources",
        Column("name", "name"),
        Column("tables", "tables", form.count),
        *columns(rows="rows", size_bytes="size"),
        Column("lookups_per_sample", "lookups", form.count),
        Column("title", "what", wraps=True),
    )
    return Report("Named workloads", (workloads,))


def topology_report(topology: Topology) -> Report:
    """Report devices with memory budgets and bandwidths, and the source of each constant."""
    with_gpus, without = len(topology.hosts) - len(topology.servers), len(topology.servers)
    of_gpus = f"{counted(len(topology.gpus), 'GPU')} in {counted(with_gpus, 'host')}"
    headline = [of_gpus + (f", and {counted(without, 'host')} without GPUs" if without else "")]
    if topology.emulated:
        headline.append("The GPU is emulated: a part of host memory plays its memory.")

    def of_gpu(bandwidth: Callable[[str], float]) -> Callable[[Gpu | Host], float | None]:
        return lambda device: (bandwidth(device.id) or None) if isinstance(device, Gpu) else None

    def of_network(device: Gpu | Host) -> float | None:
        if device in topology.servers:
            return topology.server_bytes_per_s(device.id)
        return of_gpu(topology.network_bytes_per_s)(device)

    def memory(device: Gpu | Host) -> float:
        return device.hbm_bytes_per_s if isinstance(device, Gpu) else device.dram_bytes_per_s

    devices = table_of(
        (*topology.gpus, *topology.hosts),
        "devices",
        "Devices",
        Column("device", "device", of=lambda device: device.id),
        Column("host", "host", of=lambda device: getattr(device, "host", None)),
        Column("memory_bytes", "budget"),
        Column("memory_bytes_per_s", "memory", of=memory),
        Column("host_link_bytes_per_s", "to host", of=of_gpu(topology.host_link_bytes_per_s)),
        Column("peer_bytes_per_s", "to peers", of=of_gpu(topology.peer_bytes_per_s)),
        Column("rack_bytes_per_s", "to rack", of=of_gpu(topology.rack_bytes_per_s)),
        Column("network_bytes_per_s", "to network", of=of_network),
        shown=MOST_DEVICES,
    )
    drives = table_of(
        (
            (host.id, drive.memory_bytes, drive.reads_per_s, drive.writes_per_s)
            for host in topology.hosts
            if (drive := host.drive) is not None
        ),
        "drives",
        "Drives",
        *columns(
            host="host", memory_bytes="budget", reads_per_s="reads/s", writes_per_s="writes/s"
        ),
        shown=MOST_DEVICES,
    )
    sources = table_of(
        topology.sources.items(),
        "sources",
        "Where the constants come from",
        Column("constant", "constant"),
        Column("source", "source", wraps=True),
    )
    facts = {"name": topology.name, "emulated": topology.emulated}
    sections = (devices, drives, sources) if drives.rows else (devices, sources)
    return Report(f"Topology {topology.name}", sections, facts, tuple(headline))
