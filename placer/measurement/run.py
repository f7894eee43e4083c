"""Measures a machine for a cost model: the cases it needs, within a budget, into a file."""

from collections.abc import Callable
from pathlib import Path

from placer.measurement.dataset import collect
from placer.measurement.designed import LEAST_CASES, designed_cases
from placer.measurement.draw import random_cases
from placer.measurement.times import Effort, Setting, resolved

PASSES = 2
"""How often each case is measured, if there is time."""


def measure_machine(
    file: Path,
    setting: Setting,
    *,
    workloads: int | None = None,
    seed: int = 0,
    budget_s: float = 300.0,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Measure what embedding work takes here, going on with what is in the file already.

    Parameters
    ----------
    file : Path
        Of measurements; `placer.measurement.Dataset.load` reads it.
    setting : Setting
        Backend, device and processes that are measured.
    workloads : int, optional
        Measure two plans of so many random workloads, for learned models; by default designed
        cases, for the constants of a calibrated one.
    seed : int
        Of random workloads.
    budget_s : float
        No case is begun after so many seconds, but for the first `LEAST_CASES` of designed ones:
        with fewer there are no constants.
    fresh : bool
        Start anew.
    stop : callable
        Returns whether to end early.
    on_case : callable
        Called with the measurements that are done, and their number in all.
    """
    setting = resolved(setting)
    if fresh:
        file.unlink(missing_ok=True)
    cases = list(
        designed_cases(tiers=setting.tiers, gpus=setting.ranks, load=setting.load)
        if workloads is None
        else random_cases(seed, workloads, plans=2, gpus=setting.ranks, load=setting.load)
    )
    total = PASSES * len(cases)
    collect(
        cases,
        file,
        setting,
        budget_s=budget_s,
        # A GPU's batches are large: to draw them takes longest.
        effort=Effort() if setting.load == 1 else Effort(batches=6),
        least=LEAST_CASES if workloads is None else 0,
        repeats=PASSES,
        stop=stop,
        on_case=lambda done: on_case(done, total),
    )
