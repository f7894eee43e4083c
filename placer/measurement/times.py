"""Hold measured step times, the setting of a measurement, and its effort."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from placer.errors import PlacerError
from placer.executor.backends import make_backend, usable_device
from placer.executor.names import MOST_THREADS

Clock = Literal["wall", "cpu"]
"""Elapsed time, or processor time. Both are equal on a quiet machine with one thread."""

NOISY_SPREAD = 0.15
"""Times are noisy if their interquartile range exceeds this share of their median."""

_GPU_LOAD = 32
"""Give a GPU this many times a core's lookups; with fewer, it only waits for kernel launches."""

NOISY_WAIT = 0.15
"""Times are noisy if elapsed time exceeds processor time by this share: other programs ran."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many steps to measure, and for how long."""

    # Least and most steps to time, after a few warm-up steps.
    least_steps: int = 8
    most_steps: int = 100
    # Stop after `least_s` seconds and `least_steps` steps, or in any case after `most_s` seconds.
    least_s: float = 0.25
    most_s: float = 2.0
    batches: int = 12  # Number of batches that the steps cycle through.


QUICK = Effort(least_steps=4, most_steps=8, least_s=0.02, most_s=0.5, batches=6)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each step: prefetch of the next batch, forward, backward and update."""

    wall_s: tuple[float, ...]  # Elapsed time; with several ranks, of the slowest.
    cpu_s: tuple[float, ...]  # Processor time of all threads; with several ranks, of the busiest.

    def seconds(self, clock: Clock = "wall") -> float:
        """Return the lower quartile of the times, because other programs only add time."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

    def spread(self, clock: Clock = "wall") -> float:
        """Return the interquartile range of the times, divided by their median."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        if len(times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / statistics.median(times)

    @property
    def noisy(self) -> bool:
        """Whether other programs ran on the machine, or the times differ too much."""
        waited = self.seconds("wall") > (1 + NOISY_WAIT) * self.seconds("cpu")
        return waited or self.spread() > NOISY_SPREAD


def step_s(measured: Iterable[Measured], clock: Clock = "wall") -> float:
    """Return the least step time of several measurements, because other load comes in bursts."""
    return min(times.seconds(clock) for times in measured)


@dataclass(frozen=True, slots=True)
class Setting:
    """How steps are measured. Only compare times of equal settings."""

    backend: str = "auto"  # Backend of the executor; see `PlacedEmbeddings`.
    device: str = "cpu"
    ranks: int = 1  # Processes that train together over gloo, one for each GPU of the plan.
    threads: int = 1  # Threads of each process.
    pinned: bool = True  # Whether each process is bound to its own cores.

    def __post_init__(self) -> None:
        if not 1 <= self.ranks * self.threads <= MOST_THREADS:
            raise PlacerError(
                f"{self.ranks} ranks of {self.threads} threads are not from 1 to {MOST_THREADS} "
                "threads together; lower --ranks or --threads"
            )

    @property
    def load(self) -> int:
        """Factor for a step's lookups, relative to a core's, so that launches do not dominate."""
        return _GPU_LOAD if self.device.startswith("cuda") else 1

    @property
    def tiers(self) -> bool:
        """Whether the backend has separate tiers for HBM and DRAM."""
        return self.backend not in ("numba", "torch")


def resolved(setting: Setting) -> Setting:
    """Return the setting with the backend that ``auto`` selects on this machine."""
    backend = make_backend(setting.backend, usable_device(setting.device))
    return replace(setting, backend=backend.name)
