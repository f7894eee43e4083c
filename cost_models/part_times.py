"""Seconds of what batches do with each part of a plan's shards; see `cost_models.replay`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.arenas import Arena, arena_of
from cost_models.base import Float
from cost_models.step_equation.arena_loads import arena_loads
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import COPIES, HOST, LOOKUP, NAMES, UPDATE, read_matrix
from cost_models.step_equation.unit_costs import ReadKind, UnitCosts
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
        self._serving = np.zeros((len(parts), len(serving)))
        self._hosts = np.zeros((len(hosts), len(parts)))
        self._group_lookup_s, self._sliced_row_s = np.zeros(len(parts)), np.zeros(len(parts))
        # Seconds of phases and of hosts for a lookup, a row and a vector; see `read_matrix`.
        shape = len(parts), HOST + 1, 3
        self._in_hbm, self._copied, self._in_place = (np.zeros(shape) for _ in range(3))
        for at, part in enumerate(parts):
            shard, gpu = plan.shards[part.shard], topology.gpus_by_id.get(part.device)
            table = plan.tables[part.table]
            self._serving[at, serving[part.device]] = 1.0
            self._hosts[hosts[part.device if gpu is None else gpu.host], at] = 1.0
            unit = costs[part.table][serving[part.device]]
            lookup_s = mapped[group_of(shard)] * unit.mapped_lookup_s
            lookup_s += (group_of(shard) in pooled) * unit.pooled_lookup_s
            self._group_lookup_s[at] = _share(part, shard) * lookup_s
            if shard.width < table.dim:
                self._sliced_row_s[at] = part.row_bytes * unit.sliced_row_byte_s
            # Where they lie, rows may have other bytes than in HBM, and may be on a drive besides.
            home_bytes = float(table.bytes_per_row(part.cols[1] - part.cols[0], shard.dtype))
            sizes = float(part.weight_bytes), float(part.row_bytes)
            self._in_hbm[at], self._copied[at], self._in_place[at] = (
                read_matrix(unit, kind, (*sizes, home), lookup_shares)
                for kind, home in zip(_KINDS[part.lookup], (0.0, home_bytes, 0.0), strict=True)
            )
            if shard.memory == "ssd":
                self._copied[at, COPIES, 1] += drive_row_s(topology, part.device, home_bytes)
        # What copies take on top. They land in HBM before the lookup, and leave after the update.
        self._copied -= self._in_hbm
        in_hbm_s = self._copied[:, [LOOKUP, UPDATE]].sum(axis=1, keepdims=True)
        self._copied[:, [LOOKUP, UPDATE]] = in_hbm_s / 2

    def seconds(self, counts: StepCounts) -> tuple[Float, Float, Float]:
        """Return time by phase and device, (8, serving); of DRAM by host, and of it ahead."""
        c = counts.parts
        # Each holder of replicated rows updates all that any holder's samples read.
        touched = np.where(self._replicated, c.update_rows, c.rows)
        lookups, rows = c.lookups - c.in_place_lookups, np.maximum(touched - c.in_place_rows, 0)
        own = _times(self._in_hbm, lookups, rows, c.vectors)
        own += _times(self._in_place, c.in_place_lookups, c.in_place_rows)
        own[[LOOKUP, UPDATE]] += (
            c.lookups * self._group_lookup_s + touched * self._sliced_row_s
        ) / 2
        missed = np.where(self._pooled, lookups - c.hit_lookups, 0)
        copies = _times(self._copied, missed, (c.staged_rows + c.written_back_rows) / 2)
        busier = np.maximum(c.staged_rows, c.written_back_rows)
        copies[COPIES] = _times(self._copied[:, [COPIES]], missed, busier)
        dram_ahead_s = self._hosts @ copies[HOST]
        phase_s = (own + copies)[:HOST] @ self._serving
        return phase_s, self._hosts @ own[HOST] + dram_ahead_s, dram_ahead_s


def _times(seconds: Float, *amounts: npt.NDArray[Any]) -> Float:
    """Return seconds of shape (rows, parts), given those of units, (parts, rows, units)."""
    units = np.stack(amounts, axis=1)
    times: Float = np.einsum("pru,pu->rp", seconds[:, :, : len(amounts)], units)
    return times


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
