"""Measures a machine for a cost model: the cases it needs, within a budget, into a file."""

from collections.abc import Callable
from pathlib import Path

from placer.measurement.dataset import collect
from placer.measurement.designed import LEAST_CASES, designed_cases
from placer.measurement.times import Effort, Setting, resolved

PASSES = 2
"""How often each case is measured, if there is time."""


def measure_machine(
    file: Path,
    setting: Setting,
    *,
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
    budget_s : float
        Seconds after which no case is begun, except for the first `LEAST_CASES`: with fewer there
        are no constants.
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
    cases = list(designed_cases(tiers=setting.tiers, gpus=setting.ranks, load=setting.load))
    total = PASSES * len(cases)
    collect(
        cases,
        file,
        setting,
        budget_s=budget_s,
        # A GPU's batches are large: to draw them takes longest.
        effort=Effort() if setting.load == 1 else Effort(batches=6),
        least=LEAST_CASES,
        repeats=PASSES,
        stop=stop,
        on_case=lambda done: on_case(done, total),
    )
