"""Profile a few training steps: write a Chrome trace, and sum up the time of each phase."""

import gzip
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from placer.errors import PlacerError
from placer.executor.streams import PHASE_PREFIX, Phase
from placer.files.atomic import replacing, temporary_beside
from placer.training.config import TraceRequest

READ = "read"
"""Name after `PHASE_PREFIX` of the time that the loop waits for the log."""

NAMES: tuple[str, ...] = (READ, *get_args(Phase))


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Mean time of one phase in a step, without phases nested in it."""

    # A `Phase` of the executor; ``read``, which is waiting for the log; or ``other``, the
    # rest: MLPs, their optimizer, the loop.
    name: str
    host_s: float  # Mean time of the host; with a GPU, the time to launch the work.
    device_s: float  # Mean time of GPU kernels.


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Summary of a trace: its steps, and the time of each phase."""

    path: Path
    steps: int  # Steps in the trace: fewer than requested if the run ended early.
    step_s: float  # Mean time under the profiler from one step to the next.
    phases: tuple[PhaseTime, ...]  # The phases that occurred, in the order of a step.


class Tracer:
    """Records the requested steps inside a ``with`` block; call `step` at the end of each step.

    The trace is written after its last step or at the end of the block. Until then, `summary` is
    None. A run that fails or ends during the warm-up leaves no trace. Without a request, this does
    nothing.
    """

    def __init__(self, request: TraceRequest | None, device: torch.device) -> None:
        self.summary: TraceSummary | None = None
        self._profile: profile | None = None
        self._failed = False
        if request is None:
            return
        self._request, self._on_gpu = request, device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        # The last warm-up step starts the profiler. Its events are left out.
        steps = schedule(wait=request.warm_up - 1, warmup=1, active=request.steps, repeat=1)
        self._profile = profile(activities=activities, schedule=steps, on_trace_ready=self._write)

    def __enter__(self) -> "Tracer":
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error of the trace must not hide an error of the run.
        self._failed = kind is not None
        self._stop()

    def step(self) -> None:
        """Mark the end of a step."""
        if self._profile is None:
            return
        last = self._request.warm_up + self._request.steps
        if self._on_gpu and self._profile.step_num + 1 == last:
            torch.cuda.synchronize()  # The last step's kernels belong to the trace.
        self._profile.step()
        if self.summary is not None:
            self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            stopping, self._profile = self._profile, None
            stopping.stop()

    def _write(self, recorded: profile) -> None:
        steps = recorded.step_num - self._request.warm_up
        if self._failed or self.summary is not None or steps < 1:
            return
        _export(recorded, self._request.path)
        events: Iterable[Any] = recorded.events() or ()  # type: ignore[no-untyped-call]
        self.summary = summarize(events, self._request.path, steps)


def summarize(events: Iterable[Any], path: Path, steps: int) -> TraceSummary:
    """Return mean times of the phases over the first `steps` steps, from the profiler's events.

    The time of a nested phase, as ``write-back`` in ``stage``, only counts for the nested phase.
    """
    host_s, device_s = defaultdict[str, float](float), defaultdict[str, float](float)
    whole: list[tuple[float, float, float]] = []  # Start, host time and device time of steps.
    for event in events:
        if event.device_type.name != "CPU":
            continue
        own = event.cpu_time_total / 1e6, event.device_time_total / 1e6
        if event.name.startswith("ProfilerStep"):
            whole.append((event.time_range.start, *own))
        if not event.name.startswith(PHASE_PREFIX):
            continue
        around = event.cpu_parent
        while around is not None and not around.name.startswith(PHASE_PREFIX):
            around = around.cpu_parent
        for totals, seconds in ((host_s, own[0]), (device_s, own[1])):
            totals[event.name.removeprefix(PHASE_PREFIX)] += seconds
            if around is not None:
                totals[around.name.removeprefix(PHASE_PREFIX)] -= seconds
    taken = sorted(whole)[:steps]  # The profiler may have begun another step.
    step_s, step_device_s = (sum(step[at] for step in taken) for at in (1, 2))
    rest_s = max(step_s - sum(host_s.values()), 0.0)
    rest_device_s = max(step_device_s - sum(device_s.values()), 0.0)
    times = [PhaseTime(n, host_s[n] / steps, device_s[n] / steps) for n in NAMES if n in host_s]
    other = PhaseTime("other", rest_s / steps, rest_device_s / steps)
    return TraceSummary(path, steps, step_s / steps, (*times, other))


def waiting_for_log() -> record_function:
    """Return a context that marks time in which the loop waits for the log."""
    return record_function(PHASE_PREFIX + READ)


def _export(recorded: profile, path: Path) -> None:
    with replacing(path) as temporary:
        if path.suffix != ".gz":
            _write(recorded, temporary, path)
        else:
            with temporary_beside(path) as plain:
                _write(recorded, plain, path)
                with plain.open("rb") as source, gzip.open(temporary, "wb") as target:
                    shutil.copyfileobj(source, target)


def _write(recorded: profile, file: Path, path: Path) -> None:
    """Write a trace into a file, which will be `path`; the profiler does not say if it cannot."""
    recorded.export_chrome_trace(str(file))
    file.with_name(f"{file.name}.tmp").unlink(missing_ok=True)  # It stays there on a full disk.
    if not file.stat().st_size:
        raise PlacerError(f"cannot write {path}: the profiler wrote nothing; is the disk full?")
