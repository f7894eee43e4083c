"""Decide by an integer program whether any placement fits, and what is short if none does.

With z[t,o] ∈ {0,1} for table t in sharding option o, and x[p,g,k] ∈ {0,1} for shard p on GPU g with
the hot rows of point k of its curve::

    Σ_o z[t,o] = 1                                                  for each table t
    Σ_g,k x[p,g,k] = z[t,o]                                         for each shard p of t in o
    Σ_p,k x[p,g,k] ≤ 1                                              for the shards p of t in o
    Σ_p,k bytes(p,k)·x[p,g,k] + Σ_t,o replicas(t,o)·z[t,o] ≤ HBM[g]      for each GPU g
    Σ_p,k dram_bytes(p,k)·x[p,g,k] ≤ DRAM[h]                        for the GPUs g of host h

Drives have the same row; an option has all of its cold rows on a drive or none.

Any solution is a placement. If there is none, a second program lets devices lack bytes and
minimises their sum: that is what is short.

Curves of many rows are reduced to a few points and straight lines between them, which are nowhere
above the curve's bytes. Along a line, rows move one by one from DRAM to HBM.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placer.errors import BackendError
from placer.plan.fields import Memory, Shard
from placer.plan.memory import record_bytes
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, HOT, Float, costs_with
from solvers.result import Limits
from solvers.search.curve_lines import (
    ROUNDING_BYTES,
    Line,
    pieces_of,
    with_every_row,
)

Options = Sequence[Sequence[ShardingOption]]
"""The sharding options that each table may take."""

_POINTS = (2, 4, 16)
"""Points of curves in successive programs: few mostly suffice."""

_MOST_PLACES = 60_000
"""Largest program, in shards × GPUs × points of curves: larger ones take minutes."""

_SHORTAGES_S = 2.0
"""Spend at least this many seconds, and as many as the proof took, on what is short once it is
proven that nothing fits."""


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """The answer of CP-SAT."""

    assignment: Assignment | None = None
    is_impossible: bool = False  # True if it is proven that nothing fits.
    # Bytes that ``"hbm"`` of a GPU, or ``"dram"`` or ``"ssd"`` of a host, lacks in the best
    # placement.
    short_bytes: dict[tuple[Memory, int], int] | None = None
    lacks_steps: bool = False  # True if nothing was found in the work that the steps allow.


@dataclass(frozen=True, slots=True)
class _Point:
    """A choice of the program: a shard on a GPU with some of its rows in HBM.

    A line has its first point's costs, and `rows` counts the hot rows beyond that point.
    """

    shard: TableShard
    gpu: int
    costs: Float
    chosen: Any
    rows: Any


def fit(instance: Instance, limits: Limits, time_limit_s: float) -> FitAnswer:
    """Find any assignment that fits; or prove that none does, and say what is short."""
    every = [instance.options_of(table) for table in range(instance.tables)]
    few = [[option for option in of if _is_even(option)] or of for of in every]
    deadline, steps = time.monotonic() + time_limit_s, limits.max_steps
    # All programs share this.
    work_s = min(_REPEATED_S, _LEAST_S + (steps or 0) * _STEP_S)

    def left_s() -> float:
        return deadline - time.monotonic() if steps is None else work_s

    def run(most_points: int, most_s: float, *, may_lack: bool = False) -> FitAnswer:
        nonlocal work_s
        left = replace(limits, time_limit_s=max(0.0, deadline - time.monotonic()))
        for options in (every, few):
            if _places(instance, options, most_points) <= _MOST_PLACES:
                program = FitProgram(instance, options, most_points, may_lack=may_lack)
                answer = program.run(left, most_s)
                work_s -= program.work_s
                return answer
        return FitAnswer()

    for most_points in _POINTS:
        before_s = left_s()
        answer = run(most_points, before_s / 2 if steps is None else before_s)
        if answer.is_impossible:
            spare_s = left_s() if steps is None else max(_LEAST_S, left_s())
            most_s = min(max(_SHORTAGES_S, before_s - left_s()), spare_s)
            # Lines are below what is short: with more points, less so.
            lacking = run(_POINTS[-1], most_s, may_lack=True)
            if not lacking.short_bytes:
                lacking = run(most_points, most_s, may_lack=True)
            return replace(answer, short_bytes=lacking.short_bytes)
        is_over = time.monotonic() > deadline or (limits.stop is not None and limits.stop())
        if answer.assignment is not None or is_over:
            return answer
        if steps is not None and work_s <= 0:
            return FitAnswer(lacks_steps=True)
    return FitAnswer()


def _is_even(option: ShardingOption) -> bool:
    """Return whether an option is worth trying if there are many."""
    if option.replicated_rows or len(set(option.column_widths)) > 1:
        return False
    return option.row_slices & (option.row_slices - 1) == 0


def _places(instance: Instance, options: Options, most_points: int) -> int:
    """Return the size of a program: shards × GPUs × points."""
    if sum(option.shard_count for of in options for option in of) * instance.gpus > _MOST_PLACES:
        return _MOST_PLACES + 1
    curves = (
        with_every_row(instance.curve(shard, 0), most_points)
        for table, of in enumerate(options)
        for option in of
        for shard in instance.shards(table, option)
    )
    return instance.gpus * sum(min(curve.hot_rows.size, most_points) for curve in curves)


class FitProgram:
    """The program of this module's docstring.

    - `options`: the options that each table may take. With all options, having no solution is a
      proof.
    - `most_points`: points of each curve.
    - `may_lack`: whether devices may lack bytes.
    """

    def __init__(
        self, instance: Instance, options: Options, most_points: int, *, may_lack: bool = False
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance, self.may_lack, self.most_points = instance, may_lack, most_points
        self.is_complete = all(
            len(of) == len(instance.options_of(table)) for table, of in enumerate(options)
        )
        self.model = cp_model.CpModel()
        self.points: list[_Point] = []
        self.replicas: list[tuple[TableShard, Any]] = []
        # Variables with their bytes, for each GPU and host.
        self._rows: dict[tuple[Memory, int], list[tuple[Any, int]]] = defaultdict(list)
        for table, of_table in enumerate(options):
            used = [self.model.new_bool_var("") for _ in of_table]
            self.model.add_exactly_one(used)
            for option, chosen in zip(of_table, used, strict=True):
                self._add_option(table, option, chosen)
        self._keep_together()
        self.short: dict[tuple[Memory, int], Any] = {}
        self._add_memory()
        if self.short:
            self.model.minimize(sum(self.short.values()))

    def _add_option(self, table: int, option: ShardingOption, used: Any) -> None:
        """Add the shards of a table in one option."""
        instance = self.instance
        for replica in instance.replicas(table, option):
            self.replicas.append((replica, used))
            for gpu in range(instance.gpus):
                self._add_bytes(gpu, instance.priced_costs(replica, gpu)[:, 0], used)
        shards = instance.shards(table, option)
        at_gpu: dict[int, list[Any]] = defaultdict(list)
        split: list[_Point] = []
        whole: list[_Point] = []
        for shard in shards:
            here = []
            for gpu in range(instance.gpus):
                if not instance.may_serve(shard, gpu):
                    continue
                hot_rows = instance.curve(shard, gpu).hot_rows
                for costs, line in self._pieces(shard, gpu):
                    chosen = self.model.new_bool_var("")
                    rows = None if line is None else self._add_line(gpu, line, chosen)
                    point = _Point(shard, gpu, costs, chosen, rows)
                    here.append(chosen)
                    at_gpu[gpu].append(chosen)
                    self.points.append(point)
                    self._add_bytes(gpu, costs, chosen)
                    if shard.option.home.drive_share == 1 and instance.is_gpu(gpu):
                        cold = int(hot_rows[-1] - costs[HOT])
                        self._add_drive(shard, gpu, (chosen, cold), (rows, -1))
                    (whole if costs[-1] in (hot_rows[0], hot_rows[-1]) else split).append(point)
            self.model.add(sum(here) == used)
        for every in at_gpu.values() if len(shards) > 1 else ():
            self.model.add_at_most_one(every)
        if split and len(option.column_widths) > 1:
            self._add_maps(split, whole)

    def _pieces(self, shard: TableShard, gpu: int) -> list[tuple[Float, Line | None]]:
        """Return costs at points of a curve, and lines below the curve between them."""
        instance, host = self.instance, self.instance.host_of_gpu[gpu]
        few = instance.cost_model.uniform_splits and shard.option.shard_count > 1
        room = float(instance.hbm_bytes[gpu]), float(instance.dram_bytes[host])
        room = (math.inf, math.inf) if self.may_lack else room
        return pieces_of(instance.curve(shard, gpu), 2 if few else self.most_points, room)

    def _add_bytes(self, gpu: int, costs: Float, chosen: Any) -> None:
        """Count bytes of a GPU and its host if a variable is 1."""
        host = self.instance.host_of_gpu[gpu]
        memories: tuple[tuple[Memory, int, int], ...]
        memories = (("hbm", gpu, BYTES), ("dram", host, DRAM_BYTES))
        for kind, of, row in memories:
            bytes_ = math.ceil(float(costs[row]) - ROUNDING_BYTES)  # Plans are of whole bytes.
            if bytes_:
                self._rows[kind, of].append((chosen, bytes_))

    def _add_drive(self, shard: TableShard, gpu: int, *terms: tuple[Any, int]) -> None:
        """Count bytes of rows on a drive."""
        spec = self.instance.problem.profile.tables[shard.table].table
        cols, dtype = self.instance.columns(shard), shard.option.home.dtype or None
        row = Shard(spec.name, (0, 1, 1), cols, ("",), "ssd", "staged", dtype=dtype)
        held = self._rows["ssd", self.instance.host_of_gpu[gpu]]
        row_bytes = record_bytes(spec, row)
        held += [(of, rows * row_bytes) for of, rows in terms if of is not None and rows]

    def _add_line(self, gpu: int, line: Line, chosen: Any) -> Any:
        """Count bytes of the hot rows beyond the start of a line, if it is chosen.

        Return the variable with the number of these rows.
        """
        rows = self.model.new_int_var(0, line.rows, "")
        self.model.add(rows <= line.rows * chosen)
        self._rows["hbm", gpu].append((rows, line.hbm_bytes_a_row))
        self._rows["dram", self.instance.host_of_gpu[gpu]].append((rows, line.dram_bytes_a_row))
        return rows

    def _add_maps(self, split: Sequence[_Point], whole: Sequence[_Point]) -> None:
        """If one column slice is split, GPUs of the other slices need its row map too."""
        map_bytes = self.instance.curve(split[0].shard, split[0].gpu).split_hbm_bytes
        if not map_bytes:
            return
        is_split = self.model.new_bool_var("")
        for point in split:
            self.model.add_implication(point.chosen, is_split)
        for point in whole:
            mapped = self.model.new_bool_var("")
            self.model.add_bool_or(mapped, ~point.chosen, ~is_split)
            self._rows["hbm", point.gpu].append((mapped, math.floor(map_bytes)))

    def _keep_together(self) -> None:
        """Put all shards of a group's tables on the same GPU."""
        instance = self.instance
        on: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for point in self.points:
            on[point.shard.table, point.gpu].append(point.chosen)
        tables = [TableShard(table) for table in range(instance.tables)]
        for group in instance.blocks(tables):
            for gpu in range(instance.gpus) if len(group) > 1 else ():
                first, *others = (sum(on[shard.table, gpu]) for shard in group)
                for other in others:
                    self.model.add(first == other)

    def _add_memory(self) -> None:
        """Limit the bytes of devices, or count the bytes that they lack."""
        instance = self.instance
        devices: list[tuple[Memory, int, float]]
        devices = [("hbm", gpu, b) for gpu, b in enumerate(instance.hbm_bytes.tolist())]
        devices += [("dram", host, b) for host, b in enumerate(instance.dram_bytes.tolist())]
        drives = [host.drive for host in instance.problem.topology.hosts]
        devices += [("ssd", host, d.memory_bytes) for host, d in enumerate(drives) if d]
        for kind, number, bytes_ in devices:
            terms = self._rows[kind, number]
            if not terms:
                continue
            used = sum(each * variable for variable, each in terms)
            if self.may_lack:
                most = sum(max(0, each) * of.domain.max() for of, each in terms)
                short = self.short[kind, number] = self.model.new_int_var(0, most, "")
                used = used - short
            self.model.add(used <= math.floor(bytes_))

    def run(self, limits: Limits, most_s: float) -> FitAnswer:
        """Solve the program; read back the assignment or what is short."""
        from ortools.sat.python import cp_model

        solver, status = run_cp_sat(self.model, limits, most_s)
        self.work_s = solver.response_proto.deterministic_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return FitAnswer(None, status == cp_model.INFEASIBLE and self.is_complete)
        lacking = {of: solver.value(short) for of, short in self.short.items()}
        short_bytes = {of: bytes_ for of, bytes_ in lacking.items() if bytes_}
        assignment = None if short_bytes else self._assignment(solver)
        return FitAnswer(assignment, short_bytes=short_bytes)

    def _assignment(self, solver: Any) -> Assignment | None:
        """Return the chosen assignment, with HBM filled again if that is faster."""
        placed = [point for point in self.points if solver.value(point.chosen)]
        pairs = [(point.shard, point.gpu) for point in placed]
        replicas = [replica for replica, used in self.replicas if solver.value(used)]
        every = {one.shard: self._costs(solver, one)[:, None] for one in placed}
        # Lines may be below their curves' bytes: else their shards take what is best at some price.
        columns = self.instance.prices.size
        known = {
            one.shard: np.tile(one.costs[:, None], columns) for one in placed if one.rows is None
        }
        filled = [
            Assignment.of(self.instance, pairs, replicas, fixed=f) for f in (every, known, {})
        ]
        fitting = [assignment for assignment in filled if assignment is not None]
        return min(fitting, key=lambda one: one.step_time_s, default=None)

    def _costs(self, solver: Any, point: _Point) -> Float:
        """Return what a chosen point costs, or a line with its number of hot rows."""
        if point.rows is None:
            return point.costs
        curve = self.instance.curve(point.shard, point.gpu)
        return costs_with(curve, int(point.costs[HOT]) + solver.value(point.rows))


_POLL_S = 0.05
"""Seconds between two checks whether the caller wants to stop."""


_GAP = 0.05
"""Relative gap of the objective, the bytes that devices lack."""

_REPEATED_S, _LEAST_S, _STEP_S = 10.0, 1.0, 0.1
"""Limits of CP-SAT's deterministic time, roughly seconds, if steps are limited instead of time: the
largest, the smallest, and what each step adds to the smallest."""


def run_cp_sat(model: Any, limits: Limits, most_s: float) -> tuple[Any, Any]:
    """Solve a model; return CP-SAT's solver, which has the values, and its status."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, most_s)
    solver.parameters.num_workers = limits.thread_count
    if limits.max_steps is not None:  # The same answer on any machine, by deterministic time.
        solver.parameters.max_time_in_seconds = max(0.1, limits.time_limit_s)
        solver.parameters.max_deterministic_time = max(0.0, most_s)
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = _GAP
    # Deterministic for a seed unless the time limit is reached.
    solver.parameters.interleave_search = True
    status = _solved(solver, model, limits)
    if status == cp_model.MODEL_INVALID:
        raise BackendError(f"CP-SAT rejects the model: {model.validate()}")
    return solver, status


def _solved(solver: Any, model: Any, limits: Limits) -> Any:
    """Return CP-SAT's status for a model; stop at once if the caller asks or on Ctrl-C.

    CP-SAT runs in its own thread: Python handles signals only between bytecodes of the main thread,
    which also polls the caller.
    """
    # CP-SAT's own handling of Ctrl-C would hide the signal from Python.
    solver.parameters.catch_sigint_signal = False
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(solver.solve(model))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="CP-SAT", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if limits.stop is not None and limits.stop():
                solver.stop_search()
    except BaseException:
        while thread.is_alive():  # A search that has not begun ignores a stop, so repeat it.
            solver.stop_search()
            thread.join(_POLL_S)
        raise
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
