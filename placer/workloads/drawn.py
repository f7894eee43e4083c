"""Workloads that are published in part or not at all. Other values are drawn with a fixed seed.

All draws use uniform doubles of NumPy's PCG64 and the inverse CDFs below, so a name gives the same
tables in every version of NumPy.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from statistics import NormalDist

import numpy as np

from placer.errors import ProfileError
from placer.profile.cdf import zipf_cdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table

RECSHARD_TABLES = 397
RECSHARD_DIM = 64
RECSHARD_ROWS = {"rm1": 1_331_656_544, "rm2": 2_661_369_917, "rm3": 5_320_796_628}
"""Total rows, as recalled from Sethi et al., ASPLOS 2022, doi:10.1145/3503222.3507777."""

_RECSHARD_SEED = 397
_META_SEED = 856
_META_DIM = 64
_DIMS = (16, 32, 64, 128)
_ROWS_RANGE = (1e3, 4e7)
_EXPONENTS = (0.6, 1.3)
_COVERAGE = (0.2, 1.0)
_MOST_LOOKUPS = 200.0
_POOLING_MEDIAN = 4.0
_POOLING_SIGMA = 1.3
_RECSHARD_SIGMA = 2.0

_NEUROSHARD_TABLES = 60
_NEUROSHARD_DIMS = (4, 8, 16, 32, 64, 128)
_NEUROSHARD_LEAST_ROWS = 100
_NEUROSHARD_WEIGHT_BYTES = 15 * 2**30

_DRAWN = (
    f"pooling factors log-normal (median {_POOLING_MEDIAN:g}, sigma {_POOLING_SIGMA:g}, clipped "
    f"to 1..{_MOST_LOOKUPS:g}), coverage uniform in {_COVERAGE[0]}..{_COVERAGE[1]}, Zipf exponents "
    f"uniform in {_EXPONENTS[0]}..{_EXPONENTS[1]}"
)


class _Draws:
    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(self._generator.random())

    def log_normal(self, median: float, sigma: float) -> float:
        # Avoid 0 and 1, where the inverse normal is infinite.
        quantile = self.uniform(1e-12, 1 - 1e-12)
        return median * math.exp(sigma * NormalDist().inv_cdf(quantile))

    def choice(self, values: Sequence[int]) -> int:
        return values[int(self.uniform(0, len(values)))]

    def table(self, name: str, rows: int, dim: int) -> TableProfile:
        """Return a table of the given size with drawn pooling, coverage and skew."""
        lookups = self.log_normal(_POOLING_MEDIAN, _POOLING_SIGMA)
        pooling = round(min(max(lookups, 1.0), _MOST_LOOKUPS), 2)
        coverage = round(self.uniform(*_COVERAGE), 3)
        exponent = round(self.uniform(*_EXPONENTS), 3)
        table = Table(name, rows, dim, features=(Feature(name, pooling, coverage),))
        return TableProfile.zipf(table, exponent)


def random_workload(tables: int, seed: int = 0) -> Profile:
    """Return `tables` tables with drawn rows, dim, pooling, coverage and skew."""
    if not 1 <= tables <= 100_000:
        raise ProfileError(f"random-{tables}: a workload has 1 to 100,000 tables")
    draws = _Draws(seed)
    drawn = []
    for number in range(tables):
        rows = round(math.exp(draws.uniform(*map(math.log, _ROWS_RANGE))))
        drawn.append(draws.table(f"t{number + 1}", rows, draws.choice(_DIMS)))
    return Profile(
        tuple(drawn),
        source=f"workload random-{tables}@{seed}: drawn with seed {seed}: rows log-uniform in "
        f"{_ROWS_RANGE[0]:,.0f}..{_ROWS_RANGE[1]:,.0f}, dims one of {_DIMS}, {_DRAWN}.",
    )


def recshard_workload(model: str) -> Profile:
    """Return RecShard's ``rm1``, ``rm2`` or ``rm3``: the same features with ever larger tables.

    The number of tables, the dim and the total of rows are the paper's. The rows of each table are
    log-normal, scaled to the total.
    """
    total = RECSHARD_ROWS[model]
    draws = _Draws(_RECSHARD_SEED)
    weights = [draws.log_normal(1.0, _RECSHARD_SIGMA) for _ in range(RECSHARD_TABLES)]
    # Round the running sum instead of each term, so that rows add up to the total.
    ends = [round(total * part) for part in np.cumsum(weights) / math.fsum(weights)]
    ends[-1] = total
    return Profile(
        tuple(
            draws.table(f"t{number + 1}", int(stop - start), RECSHARD_DIM)
            for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False))
        ),
        source=f"workload recshard-{model}: {RECSHARD_TABLES} tables, dim {RECSHARD_DIM} and "
        f"{total:,} rows in all, as recalled from Sethi et al., ASPLOS 2022, "
        "doi:10.1145/3503222.3507777. What the paper does not publish is drawn with seed "
        f"{_RECSHARD_SEED}: rows of each table log-normal (sigma {_RECSHARD_SIGMA:g}) scaled to "
        f"the total, {_DRAWN}.",
    )


def neuroshard_workload(tables: int, seed: int = 0) -> Profile:
    """Return a task in NeuroShard's setting: some of `meta_workload`'s tables, with drawn dims.

    As in its task generator (Zha et al. 2023, arXiv:2305.01868), tables are drawn with repetition,
    each with its own dim. They are drawn again until their weights take at most 15 GiB, 1 GiB less
    than the memory of four GPUs with 4 GiB. No table has fewer than 100 rows.

    Raises ProfileError if `tables` is not within 1..60, as in NeuroShard's tasks.
    """
    if not 1 <= tables <= _NEUROSHARD_TABLES:
        raise ProfileError(
            f"neuroshard-{tables}: a task has 1 to {_NEUROSHARD_TABLES} tables; "
            "random-N has as many as you like"
        )
    candidates = meta_workload().tables
    draws = _Draws(seed)
    while True:
        shapes = [
            (draws.choice(range(len(candidates))), draws.choice(_NEUROSHARD_DIMS))
            for _ in range(tables)
        ]
        if sum(4 * candidates[n].table.rows * dim for n, dim in shapes) <= _NEUROSHARD_WEIGHT_BYTES:
            break
    return Profile(
        resized_meta_tables(shapes),
        source=f"workload neuroshard-{tables}@{seed}: tables of meta-t856 and dims of "
        f"{_NEUROSHARD_DIMS} drawn with seed {seed}, at least {_NEUROSHARD_LEAST_ROWS} rows each "
        f"and at most {_NEUROSHARD_WEIGHT_BYTES >> 30} GiB of weights in all, as in Zha et al. "
        f"2023, arXiv:2305.01868. Lookups and skew are those of meta-t856, drawn with seed "
        f"{_META_SEED}: {_DRAWN}.",
    )


def resized_meta_tables(shapes: Iterable[tuple[int, int]]) -> tuple[TableProfile, ...]:
    """Return tables of `meta_workload` by (number from 0, dim), named t1, t2, ...

    >>> [(t.name, t.table.rows, t.table.dim) for t in resized_meta_tables([(3, 64), (3, 8)])]
    [('t1', 6138289, 64), ('t2', 6138289, 8)]
    """
    candidates = meta_workload().tables
    tables = []
    for position, (number, dim) in enumerate(shapes, 1):
        known, name = candidates[number], f"t{position}"
        rows = max(known.table.rows, _NEUROSHARD_LEAST_ROWS)
        (feature,) = known.table.features
        table = Table(name, rows, dim, features=(replace(feature, name=name),))
        # A table that is never read has no exponent: any will do.
        cdf = zipf_cdf(rows, known.zipf_exponent or 1.0)
        tables.append(TableProfile(table, cdf, zipf_exponent=known.zipf_exponent))
    return tuple(tables)


def meta_workload() -> Profile:
    """Return the 856 tables of Meta's synthetic traces of 2021.

    The trace never reads the features of tables with one row. These tables are kept, without
    lookups.
    """
    text = files("placer.workloads").joinpath("meta_t856.json").read_text(encoding="utf-8")
    trace = json.loads(text)
    draws = _Draws(_META_SEED)
    return Profile(
        tuple(
            draws.table(f"t{number}", count, _META_DIM) if count > 1 else _unread(f"t{number}")
            for number, count in enumerate(trace["rows"])
        ),
        source=f"workload meta-t856: {trace['source']}. Drawn with seed {_META_SEED}: {_DRAWN}; "
        f"dim {_META_DIM} is assumed. The 269 tables of one row are never read.",
    )


def _unread(name: str) -> TableProfile:
    return TableProfile(
        Table(name, 1, _META_DIM, features=(Feature(name, 1.0, 0.0),)), zipf_cdf(1, 1.0)
    )
