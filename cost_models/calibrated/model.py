"""Step time from constants that `placer calibrate` measured on a machine.

The equation is that of every model here (`cost_models.step_equation.equation`); its constants are
fitted to steps of the executor (`cost_models.calibrated.fit`). They are of the machine and backend
that were measured: of a plan's topology only the memory, the number of GPUs and, where nothing was
exchanged in the measurements, the links between GPUs count.
"""

import json
import math
import os
import weakref
from dataclasses import asdict, astuple, dataclass, field, replace
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
from placer.errors import PlacerError
from placer.files import SEAL, sealed, write_text
from placer.pipeline import Pipeline
from placer.problem import Problem
from placer.read_files import LimitError, read_json
from placer.tables import OPTIMIZERS, Table

FORMAT = "placer-calibration"
VERSION = 2

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
"""Constants, in seconds. Those of ``staged``, ``hit``, ``uva`` come on top of rows in HBM, those
of ``miss`` on top of a hit; ``host`` stands for itself.

An ``arena`` is the rows of one element type, width and optimizer on a GPU, which kernels handle at
once; what comes on top of it, by how its rows are read, is that of `cost_models.arenas.ArenaCosts`.
``rowwise_slice`` comes on top of a ``column_slice`` under row-wise Adagrad, whose state needs whole
rows; ``rowwise_slice_byte`` is for a byte of each of its distinct rows. A ``mapped_lookup`` has to
ask a map where its row lies. ``replicas`` is for a GPU that holds any replicated rows.
"""

RATE_TERMS = ("lookup", "lookup_byte", "row", "row_byte", "vector", "vector_byte")
"""Units of `TERMS` that are the fields of `Rates`; for those of ``host``, all."""

ARENA_TERMS = ("arena_cached", "arena_cached_lookup", "arena_pooled_lookup", "replicas")
"""Those of `TERMS` that are the fields of `cost_models.arenas.ArenaCosts`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Seconds of one unit, and where nine of ten resampled fits find it."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the machine's speed varied."""

    # Interquartile range of the steps of a case over their median: the median case's.
    spread: float = 0.0
    drift: float = 0.0  # Range of a case that was measured again and again, over its median.
    # Time on the clock beyond that on the processor, over the latter: the median case's.
    wait: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Constants of the step equation for one executor on one machine."""

    constants: dict[str, Constant]  # By name of `TERMS`; those that were not measured are missing.
    # Whether the executor keeps HBM and DRAM apart. Where it does not, all ways to read rows cost
    # the same.
    tiers: bool = True
    # Mean error, and that which one of ten exceeds, of predicted step times of cases that a fit had
    # not seen, over the measured time.
    relative_error: float = 0.0
    p90_error: float = 0.0
    cases: int = 0  # Measurements that the constants rest on.
    noise: Noise = Noise()
    noisy: bool = False  # Whether the machine was too unsteady to trust them.
    # Backend, ranks and threads; processor, versions and date.
    setting: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def seconds(self, term: str) -> float:
        """Return the constant with the name `term`; 0 if it was not measured.

        The state of an optimizer that was not measured costs what the dearest one's does.
        """
        constant = self.constants.get(term)
        unit, _, optimizer = term.partition(".")
        if constant is None and optimizer in OPTIMIZERS:
            others = (self.constants.get(f"{unit}.{other}") for other in OPTIMIZERS)
            return max((other.value_s for other in others if other is not None), default=0.0)
        return 0.0 if constant is None else constant.value_s

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, atomically."""
        write_text(path, json.dumps(sealed(self.to_json()), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as a JSON object."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` wrote."""
        try:
            return cls.from_json(read_json(Path(path)), path)
        except (OSError, LimitError) as error:
            raise _unreadable(path, error) from error

    @classmethod
    def from_json(cls, document: Any, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `to_json` returned; errors name `path`, its file."""
        try:
            data = dict(document)
            altered = bool(data.get(SEAL)) and data[SEAL] != sealed(data)[SEAL]
            data.pop(SEAL, None)
            kind, version = data.pop("format"), data.pop("version")
        except (TypeError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from error
        if kind != FORMAT or version != VERSION:
            raise PlacerError(
                f"{path} is {kind!r} of version {version}; this placer reads {FORMAT!r} of "
                f"version {VERSION}: run the `placer calibrate` that made it again, with --budget "
                "0s if its measurements are still beside it, so that nothing is measured anew"
            )
        try:
            constants = {name: Constant(**value) for name, value in data.pop("constants").items()}
            unknown = sorted(constants.keys() - set(TERMS))
            wrong = [
                name
                for name, one in constants.items()
                if not all(0 <= seconds < math.inf for seconds in astuple(one))
            ]
            if unknown or wrong:
                raise ValueError(f"constants {unknown or wrong}")
            made = cls(constants, noise=Noise(**data.pop("noise")), **data)
            numbers = (made.relative_error, made.p90_error, *astuple(made.noise))
            if not all(math.isfinite(number) for number in numbers):
                raise ValueError(f"errors or noise are no numbers: {numbers}")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PlacerError(f"{path} is a damaged calibration: {error!r}") from error
        if altered:
            raise PlacerError(
                f"{path} was altered since it was written: restore it, or run `placer calibrate` "
                "again; a calibration of your own has no sha256"
            )
        return made


def _unreadable(path: str | os.PathLike[str], error: Exception) -> PlacerError:
    return PlacerError(
        f"cannot read a calibration from {path}: {error!r}; make one with "
        "`placer calibrate -o FILE`"
    )


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
        hit, in_place = own + Rates(row_s=of("hit.row")), Rates(lookup_s=of("uva.lookup"))
        in_place += Rates(row_s=of("uva.row"), row_byte_s=of("uva.row_byte"))
        return UnitCosts(
            device=device,
            staged=ReadCosts(own, Rates(row_s=of("staged.row"), row_byte_s=of("staged.row_byte"))),
            uva=ReadCosts(own, in_place),
            host=ReadCosts(link=Rates(*(of(f"host.{unit}") for unit in RATE_TERMS))),
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
