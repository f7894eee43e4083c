"""The integer program of a whole problem with numbers of hot rows among its decisions.

With z[t,o] ∈ {0,1} for table t in sharding option o, x[p,g,k] ∈ {0,1} for shard p on GPU g with
the hot rows of point k of its curve, and a[g,e] ∈ {0,1} for a GPU that serves arena e::

    Σ_o z[t,o] = 1                                                  for each table t
    Σ_g,k x[p,g,k] = z[t,o]                                         for each shard p of t in o
    Σ_p,k x[p,g,k] ≤ 1                                              for the shards p of t in o
    Σ_p,k bytes(p,k)·x[p,g,k] + Σ_t,o replicas(t,o)·z[t,o] ≤ HBM[g]      for each GPU g
    Σ_p,k dram_bytes(p,k)·x[p,g,k] ≤ DRAM[h]                        for the GPUs g of host h
    Σ_p,k time(p,k,f)·x[p,g,k] + ... + Σ_e launches(f)·a[g,e] + added[g,f] ≤ T[f]   for each g, f
    Σ_f of a chain T[f] ≤ T,   Σ_p,k dram_time(p,k)·x[p,g,k] ≤ T    for each chain and host
    minimise T

where added is what lanes that two phases share make longer (`cost_models.schedule.SharedLane`).

It is for small problems, and for those where room is hard to find. For these, bytes are all that
counts. Where nothing fits, a program that `may_lack` bytes says which devices are short: it
minimises the sum of what they lack.

Left out is what arenas take for how their rows are read, but for what replicas take once.

A curve of many rows has a few of its points here. Where bytes are all that counts, it also has
straight lines from one to the next that are not above the curve's bytes anywhere: rows move from
DRAM to HBM one by one along a line. If that does not fit, nothing does.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from solvers.bounds.claims import Claim, Options, every_option
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, DRAM_S, PHASES, Float
from solvers.result import Limits
from solvers.search.cp_sat import run_cp_sat
from solvers.search.curve_lines import Line, Piece, pieces_of, with_every_row

_TIME_UNITS = 10_000_000
"""The step time to beat in integer units."""

_ROUNDING_BYTES = 1e-6

_REPEATED_S = {"time": 2.0, "fit": 10.0}
"""CP-SAT's own measure of its work, about seconds, where steps are limited and not time."""

_LACKING_GAP = 0.05
"""How far from the least the bytes may be that devices are said to lack."""

POINTS = (64, 16, 8, 4, 2)
"""Points of a curve, as many as there is room for in a program."""


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """What CP-SAT found.

    Attributes
    ----------
    assignment : Assignment or None
        Of a step time below the limit; or one that fits.
    claim : Claim
        A step time that no placement is below; 0 where points of curves were left out, infinite
        where nothing fits.
    short_bytes : dict of (str, int) to int
        Bytes that ``"hbm"`` of a GPU, or ``"dram"`` of a host, lacks in the best placement.
    variables : int
    """

    assignment: Assignment | None
    claim: Claim
    short_bytes: dict[tuple[str, int], int]
    variables: int


@dataclass(frozen=True, slots=True)
class _Point:
    """A shard on a GPU with some of its rows in HBM, and whether that is chosen."""

    shard: TableShard
    gpu: int
    costs: Float
    chosen: Any
    is_line: bool


class ExactProgram:
    """The program of this module's docstring.

    Parameters
    ----------
    instance : Instance
    aim : {"time", "fit"}
        The least step time, or any assignment that fits.
    options : sequence of sequences of ShardingOption
        Those that each table may take.
    most_points : int
        Points of each curve.
    upper_s : float
        A step time that is not to be exceeded.
    may_lack : bool
        Whether devices may lack bytes.
    """

    def __init__(
        self,
        instance: Instance,
        aim: Literal["time", "fit"],
        options: Options,
        most_points: int,
        upper_s: float = math.inf,
        *,
        may_lack: bool = False,
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance, self.aim, self.may_lack = instance, aim, may_lack
        self.most_points = most_points
        self.claimed = Claim(0.0, options)
        self.is_complete = self.claimed.covers(instance)
        self.unit_s = upper_s / _TIME_UNITS
        self.model = cp_model.CpModel()
        self.points: list[_Point] = []
        self.replicas: list[tuple[TableShard, Any]] = []
        # Of each GPU and host: variables with their bytes or units of time.
        self._rows: dict[tuple[str, int], list[tuple[Any, int]]] = defaultdict(list)
        self._once: dict[tuple[int, object], Any] = {}
        for table, of_table in enumerate(options):
            used = [self.model.new_bool_var("") for _ in of_table]
            self.model.add_exactly_one(used)
            for option, chosen in zip(of_table, used, strict=True):
                self._add_option(table, option, chosen)
        self._keep_together()
        self.short: dict[tuple[str, int], Any] = {}
        self.step = self._add_times() if aim == "time" else None
        self._add_memory()
        if self.step is not None or self.short:
            self.model.minimize(sum(self.short.values()) if self.step is None else self.step)

    @classmethod
    def build(
        cls,
        instance: Instance,
        aim: Literal["time", "fit"],
        most_places: int,
        upper_s: float = math.inf,
        most_points: int = POINTS[0],
        *,
        options: Options | None = None,
        may_lack: bool = False,
    ) -> "ExactProgram | None":
        """The largest program of at most so many shards × GPUs × points, or None."""
        options = every_option(instance) if options is None else options
        shards = [option.shard_count for of in options for option in of]
        if sum(shards) * instance.gpus * POINTS[-1] > most_places:
            return None
        curves = [
            instance.curve(shard, 0)
            for table, of in enumerate(options)
            for option in of
            for shard in instance.shards(table, option)
        ]
        for points in (p for p in POINTS if p <= most_points):
            known = [with_every_row(curve, points) if aim == "fit" else curve for curve in curves]
            sizes = [min(curve.hot_rows.size, points) for curve in known]
            if instance.gpus * sum(sizes) <= most_places:
                return cls(instance, aim, options, points, upper_s, may_lack=may_lack)
        return None

    def _add_option(self, table: int, option: ShardingOption, used: Any) -> None:
        """A table's shards, if it takes an option."""
        instance = self.instance
        replica = instance.replica(table, option)
        if replica is not None:
            self.replicas.append((replica, used))
            once_s = instance.arena_times.least_replicas_s
            for gpu in range(instance.gpus):
                self._add_costs(gpu, instance.priced_costs(replica, gpu)[:, 0], used)
                self._add_arena(gpu, replica, used)
                self._add_once((gpu, "replicas"), once_s, used)
        shards = instance.shards(table, option)
        at_gpu: dict[int, list[Any]] = defaultdict(list)
        split: list[_Point] = []
        whole: list[_Point] = []
        for shard in shards:
            here = []
            for gpu in range(instance.gpus):
                if not instance.may_serve(shard, gpu):
                    continue
                curve = instance.curve(shard, gpu)
                for costs, line in self._pieces(shard, gpu):
                    chosen = self.model.new_bool_var("")
                    point = _Point(shard, gpu, costs, chosen, line is not None)
                    here.append(chosen)
                    at_gpu[gpu].append(chosen)
                    self.points.append(point)
                    self._add_costs(gpu, costs, chosen)
                    if line is not None:
                        self._add_line(gpu, line, chosen)
                    self._add_arena(gpu, shard, chosen)
                    ends = (curve.hot_rows[0], curve.hot_rows[-1])
                    (whole if costs[-1] in ends else split).append(point)
            self.model.add(sum(here) == used)
        for every in at_gpu.values() if len(shards) > 1 else ():
            self.model.add_at_most_one(every)
        if split and len(option.column_widths) > 1:
            self._add_maps(split, whole)

    def _pieces(self, shard: TableShard, gpu: int) -> list[Piece]:
        """Costs at points of a curve, and where room counts, lines below what is between them."""
        instance, host = self.instance, self.instance.host_of_gpu[gpu]
        few = instance.cost_model.uniform_splits and shard.option.shard_count > 1
        room = float(instance.hbm_bytes[gpu]), float(instance.dram_bytes[host])
        pieces, is_complete = pieces_of(
            instance.curve(shard, gpu),
            2 if few else self.most_points,
            (math.inf, math.inf) if self.may_lack else room,
            with_lines=self.aim == "fit",
        )
        self.is_complete &= is_complete
        return pieces

    def _add_costs(self, gpu: int, costs: Float, chosen: Any) -> None:
        """Bytes and times of a GPU and its host if a variable is 1."""
        host = self.instance.host_of_gpu[gpu]
        for kind, of, row in (("hbm", gpu, BYTES), ("dram", host, DRAM_BYTES)):
            bytes_ = math.floor(float(costs[row]) + _ROUNDING_BYTES)  # A proof may not round up.
            if bytes_:
                self._rows[kind, of].append((chosen, bytes_))
        if self.aim != "time":
            return
        self._rows["dram_s", host].append((chosen, math.floor(float(costs[DRAM_S]) / self.unit_s)))
        for phase, seconds in enumerate(costs[PHASES].tolist()):
            if seconds:
                units = math.floor(seconds / self.unit_s)
                self._rows[f"phase {phase}", gpu].append((chosen, units))

    def _add_line(self, gpu: int, line: Line, chosen: Any) -> None:
        """Bytes of the rows that are hot beyond the first point of a line, if it is chosen."""
        rows = self.model.new_int_var(0, line.rows, "")
        self.model.add(rows <= line.rows * chosen)
        self._rows["hbm", gpu].append((rows, line.hbm_bytes_a_row))
        self._rows["dram", self.instance.host_of_gpu[gpu]].append((rows, line.dram_bytes_a_row))

    def _add_arena(self, gpu: int, shard: TableShard, chosen: Any) -> None:
        """A GPU launches kernels of a shard's arena if a variable is 1."""
        arena = self.instance.arena_of(shard)
        self._add_once((gpu, arena), self.instance.launches_s[gpu], chosen)

    def _add_once(self, key: tuple[int, object], seconds: Float | float, chosen: Any) -> None:
        """A GPU's phases take seconds, shape (phases,), once if any variable of a key is 1."""
        if self.aim != "time" or not np.any(seconds):
            return
        if key not in self._once:
            once = self._once[key] = self.model.new_bool_var("")
            for phase, each_s in enumerate(np.asarray(seconds).tolist()):
                self._rows[f"phase {phase}", key[0]].append(
                    (once, math.floor(each_s / self.unit_s))
                )
        self.model.add_implication(chosen, self._once[key])

    def _add_maps(self, split: Sequence[_Point], whole: Sequence[_Point]) -> None:
        """If a column slice is split, whatever serves another needs a map of its rows too."""
        gpu = split[0].gpu
        map_bytes = self.instance.curve(split[0].shard, gpu).split_hbm_bytes
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
        """Tables of a group have all their shards on the same GPU."""
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
        """Limit what devices hold, or count what they lack."""
        instance = self.instance
        devices = [("hbm", gpu, b) for gpu, b in enumerate(instance.hbm_bytes.tolist())]
        devices += [("dram", host, b) for host, b in enumerate(instance.dram_bytes.tolist())]
        for kind, number, bytes_ in devices:
            terms = self._rows[kind, number]
            if not terms:
                continue
            used = _sum(terms)
            if self.may_lack:
                most = sum(max(0, each) * of.domain.max() for of, each in terms)
                short = self.short[kind, number] = self.model.new_int_var(0, most, "")
                used = used - short
            self.model.add(used <= math.floor(bytes_))

    def _add_times(self) -> Any:
        """Times of phases, with what shared lanes add, of chains and hosts; the step time."""
        instance, schedule = self.instance, self.instance.objective.schedule
        step = self.model.new_int_var(0, _TIME_UNITS, "T")
        phases = [self.model.new_int_var(0, _TIME_UNITS, "") for _ in schedule.phases]
        fixed = np.floor(instance.objective.fixed / self.unit_s).astype(int).tolist()
        for chain, more in zip(schedule.chains, fixed, strict=True):
            self.model.add(sum(phases[phase] for phase in chain) + more <= step)
        used: dict[tuple[int, int], Any] = {}
        for (kind, number), terms in self._rows.items():
            if kind == "dram_s":
                self.model.add(_sum(terms) <= step)
            elif kind.startswith("phase "):
                used[number, int(kind.split()[1])] = _sum(terms)
        for lane in schedule.shared:
            waited = sum(phases[phase] for phase in lane.before)
            for gpu in range(instance.gpus):
                phase, part, beside = (
                    used.get((gpu, row), 0) for row in (lane.phase, lane.part, lane.beside)
                )
                if not isinstance(part, int) and not isinstance(beside, int):
                    added = self._added(lane.begin_s, waited, phase, part, beside)
                    used[gpu, lane.phase] = phase + added
        for (_, number), units in used.items():
            if schedule.members[:, number].any():  # Nothing waits for others.
                self.model.add(units <= phases[number])
        return step

    def _added(self, begin_s: float, waited: Any, phase: Any, part: Any, beside: Any) -> Any:
        """What a shared lane adds to a phase: the least of four; see `SharedLane.added_s`."""
        begin, begins = math.floor(begin_s / self.unit_s), waited + phase - part
        added = self.model.new_int_var(0, _TIME_UNITS, "")
        least = part, part + begins - begin, begin + beside - begins, beside
        picked = [self.model.new_bool_var("") for _ in least]
        self.model.add_bool_or(picked)
        for units, chosen in zip(least, picked, strict=True):
            self.model.add(added >= units).only_enforce_if(chosen)
        return added

    def hint(self, warm: Assignment) -> None:
        """Start from an assignment."""
        placed = {(p.shard, p.gpu): p.hot_rows for p in warm.placements()}
        for point in self.points:
            hot = placed.get((point.shard, point.gpu))
            self.model.add_hint(point.chosen, int(hot == int(point.costs[-1])))

    def run(self, limits: Limits, time_limit_s: float) -> ExactAnswer:
        """Solve, and read the assignment and what is proven back."""
        from ortools.sat.python import cp_model

        gap = limits.gap / 4 if self.aim == "time" else _LACKING_GAP
        solver, status = run_cp_sat(
            self.model, limits, time_limit_s, gap=gap, repeated_s=_REPEATED_S[self.aim]
        )
        proven = solver.best_objective_bound if self.is_complete else 0.0
        bound_s = 0.0
        if status == cp_model.INFEASIBLE and self.is_complete:
            bound_s = _TIME_UNITS * self.unit_s * (1 - 1e-4)  # No plan of these beats the limit.
        elif (
            self.step is not None and proven > 0
        ):  # Terms of phases are rounded down, and shared lanes subtract some.
            rounded = 3 * self.instance.tables * len(self.instance.objective.schedule.phases)
            bound_s = max(0.0, proven - rounded) * self.unit_s
        short, assignment = {}, None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            short = {of: solver.value(lacking) for of, lacking in self.short.items()}
            if not any(short.values()):
                assignment = self._assignment(solver)
        return ExactAnswer(
            assignment,
            replace(self.claimed, step_time_s=bound_s),
            {of: lacking for of, lacking in short.items() if lacking},
            len(self.model.proto.variables),
        )

    def _assignment(self, solver: Any) -> Assignment | None:
        """The chosen points, or the same shards with HBM filled anew if that is faster."""
        placed = [point for point in self.points if solver.value(point.chosen)]
        pairs = [(point.shard, point.gpu) for point in placed]
        replicas = [replica for replica, used in self.replicas if solver.value(used)]
        # Lines say no number of hot rows: their shards take what is best at some price.
        fixed = [point for point in placed if not point.is_line]
        columns = 1 if len(fixed) == len(placed) else self.instance.prices.size
        known = {point.shard: np.tile(point.costs[:, None], columns) for point in fixed}
        filled = [Assignment.of(self.instance, pairs, replicas, fixed=f) for f in (known, {})]
        fitting = [assignment for assignment in filled if assignment is not None]
        return min(fitting, key=lambda one: one.step_time_s, default=None)


def _sum(terms: Sequence[tuple[Any, int]]) -> Any:
    return sum(each * variable for variable, each in terms)
