"""Sharding options in words, for plans and reports."""

from collections.abc import Iterable

from cost_models import ShardingOption


def ways_to_shard(options: Iterable[ShardingOption]) -> str:
    """Sharding options in words: "whole, in 2, 4 strided row slices, in 2 column slices"."""
    rows: set[int] = set()
    columns: set[int] = set()
    grids: set[tuple[int, int]] = set()
    blocked = replicated = False
    for option in options:
        blocked |= option.blocked
        replicated |= option.replicated_rows > 0
        if not option.column_widths:
            rows.add(option.row_slices)
        elif option.row_slices == 1:
            columns.add(len(option.column_widths))
        else:
            grids.add((option.row_slices, len(option.column_widths)))
    ways = ["whole"]
    if rows := {count for count in rows if count > 1}:
        slices = "blocks of rows" if blocked else "strided row slices"
        ways.append(f"in {', '.join(map(str, sorted(rows)))} {slices}")
    if columns:
        ways.append(f"in {', '.join(map(str, sorted(columns)))} column slices")
    if grids:
        ways.append("in grids of " + ", ".join(f"{w}×{s}" for w, s in sorted(grids)))
    if replicated:
        ways.append("with all or its hottest rows replicated")
    return ", ".join(ways)


def search_space(options: set[ShardingOption], *, is_constrained: bool) -> str:
    """Return the search space of all tables' options in words."""
    within = ", within the constraints" if is_constrained else ""
    homes = {option.home for option in options}
    if any(home.drive_share for home in homes):
        within = ", the coldest of them on the host's drive" + within
    if dtypes := sorted({home.dtype for home in homes if home.dtype}):
        within = f", perhaps as {' or '.join(dtypes)}" + within
    return (
        f"each table {ways_to_shard(options)}; each shard on one GPU, any number of its "
        "hottest rows in HBM and the rest in DRAM, "
        + " or ".join(sorted({option.cold for option in options}))
        + within
    )
