"""Step times of a replayed log: what was counted, times what each unit of it costs.

The constants are those of any cost model with a step equation
(`cost_models.step_equation.unit_costs`): a roofline's or calibrated ones. Where `evaluate`
multiplies them with the work that a profile leads to expect, this multiplies them with the work
that batches really did:

* rows in HBM, and copies of staged and cached rows there, are work of ``device`` and ``hit``;
* a row that was copied to HBM costs what ``staged`` (or ``miss``) costs more than that, once its
  old row has gone back too: half of it each way for the memories, and the busier way for the
  link, which carries both at once;
* staged and cached rows without an entry are work of ``uva``.

Seconds belong to the phases that `cost_models.step_equation.phases` describes, and a step takes
what its schedule says. With look-ahead, rows of the next batch are copied to HBM, and ids of the
one after it travel to their holders, beside the present batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.dense import dense_phase_s
from cost_models.part_times import ArenaTimer, PartTimer
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.exchanged_bytes import with_own_part
from cost_models.step_equation.phases import (
    COPIES,
    IDS,
    LOOKUP,
    NAMES,
    UPDATE,
    with_lanes,
)
from cost_models.step_equation.unit_costs import READ_KINDS, ReadCosts, UnitCosts
from cost_models.step_equation.work import Extras, group_of
from placer.data.log import Chunk
from placer.errors import DataError, PlacerError, PlanMismatchError
from placer.executor.distributed.placement.division import servers_of
from placer.pipeline import PIPELINES, Pipeline
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.simulator.counts import StepCounts, Totals
from placer.simulator.parts import Arrangement
from placer.simulator.replay import Simulator
from placer.simulator.summary import StepRecord, served

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Seconds of one step, by who serves (GPUs, then servers), and by host."""

    phase_s: Float  # Shape (8, serving): as `cost_models.step_equation.phases` has them.
    # Shape (hosts,): of hosts' memories, all and ahead.
    dram_s: Float
    dram_ahead_s: Float
    schedules: Mapping[Pipeline, Schedule]  # By pipeline.

    @property
    def gpu_s(self) -> Float:
        """Seconds of each with all its work one after the other, shape (serving,)."""
        seconds: Float = self.phase_s.sum(axis=0)
        return seconds

    @property
    def sum_s(self) -> float:
        """The step if nothing overlaps: each phase's slowest GPU, or the busiest host's memory."""
        rows_s = with_lanes(self.phase_s, "serial")
        return max(self.schedules["serial"].step_time_s(rows_s), _most(self.dram_s))

    def overlapped_s(self, *following: "StepTimes") -> float:
        """Return seconds of this step beside the next step's copies and the ids after that.

        Those that are not given do not follow.
        """
        phase_s, dram_s = self.phase_s.copy(), self.dram_s - self.dram_ahead_s
        phase_s[[IDS, COPIES]] = 0.0
        if following:
            phase_s[COPIES] = following[0].phase_s[COPIES]
            dram_s = dram_s + following[0].dram_ahead_s
        if following[1:]:
            phase_s[IDS] = following[1].phase_s[IDS]
        rows_s = with_lanes(phase_s, "look-ahead")
        return max(self.schedules["look-ahead"].step_time_s(rows_s), _most(dram_s))


class StepTimer:
    """Turns counts of an arrangement, with a process for each GPU and server, into seconds.

    Constants that depend on accesses need the profile of the plan's tables. Raises
    PlanMismatchError if processes stand for several GPUs.
    """

    def __init__(
        self, arrangement: Arrangement, equation: StepEquation, profile: Profile | None = None
    ) -> None:
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
        # What a server sends crosses the network; GPUs' exchange counts what stays as well.
        self._spread = np.ones(len(numbers))
        self._spread[:gpus] = with_own_part(1.0, gpus)
        problem = Problem(
            _of_tables_alone(plan) if profile is None else profile,
            topology,
            max(1, plan.batch_size),
            dense=plan.dense,
            exchange_dtype=plan.exchange_dtype,
        )
        self._schedules: dict[Pipeline, Schedule] = {
            pipeline: equation.schedule(replace(problem, pipeline=pipeline))
            for pipeline in PIPELINES
        }
        self.dense_s = None if plan.dense is None else max(dense_phase_s(problem))
        tables = _table_numbers(problem, plan)
        costs = [
            [equation.serving_costs(problem, table, number) for number in numbers.values()]
            for table in tables
        ]
        self._parts = PartTimer(arrangement, problem, tables, costs, equation.lookup_shares)
        # Of each table on each of them; what reads cost is in the constants of parts.
        without_reads: list[Any] = [ReadCosts()] * len(READ_KINDS)
        arrays = np.array([[each[len(READ_KINDS) :] for each in row] for row in costs])
        self._costs = UnitCosts(*without_reads, *np.moveaxis(arrays, -1, 0))
        self._launch_s = _launch_s(arrangement, costs)
        self._arenas = ArenaTimer(arrangement, equation, replace(problem, pipeline="serial"))

    def times(self, counts: StepCounts) -> StepTimes:
        """Return seconds of one step."""
        phase_s, dram_s, dram_ahead_s = self._parts.seconds(counts)
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
        phase_s[: len(NAMES)] += self._arenas.seconds(counts)
        return StepTimes(phase_s, dram_s, dram_ahead_s, self._schedules)

    def _by_device(self, by_process: npt.NDArray[np.int64]) -> Float:
        """Return what is of each process, along the last axis, by who serves."""
        found = np.zeros((len(by_process), self._spread.size))
        found[:, self._processes] = by_process
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Counts and step times of batches replayed under a plan."""

    totals: Totals
    records: tuple[StepRecord, ...]  # Of each step, in order.
    # Shape (serving,): mean seconds of each GPU's and server's work, one after the other.
    gpu_s: Float

    @classmethod
    def joined(cls, parts: "Sequence[Replayed]") -> "Replayed":
        """Several logs, one after the other, as one."""
        totals = parts[0].totals
        for part in parts[1:]:
            totals = totals.joined(part.totals)
        steps = [len(part.records) for part in parts]
        work = [part.gpu_s * count for part, count in zip(parts, steps, strict=True)]
        records = tuple(record for part in parts for record in part.records)
        return cls(totals, records, np.sum(work, axis=0) / sum(steps))


def replayed(
    simulator: Simulator,
    timer: StepTimer,
    batches: Iterable[Chunk],
    on_step: Callable[[int], object] = lambda done: None,
) -> Replayed:
    """Run batches through a simulator, from where it is, and time each of them.

    `on_step` is called after each step with the number of steps done. Raises DataError if there is
    no batch, or an id is no row of its table.
    """
    arrangement, ahead = simulator.arrangement, simulator.options.look_ahead
    totals = Totals.zeros(
        len(arrangement.parts), len(arrangement.row_caches), arrangement.processes
    )
    seen: list[StepRecord] = []
    gpu_s = np.zeros(len(arrangement.plan.topology.serving))
    recent: list[StepTimes] = []
    for step in simulator.run(batches):
        times = timer.times(step)
        recent = [*recent[-2:], times]
        for back in range(1, len(recent)) if ahead else ():
            step_s = recent[-1 - back].overlapped_s(*recent[len(recent) - back :])
            seen[-back] = replace(seen[-back], step_s=step_s)
        step_s = times.overlapped_s() if ahead else times.sum_s
        by = served(arrangement, step.parts)
        held, needed = int(step.held.sum()), int(step.needed.sum())
        seen.append(
            StepRecord(by.lookups, by.hbm_lookups, by.slow_rows, held, needed, step_s, times.sum_s)
        )
        totals += step
        gpu_s += times.gpu_s
        on_step(len(seen))
    if not seen:
        raise DataError("there is no batch to replay; give a log that has samples")
    return Replayed(totals, tuple(seen), gpu_s / len(seen))


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """Step times over batches, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "TimeSummary":
        """Summarise the times of at least one step."""
        values = np.asarray(seconds, dtype=np.float64)
        low, high = np.quantile(values, [0.5, 0.99])
        return cls(float(values.mean()), float(low), float(high))


def _launch_s(arrangement: Arrangement, costs: Sequence[Sequence[UnitCosts]]) -> Float:
    """Fixed costs of the shards and column slices of each device, shape (serving,)."""
    plan = arrangement.plan
    numbers = plan.topology.serving_numbers
    dims = [table.dim for table in plan.tables]
    launch_s, seen = np.zeros(len(numbers)), set()
    for part in arrangement.parts:
        shard, gpu = plan.shards[part.shard], numbers[part.device]
        key = group_of(shard), gpu
        is_slice = shard.width < dims[part.table] and key not in seen
        seen.add(key)
        extras = Extras(float(is_slice), float(part.leads_shard))
        launch_s[gpu] += extras.launch_s(costs[part.table][gpu])
    return launch_s


def step_equation(model: object) -> StepEquation:
    """Return a cost model as one whose constants can be multiplied with counts.

    Raises PlacerError if it has none.
    """
    if not isinstance(model, StepEquation):
        name = getattr(model, "name", type(model).__name__)
        raise PlacerError(
            f"cost model {name!r} has no constants for a unit of work, so counts say nothing of "
            "its times; take roofline, or a calibrated model"
        )
    return model


def _table_numbers(problem: Problem, plan: Plan) -> list[int]:
    """Return the number of each of the plan's tables in the problem's profile."""
    known = problem.profile.table_numbers
    missing = [table.name for table in plan.tables if table.name not in known]
    if missing:
        raise PlanMismatchError(f"the profile has no table {missing[0]!r} of the plan")
    return [known[table.name] for table in plan.tables]


def _of_tables_alone(plan: Plan) -> Profile:
    """Return a profile of which nothing but the tables is known: all rows are read alike."""
    return Profile(
        tuple(TableProfile(table, AccessCdf.zipf(table.rows, 0.0)) for table in plan.tables)
    )


def _most(values: Float) -> float:
    return float(values.max()) if values.size else 0.0
