"""The calibrated cost model, with constants that `placer calibrate` measured on a machine.

It uses the step equation (`cost_models.step_equation.equation`), with constants fitted to steps of
the executor (`cost_models.calibrated.fit`). They describe the measured machine and backend. Of a
plan's topology, only memory and the number of GPUs count, and the links between GPUs if the
measurements had no exchange.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cost_models.arenas import ArenaCosts
from cost_models.base import Float
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import (
    LOOKUP,
    ROWS,
    UPDATE,
    Rates,
    ReadCosts,
    UnitCosts,
    with_lanes,
)
from cost_models.step_equation.work import drive_rows_per_s, one_is_fastest
from placer.errors import PlacerError, did_you_mean
from placer.files.atomic import SEAL, sealed, write_text
from placer.files.reading import LimitError, kind_of, read_json
from placer.plan.fields import Pipeline
from placer.problem import Problem
from placer.tables import OPTIMIZERS, OptimizerName

FORMAT = "placer-calibration"
VERSION = 2
_MAKE = "make one with `placer calibrate -o FILE`"

TERMS = (
    "lookup", "lookup_byte",
    *(f"row.{optimizer}" for optimizer in OPTIMIZERS),
    *(f"row_byte.{optimizer}" for optimizer in OPTIMIZERS),
    "staged.row", "staged.row_byte", "hit.row", "miss.row", "miss.row_byte", "cache_row",
    "uva.lookup", "uva.row", "uva.row_byte",
    "host.lookup", "host.lookup_byte", "host.row", "host.row_byte", "host.vector",
    "host.vector_byte",
    "output_vector", "output_byte", "exchange_byte", "mapped_lookup", "step",
    "arena", "arena_cached", "arena_cached_lookup", "arena_pooled_lookup",
    "replicas", "column_slice", "rowwise_slice", "rowwise_slice_byte", "shard",
)  # fmt: skip
"""Names of constants, all in seconds. ``staged``, ``hit`` and ``uva`` are added to the cost of rows
in HBM, and ``miss`` to the cost of a hit; ``host`` is the whole cost.

`ARENA_TERMS` are added to an ``arena``, by how its rows are read: see
`cost_models.arenas.ArenaCosts`. For row-wise Adagrad, whose state needs whole rows,
``rowwise_slice`` is added to a ``column_slice``, and ``rowwise_slice_byte`` for each byte of its
distinct rows. A ``mapped_lookup`` finds its row in a map.
"""

ARENA_TERMS = ("arena_cached", "arena_cached_lookup", "arena_pooled_lookup", "replicas")
"""The terms for the fields of `cost_models.arenas.ArenaCosts`, in their order."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Seconds of one unit. Their range also holds nine of ten fits to resampled workloads."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Measures of how the machine's speed varied while it was measured."""

    # Interquartile range of a case's step times over their median; median over cases.
    spread: float = 0.0
    drift: float = 0.0  # Range of the repeated case's times over their median.
    # (wall time − CPU time) / CPU time; median over cases.
    wait: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Constants of the step equation for one executor on one machine."""

    constants: dict[str, Constant]  # By name of `TERMS`, if measured.
    # Whether the executor has separate memories for HBM and DRAM. If not, all ways to read rows
    # cost the same.
    tiers: bool = True
    # Median and 90th percentile of relative errors of predicted step times, for cases that the fit
    # did not use.
    relative_error: float = 0.0
    p90_error: float = 0.0
    cases: int = 0  # Number of measured cases in the fit.
    noise: Noise = Noise()
    noisy: bool = False  # Whether the speed varied too much to trust the fit.
    # Backend, ranks and threads; processor, versions and date.
    setting: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def seconds(self, term: str) -> float:
        """Return the constant with the name `term`; 0 if it was not measured.

        For an optimizer that was not measured, return the most expensive optimizer's constant.
        """
        constant = self.constants.get(term)
        unit, _, optimizer = term.partition(".")
        if constant is None and optimizer in OPTIMIZERS:
            others = (self.constants.get(f"{unit}.{other}") for other in OPTIMIZERS)
            return max((other.value_s for other in others if other is not None), default=0.0)
        return 0.0 if constant is None else constant.value_s

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, atomically."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_text(path, json.dumps(sealed(document), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a calibration from a file that `save` wrote."""
        try:
            document = read_json(Path(path))
        except (OSError, LimitError) as error:
            why = getattr(error, "strerror", None) or error
            raise PlacerError(f"cannot read a calibration from {path}: {why}; {_MAKE}") from error
        if not isinstance(document, dict) or "format" not in document:
            what = f"{kind_of(document)} and no" if kind_of(document) else "no"
            raise PlacerError(f"{path} is {what} calibration; {_MAKE}")
        altered = bool(document.get(SEAL)) and document[SEAL] != sealed(document)[SEAL]
        data = {name: document[name] for name in document if name != SEAL}
        kind, version = data.pop("format"), data.pop("version", None)
        if kind != FORMAT or version != VERSION:
            raise PlacerError(
                f"{path} is {kind!r} of version {version}; this placer reads {FORMAT!r} of "
                f"version {VERSION}: make it again with `placer calibrate`; if its "
                "measurements are still beside it, --budget 0s takes these and measures nothing"
            )
        try:
            own = [one.name for one in fields(cls)]
            constants = {name: Constant(**value) for name, value in data["constants"].items()}
            asked = [(name, own) for name in data] + [(name, list(TERMS)) for name in constants]
            for name, known in asked:
                if name not in known:
                    raise ValueError(f"there is no field {name!r}{did_you_mean(name, known)}")
            wrong = [name for name, one in constants.items() if min(astuple(one)) < 0]
            if wrong:
                raise ValueError(f"constants {wrong}")
            data |= {"constants": constants, "noise": Noise(**data["noise"])}
            made = cls(**data)
            if min(made.relative_error, made.p90_error, *astuple(made.noise)) < 0:
                raise ValueError("errors or noise are negative")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PlacerError(f"{path} is a damaged calibration: {error!r}") from error
        if altered:
            raise PlacerError(
                f"{path} was altered since it was written: restore it, or run `placer calibrate` "
                "again; a calibration of your own has no sha256"
            )
        return made


LEAST_SHARD_S = 1e-7
"""Least seconds of a shard, as it takes a few calls even if a fit charges all time to arenas."""


class Calibrated(StepEquation):
    """A cost model with measured constants; see `cost_models.CostModel`.

    `name` is a name with which `cost_models.cost_model` finds the model again.
    """

    def __init__(self, calibration: Calibration, name: str = "calibrated") -> None:
        self.name = name
        self.calibration = calibration
        # By the table's optimizer and the seconds of an exchanged byte.
        self._costs: dict[tuple[OptimizerName, float], UnitCosts] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibrated":
        """Return the model with the constants of a file that `placer calibrate` wrote."""
        return cls(Calibration.load(path), f"calibrated:{os.fspath(path)}")

    def relative_error(self, problem: Problem) -> float | None:
        """Return the error for cases that were not fitted; None if CPUs were measured, not GPUs."""
        on_cpu = str(self.calibration.setting.get("device", "")).startswith("cpu")
        is_measured = not on_cpu or problem.topology.emulated
        return self.calibration.relative_error if is_measured else None

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Return the measured costs, for any topology. See `StepEquation.unit_costs`."""
        optimizer = problem.profile.tables[table].table.optimizer
        key = optimizer, self._exchange_byte_s(problem, gpu)
        if key not in self._costs:
            of, tiers = self.calibration.seconds, self.calibration.tiers
            self._costs[key] = unit_costs_of(of, optimizer, tiers, key[1], self._shard_s)
        return self._costs[key]

    def schedule(self, problem: Problem, *, with_servers: bool = True) -> Schedule:
        """Return the schedule with the fixed time of a step. See `CostModel.schedule`."""
        schedule = super().schedule(problem, with_servers=with_servers)
        main_s, *others_s = schedule.fixed_s
        return replace(schedule, fixed_s=(main_s + self.calibration.seconds("step"), *others_s))

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Return the fixed seconds of an arena. See `CostModel.launches`."""
        is_gpu = gpu < len(problem.topology.gpus)
        return _in_phases(is_gpu * self.calibration.seconds("arena"), problem.pipeline)

    def arena_costs(self, problem: Problem, gpu: int) -> ArenaCosts | None:
        """Return measured costs; without tiers, only of replicas. See `CostModel.arena_costs`."""
        tiers, of = self.calibration.tiers, self.calibration.seconds
        seconds = [of(term) if tiers or term == "replicas" else 0.0 for term in ARENA_TERMS]
        if not any(seconds) or gpu >= len(problem.topology.gpus):
            return None
        return ArenaCosts(*(_in_phases(one, problem.pipeline) for one in seconds))

    def least_shard_s(self, problem: Problem) -> float | None:
        """Return a shard's seconds; None if no GPU is best. See `StepEquation.least_shard_s`."""
        topology = problem.topology
        speeds = {
            (-self._exchange_byte_s(problem, number), drive_rows_per_s(topology, gpu.id))
            for number, gpu in enumerate(topology.gpus)
        }
        return self._shard_s if one_is_fastest(speeds) else None

    def _exchange_byte_s(self, problem: Problem, gpu: int) -> float:
        """Return the seconds of a byte that the GPU sends evenly to all GPUs."""
        topology = problem.topology
        if "exchange_byte" not in self.calibration.constants:
            return topology.exchange_s(topology.gpus[gpu].id, 1.0)
        gpus = len(topology.gpus)
        return self.calibration.seconds("exchange_byte") * (gpus - 1) / gpus

    @property
    def _shard_s(self) -> float:
        return max(LEAST_SHARD_S, self.calibration.seconds("shard"))


def unit_costs_of(
    of: Callable[[str], Any],
    optimizer: OptimizerName,
    tiers: bool,
    exchange_byte_s: Any,
    shard_s: Any,
) -> UnitCosts:
    """Return the unit costs of tables with an optimizer; `of` gives the seconds of each of `TERMS`.

    Seconds may be arrays. Costs are linear in them, except for `shard_s`, which has a least value.
    """
    own = Rates(  # For rows in HBM.
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
        "shard_s": shard_s,
    }
    if optimizer == "rowwise_adagrad":
        fixed["column_slice_s"] = of("column_slice") + of("rowwise_slice")
        fixed["sliced_row_byte_s"] = of("rowwise_slice_byte")
    if not tiers:
        # The processor that pools is the host's, and reads all rows in place.
        return UnitCosts(device, device, device, ReadCosts(link=own), device, device, **fixed)
    hit, in_place = own + Rates(row_s=of("hit.row")), Rates(lookup_s=of("uva.lookup"))
    in_place += Rates(row_s=of("uva.row"), row_byte_s=of("uva.row_byte"))
    by_host = Rates(*(of(f"host.{name.removesuffix('_s')}") for name in Rates._fields))
    return UnitCosts(
        device=device,
        staged=ReadCosts(own, Rates(row_s=of("staged.row"), row_byte_s=of("staged.row_byte"))),
        uva=ReadCosts(own, in_place),
        host=ReadCosts(link=by_host),
        hit=ReadCosts(hit),
        miss=ReadCosts(hit, Rates(row_s=of("miss.row"), row_byte_s=of("miss.row_byte"))),
        cache_row_s=of("cache_row"),
        pooled_lookup_s=of("arena_pooled_lookup"),
        **fixed,
    )


def _in_phases(seconds: float, pipeline: Pipeline) -> Float:
    """Divide seconds into phases: half for the lookup, and half for the update."""
    phase_s = np.zeros(ROWS)
    phase_s[[LOOKUP, UPDATE]] = seconds / 2
    return with_lanes(phase_s, pipeline)
