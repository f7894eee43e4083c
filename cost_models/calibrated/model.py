"""Step time from constants that `placer calibrate` measured on a machine.

The equation is that of every model here (`cost_models.step_equation.equation`); its constants are
fitted to steps of the executor (`cost_models.calibrated.fit`). They are of the machine and backend
that were measured: of a plan's topology only the memory, the number of GPUs and, where nothing was
exchanged in the measurements, the links between GPUs count.
"""

import os
import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from cost_models.arenas import ArenaCosts
from cost_models.base import Float
from cost_models.calibrated.calibration import ARENA_TERMS, Calibration
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import LOOKUP, ROWS, UPDATE, with_lanes
from cost_models.step_equation.unit_costs import Rates, ReadCosts, UnitCosts
from cost_models.step_equation.work import drive_rows_per_s, one_is_fastest
from placer.pipeline import Pipeline
from placer.problem import Problem
from placer.tables import Table

LEAST_SHARD_S = 1e-7
"""A shard takes at least a few calls, even where a fit charges all to arenas."""


class Calibrated(StepEquation):
    """The cost model of this module's docstring; see `cost_models.CostModel`.

    Parameters
    ----------
    name : str
        As `cost_models.cost_model` finds it again.
    """

    def __init__(self, calibration: Calibration, name: str = "calibrated") -> None:
        self.name = name
        self.calibration = calibration
        # Of the last problem that was asked about: costs by table and by exchange.
        self._problem: weakref.ref[Problem] | None = None
        self._costs: dict[tuple[int, float], UnitCosts] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibrated":
        """Return the model of a file that `placer calibrate` wrote."""
        return cls(Calibration.load(path), f"calibrated:{os.fspath(path)}")

    def identity(self) -> Any:
        """Return all that answers depend on besides source, as JSON: by it plans are kept."""
        return self.calibration.to_json()

    @property
    def relative_error(self) -> float:
        """Mean relative error of step times in the calibration's own test."""
        return self.calibration.relative_error

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Return the measured costs, whatever the topology. See `StepEquation.unit_costs`."""
        if self._problem is None or self._problem() is not problem:
            self._problem, self._costs = weakref.ref(problem), {}
        key = table, self._exchange_byte_s(problem, gpu)
        costs = self._costs.get(key)
        if costs is None:
            spec = problem.profile.tables[table].table
            costs = self._costs[key] = self._costs_of(spec, key[1])
        return costs

    def schedule(self, problem: Problem) -> Schedule:
        """Add what every step takes to the main chain. See `CostModel.schedule`."""
        schedule = super().schedule(problem)
        main_s, *others_s = schedule.fixed_s
        return replace(schedule, fixed_s=(main_s + self.calibration.seconds("step"), *others_s))

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Return what an arena takes whatever is in it. See `CostModel.launches`."""
        is_gpu = gpu < len(problem.topology.gpus)
        return _in_phases(is_gpu * self.calibration.seconds("arena"), problem.pipeline)

    def arena_costs(self, problem: Problem, gpu: int) -> ArenaCosts | None:
        """Return replicas' alone where tiers are one memory. See `CostModel.arena_costs`."""
        tiers, of = self.calibration.tiers, self.calibration.seconds
        seconds = [of(term) if tiers or term == "replicas" else 0.0 for term in ARENA_TERMS]
        if not any(seconds) or gpu >= len(problem.topology.gpus):
            return None
        return ArenaCosts(*(_in_phases(one, problem.pipeline) for one in seconds))

    def least_shard_s(self, problem: Problem) -> float | None:
        """Return a shard's, or None if no GPU is fastest. See `StepEquation.least_shard_s`."""
        topology = problem.topology
        speeds = {
            (-self._exchange_byte_s(problem, number), drive_rows_per_s(topology, gpu.id))
            for number, gpu in enumerate(topology.gpus)
        }
        return self._shard_s if one_is_fastest(speeds) else None

    def _exchange_byte_s(self, problem: Problem, gpu: int) -> float:
        """Return seconds of a byte that is spread evenly over all GPUs."""
        topology = problem.topology
        if "exchange_byte" not in self.calibration.constants:
            return topology.exchange_s(topology.gpus[gpu].id, 1.0)
        gpus = len(topology.gpus)
        return self.calibration.seconds("exchange_byte") * (gpus - 1) / gpus

    @property
    def _shard_s(self) -> float:
        return max(LEAST_SHARD_S, self.calibration.seconds("shard"))

    def _costs_of(self, table: Table, exchange_byte_s: float) -> UnitCosts:
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
            "column_slice_s": of("column_slice"),
            "mapped_lookup_s": of("mapped_lookup"),
            "shard_s": self._shard_s,
        }
        if optimizer == "rowwise_adagrad":
            fixed["column_slice_s"] += of("rowwise_slice")
            fixed["sliced_row_byte_s"] = of("rowwise_slice_byte")
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
            pooled_lookup_s=of("arena_pooled_lookup"),
            **fixed,
        )


def _in_phases(seconds: float, pipeline: Pipeline) -> Float:
    """Return seconds of each phase: half of them are the lookup's, the others the update's."""
    phase_s = np.zeros(ROWS)
    phase_s[[LOOKUP, UPDATE]] = seconds / 2
    return with_lanes(phase_s, pipeline)
