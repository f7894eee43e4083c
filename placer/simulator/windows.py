"""Compares a plan's hit rates over a log's windows, and says when another plan would pay."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placer.errors import DataError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Counts and time of one step."""

    # See `placer.simulator.summary.Served`.
    lookups: int
    hbm_lookups: int
    slow_rows: int
    # HBM entries for copies of rows, all row caches together; see `StepCounts`.
    held: int
    needed: int
    # With copies beside the step before, and one after the other.
    step_s: float
    sum_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Some consecutive steps."""

    name: str
    steps: int
    hbm_share: float  # Share of lookups whose row was in HBM; 1 without any.
    # Lookups a step whose row was not, and distinct rows a step that came from DRAM.
    slow_lookups: float
    slow_rows: float
    # Of the step times.
    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, name: str, records: Sequence[StepRecord]) -> "Window":
        """Return the window of at least one step."""
        steps, lookups = len(records), sum(one.lookups for one in records)
        hbm = sum(one.hbm_lookups for one in records)
        seconds = np.array([one.step_s for one in records])
        return cls(
            name,
            steps,
            hbm / lookups if lookups else 1.0,
            (lookups - hbm) / steps,
            sum(one.slow_rows for one in records) / steps,
            float(seconds.mean()),
            float(np.quantile(seconds, 0.99)),
        )


@dataclass(frozen=True, slots=True)
class Drifted:
    """A window under a plan, beside its first window and under another plan."""

    window: Window
    first: Window
    other: Window | None = None  # The same steps under the other plan.
    migration_s: float | None = None  # What it takes to get from the one to the other.

    @property
    def lost_share(self) -> float:
        """Share of lookups that HBM served in the first window, minus this one's."""
        return self.first.hbm_share - self.window.hbm_share

    @property
    def break_even_steps(self) -> float | None:
        """Steps like these after which the migration has paid; None if it never does.

        0 where nothing moves.
        """
        if self.other is None or self.migration_s is None:
            return None
        if self.migration_s == 0:
            return 0.0
        saved = self.window.mean_s - self.other.mean_s
        return self.migration_s / saved if saved > 0 else None


def equal_windows(name: str, records: Sequence[StepRecord], windows: int) -> list[Window]:
    """Equal windows of a log's steps, the last ones a step longer where they do not divide.

    Raises DataError if there are fewer steps than windows.
    """
    if len(records) < windows:
        raise DataError(
            f"{name} has {len(records)} steps, which do not make {windows} windows; ask for "
            "fewer windows, or for a smaller batch"
        )
    ends = [len(records) * number // windows for number in range(windows + 1)]
    if windows == 1:
        return [Window.of(name, records)]
    return [
        Window.of(f"{name} {number + 1}/{windows}", records[ends[number] : ends[number + 1]])
        for number in range(windows)
    ]


def drifted(
    windows: Sequence[Window], others: Sequence[Window] | None, migration_s: float | None
) -> tuple[Drifted, ...]:
    """Return each window beside the first, and beside the other plan's where there is one."""
    return tuple(
        Drifted(window, windows[0], None if others is None else others[number], migration_s)
        for number, window in enumerate(windows)
    )
