# mypy: disable-error-code="no-untyped-call"
"""Clocks for `gpu.py`: steps, copies, waits of the host, and captured graphs."""

import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Step = Callable[[], None]

WARM_UP_STEPS = 6
TIMED_STEPS = 16
FEWEST_STEPS = 2
_COPY_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each timed step."""

    seconds: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Mean of the steps: a long one that prepares two may come before a short one."""
        return statistics.fmean(self.seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(
    step: Step,
    device: torch.device,
    limit_s: float,
    warm_up: int = WARM_UP_STEPS,
    warmed: Step | None = None,
) -> Timing:
    """Time steps one behind the other, from the end of one to the end of the next.

    Nothing waits between them, so that what a step prepares for the next one, and how far the
    host runs ahead, count as they do in training.

    Parameters
    ----------
    step : callable
        Runs one step; each call takes the next batch.
    limit_s : float
        A slow step is repeated less often: `FEWEST_STEPS` at least.
    warm_up : int
        Steps before the clock, the first of which compile; fewer if they are slow.
    warmed : callable, optional
        Called between those and the timed ones.
    """
    one_s = 0.0
    for _ in range(warm_up):
        start = time.perf_counter()
        step()
        synchronize(device)
        one_s = time.perf_counter() - start
        if one_s > limit_s / 2:
            break
    if warmed is not None:
        warmed()
    steps = max(FEWEST_STEPS, min(TIMED_STEPS, int(limit_s / max(one_s, 1e-9))))
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(steps):
            step()
            ends.append(time.perf_counter())
        return Timing(tuple(end - start for start, end in pairwise(ends)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return Timing(tuple(start.elapsed_time(end) / 1e3 for start, end in pairwise(events)))


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes per second of large copies: what the machine can do."""

    hbm_bytes_per_s: float  # Device to device; bytes read and bytes written both count.
    # Over the link, one way alone; and each way while the other is as busy.
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    both_bytes_per_s: float


def measure_copies(device: torch.device, size: int) -> Copies:
    """Copy `size` bytes around; medians. On a CPU all memory is one, and so are its figures."""
    on_gpu = device.type == "cuda"
    here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    # Two buffers on the host: what comes and what goes must not be the same pages.
    host, back = (torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
    for buffer in (here, there, host, back):
        buffer.fill_(1)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []

    def both() -> None:
        if not streams:
            here.copy_(host)
            back.copy_(there)
            return
        current = torch.cuda.current_stream(device)
        for stream, target, source in zip(streams, (here, back), (host, there), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:  # Only now, or the second would wait for the first.
            current.wait_stream(stream)

    def seconds(copy: Step) -> float:
        rounds = range(_COPY_ROUNDS + 2)
        times = [time_steps(copy, device, 0.0, warm_up=0).mean_s for _ in rounds]
        return statistics.median(times[2:])

    return Copies(
        2 * size / seconds(lambda: _copy(there, here)),
        size / seconds(lambda: _copy(here, host)),
        size / seconds(lambda: _copy(back, there)),
        size / seconds(both),
    )


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def host_waits(step: Step, device: torch.device) -> str:
    """``none``, or where a step in its steady state waits for the device.

    Torch warns of every call of its own that waits. (It can be told to raise instead, but that
    shows the first place alone and leaves a model with half a step done.)
    """
    if device.type != "cuda":
        return "not asked: no GPU"
    synchronize(device)
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    places = [
        f"{'/'.join(warning.filename.split('/')[-2:])}:{warning.lineno}"
        for warning in caught
        if "synchronizing" in str(warning.message)
    ]
    counted = [f"{place} ×{places.count(place)}" for place in dict.fromkeys(places)]
    return ", ".join(counted) or "none"


def why(error: BaseException) -> str:
    """An error in one line, with the innermost place in this project that it came from."""
    text = next(iter(str(error).strip().splitlines()), "")
    frames = [
        f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/placer/" in frame.filename or "/benchmarks/" in frame.filename
    ]
    return f"{type(error).__name__}: {text[:200]}" + (f" at {frames[-1]}" if frames else "")
