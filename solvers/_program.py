"""The integer program over which GPU serves which piece, for `solvers.ilp`.

With x[p,g] ∈ {0,1} for piece p on GPU g, z[t,c] ∈ {0,1} for table t in cut c, and h[p] the
piece's hot rows::

    minimise T
    Σ_c z[t,c] = 1                                    for each table t
    Σ_g x[p,g] = z[t,c]                               for each piece p of table t in cut c
    Σ_p time(p, h[p])·x[p,g] ≤ T                      for each GPU g
    Σ_p bytes(p, h[p])·x[p,g] ≤ HBM[g]                for each GPU g

RecShard enumerates split points with a binary each, which relaxes badly. Here the last two
rows are replaced by their combinations at a list of prices λ of HBM:

    Σ_p c[p,λ]·x[p,g] ≤ T + λ·HBM[g]    with c[p,λ] = min over h of time(p, h) + λ·bytes(p, h)

The split of each piece is thereby decided by the price, and only the assignment is left for
CP-SAT. Each row holds for every placement, so CP-SAT's bound is one of the true problem;
and as time is convex in bytes, the rows of all prices together are equivalent to the two
they replace (duality of the fractional knapsack), up to the cost of splits. A few prices
come close, so the placement found is nearly as good as the program says; it is filled GPU
by GPU and costed exactly.

Cuts that no plan as good as the one at hand can use are left out: those with a piece longer
than that plan's step, and those whose extra work alone lifts the pooled bound above it.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from placer.errors import BackendError
from solvers._base import Limits
from solvers._bound import PooledBound, least
from solvers._instance import Cut, Instance, Piece
from solvers._packing import Packing

_TIME_UNITS = 1_000_000
"""The greedy's step time in integer units, so that rounding is far below any gap."""

_PRICE_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)

_MAX_PLACES = 20_000
"""Pieces × GPUs beyond which a model takes longer to build than a search would gain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What CP-SAT found: a packing or none, and a bound of the true step time."""

    packing: Packing | None
    bound_s: float
    status: str
    variables: int


class Program:
    """The assignment problem at one price of HBM, and what is needed to read its answer."""

    def __init__(
        self,
        instance: Instance,
        cuts: Sequence[Sequence[Cut]],
        upper_s: float,
        prices: Sequence[float],
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance = instance
        self.unit_s = upper_s / _TIME_UNITS
        self.model = cp_model.CpModel()
        self.on: dict[tuple[Piece, int], Any] = {}
        gpus = range(instance.gpus)
        load: list[list[list[Any]]] = [[[] for _ in prices] for _ in gpus]
        for table, options in enumerate(cuts):
            chosen = [self.model.new_bool_var("") for _ in options]
            self.model.add_exactly_one(chosen)
            for cut, used in zip(options, chosen, strict=True):
                pieces = instance.pieces(table, cut)
                for piece in pieces:
                    here = [self.model.new_bool_var("") for _ in gpus]
                    self.model.add(sum(here) == used)
                    for gpu, variable in zip(gpus, here, strict=True):
                        self.on[piece, gpu] = variable
                        curve = instance.curve(piece, gpu)
                        hbm_bytes = float(instance.hbm_bytes[gpu])
                        if curve.hbm_bytes.min() > hbm_bytes:
                            self.model.add(variable == 0)
                            continue
                        for row, price in zip(load[gpu], prices, strict=True):
                            cost = least(curve, hbm_bytes, price)[1]
                            row.append(math.floor(cost / self.unit_s) * variable)
                for gpu in gpus if cut.pieces > 1 else ():
                    self.model.add_at_most_one(self.on[piece, gpu] for piece in pieces)
        self.step = self.model.new_int_var(0, _TIME_UNITS, "T")
        for gpu in gpus:
            for row, price in zip(load[gpu], prices, strict=True):
                credit = math.ceil(price * instance.hbm_bytes[gpu] / self.unit_s)
                self.model.add(sum(row) <= self.step + credit)
        self.model.minimize(self.step)

    @classmethod
    def build(
        cls, instance: Instance, bound: PooledBound, warm: Packing | None, upper_s: float
    ) -> "Program | None":
        """The program of an instance, or None if it is too large to be worth it."""
        if not math.isfinite(upper_s):
            upper_s = 8 * bound.step_time_s
        spare_s = instance.gpus * upper_s - bound.work_s(upper_s)
        cuts = []
        for table in range(instance.tables):
            cheapest = bound.cut_for(table, upper_s)
            assert cheapest is not None, "a plan of this step time exists, or the limit is generous"
            cuts.append(
                [
                    cut.cut
                    for cut in bound.cuts[table]
                    if cut.longest_s <= upper_s
                    and cut.priced_s - cheapest.priced_s <= spare_s + 1e-12
                ]
            )
        if sum(cut.pieces for options in cuts for cut in options) * instance.gpus > _MAX_PLACES:
            return None
        prices = {0.0, *(bound.price_s_per_byte * factor for factor in _PRICE_FACTORS)}
        program = cls(instance, cuts, upper_s, sorted(prices))
        if warm is not None:
            program.hint(warm)
        return program

    def hint(self, warm: Packing) -> None:
        """Start from a packing."""
        used = {(piece, gpu) for gpu, pieces in enumerate(warm.pieces) for piece in pieces}
        for key, variable in self.on.items():
            self.model.add_hint(variable, key in used)

    def run(self, limits: Limits, time_limit_s: float) -> Answer:
        """Solve, and read the packing and the bound of the true problem back."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
        solver.parameters.num_workers = limits.threads or os.cpu_count() or 1
        solver.parameters.random_seed = limits.seed
        solver.parameters.relative_gap_limit = limits.gap / 4
        # Deterministic for a seed as long as the time limit does not strike.
        solver.parameters.interleave_search = True
        status = solver.solve(self.model)
        if status == cp_model.MODEL_INVALID:
            raise BackendError(f"CP-SAT rejects the model: {self.model.validate()}")
        packing = None
        bound_s = solver.best_objective_bound * self.unit_s
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            on = [key for key, variable in self.on.items() if solver.value(variable)]
            packing = Packing.of(self.instance, on)
        elif status == cp_model.INFEASIBLE:
            bound_s = _TIME_UNITS * self.unit_s  # No plan takes less than the limit given.
        return Answer(packing, bound_s, solver.status_name(status), len(self.model.proto.variables))
