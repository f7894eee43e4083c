"""Step time by unit costs that networks learned from measured steps.

The step equation (`cost_models.step_equation.equation`) adds up what lookups, rows and bytes of
each table cost. Here those unit costs are the calibrated ones times factors, which an ensemble of
small networks says from features of the table and of the problem it is part of. As the factors are
of tables, and not of shards, a plan costs what its shards cost, and every solver can use the model
as it does the others. Sums over tables of what a network says of each are the form of AutoShard
(arXiv:2208.06399), DreamShard (arXiv:2210.02023) and NeuroShard (arXiv:2305.01868).
"""

import math
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cost_models.arenas import ArenaCosts
from cost_models.base import Float
from cost_models.calibrated.model import Calibrated
from cost_models.learned.features import features
from cost_models.learned.file import LearnedFile
from cost_models.learned.parts import PARTS, contributions, fixed_times, parts_of
from cost_models.learned.shipped import of_this_machine, shipped
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.unit_costs import UnitCosts, from_array
from placer.plan.plan import Plan
from placer.problem import Problem

_OF_A_SHARD = PARTS.index("shard")

MISSES_PER_CACHE_ROW = 8.0
"""A miss costs so much more than a hit than room for a row does."""

_PROBLEMS = 4
"""Problems whose unit costs are kept."""


class Prediction(NamedTuple):
    """A step time and its standard error, in seconds."""

    mean_s: float
    std_s: float


@dataclass(slots=True, eq=False)
class _Known:
    """What was worked out of a problem.

    Attributes
    ----------
    log_factors : shape (members, tables, parts)
    factors : shape (tables, parts)
        Mean over the members.
    novelty : shape (tables,)
    costs : dict
        Unit costs by table and by those of an exchanged byte, the only ones in which GPUs differ.
    """

    problem: Problem
    log_factors: Float
    factors: Float
    novelty: Float
    costs: dict[tuple[int, float], UnitCosts]


class Learned(StepEquation):
    """The cost model of this module's docstring; see `cost_models.CostModel`.

    Parameters
    ----------
    file : LearnedFile
    name : str
        As `cost_models.cost_model` finds it again.
    """

    def __init__(self, file: LearnedFile, name: str = "learned") -> None:
        self.name = name
        self.file = file
        self.calibrated = Calibrated(file.calibration)
        self._problems: OrderedDict[int, _Known] = OrderedDict()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Learned":
        """Read what `placer calibrate --learn` wrote, or a model that comes with placer.

        Parameters
        ----------
        path : path
            A file, or the name of a model that comes with placer.

        Raises
        ------
        PlacerError
            If the file is missing, damaged, or not such a file.
        """
        name, known = os.fspath(path), shipped()
        is_file = name not in known or Path(name).exists()
        return cls(LearnedFile.load(path if is_file else known[name]), f"learned:{name}")

    @classmethod
    def of_this_machine(cls) -> "Learned":
        """The model that comes with placer for this processor and the usual backend.

        Raises
        ------
        PlacerError
            If there is none.
        """
        return cls(LearnedFile.load(of_this_machine()))

    def identity(self) -> Any:
        """All that answers depend on besides source, as JSON: by it plans are kept."""
        return self.file.identity()

    @property
    def relative_error(self) -> float:
        """Mean relative error of step times of workloads that were held out of training."""
        return self.file.relative_error

    @property
    def contention(self) -> float:
        """The calibrated one. See `CostModel.contention`."""
        return self.calibrated.contention

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Calibrated ones, each part times its factor. See `StepEquation.unit_costs`."""
        base = self.calibrated.unit_costs(problem, table, gpu)
        known = self._known(problem)
        key = table, base.exchange_byte_s
        costs = known.costs.get(key)
        if costs is None:
            costs = known.costs[key] = from_array(known.factors[table] @ parts_of(base))
        return costs

    def schedule(self, problem: Problem) -> Schedule:
        """The calibrated one. See `CostModel.schedule`."""
        return self.calibrated.schedule(problem)

    def launches(self, problem: Problem, gpu: int) -> Float:
        """The calibrated ones, as an arena is of no table. See `CostModel.launches`."""
        return self.calibrated.launches(problem, gpu)

    def arena_costs(self, problem: Problem, gpu: int) -> ArenaCosts | None:
        """The calibrated ones. See `CostModel.arena_costs`."""
        return self.calibrated.arena_costs(problem, gpu)

    def least_shard_s(self, problem: Problem) -> float | None:
        """The calibrated one times the least factor of any table.

        Factors are the same on all GPUs: where one kind of GPU has the least of all calibrated
        costs, it has the least of these. See `StepEquation.least_shard_s`.
        """
        extra_s = self.calibrated.least_shard_s(problem)
        if extra_s is None:
            return None
        return extra_s * float(self._known(problem).factors[:, _OF_A_SHARD].min())

    def predict(self, problem: Problem, plan: Plan) -> Prediction:
        """Step time of a plan, equal to that of `evaluate`, and its uncertainty.

        The variance is that between members, and that of what they got wrong on held-out
        workloads, which counts for more the further tables are from those that were measured.
        """
        mean_s = self.evaluate(problem, plan).step_time_s
        known = self._known(problem)
        seconds = contributions(self.calibrated, problem, plan)
        fixed_s = fixed_times(self.calibrated, problem, plan)
        by_member = np.einsum("dtk,mtk->mdt", seconds, np.exp(known.log_factors))
        spread_s = float((by_member.sum(axis=2) + fixed_s).max(axis=1).std(ddof=1))
        by_device = by_member.mean(axis=0)
        slowest = by_device[(by_device.sum(axis=1) + fixed_s).argmax()]
        far = float(slowest @ known.novelty) / max(float(slowest.sum()), 1e-300)
        return Prediction(mean_s, math.hypot(spread_s, self.file.residual * (1 + far) * mean_s))

    def _known(self, problem: Problem) -> _Known:
        """Factors of a problem's tables, worked out once."""
        known = self._problems.get(id(problem))
        if known is None:
            free, monotone = features(problem)
            logs = self.file.networks.log_factors(free, monotone)
            novelty = self.file.networks.novelty(free, monotone)
            known = _Known(problem, logs, np.exp(logs).mean(axis=0), novelty, {})
            self._problems[id(problem)] = known
            if len(self._problems) > _PROBLEMS:
                self._problems.popitem(last=False)
        return known
