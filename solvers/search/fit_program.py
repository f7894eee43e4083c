"""Decide by an integer program whether any placement fits, and what is short if none does.

With z[t,o] ∈ {0,1} for table t in sharding option o, and x[p,g,k] ∈ {0,1} for shard p on GPU g with
the hot rows of piece k of its curve::

    Σ_o z[t,o] = 1                                                  for each table t
    Σ_g,k x[p,g,k] = z[t,o]                                         for each shard p of t in o
    Σ_p,k x[p,g,k] ≤ 1                                              for the shards p of t in o
    Σ_p,k bytes(p,k)·x[p,g,k] + Σ_t,o replicas(t,o)·z[t,o] ≤ HBM[g]      for each GPU g
    Σ_p,k dram_bytes(p,k)·x[p,g,k] ≤ DRAM[h]                        for the GPUs g of host h

Drives have the same row; an option has all of its cold rows on a drive or none.

A curve has three pieces: no hot rows, all rows hot, and a straight line between them, along which
rows move one by one from DRAM to HBM. The line is nowhere above the curve's bytes. So if the
program has no solution, nothing fits. A second program then lets devices lack bytes and minimises
their sum: that is what is short.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cost_models import CostCurve
from placer.errors import BackendError
from placer.plan.fields import Memory, Shard
from placer.plan.memory import record_bytes
from solvers.model.assignment import Assignment
from solvers.model.curves import curve_at
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, HOT, Float, costs_of, costs_with
from solvers.result import Limits

_FEW_ROWS = 16
"""Up to this many rows, each number of hot rows is a piece of its own."""

_MOST_PLACES = 60_000
"""Largest program, in shards × GPUs × pieces of curves: larger ones take minutes."""

_PROOF_SHARE = 0.5
"""Share of the time for finding a placement or the proof."""

_SHORTAGES_S = 2.0
"""Spend at least this many seconds, and as many as the proof took, on what is short."""

_ROUNDING_BYTES = 1e-6
"""Bytes that are none, but a rounding error."""


@dataclass(frozen=True, slots=True)
class FitAnswer:
    """The answer of CP-SAT."""

    assignment: Assignment | None = None
    is_impossible: bool = False  # True if it is proven that nothing fits.
    # Bytes that ``"hbm"`` of a GPU, or ``"dram"`` or ``"ssd"`` of a host, lacks in the best
    # placement.
    short_bytes: dict[tuple[Memory, int], int] | None = None
    lacks_steps: bool = False  # True if nothing was found in the work that the steps allow.


class Line(NamedTuple):
    """A lower bound of a shard's bytes between two numbers of hot rows."""

    first: int  # Hot rows at the start of the line.
    rows: int  # Hot rows at its end minus hot rows at its start.
    # Bytes at the start.
    hbm_bytes: int
    dram_bytes: int
    # Bytes that each further hot row adds; mostly negative in DRAM.
    hbm_bytes_a_row: int
    dram_bytes_a_row: int

    def fits(self, hbm_bytes: float, dram_bytes: float) -> bool:
        """Return whether some number of hot rows fits each memory by itself."""
        least_hbm = self.hbm_bytes + min(0, self.rows * self.hbm_bytes_a_row)
        least_dram = self.dram_bytes + min(0, self.rows * self.dram_bytes_a_row)
        return least_hbm <= hbm_bytes and least_dram <= dram_bytes


def line_between(curve: CostCurve) -> Line | None:
    """Return a line below a curve's bytes between no hot rows and all, where a split takes bytes.

    A curve's bytes are linear between two points, as all rows there are read alike. So a line that
    is not above the points is not above the curve. None if there are no numbers between.
    """
    low, high = int(curve.hot_rows[0]) + 1, int(curve.hot_rows[-1]) - 1
    if high < low:
        return None
    inner = curve.hot_rows[(curve.hot_rows > low) & (curve.hot_rows < high)]
    part = curve_at(curve, np.unique(np.concatenate(([low], inner, [high]))))
    rows = part.hot_rows - low
    starts, slopes = [], []
    for used in (part.hbm_bytes + curve.split_hbm_bytes, part.dram_bytes):
        slope = round(float(used[-1] - used[0]) / max(1, high - low))
        starts.append(math.ceil(float((used - slope * rows).min()) - _ROUNDING_BYTES))
        slopes.append(slope)
    return Line(low, high - low, *starts, *slopes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A choice of the program: a shard on a GPU with some of its rows in HBM."""

    shard: TableShard
    gpu: int
    hot_rows: int  # The fewest, if `more` counts further ones.
    chosen: Any
    more: Any = None


def fit(instance: Instance, limits: Limits, time_limit_s: float) -> FitAnswer:
    """Find any assignment that fits; or prove that none does, and say what is short."""
    options = [instance.options_of(table) for table in range(instance.tables)]
    shards = sum(max(1, option.shard_count) for of in options for option in of)
    if shards * instance.gpus * 3 > _MOST_PLACES:
        return FitAnswer()
    most_s = time_limit_s
    if limits.max_steps is not None:
        most_s = min(_REPEATED_S, _LEAST_S + limits.max_steps * _STEP_S)
    program = FitProgram(instance, options)
    answer = program.run(limits, _PROOF_SHARE * most_s)
    if not answer.is_impossible:
        return answer
    left_s = min(max(_SHORTAGES_S, program.took_s), (1 - _PROOF_SHARE) * most_s)
    lacking = FitProgram(instance, options, may_lack=True).run(limits, left_s)
    return replace(answer, short_bytes=lacking.short_bytes)


class FitProgram:
    """The program of this module's docstring.

    - `options`: the options that each table may take.
    - `may_lack`: whether devices may lack bytes.
    """

    def __init__(
        self,
        instance: Instance,
        options: Sequence[Sequence[ShardingOption]],
        *,
        may_lack: bool = False,
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance, self.may_lack, self.took_s = instance, may_lack, 0.0
        self.model = cp_model.CpModel()
        self.pieces: list[_Piece] = []
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
        at_gpu: dict[int, list[Any]] = defaultdict(list)
        shards, first = instance.shards(table, option), len(self.pieces)
        for shard in shards:
            here = []
            for gpu in range(instance.gpus):
                if instance.may_serve(shard, gpu):
                    pieces = self._pieces(shard, gpu)
                    here += [piece.chosen for piece in pieces]
                    at_gpu[gpu] += [piece.chosen for piece in pieces]
                    self.pieces += pieces
            self.model.add(sum(here) == used)
        for every in at_gpu.values() if len(shards) > 1 else ():
            self.model.add_at_most_one(every)
        if len(option.column_widths) > 1:
            self._add_maps(self.pieces[first:])

    def _pieces(self, shard: TableShard, gpu: int) -> list[_Piece]:
        """Add the pieces of a shard's curve on a GPU, and return them."""
        curve = self.instance.curve(shard, gpu)
        first, last = int(curve.hot_rows[0]), int(curve.hot_rows[-1])
        may_split = not curve.only_points and np.isfinite(curve.split_s)
        if may_split and last - first < _FEW_ROWS:
            points = costs_of(curve_at(curve, np.arange(first, last + 1))).T
        else:
            points = costs_of(curve)[:, sorted({0, curve.hot_rows.size - 1})].T
        pieces = []
        for costs in points:
            chosen = self.model.new_bool_var("")
            self._add_bytes(gpu, costs, chosen)
            pieces.append(_Piece(shard, gpu, int(costs[HOT]), chosen))
        line = line_between(curve) if may_split and last - first >= _FEW_ROWS else None
        host = self.instance.host_of_gpu[gpu]
        room = self.instance.hbm_bytes[gpu], self.instance.dram_bytes[host]
        # Leaving out lines that need more than there is makes hard programs far faster.
        if line is not None and (self.may_lack or line.fits(*room)):
            chosen = self.model.new_bool_var("")
            more = self.model.new_int_var(0, line.rows, "")
            self.model.add(more <= line.rows * chosen)
            self._rows["hbm", gpu] += [(chosen, line.hbm_bytes), (more, line.hbm_bytes_a_row)]
            self._rows["dram", host] += [(chosen, line.dram_bytes), (more, line.dram_bytes_a_row)]
            pieces.append(_Piece(shard, gpu, line.first, chosen, more))
        if shard.option.home.drive_share == 1 and self.instance.is_gpu(gpu):
            self._add_drive(pieces, last)
        return pieces

    def _add_bytes(self, gpu: int, costs: Float, chosen: Any) -> None:
        """Count bytes of a GPU and its host if a variable is 1."""
        host = self.instance.host_of_gpu[gpu]
        memories: tuple[tuple[Memory, int, int], ...]
        memories = (("hbm", gpu, BYTES), ("dram", host, DRAM_BYTES))
        for kind, of, row in memories:
            bytes_ = math.ceil(float(costs[row]) - _ROUNDING_BYTES)  # Plans are of whole bytes.
            if bytes_:
                self._rows[kind, of].append((chosen, bytes_))

    def _add_maps(self, pieces: Sequence[_Piece]) -> None:
        """If one column slice is split, GPUs of the other slices need its row map too."""
        is_split, whole = self.model.new_bool_var(""), []
        for piece in pieces:
            curve = self.instance.curve(piece.shard, piece.gpu)
            if piece.more is not None or piece.hot_rows not in curve.hot_rows[[0, -1]]:
                self.model.add_implication(piece.chosen, is_split)
            elif curve.split_hbm_bytes:
                whole.append((piece, math.floor(curve.split_hbm_bytes)))
        for piece, map_bytes in whole:
            mapped = self.model.new_bool_var("")
            self.model.add_bool_or(mapped, ~piece.chosen, ~is_split)
            self._rows["hbm", piece.gpu].append((mapped, map_bytes))

    def _add_drive(self, pieces: Sequence[_Piece], rows: int) -> None:
        """Count bytes of a shard's rows that are not in HBM on its host's drive."""
        shard, gpu = pieces[0].shard, pieces[0].gpu
        spec = self.instance.problem.profile.tables[shard.table].table
        cols, dtype = self.instance.columns(shard), shard.option.home.dtype or None
        row = Shard(spec.name, (0, 1, 1), cols, ("",), "ssd", "staged", dtype=dtype)
        row_bytes, host = record_bytes(spec, row), self.instance.host_of_gpu[gpu]
        for piece in pieces:
            terms = [(piece.chosen, (rows - piece.hot_rows) * row_bytes)]
            terms += [] if piece.more is None else [(piece.more, -row_bytes)]
            self._rows["ssd", host] += terms

    def _keep_together(self) -> None:
        """Put all shards of a group's tables on the same GPU."""
        instance = self.instance
        on: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for piece in self.pieces:
            on[piece.shard.table, piece.gpu].append(piece.chosen)
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
        response, repeats = solver.response_proto, limits.max_steps is not None
        self.took_s = response.deterministic_time if repeats else response.wall_time
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            is_impossible = status == cp_model.INFEASIBLE
            return FitAnswer(None, is_impossible, lacks_steps=repeats and not is_impossible)
        if self.short:
            lacking = {of: solver.value(short) for of, short in self.short.items()}
            return FitAnswer(short_bytes={of: bytes_ for of, bytes_ in lacking.items() if bytes_})
        return FitAnswer(self._assignment(solver))

    def _assignment(self, solver: Any) -> Assignment | None:
        """Return the chosen assignment, with HBM filled again if that is faster."""
        placed = [piece for piece in self.pieces if solver.value(piece.chosen)]
        pairs = [(piece.shard, piece.gpu) for piece in placed]
        replicas = [replica for replica, used in self.replicas if solver.value(used)]
        fixed: dict[TableShard, Float] = {}
        for piece in placed:
            more = 0 if piece.more is None else solver.value(piece.more)
            curve = self.instance.curve(piece.shard, piece.gpu)
            fixed[piece.shard] = costs_with(curve, piece.hot_rows + more)[:, None]
        filled = [Assignment.of(self.instance, pairs, replicas, fixed=each) for each in (fixed, {})]
        fitting = [assignment for assignment in filled if assignment is not None]
        return min(fitting, key=lambda one: one.step_time_s, default=None)


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
