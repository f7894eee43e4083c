"""Step times of a replayed log: counted units of work times the cost of each unit.

`evaluate` multiplies the unit costs of a step equation (`cost_models.step_equation.phases`) with
the work that a profile predicts; this module multiplies them with the work that batches really did.
Lookups of rows in HBM, copies of staged and cached rows included, cost ``device`` or ``hit``, and
staged and cached rows without an entry in HBM cost ``uva``. docs/simulate.md says how copies are
charged, and what runs beside a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.arenas import Arena, arena_loads, arena_of
from cost_models.base import CostModel, Float, require_match
from cost_models.dense import dense_step_s
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.loads import with_own_part
from cost_models.step_equation.phases import (
    COPIES,
    HOST,
    IDS,
    LOOKUP,
    NAMES,
    READ_KINDS,
    UPDATE,
    ReadCosts,
    ReadKind,
    UnitCosts,
    read_matrix,
    with_lanes,
)
from cost_models.step_equation.work import (
    Extras,
    drive_row_s,
    group_of,
    groups_of,
    host_pools,
    is_mapped,
)
from placer.errors import PlacerError, PlanMismatchError
from placer.executor.distributed.division import servers_of
from placer.plan.fields import PIPELINES, Pipeline
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.simulator.counts import StepCounts
from placer.simulator.parts import Arrangement

_KINDS: dict[str, tuple[ReadKind, ReadKind, ReadKind]] = {
    "device": ("device", "device", "device"),
    "staged": ("device", "staged", "uva"),
    "cached": ("hit", "miss", "uva"),
    "uva": ("uva", "uva", "uva"),
    "host": ("host", "host", "host"),
}
"""How a part's rows are read: rows in HBM, rows copied to HBM, and other rows."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds of one step, by serving device (GPUs, then servers) and by host."""

    phase_s: Float  # Shape (8, serving): see `cost_models.step_equation.phases`.
    # Shape (hosts,): seconds of hosts' memory, and the part of them ahead of the step.
    dram_s: Float
    dram_ahead_s: Float
    schedules: Mapping[Pipeline, Schedule]  # The schedule of each pipeline.

    @property
    def gpu_s(self) -> Float:
        """Seconds of each device's work without overlap, shape (serving,)."""
        seconds: Float = self.phase_s.sum(axis=0)
        return seconds

    @property
    def sum_s(self) -> float:
        """The step time without overlap: of the slowest GPUs, or of the busiest host's memory."""
        rows_s = with_lanes(self.phase_s, "serial")
        busiest_s = float(self.dram_s.max(initial=0.0))
        return max(self.schedules["serial"].step_time_s(rows_s), busiest_s)

    def overlapped_s(self, *following: "StepTimes") -> float:
        """Return the time of this step beside copies for the next step and ids of the one after it.

        `following` are up to two next steps; fewer at the end of the log.
        """
        phase_s, dram_s = self.phase_s.copy(), self.dram_s - self.dram_ahead_s
        phase_s[[IDS, COPIES]] = 0.0
        if following:
            phase_s[COPIES] = following[0].phase_s[COPIES]
            dram_s = dram_s + following[0].dram_ahead_s
        if following[1:]:
            phase_s[IDS] = following[1].phase_s[IDS]
        rows_s = with_lanes(phase_s, "look-ahead")
        busiest_s = float(dram_s.max(initial=0.0))
        return max(self.schedules["look-ahead"].step_time_s(rows_s), busiest_s)


class StepTimer:
    """Turns counts of steps into seconds, for an arrangement of one process per GPU and server.

    Without the profile of the plan's tables, all rows count as read equally often. Raises
    PlanMismatchError if a process stands for several GPUs, and PlacerError if the cost model has no
    step equation.
    """

    def __init__(
        self, arrangement: Arrangement, equation: CostModel, profile: Profile | None = None
    ) -> None:
        if not isinstance(equation, StepEquation):
            raise PlacerError(
                f"cost model {equation.name!r} has no constants for a unit of work, so counts say "
                "nothing of its times; take roofline, or a calibrated model"
            )
        plan = arrangement.plan
        topology = plan.topology
        servers = servers_of(plan)
        if arrangement.processes != len(topology.gpus) + len(servers):
            raise PlanMismatchError(
                f"times need one process for each of the {len(topology.gpus)} GPUs"
                f"{f' and each of {len(servers)} servers' if servers else ''}, not "
                f"{arrangement.processes} processes"
            )
        gpus, numbers = len(topology.gpus), topology.serving_numbers
        self._processes = [*range(gpus), *(numbers[server] for server in servers)]
        # All bytes of a server cross the network; costs of GPUs also count bytes that stay.
        self._spread = np.ones(len(numbers))
        self._spread[:gpus] = with_own_part(1.0, gpus)
        if profile is None:  # Assume that all rows are read equally often.
            profile = Profile(tuple(TableProfile.zipf(one, 0.0) for one in plan.tables))
        # Parts and counts name tables by their numbers in the plan, so keep its order.
        profile = Profile(tuple(profile[table.name] for table in plan.tables))
        problem = Problem.of_plan(plan, profile)
        require_match(problem, plan)
        self._schedules: dict[Pipeline, Schedule] = {
            pipeline: equation.schedule(
                replace(problem, pipeline=pipeline), with_servers=bool(servers)
            )
            for pipeline in PIPELINES
        }
        self.dense_s = dense_step_s(problem)
        costs = [
            [equation.serving_costs(problem, table, number) for number in numbers.values()]
            for table in range(len(plan.tables))
        ]
        # Costs of each table on each serving device; costs of reads are in the constants of parts.
        without_reads: list[Any] = [ReadCosts()] * len(READ_KINDS)
        arrays = np.array([[each[len(READ_KINDS) :] for each in row] for row in costs])
        self._costs = UnitCosts(*without_reads, *np.moveaxis(arrays, -1, 0))
        self._add_parts(arrangement, costs, equation.lookup_shares, profile)
        # Arenas of each serving device, and their costs.
        serial, serving = replace(problem, pipeline="serial"), range(len(numbers))
        self._loads = [list(loads.items()) for loads in arena_loads(problem, plan)]
        self._launches = [equation.launches(serial, gpu) for gpu in serving]
        self._arena_costs = [equation.arena_costs(serial, gpu) for gpu in serving]

    def _add_parts(
        self,
        arrangement: Arrangement,
        costs: Sequence[Sequence[UnitCosts]],
        lookup_shares: Float,
        profile: Profile,
    ) -> None:
        """Set the costs of each part, as arrays to multiply with counts."""
        plan, parts = arrangement.plan, arrangement.parts
        topology, count = plan.topology, len(parts)
        numbers = topology.serving_numbers
        hosts = {host.id: number for number, host in enumerate(topology.hosts)}
        self._in_cache = np.array([part.uses_row_cache for part in parts], dtype=bool)
        self._replicated = np.array([part.replicated for part in parts], dtype=bool)
        self._serving, self._hosts = np.zeros((count, len(numbers))), np.zeros((len(hosts), count))
        # The share of a shard's columns in each part, as every part counts the shard's lookups.
        self._shares, self._pooled = np.zeros(count), np.zeros(count, dtype=bool)
        self._parts_of: dict[tuple[int, Arena], list[int]] = defaultdict(list)
        # Fixed costs of shards and column slices, by serving device.
        self._launch_s = np.zeros(len(numbers))
        groups, seen = groups_of(plan), set[tuple[object, int]]()
        # Seconds of phases and of hosts, for a lookup, a row and a vector; see `read_matrix`.
        shape = count, HOST + 1, 3
        self._in_hbm, self._copied, self._in_place = (np.zeros(shape) for _ in range(3))
        for at, part in enumerate(parts):
            shard, gpu = plan.shards[part.shard], topology.gpus_by_id.get(part.device)
            table, group, number = plan.tables[part.table], group_of(shard), numbers[part.device]
            unit, is_slice = costs[part.table][number], shard.width < table.dim
            self._serving[at, number] = 1.0
            self._hosts[hosts[part.device if gpu is None else gpu.host], at] = 1.0
            self._parts_of[number, arena_of(table, shard.width)].append(at)
            self._shares[at] = (part.cols[1] - part.cols[0]) / shard.width
            self._pooled[at] = host_pools(groups[group])
            # What lookups and rows cost besides, however they are read.
            mapped = is_mapped(profile[table.name], groups[group])
            lookup = Extras(
                mapped_lookups=mapped * self._shares[at],
                pooled_lookups=self._pooled[at] * self._shares[at],
            )
            row = Extras(sliced_row_bytes=float(is_slice * part.row_bytes))
            besides = np.zeros(shape[1:])
            besides[:HOST, 0], besides[:HOST, 1] = lookup.phase_s(unit), row.phase_s(unit)
            extras = Extras(
                float(is_slice and (group, number) not in seen), (part.shard, number) not in seen
            )
            self._launch_s[number] += extras.launch_s(unit)
            seen |= {(group, number), (part.shard, number)}
            # In its home, a row may have fewer bytes than in HBM, and may lie on a drive.
            home_bytes = float(table.bytes_per_row(part.cols[1] - part.cols[0], shard.dtype))
            sizes = float(part.weight_bytes), float(part.row_bytes)
            self._in_hbm[at], self._copied[at], self._in_place[at] = (
                besides + read_matrix(unit, kind, (*sizes, home), lookup_shares)
                for kind, home in zip(_KINDS[part.lookup], (0.0, home_bytes, 0.0), strict=True)
            )
            if shard.memory == "ssd":
                self._copied[at, COPIES, 1] += drive_row_s(topology, part.device, home_bytes)
        # Copies write to HBM before the lookup and read from it after the update.
        self._copied -= self._in_hbm
        in_hbm_s = self._copied[:, [LOOKUP, UPDATE]].sum(axis=1, keepdims=True)
        self._copied[:, [LOOKUP, UPDATE]] = in_hbm_s / 2

    def times(self, counts: StepCounts) -> StepTimes:
        """Return the seconds of one step, from its counts."""
        phase_s, dram_s, dram_ahead_s = self._of_parts(counts)
        served = counts.served
        requests, pooled, returned = (
            self._by_device(sent) * self._spread
            for sent in (served.request_bytes, served.pooled_bytes, served.returned_bytes)
        )
        extras = Extras(
            output_vectors=self._by_device(served.output_vectors),
            output_bytes=self._by_device(served.output_bytes),
            exchanged_bytes=requests + returned,
            id_bytes=requests,
            gradient_bytes=returned - pooled,
        )
        phase_s += extras.phase_s(self._costs).sum(axis=1)
        phase_s[[LOOKUP, UPDATE]] += self._launch_s / 2
        phase_s[: len(NAMES)] += self._of_arenas(counts)
        return StepTimes(phase_s, dram_s, dram_ahead_s, self._schedules)

    def _of_parts(self, counts: StepCounts) -> tuple[Float, Float, Float]:
        """Return seconds by phase and device, and of DRAM by host: all, and ahead of the step."""
        c = counts.parts
        # Each replica updates all rows that samples of any replica have read.
        touched = np.where(self._replicated, c.update_rows, c.rows)
        lookups, rows = c.lookups - c.in_place_lookups, np.maximum(touched - c.in_place_rows, 0)
        own = _times(self._in_hbm, lookups, rows, c.vectors)
        own += _times(self._in_place, c.in_place_lookups, c.in_place_rows)
        missed = np.where(self._in_cache, lookups - c.hit_lookups, 0)
        copies = _times(self._copied, missed, (c.staged_rows + c.written_back_rows) / 2)
        busier = np.maximum(c.staged_rows, c.written_back_rows)
        copies[COPIES] = _times(self._copied[:, [COPIES]], missed, busier)
        dram_ahead_s = self._hosts @ copies[HOST]
        phase_s = (own + copies)[:HOST] @ self._serving
        return phase_s, self._hosts @ own[HOST] + dram_ahead_s, dram_ahead_s

    def _of_arenas(self, counts: StepCounts) -> Float:
        """Return seconds of arenas for the counted lookups in them, shape (6, serving)."""
        lookups = counts.parts.lookups * self._shares
        pooled = lookups * self._pooled
        taken_s = np.zeros((len(NAMES), len(self._loads)))
        for gpu, (loads, costs) in enumerate(zip(self._loads, self._arena_costs, strict=True)):
            taken_s[:, gpu] = len(loads) * self._launches[gpu]
            if costs is not None:
                members = [(load, self._parts_of[gpu, arena]) for arena, load in loads]
                taken_s[:, gpu] += costs.seconds(
                    load._replace(
                        lookups=float(lookups[at].sum()), pooled_lookups=float(pooled[at].sum())
                    )
                    for load, at in members
                )
        return taken_s

    def _by_device(self, by_process: npt.NDArray[np.int64]) -> Float:
        """Turn a last axis of processes into one of serving devices."""
        found = np.zeros((len(by_process), self._spread.size))
        found[:, self._processes] = by_process
        return found


def _times(seconds: Float, *amounts: npt.NDArray[Any]) -> Float:
    """Multiply seconds of units, (parts, rows, units), with amounts; shape (rows, parts)."""
    units = np.stack(amounts, axis=1)
    times: Float = np.einsum("pru,pu->rp", seconds[:, :, : len(amounts)], units)
    return times
