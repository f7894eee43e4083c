"""Files of measurements: a line of JSON for the machine, then one for each case.

Lines are appended as cases are measured, so that a run that ends early can be taken up again.
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placer.errors import DataError
from placer.measurement.cases import Case
from placer.measurement.times import Measured, Setting
from placer.read_files import open_file

FORMAT = "placer-measurements"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case and the times of its steps; `repeat` counts measurements of the same case."""

    case: Case
    measured: Measured
    repeat: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """Measurements of one machine in one setting, as they are in a file."""

    setting: Setting
    machine: dict[str, Any]  # Processor, cores, system, versions and date.
    measurements: tuple[Measurement, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Dataset":
        """Read a file, compressed if its name ends in ``.gz``.

        Its last line may be incomplete, as an interrupted run leaves it.

        Raises DataError if it is none, or of a newer version.
        """
        try:
            with open_file(path) as file:
                data = file.read()
            if Path(path).suffix == ".gz":
                data = gzip.decompress(data)
            lines = data.decode("utf-8").split("\n")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"cannot read measurements from {path}: {error}") from error
        header = _header(lines[0], path)
        measurements = []
        for number, line in enumerate(lines[1:-1], 2):
            try:
                record = json.loads(line)
                measurements.append(
                    Measurement(
                        Case.from_json(record["case"]),
                        Measured(tuple(record["wall_s"]), tuple(record["cpu_s"])),
                        int(record["repeat"]),
                        float(record["seconds"]),
                    )
                )
            except (ValueError, KeyError, TypeError, DataError) as error:
                raise DataError(f"{path}, line {number}, is no measurement: {error!r}") from error
        return cls(Setting(**header["setting"]), header["machine"], tuple(measurements))

    def of_kind(self, *kinds: str) -> "Dataset":
        """Return the same with cases of these kinds only."""
        kept = tuple(m for m in self.measurements if m.case.kind in kinds)
        return Dataset(self.setting, self.machine, kept)


def case_sha256(case: Case) -> str:
    """Hash of a case."""
    return hashlib.sha256(json.dumps(case.to_json(), sort_keys=True).encode()).hexdigest()


def _header(line: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(line)
        version, kind = header["version"], header["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of measurements: {error!r}") from error
    if kind != FORMAT or version != VERSION:
        raise DataError(
            f"{path} is {kind!r} of version {version}; this placer reads {FORMAT!r} of version "
            f"{VERSION}"
        )
    return header


def repeated(measurements: Iterable[Measurement]) -> Iterator[tuple[Case, tuple[Measured, ...]]]:
    """Yield each case once, with all its measurements."""
    by_case: dict[str, tuple[Case, list[Measured]]] = {}
    for measurement in measurements:
        key = case_sha256(measurement.case)
        by_case.setdefault(key, (measurement.case, []))[1].append(measurement.measured)
    for case, times in by_case.values():
        yield case, tuple(times)
