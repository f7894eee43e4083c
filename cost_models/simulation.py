"""Replay a log through a plan and time its steps: the Python side of `placer simulate`."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from operator import add

import numpy as np

from cost_models.base import CostModel, Float
from cost_models.replay import StepTimer, StepTimes
from placer.data.log import Chunk
from placer.data.reader import EncodedLog
from placer.errors import DataError
from placer.growing import KeyCounts
from placer.plan.diff import diff
from placer.plan.migration import migration
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.simulator.counts import StepCounts
from placer.simulator.replay import ReplayOptions, Simulator
from placer.simulator.summary import (
    DeviceTotals,
    Served,
    StepRecord,
    Window,
    device_totals,
    drifted,
    equal_windows,
    served,
)
from placer.training.loop import check_log
from placer.training.reading import batches as batches_of
from placer.training.reading import in_background
from placer.workloads.batches import drawn_batches

Stream = tuple[str, Callable[[], Iterable[Chunk]]]
"""The name of a log, and a function that reads its batches from the beginning."""


def log_stream(plan: Plan, log: EncodedLog, batch_size: int, batches: int | None = None) -> Stream:
    """Return a log as a stream for `simulate`, named by the log's description.

    Raises PlanMismatchError when batches are read, if the log lacks a feature of the plan, or its
    tables have other sizes.

    Parameters
    ----------
    log : EncodedLog
        The log, encoded with the id mapping of the plan's profile.
    batch_size : int
        Samples in a step of all GPUs together.
    batches : int, optional
        Number of batches to read; by default all.
    """

    def read() -> Generator[Chunk]:
        yield from islice(batches_of(log, batch_size), batches)

    def read_ahead() -> Iterator[Chunk]:
        check_log(plan, log)
        return in_background(read)  # Read the next batch while the present batch is counted.

    return log.description, read_ahead


def drawn_stream(profile: Profile, batch_size: int, batches: int, *, seed: int = 0) -> Stream:
    """Return a stream for `simulate` of batches that `drawn_batches` draws from a profile."""
    return "drawn", partial(drawn_batches, profile, batch_size, batches, seed=seed)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """Counts and step times of batches replayed under a plan."""

    totals: StepCounts
    records: tuple[StepRecord, ...]  # One record for each step, in order.
    # Shape (serving,): mean seconds of a step's work of each GPU and server, without overlap.
    gpu_s: Float

    @classmethod
    def joined(cls, parts: "Sequence[Replayed]") -> "Replayed":
        """Return the results of several logs as those of one log."""
        totals = reduce(add, (part.totals for part in parts))
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
    """Run batches through a simulator, in its present state, and time each step.

    Call `on_step` after each step with the number of steps done. Raises DataError if there is no
    batch, or an id is not a row of its table.
    """
    arrangement, ahead = simulator.arrangement, simulator.options.look_ahead
    totals: StepCounts | None = None
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
        totals = step if totals is None else totals + step
        gpu_s += times.gpu_s
        on_step(len(seen))
    if totals is None:
        raise DataError("there is no batch to replay; give a log that has samples")
    return Replayed(totals, tuple(seen), gpu_s / len(seen))


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """Mean, median and 99th percentile of step times, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "TimeSummary":
        """Return the summary of the times of one or more steps."""
        values = np.asarray(seconds, dtype=np.float64)
        low, high = np.quantile(values, [0.5, 0.99])
        return cls(float(values.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """The result of `simulate`: what happened to the batches of some logs under a plan.

    `totals` are counts of all steps, `records` the numbers of each step, and `served` the lookups
    by the memory that served them. `gpu_s` are mean seconds of a step's work of each GPU and
    server, without overlap. `windows` are parts of the logs, compared with the first part and with
    the same part under the other plan. `dense_s` are seconds of dense layers in a step; None for
    embeddings alone. `keys` counts what happened to the keys of each table that grows.
    """

    options: ReplayOptions
    totals: StepCounts
    devices: Sequence[DeviceTotals]
    served: Served
    records: tuple[StepRecord, ...]
    gpu_s: Float
    windows: tuple[Window, ...]
    dense_s: float | None = None
    keys: Mapping[str, KeyCounts] = field(default_factory=dict)

    @property
    def step_times(self) -> TimeSummary:
        """Step times with overlap: copies run beside the previous step if the options say so."""
        return TimeSummary.of([one.step_s for one in self.records])

    @property
    def sum_times(self) -> TimeSummary:
        """Step times without any overlap."""
        return TimeSummary.of([one.sum_s for one in self.records])


def simulate(
    plan: Plan,
    streams: Sequence[Stream],
    cost_model: CostModel,
    profile: Profile | None = None,
    *,
    other: Plan | None = None,
    options: ReplayOptions | None = None,
    windows: int = 1,
    on_step: Callable[[str, int], None] = lambda name, steps: None,
) -> Simulated:
    """Replay logs through a plan, one after the other; count the work of each batch and time it.

    Raises PlacerError if the cost model has no costs of units of work. Raises DataError if there is
    no batch, or there are fewer steps than windows.

    Parameters
    ----------
    streams : sequence of (name, callable)
        Logs from `log_stream` or `drawn_stream`. The callable returns the batches.
    cost_model : CostModel
        A model with costs of each unit of work: roofline or calibrated.
    profile : Profile, optional
        The profile of the plan's tables, for costs that depend on accesses.
    other : Plan, optional
        Another plan for the same batches, to find after how many steps moving to it pays.
    windows : int
        Number of equal parts of each log in the result.
    on_step : callable
        Called after each step with the log's name and the number of its steps so far.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> profile = named_workload("random-3@1")
    >>> plan = solve(Problem(profile, Topology.parse("2xt4"), batch_size=64), "greedy-cost").plan
    >>> found = simulate(plan, [drawn_stream(profile, 128, batches=4)], Roofline(), profile)
    >>> len(found.records), found.step_times.mean_s > 0
    (4, True)
    """
    options = (options or ReplayOptions()).of_plan(plan)
    if not streams:
        raise DataError("there is no log to replay")

    def run(one: Plan) -> tuple[Simulator, Replayed, list[Window], float | None]:
        simulator = Simulator(one, options)
        timer = StepTimer(simulator.arrangement, cost_model, profile)
        replays: list[Replayed] = []
        parts: list[Window] = []
        for name, read in streams:
            replays.append(replayed(simulator, timer, read(), partial(on_step, name)))
            parts += equal_windows(name, replays[-1].records, windows)
        return simulator, Replayed.joined(replays), parts, timer.dense_s

    simulator, own, parts, dense_s = run(plan)
    other_parts = None if other is None else run(other)[2]
    migration_s = None if other is None else migration(diff(plan, other)).seconds
    return Simulated(
        options,
        own.totals,
        device_totals(simulator.arrangement, own.totals, simulator.cache_entries),
        served(simulator.arrangement, own.totals.parts),
        own.records,
        own.gpu_s,
        drifted(parts, other_parts, migration_s),
        dense_s,
        simulator.key_counts(),
    )
