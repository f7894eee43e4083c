"""`placer profile` and `placer workloads`: what a log says of each table."""

from collections.abc import Mapping

from placer.growing.working_set import SHARES, WorkingSet
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from placer.units import counted, format_bytes
from placer.workloads import named_workload, workload_infos

MOST_TABLES = 60
_MANY_TIMES, _MANY_ROWS = 10, 1000
"""Rows for each one that is read, and rows, from which on a table is wasteful."""


def profile_report(
    profile: Profile,
    batch_size: int = 8192,
    *,
    ids_in_use: Mapping[str, WorkingSet] | None = None,
) -> Report:
    """Report one row per table: its size, how it is read, and how skewed that is.

    Parameters
    ----------
    profile : Profile
    batch_size : int
        Samples of a step, for the number of distinct rows that it touches.
    ids_in_use : mapping of table name to WorkingSet, optional
        What windows of the log read.
    """
    tables = list(profile)
    shown = None if len(tables) <= MOST_TABLES else MOST_TABLES
    if shown:
        tables.sort(key=lambda table: -table.table.total_bytes)
    rows = [_table_row(table, batch_size) for table in tables]
    headline = [
        f"{format_bytes(profile.total_bytes)} of weights and optimizer state, "
        f"{counted(sum(table.table.rows for table in profile), 'row')}, "
        f"{form.count(sum(table.table.lookups_per_sample for table in profile))} lookups per sample"
    ]
    if profile.samples:
        sampled = f", {form.share(profile.sampling)} of the log" if profile.sampling < 1 else ""
        headline.append(f"from {counted(profile.samples, 'sample')}{sampled}")
    if profile.source:
        headline.append(profile.source)
    if unknown := unknown_words(profile):
        headline.append(unknown)
    if unread := unread_words(profile):
        headline.append(unread)
    is_published = any(table.zipf_exponent is not None for table in profile)
    return Report(
        title=f"Profile of {counted(len(profile), 'table')}",
        sections=(
            Section(
                "tables",
                f"Tables (distinct rows: per step of {batch_size:,} samples)",
                (
                    Column("table", "table"),
                    Column("rows", "rows", form.count),
                    Column("dim", "dim", form.count, spare=True),
                    Column("size_bytes", "size"),
                    Column("lookups_per_sample", "lookups", form.count),
                    Column("pooling_factor", "pooling", form.number, spare=True),
                    Column("coverage", "coverage", form.share, spare=True),
                    Column("rows_read", "rows read", form.count, spare=True),
                    Column("top_1_percent_share", "top 1%"),
                    Column("top_10_percent_share", "top 10%"),
                    Column("unique_rows", "distinct", form.count),
                    Column("unique_rows_of_draws", "if drawn", form.count, spare=True),
                    Column("unknown_share", "unknown"),
                    Column("unknown_id_share", "unknown ids", spare=True),
                    *([Column("zipf_exponent", "Zipf", form.number)] * is_published),
                ),
                tuple(rows),
                shown=shown,
                order="largest first",
            ),
            *(() if ids_in_use is None else (_ids_in_use(ids_in_use),)),
        ),
        facts={
            "source": profile.source,
            "samples": profile.samples,
            "sampling": profile.sampling,
            "size_bytes": profile.total_bytes,
            "batch_size": batch_size,
        },
        headline=tuple(headline),
    )


def unknown_words(profile: Profile) -> str:
    """Say which lookups a vocabulary did not know; say nothing if there are none."""
    shares = {table.name: table.unknown_share or 0.0 for table in profile}
    worst = sorted(shares, key=lambda name: -shares[name])[:3]
    named = [f"{form.share(shares[name])} of {name}" for name in worst if shares[name]]
    if not named:
        return ""
    more = sum(1 for share in shares.values() if share) - len(named)
    others = f" and less of {more} more" if more else ""
    return (
        f"unknown to the vocabularies: {', '.join(named)}{others} of the lookups; all unknown ids "
        "of a table share row 0, which looks hot though no one of them is"
    )


def unread_words(profile: Profile) -> str:
    """Say which tables have many more rows than were read, as their ids are rows."""
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
        # Over all bags of all features that read the table.
        "pooling_factor": lookups / covered if covered else None,
        "coverage": covered / len(table.features) if table.features else None,
        "rows_read": None if profile.counts is None else int(profile.counts.ids.size),
        "top_1_percent_share": float(cdf.share(max(1.0, 0.01 * table.rows))) if lookups else None,
        "top_10_percent_share": float(cdf.share(max(1.0, 0.1 * table.rows))) if lookups else None,
        "unique_rows": profile.expected_unique(batch_size),
        # Where windows of the log were counted, beside what independent draws would read.
        "unique_rows_of_draws": profile.cdf.unique(batch_size * lookups)
        if profile.locality
        else None,
        "unknown_share": profile.unknown_share,
        "unknown_id_share": profile.unknown_id_share,
        "zipf_exponent": profile.zipf_exponent,
    }


def _ids_in_use(working_sets: Mapping[str, WorkingSet]) -> Section:
    """Report how many ids windows read, and what share of lookups fewer rows would serve."""
    rows: list[Row] = []
    for name, found in working_sets.items():  # What follows the shares is for plans.
        later = found.unknown_of_windows[1:]
        rates: Row = {
            f"{rate.eviction}_hit_rate_{share:.0%}": rate.hit_rate
            for share, rate in zip(SHARES * 2, found.hit_rates, strict=False)
        }
        rows.append(
            {
                "table": name,
                "ids": found.distinct,
                "ids_of_window": sum(found.distinct_of_windows) / len(found.distinct_of_windows),
                "new_share": sum(later) / len(later) if later else None,
                **rates,
            }
        )
    return Section(
        "ids_in_use",
        "Ids in use (new: share of a window's lookups; hits: share served by so many of the rows)",
        (
            Column("table", "table"),
            Column("ids", "ids", form.count),
            Column("ids_of_window", "a window", form.count),
            Column("new_share", "new", form.share),
            *(
                Column(
                    f"{eviction}_hit_rate_{share:.0%}", f"{words} {share:.0%}", form.share, spare
                )
                for eviction, words, spare in (("lfu", "hits", False), ("lru", "LRU", True))
                for share in SHARES
            ),
        ),
        tuple(rows),
    )


def workloads_report() -> Report:
    """Report the named workloads and their sizes."""
    rows: list[Row] = []
    for info in workload_infos():
        # A name with a parameter stands for a family, which has no size of its own.
        sizes: Row = dict.fromkeys(("tables", "rows", "size_bytes", "lookups_per_sample"))
        if "[" not in info.name:
            profile = named_workload(info.name)
            sizes = {
                "tables": len(profile),
                "rows": sum(one.table.rows for one in profile),
                "size_bytes": profile.total_bytes,
                "lookups_per_sample": sum(one.table.lookups_per_sample for one in profile),
            }
        rows.append({"name": info.name, **sizes, "title": info.title})
    return Report(
        title="Named workloads",
        sections=(
            Section(
                "workloads",
                "float32 weights and row-wise Adagrad; docs/workloads.md has the sources",
                (
                    Column("name", "name"),
                    Column("tables", "tables", form.count),
                    Column("rows", "rows", form.count),
                    Column("size_bytes", "size"),
                    Column("lookups_per_sample", "lookups", form.count),
                    Column("title", "what", wraps=True),
                ),
                tuple(rows),
            ),
        ),
    )
