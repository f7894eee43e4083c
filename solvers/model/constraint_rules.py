"""Apply the user's constraints to the search space, and say in words what is searched."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from cost_models import IN_DRAM, CostCurve, ShardingOption, TableShard
from placer.errors import ProblemError
from placer.problem import Problem
from placer.topology.topology import Topology
from solvers.model.curves import curve_at
from solvers.model.knapsack import Bool


class ConstraintRules:
    """The sharding options, GPUs and numbers of hot rows that each table may have."""

    def __init__(self, problem: Problem) -> None:
        constraints, names = problem.constraints, problem.profile.table_names
        rules = {}
        if constraints:
            rules = {at: constraints.rule_of(name) for at, name in enumerate(names)}
        self.any = bool(constraints)
        self.tiers = {at: rule.tier for at, rule in rules.items() if rule.tier is not None}
        self.forbidden = {at: rule.forbid for at, rule in rules.items() if rule.forbid}
        self.group_of_table: dict[int, int] = {}
        number = problem.profile.table_numbers
        for group, members in enumerate(constraints.together if constraints else ()):
            self.group_of_table |= dict.fromkeys((number[name] for name in members), group)
        pinned = {at: set(rule.devices) for at, rule in rules.items() if rule.devices is not None}
        self._gpus = len(problem.topology.gpus)
        topology = problem.topology
        self._has_drives = any(host.drive for host in topology.hosts if topology.gpus_of(host.id))
        on_gpus = {at for at, tier in self.tiers.items() if tier != "dram"}
        on_gpus |= {at for at, forbid in self.forbidden.items() if "host" in forbid}
        self.gpus_of_table = self._gpus_of_tables(pinned, on_gpus, topology)
        self._names = names
        self._rows = [profile.table.rows for profile in problem.profile]

    def _gpus_of_tables(
        self, pinned: dict[int, set[str]], on_gpus: set[int], topology: Topology
    ) -> dict[int, Bool]:
        """Return the GPUs that may serve each table that is pinned or grouped with a pinned table.

        One GPU serves all tables of a group, so only GPUs that are allowed for each of its pinned
        tables remain. Servers come after GPUs and serve no table of `on_gpus`.
        """
        masks = {
            table: np.array(
                [gpu.id in devices or gpu.host in devices for gpu in topology.gpus]
                + [server.id in devices for server in topology.servers]
            )
            for table, devices in pinned.items()
        }
        for table in on_gpus if topology.servers else ():
            mask = masks.setdefault(table, np.ones(len(topology.serving), dtype=bool))
            mask[self._gpus :] = False
        groups: dict[int, list[int]] = {}
        for table, group in self.group_of_table.items():
            groups.setdefault(group, []).append(table)
        for tables in groups.values():
            of_group = [masks[t] for t in tables if t in masks]
            if of_group:
                common: Bool = np.logical_and.reduce(of_group)
                masks |= dict.fromkeys(tables, common)
        return masks

    def allowed_options(
        self, table: int, options: Sequence[ShardingOption]
    ) -> tuple[ShardingOption, ...]:
        """Return the sharding options that are not forbidden."""
        forbidden = self.forbidden.get(table, frozenset())
        pinned = self.gpus_of_table.get(table)
        tests: dict[str, Callable[[ShardingOption], bool]] = {
            "row-wise": lambda option: option.row_slices > 1,
            "column-wise": lambda option: len(option.column_widths) > 1,
            "replicated": lambda option: option.replicated_rows > 0,
            "ssd": lambda option: option.home.drive_share != 0,
            "narrow": lambda option: bool(option.home.dtype),
        }
        refused = [test for kind, test in tests.items() if kind in forbidden]
        if table in self.group_of_table:
            refused.append(lambda option: option.shard_count > 1 or option.replicated_rows > 0)
        if pinned is not None:
            servers = int(pinned.sum())
            refused.append(lambda option: option.shard_count > servers)
            if not pinned[: self._gpus].all():
                refused.append(lambda option: option.replicated_rows > 0 or option.blocked)
        tier = self.tiers.get(table)
        if tier == "ssd":
            refused.append(lambda option: option.home.drive_share < 1 or option.replicated_rows > 0)
        elif tier is not None:
            refused.append(lambda option: option.home.drive_share != 0)
        if "split" in forbidden:
            refused.append(lambda option: option.home.drive_share not in (0, 1))
        if "staged" in forbidden:
            refused.append(lambda option: option.home != IN_DRAM)
        if tier == "dram":
            refused.append(lambda option: option.replicated_rows > 0 or option.cold in forbidden)
            if "uva" in forbidden:  # A cache has at least one row, and here not all rows.
                rows = self._rows[table]
                refused.append(
                    lambda option: option.cold == "cached" and rows < 2 * option.row_slices
                )
        left = tuple(option for option in options if not any(test(option) for test in refused))
        if not left and tier == "ssd" and not self._has_drives:
            raise ProblemError(
                f"table {self._names[table]!r}: its tier is ssd, but no host has a drive; give "
                "hosts one (--ssd), or the table another tier"
            )
        if not left and pinned is not None and not pinned.any():
            raise ProblemError(
                f"table {self._names[table]!r}: its pin is to hosts without GPUs, which serve rows "
                "in their DRAM alone; pin it to GPUs, or take away its tier or `forbid: [host]`"
            )
        if not left:
            raise ProblemError(
                f"table {self._names[table]!r}: the constraints forbid every way to place it; "
                f"forbidden are {', '.join(sorted(forbidden)) or 'all but whole tables'}"
                + (f", and its tier is {tier}" if tier else "")
            )
        return left

    def limits_tiers(self, shard: TableShard) -> bool:
        """Return whether constraints limit how many of a shard's rows may be in HBM."""
        forbidden = self.forbidden.get(shard.table, frozenset())
        return shard.table in self.tiers or bool(
            forbidden & {"split", "staged", "uva", "host", "cached"}
        )

    def within_tier(self, shard: TableShard, curve: CostCurve) -> CostCurve:
        """Return the part of a curve that the table's tier and forbidden lookups allow."""
        last = curve.hot_rows.size - 1
        if last == 0 or not self.limits_tiers(shard):
            return curve
        forbidden = self.forbidden.get(shard.table, frozenset())
        tier, cached = self.tiers.get(shard.table), shard.option.cold == "cached"
        kept = np.ones(last + 1, dtype=bool)
        if tier == "hbm" or shard.option.cold in forbidden:
            kept[:-1] = False
        if tier in ("dram", "ssd"):
            kept[-1 if cached else slice(1, None)] = False
        if cached and "uva" in forbidden:
            kept[0] = False
        if "split" in forbidden and not cached:
            kept[1:-1] = False
        if kept.all():
            return curve
        part = curve_at(curve, curve.hot_rows[kept])
        if cached:
            return part
        # Only the ends.
        return replace(part, split_s=np.inf, split_s_of_phases=part.split_phase_s + np.inf)

    def open_gpus(self, block: Iterable[TableShard], gpus: int) -> Bool:
        """Return which GPUs may serve all shards of a block, room aside, shape (gpus,)."""
        may_serve = np.ones(gpus, dtype=bool)
        for shard in block:
            if shard.table in self.gpus_of_table:
                may_serve &= self.gpus_of_table[shard.table]
            if shard.home_gpu is not None:
                may_serve &= np.arange(gpus) == shard.home_gpu
        return may_serve

    def blocks(self, shards: Iterable[TableShard]) -> list[tuple[TableShard, ...]]:
        """Return shards by the group of their table; other shards each by themselves."""
        if not self.group_of_table:
            return [(shard,) for shard in shards]
        together: dict[int, list[TableShard]] = {}
        alone = []
        for shard in shards:
            group = self.group_of_table.get(shard.table)
            if group is None:
                alone.append((shard,))
            else:
                together.setdefault(group, []).append(shard)
        return alone + [tuple(members) for members in together.values()]


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
