"""Step time from constants that `placer calibrate` measured on a machine.

The equation is that of every model here (`cost_models.step_equation.equation`); its constants are
fitted to steps of the executor (`cost_models.calibrated.fit`). They are of the machine and backend
that were measured: of a plan's topology only the memory, the number of GPUs and, where nothing was
exchanged in the measurements, the links between GPUs count.
"""

import os
import weakref
from collections import Counter
from typing import Any

from cost_models.calibrated.calibration import Calibration
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.unit_costs import Rates, ReadCosts, UnitCosts
from placer.problem import Problem
from placer.tables import Table

LEAST_SHARD_S = 1e-7
"""A shard takes at least a few calls, even where a fit charges all to groups of shards."""


class Calibrated(StepEquation):
    """The cost model of this module's docstring; see `cost_models.CostModel`.

    Parameters
    ----------
    calibration : Calibration
    name : str
        As `cost_models.cost_model` finds it again.
    """

    def __init__(self, calibration: Calibration, name: str = "calibrated") -> None:
        self.name = name
        self.calibration = calibration
        # Of the last problem that was asked about: costs by table and by exchange.
        self._problem: weakref.ref[Problem] | None = None
        self._shares: tuple[list[float], float] = [], 0.0
        self._costs: dict[tuple[int, float], UnitCosts] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibrated":
        """The model of a file that `placer calibrate` wrote.

        Raises
        ------
        PlacerError
            If it is no such file.
        """
        return cls(Calibration.load(path), f"calibrated:{os.fspath(path)}")

    def identity(self) -> Any:
        """All that answers depend on besides source, as JSON: by it plans are kept."""
        return self.calibration.to_json()

    @property
    def relative_error(self) -> float:
        """Mean relative error of step times in the calibration's own test."""
        return self.calibration.relative_error

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """As measured, whatever the topology. See `StepEquation.unit_costs`."""
        if self._problem is None or self._problem() is not problem:
            self._problem, self._costs = weakref.ref(problem), {}
            self._shares = group_shares(problem)
        key = table, self._exchange_byte_s(problem, gpu)
        costs = self._costs.get(key)
        if costs is None:
            spec = problem.profile.tables[table].table
            costs = self._costs[key] = self._costs_of(spec, self._shares[0][table], key[1])
        return costs

    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """A further group; what shards return and sort is never less. See `CostModel`."""
        arena_shares, step_share = group_shares(problem)
        of = self.calibration.seconds
        return self._shard_s + min(arena_shares) * of("arena") + step_share * of("step")

    def _exchange_byte_s(self, problem: Problem, gpu: int) -> float:
        """Seconds of a byte that is spread evenly over all GPUs."""
        topology = problem.topology
        if "exchange_byte" not in self.calibration.constants:
            return topology.exchange_s(topology.gpus[gpu].id, 1.0)
        gpus = len(topology.gpus)
        return self.calibration.seconds("exchange_byte") * (gpus - 1) / gpus

    @property
    def _shard_s(self) -> float:
        return max(LEAST_SHARD_S, self.calibration.seconds("shard"))

    def _costs_of(self, table: Table, arena_share: float, exchange_byte_s: float) -> UnitCosts:
        of, optimizer = self.calibration.seconds, table.optimizer
        # Rows that are where they are used.
        own = Rates(
            lookup_s=of("lookup"),
            lookup_byte_s=of("lookup_byte"),
            row_s=of(f"row.{optimizer}"),
            row_byte_s=of(f"row_byte.{optimizer}"),
        )
        device = ReadCosts(own)
        fixed = {
            "output_vector_s": of("output_vector"),
            "output_byte_s": of("output_byte"),
            "exchange_byte_s": exchange_byte_s,
            "group_s": arena_share * of("arena") + self._shares[1] * of("step"),
            "column_slice_s": of("strip")
            + (of("row_cut") if optimizer == "rowwise_adagrad" else 0.0),
            "shard_s": self._shard_s,
        }
        if not self.calibration.tiers:
            # Whoever pools is the host, and reads each row in place.
            return UnitCosts(device, device, device, ReadCosts(link=own), device, device, **fixed)
        hit = own + Rates(row_s=of("hit.row"))
        by_host = ("lookup", "lookup_byte", "row", "row_byte", "vector", "vector_byte")
        return UnitCosts(
            device=device,
            staged=ReadCosts(own, Rates(row_s=of("staged.row"), row_byte_s=of("staged.row_byte"))),
            uva=ReadCosts(
                own,
                Rates(
                    lookup_s=of("uva.lookup"),
                    row_s=of("uva.row"),
                    row_byte_s=of("uva.row_byte"),
                ),
            ),
            host=ReadCosts(link=Rates(*(of(f"host.{unit}") for unit in by_host))),
            hit=ReadCosts(hit),
            miss=ReadCosts(hit, Rates(row_s=of("miss.row"), row_byte_s=of("miss.row_byte"))),
            cache_row_s=of("cache_row"),
            row_cache_s=row_cache_share(arena_share) * of("pool"),
            split_s=of("split"),
            split_lookup_s=of("split_lookup"),
            **fixed,
        )


def group_shares(problem: Problem) -> tuple[list[float], float]:
    """Each table's part of an arena on a GPU, and of the step of one.

    Tables of one width, dtype and optimizer share an arena. So that the parts of a GPU's tables
    add up to whole ones, tables are taken to be spread evenly over the GPUs.
    """
    specs, gpus = [profile.table for profile in problem.profile], len(problem.topology.gpus)
    alike = Counter((spec.dim, spec.dtype, spec.optimizer) for spec in specs)
    shares = [min(1.0, gpus / alike[spec.dim, spec.dtype, spec.optimizer]) for spec in specs]
    return shares, min(1.0, gpus / len(specs))


def row_cache_share(arena_share: float) -> float:
    """A table's part of an arena's cost of staging rows, from the table's part of the arena.

    The arena's row cache is paid for once, whether one of its tables needs it or all of them do.
    The geometric mean of what is right in the one case, 1, and in the other, the table's part.
    """
    return float(arena_share**0.5)
