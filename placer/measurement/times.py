"""Times of steps, the setting in which they are measured, and the effort."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from placer.executor.backends import make_backend

Clock = Literal["wall", "cpu"]
"""Time that passes, or time of the processors; the same on a quiet machine with one thread."""

NOISY_SPREAD = 0.15
"""Half of the steps lie further apart than this share of their median: not to be trusted."""

_GPU_LOAD = 32
"""With a core's lookups a GPU only waits for the host that launches its kernels."""

NOISY_WAIT = 0.15
"""So much longer on the clock than on the processor: somebody else had it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    # Steps that are timed, after a few that warm up.
    least_steps: int = 8
    most_steps: int = 100
    # Timing ends after `least_s`, but not before `least_steps`; and after `most_s` anyway.
    least_s: float = 0.25
    most_s: float = 2.0
    batches: int = 12  # Batches that the steps cycle through.


QUICK = Effort(least_steps=4, most_steps=8, least_s=0.02, most_s=0.5, batches=6)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of steps, each prefetch of the next batch, forward, backward and update."""

    wall_s: tuple[float, ...]  # By the clock. With several ranks, of the slowest.
    cpu_s: tuple[float, ...]  # Of all the process's threads; with several ranks, of the busiest.

    def seconds(self, clock: Clock = "wall") -> float:
        """Return the lower quartile of the times: whatever else runs only ever adds time."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

    def spread(self, clock: Clock = "wall") -> float:
        """Interquartile range of the times, over their median."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        if len(times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / statistics.median(times)

    @property
    def noisy(self) -> bool:
        """Whether something else ran on the machine, or the steps differ too much."""
        waited = self.seconds("wall") > (1 + NOISY_WAIT) * self.seconds("cpu")
        return waited or self.spread() > NOISY_SPREAD


def step_s(measured: Iterable[Measured], clock: Clock = "wall") -> float:
    """Return the least step time of several measurements: other load comes in bursts."""
    return min(times.seconds(clock) for times in measured)


@dataclass(frozen=True, slots=True)
class Setting:
    """How steps are measured: times of other settings cannot be compared."""

    backend: str = "auto"  # Of the executor; see `PlacedEmbeddings`.
    device: str = "cpu"
    ranks: int = 1  # Processes that train together over gloo, as many as the plan has GPUs.
    threads: int = 1  # Of each process.
    pinned: bool = True  # Whether each process stays on cores of its own.

    @property
    def load(self) -> int:
        """How many times a core's lookups a step needs here, to be more than launches."""
        return _GPU_LOAD if self.device.startswith("cuda") else 1

    @property
    def tiers(self) -> bool:
        """Whether the backend keeps HBM and DRAM apart."""
        return self.backend not in ("numba", "torch")


def resolved(setting: Setting) -> Setting:
    """Return the same with the backend that ``auto`` means here."""
    backend = make_backend(setting.backend, torch.device(setting.device))
    return replace(setting, backend=backend.name)
