"""Seconds of what batches do with each part of a plan's shards; see `cost_models.replay`."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cost_models.arenas import Arena, arena_of
from cost_models.base import Float
from cost_models.step_equation.arena_loads import arena_loads
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import (
    COPIES,
    LINK_LOOKUP,
    LINK_UPDATE,
    LOOKUP,
    NAMES,
    ROWS,
    UPDATE,
)
from cost_models.step_equation.unit_costs import (
    READ_KINDS,
    PerUnit,
    Rates,
    ReadCosts,
    ReadKind,
    UnitCosts,
)
from cost_models.step_equation.work import drive_row_s, group_of, groups_of, host_pools, is_mapped
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.simulator.counts import StepCounts
from placer.simulator.parts import Arrangement, Part


class PartTimer:
    """Constants of each part, as arrays that counts are multiplied with."""

    def __init__(
        self,
        arrangement: Arrangement,
        problem: Problem,
        tables: Sequence[int],
        costs: Sequence[Sequence[UnitCosts]],
        lookup_shares: Float,
    ) -> None:
        plan, parts = arrangement.plan, arrangement.parts
        topology = plan.topology
        numbers = dict(zip((table.name for table in plan.tables), tables, strict=True))
        serving = topology.serving_numbers
        hosts = {host.id: number for number, host in enumerate(topology.hosts)}
        groups = groups_of(plan)
        mapped = {
            key: is_mapped(problem.profile.tables[numbers[key[0]]], group)
            for key, group in groups.items()
        }
        pooled = {key for key, group in groups.items() if host_pools(group)}
        self._pooled = np.array([part.uses_row_cache for part in parts], dtype=bool)
        self._replicated = np.array([part.replicated for part in parts], dtype=bool)
        self._serving = np.zeros((len(serving), len(parts)))
        self._hosts = np.zeros((len(hosts), len(parts)))
        self._group_lookup_s, self._sliced_row_s = np.zeros(len(parts)), np.zeros(len(parts))
        reads: list[list[ReadCosts]] = []
        kinds_of: list[tuple[ReadKind, ...]] = []
        for at, part in enumerate(parts):
            shard, gpu = plan.shards[part.shard], topology.gpus_by_id.get(part.device)
            self._serving[serving[part.device], at] = 1.0
            self._hosts[hosts[part.device if gpu is None else gpu.host], at] = 1.0
            unit = costs[part.table][serving[part.device]]
            lookup_s = mapped[group_of(shard)] * unit.mapped_lookup_s
            lookup_s += (group_of(shard) in pooled) * unit.pooled_lookup_s
            self._group_lookup_s[at] = _share(part, shard) * lookup_s
            if shard.width < plan.tables[part.table].dim:
                self._sliced_row_s[at] = part.row_bytes * unit.sliced_row_byte_s
            reads.append([unit.read(kind) for kind in _KINDS[part.lookup]])
            kinds_of.append(_KINDS[part.lookup])
        weight_bytes = np.array([part.weight_bytes for part in parts], dtype=np.float64)
        row_bytes = np.array([part.row_bytes for part in parts], dtype=np.float64)
        # By how rows are read, by resource and by rate: constants of all parts at once.
        rates = np.array(reads, dtype=np.float64).reshape(len(parts), *_RATES_SHAPE)
        shares = lookup_shares[[[READ_KINDS.index(k) for k in each] for each in kinds_of]]
        self._in_hbm, self._copied, self._in_place = (
            [Rates(*rate).of(weight_bytes, row_bytes) for rate in kind]
            for kind in np.moveaxis(rates, 0, -1)
        )
        # Where they lie, rows may have other bytes than in HBM, and may be on a drive besides.
        home_bytes, drive_s = row_bytes.copy(), np.zeros(len(parts))
        for at, part in enumerate(parts):
            shard, table = plan.shards[part.shard], plan.tables[part.table]
            home_bytes[at] = table.bytes_per_row(part.cols[1] - part.cols[0], shard.dtype)
            if shard.memory == "ssd":
                drive_s[at] = drive_row_s(topology, part.device, home_bytes[at])
        for resource in (1, 2):
            rate = Rates(*np.moveaxis(rates, 0, -1)[1][resource])
            self._copied[resource] = rate.of(weight_bytes, home_bytes)
        self._copied[1] += PerUnit(0.0, drive_s, 0.0)
        self._lookup_in_hbm, _, self._lookup_in_place = (
            [Rates(*rate).of(weight_bytes, row_bytes) for rate in kind]
            for kind in np.moveaxis(rates * shares, 0, -1)
        )

    def seconds(self, counts: StepCounts) -> tuple[Float, Float, Float, Float, Float]:
        """Return time by phase and device, (8, serving); HBM and link; DRAM by host, and ahead."""
        c = counts.parts
        # Each holder of replicated rows updates all that any holder's samples read.
        touched = np.where(self._replicated, c.update_rows, c.rows)
        lookups, rows = c.lookups - c.in_place_lookups, np.maximum(touched - c.in_place_rows, 0)

        def of(in_hbm: list[PerUnit], in_place: list[PerUnit]) -> list[Float]:
            return [
                np.asarray(
                    unit.seconds(lookups, rows, c.vectors)
                    + place.seconds(c.in_place_lookups, c.in_place_rows)
                )
                for unit, place in zip(in_hbm, in_place, strict=True)
            ]

        own = of(self._in_hbm, self._in_place)
        looked_up = of(self._lookup_in_hbm, self._lookup_in_place)
        of_shard_s = c.lookups * self._group_lookup_s + touched * self._sliced_row_s
        own[0] += of_shard_s
        looked_up[0] += of_shard_s / 2
        missed = np.where(self._pooled, lookups - c.hit_lookups, 0)
        both = (c.staged_rows + c.written_back_rows) / 2
        busier = np.maximum(c.staged_rows, c.written_back_rows)
        copies = [
            np.asarray(copied.seconds(missed, moved) - unit.seconds(missed, moved))
            for copied, unit, moved in zip(
                self._copied, self._in_hbm, (both, busier, both), strict=True
            )
        ]
        serving = self._serving
        phase_s = np.zeros((ROWS, len(serving)))
        lookup_s, all_s = (serving @ (times[0] + times[1]) for times in (looked_up, own))
        copy_hbm_s, copy_link_s = serving @ copies[0], serving @ copies[1]
        link_lookup_s = serving @ looked_up[1]
        phase_s[COPIES], phase_s[LINK_LOOKUP] = copy_link_s, link_lookup_s
        phase_s[LINK_UPDATE] = serving @ own[1] - link_lookup_s
        # Copies land in HBM before the lookup, and leave it after the update.
        phase_s[LOOKUP] = lookup_s + copy_hbm_s / 2
        phase_s[UPDATE] = all_s - lookup_s + copy_hbm_s / 2
        dram_ahead_s = self._hosts @ copies[2]
        return (
            phase_s,
            serving @ own[0] + copy_hbm_s,
            serving @ own[1] + copy_link_s,
            self._hosts @ own[2] + dram_ahead_s,
            dram_ahead_s,
        )


class ArenaTimer:
    """Seconds that arenas take, of the lookups that batches really have in them.

    The problem has the plan's tables and the pipeline ``serial``.
    """

    def __init__(self, arrangement: Arrangement, equation: StepEquation, problem: Problem) -> None:
        plan = arrangement.plan
        self._names = [device.id for device in plan.topology.serving]
        self._loads = [list(loads.items()) for loads in arena_loads(problem, plan)]
        pooled = {key for key, group in groups_of(plan).items() if host_pools(group)}
        self._pooled = np.array(
            [group_of(plan.shards[part.shard]) in pooled for part in arrangement.parts], dtype=bool
        )
        self._launches = [equation.launches(problem, gpu) for gpu in range(len(self._names))]
        self._costs = [equation.arena_costs(problem, gpu) for gpu in range(len(self._names))]
        self._parts: dict[tuple[str, Arena], list[int]] = defaultdict(list)
        self._shares = np.zeros(len(arrangement.parts))
        for at, part in enumerate(arrangement.parts):
            shard = plan.shards[part.shard]
            arena = arena_of(plan.tables[part.table], shard.width)
            self._parts[part.device, arena].append(at)
            self._shares[at] = _share(part, shard)

    def seconds(self, counts: StepCounts) -> Float:
        """By phase and who serves, shape (6, serving)."""
        lookups = counts.parts.lookups * self._shares
        pooled = lookups * self._pooled
        taken_s = np.zeros((len(NAMES), len(self._names)))
        for gpu, (name, loads, costs) in enumerate(
            zip(self._names, self._loads, self._costs, strict=True)
        ):
            taken_s[:, gpu] = len(loads) * self._launches[gpu]
            if costs is not None:
                members = [(load, self._parts[name, arena]) for arena, load in loads]
                taken_s[:, gpu] += costs.seconds(
                    load._replace(
                        lookups=float(lookups[at].sum()), pooled_lookups=float(pooled[at].sum())
                    )
                    for load, at in members
                )
        return taken_s


def _share(part: Part, shard: Shard) -> float:
    """Return the part of a shard's columns in a part: its lookups count for each."""
    return (part.cols[1] - part.cols[0]) / shard.width


_KINDS: dict[str, tuple[ReadKind, ReadKind, ReadKind]] = {
    "device": ("device", "device", "device"),
    "staged": ("device", "staged", "uva"),
    "cached": ("hit", "miss", "uva"),
    "uva": ("uva", "uva", "uva"),
    "host": ("host", "host", "host"),
}
"""How rows of a part are read: those in HBM, those that were copied there, and all others."""

_RATES_SHAPE = (3, len(ReadCosts._fields), len(Rates._fields))
