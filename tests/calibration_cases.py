"""Constants of a machine that never was, and data sets that follow them exactly."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cost_models.calibrated.fit import amounts
from cost_models.calibrated.model import TERMS, Calibration, Constant
from placer.measurement import Case, Dataset, Measured, Measurement, Setting

SECONDS = {
    "lookup": 3e-8, "lookup_byte": 3e-10,
    "row.sgd": 1e-7, "row.adagrad": 2e-7, "row.rowwise_adagrad": 2.5e-7, "row.adam": 3e-7,
    "row_byte.sgd": 8e-10, "row_byte.adagrad": 1.5e-9, "row_byte.rowwise_adagrad": 1e-9,
    "row_byte.adam": 1.2e-9,
    "staged.row": 3e-7, "staged.row_byte": 1e-9, "hit.row": 1e-7,
    "miss.row": 4e-7, "miss.row_byte": 1e-9, "cache_row": 3e-8, "uva.lookup": 1e-9,
    "uva.row": 2e-8, "uva.row_byte": 2e-10, "host.lookup": 2e-8, "host.lookup_byte": 2e-10,
    "host.row": 1e-7, "host.row_byte": 3e-10, "host.vector": 3e-8, "host.vector_byte": 3e-10,
    "output_vector": 5e-8, "output_byte": 2e-10,
    "exchange_byte": 1e-9, "step": 1e-3,
    "arena": 5e-4, "arena_cached": 6e-4, "arena_cached_lookup": 5e-8, "arena_pooled_lookup": 2e-8,
    "column_slice": 3e-4, "rowwise_slice": 4e-4, "rowwise_slice_byte": 1e-9,
    "mapped_lookup": 1e-8, "shard": 5e-5, "replicas": 1e-3,
}  # fmt: skip
"""About what one core of a CPU takes with tiers of its own."""

assert set(SECONDS) == set(TERMS)


def calibration(**changes: float) -> Calibration:
    """`SECONDS` with other values of some terms."""
    seconds = {**SECONDS, **changes}
    return Calibration(
        {term: Constant(value, value * 0.9, value * 1.1) for term, value in seconds.items()},
        relative_error=0.12,
        p90_error=0.3,
        cases=100,
        setting={"backend": "tiered"},
    )


def dataset(
    cases: Iterable[Case],
    setting: Setting,
    noise: float = 0.0,
    seconds: dict[str, float] = SECONDS,
) -> Dataset:
    """Measurements that take what `seconds` say, times a little noise."""
    rng = np.random.default_rng(0)
    constants = np.array([seconds[term] for term in TERMS])
    found = []
    for case in cases:
        step_s = float((amounts(case, tiers=setting.tiers) @ constants).max())
        times = tuple((step_s * np.exp(noise * rng.standard_normal(8))).tolist())
        found.append(Measurement(case, Measured(times, times)))
    return Dataset(setting, {"cpu": "none"}, tuple(found))


def saved(path: Path, **changes: float) -> str:
    """The name of the cost model whose constants are in a file."""
    calibration(**changes).save(path)
    return f"calibrated:{path}"


def first(cases: Iterable[Case], number: int) -> list[Case]:
    return list(itertools.islice(cases, number))
