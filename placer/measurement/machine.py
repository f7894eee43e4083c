"""Measure a machine: time one case after the other, and append each to a file.

The file has a line of JSON for the machine, then one for each measurement. So a measurement that
ends early can be continued.
"""

import gzip
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from placer.errors import DataError, PlacerError
from placer.files.atomic import sha256_json, write_text
from placer.files.reading import open_file
from placer.measurement.cases import QUICK, Case, Effort, Measured, Setting, random_cases, resolved
from placer.measurement.measure import Measurer

FORMAT = "placer-measurements"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case and the times of its steps. `repeat` numbers measurements of the same case."""

    case: Case
    measured: Measured
    repeat: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Dataset:
    """The measurements of a file: of one machine in one setting."""

    setting: Setting
    machine: dict[str, Any]  # Processor, cores, system, versions and date.
    measurements: tuple[Measurement, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Dataset":
        """Read a file, compressed if its name ends in ``.gz``.

        An incomplete last line, which an interrupted run leaves, is ignored.

        Raises DataError if it is no file of measurements, or has another version.
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


def case_sha256(case: Case) -> str:
    """Return the SHA-256 of a case."""
    return sha256_json(case.to_json())


def _header(line: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(line)
        version, kind = header["version"], header["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no file of measurements: {error!r}; name another file, or begin again with "
            "--fresh, which removes it"
        ) from error
    if kind != FORMAT or version != VERSION:
        raise DataError(
            f"{path} is {kind!r} of version {version}; this placer reads {FORMAT!r} of version "
            f"{VERSION}"
        )
    return header


def repeated(measurements: Iterable[Measurement]) -> Iterator[tuple[Case, tuple[Measured, ...]]]:
    """Yield each distinct case with all its measurements."""
    by_case: dict[str, tuple[Case, list[Measured]]] = {}
    for measurement in measurements:
        key = case_sha256(measurement.case)
        by_case.setdefault(key, (measurement.case, []))[1].append(measurement.measured)
    for case, times in by_case.values():
        yield case, tuple(times)


LEAST_CASES = 12
"""Least number of cases to measure. Fewer cases hardly separate the constants of a step."""

_WORKLOADS, _SEED, _REFERENCE_EVERY = 250, 20_000, 20
"""Number of random cases of a calibration; their seed, which tests do not use; and the number of
cases after which the reference case is measured again."""

_PASSES = 2
"""Number of measurements of each case, if there is time."""


def measure_machine(
    file: Path,
    setting: Setting,
    *,
    budget_s: float = 300.0,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Measure the time of embedding work on this machine, continuing an existing file.

    After `budget_s` seconds, begin no other case, except for the first `LEAST_CASES`, without which
    constants cannot be fitted. `fresh` removes an existing file first. `stop` returns whether to
    end early. `on_case` is called with the number of finished measurements and of all measurements.
    """
    setting = resolved(setting)
    if fresh:
        file.unlink(missing_ok=True)
    cases = list(calibration_cases(setting))
    total = _PASSES * len(cases)
    collect(
        cases,
        file,
        setting,
        budget_s=budget_s,
        # Drawing a GPU's large batches takes longest.
        effort=Effort() if setting.load == 1 else Effort(batches=6),
        least=LEAST_CASES,
        repeats=_PASSES,
        stop=stop,
        on_case=lambda done: on_case(done, total),
    )


def calibration_cases(setting: Setting) -> Iterator[Case]:
    """Yield random cases to calibrate with, and the same reference case from time to time."""
    drawn = random_cases(_SEED, _WORKLOADS, gpus=setting.ranks, load=setting.load)
    (reference,) = random_cases(_SEED, 1, gpus=setting.ranks, first=_WORKLOADS, load=setting.load)
    for number, case in enumerate(drawn):
        if number % _REFERENCE_EVERY == 0:
            yield replace(reference, workload=f"reference-{number}", kind="reference")
        yield case


def collect(
    cases: Iterable[Case],
    path: str | os.PathLike[str],
    setting: Setting,
    *,
    budget_s: float = float("inf"),
    least: int = 0,
    effort: Effort | None = None,
    repeats: int = 1,
    on_case: Callable[[int], object] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Measure cases and append them to a file. Skip cases that the file already has.

    The file must be new, or uncompressed and of the same setting and machine. After `budget_s`
    seconds, begin no other case once the file has `least` measurements. With `repeats`, measure all
    cases once before any case again. After each, `on_case` is called with the number of
    measurements in the file. Returns whether all cases are measured.
    """
    started = time.perf_counter()
    target = Path(path)
    done = _begin(target, setting)
    each = list(cases)
    missing = [
        (repeat, case)
        for repeat in range(repeats)
        for case in each
        if done.get(case_sha256(case), 0) <= repeat
    ]
    with Measurer(setting) as measurer:
        for number, (repeat, case) in enumerate(missing, 1):
            measurements = sum(done.values()) + number - 1
            if stop() or (time.perf_counter() - started > budget_s and measurements >= least):
                return False
            if number == 1:
                _check_machine(target, setting)
                # First steps load code and allocate memory.
                measurer.measure(case.plan(), case.profile, effort=QUICK)
            begun = time.perf_counter()
            measured = measurer.measure(case.plan(), case.profile, seed=repeat, effort=effort)
            _append(target, _line(case, repeat, time.perf_counter() - begun, measured))
            on_case(measurements + 1)
    return True


def _begin(path: Path, setting: Setting) -> dict[str, int]:
    """Prepare the file for appending; return the number of measurements of each case, by hash."""
    if path.suffix == ".gz":
        raise DataError(f"{path} is compressed; gunzip it to go on measuring")
    done: dict[str, int] = {}
    if not path.exists():
        header = {"format": FORMAT, "version": VERSION, "setting": asdict(setting)}
        # Whole or not there: without its first line, nothing can be added to a file.
        write_text(path, _json_line(header | {"machine": machine(setting.device)}))
        return done
    known = Dataset.load(path)
    if known.setting != setting:
        raise DataError(
            f"{path} was measured with {known.setting}, not with {setting}; write to another file"
        )
    for measurement in known.measurements:
        key = case_sha256(measurement.case)
        done[key] = max(done.get(key, 0), measurement.repeat + 1)
    _drop_partial_line(path)
    return done


def _line(case: Case, repeat: int, seconds: float, measured: Measured) -> dict[str, Any]:
    return {
        "case": case.to_json(),
        "repeat": repeat,
        "seconds": round(seconds, 3),
        "wall_s": [float(f"{value:.4g}") for value in measured.wall_s],
        "cpu_s": [float(f"{value:.4g}") for value in measured.cpu_s],
    }


def _check_machine(path: Path, setting: Setting) -> None:
    """Raise DataError if a file has measurements of another machine: times would be mixed."""
    known, own = Dataset.load(path).machine, machine(setting.device)
    for name in _HARDWARE:
        if name in known and known[name] != own.get(name):
            raise DataError(
                f"{path} has measurements of another machine: {name} was {known[name]!r} and is "
                f"{own.get(name)!r} here; write to another file, or begin again with --fresh"
            )


_HARDWARE = "cpu", "cores", "system", "gpu"
"""Facts of `machine` that measurements of one file have in common."""


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe this machine with a GPU that is measured, the versions of packages, and the date."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if device != "cpu":
        import torch  # It loads slowly, so only where it is needed.

        facts["gpu"] = torch.cuda.get_device_name(device)
    for name in ("torch", "numba", "numpy", "triton", "embedding-placer"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _append(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(_json_line(data))
    except OSError as error:
        raise PlacerError(f"cannot write {path}: {error.strerror or error}") from error


def _json_line(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


def _drop_partial_line(path: Path) -> None:
    """Remove a last line that an interrupted run left incomplete."""
    with open_file(path) as file:
        text = file.read()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
