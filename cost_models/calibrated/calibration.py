"""What `placer calibrate` finds out: constants of the step equation, and how sure they are."""

import json
import math
import os
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from placer.errors import PlacerError
from placer.files import SEAL, sealed, write_text
from placer.read_files import LimitError, read_json
from placer.tables import OPTIMIZERS

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
