"""What the learned cost model knows of a table and of the problem that it is part of.

Two groups of features. What is *free* may move costs either way. What is *monotone* falls when
accesses become more skewed (shares of lookups outside the hottest rows, distinct rows), and may
move costs its own way only: hotter accesses then never cost more at the same split.
"""

from collections import Counter

import numpy as np
import numpy.typing as npt

from placer.problem import Problem
from placer.profile.table_profile import TableProfile
from placer.tables import OPTIMIZERS

Float = npt.NDArray[np.float64]

HEAD_ROWS = (1, 10, 100, 1_000, 10_000, 100_000)
"""Numbers of hottest rows outside of which shares of lookups are taken."""

FREE_FEATURES = (
    "log2_rows",
    "log2_dim",
    "log2_weight_bytes_per_row",
    "log2_state_bytes_per_row",
    "half_precision",
    *(f"optimizer_{name}" for name in OPTIMIZERS),
    "features",
    "log2_pooling_factor",
    "coverage",
    "unpooled_share",
    "log2_lookups",
    "log2_table_bytes",
    "log2_tables_alike",
    "log2_samples_per_gpu",
    "log2_tables",
    "log2_gpus",
    "log2_all_bytes_per_gpu",
    "log2_all_lookups_per_gpu",
    "log2_all_lookup_bytes_per_gpu",
)
"""`lookups` are those of a step of all GPUs; `all` means of all tables of the problem. Tables are
alike that have the same dim, dtype and optimizer: an executor may serve them with one kernel."""

MONOTONE_FEATURES = (
    *(f"share_outside_{rows}" for rows in HEAD_ROWS),
    "unique_per_lookup",
    "log2_unique_bytes",
    "log2_all_unique_bytes_per_gpu",
)
"""Distinct rows are those of a step of all GPUs, with their optimizer state."""


def features(problem: Problem) -> tuple[Float, Float]:
    """Free and monotone features of every table of a problem.

    Returns
    -------
    free : float64, shape (tables, len(FREE_FEATURES))
    monotone : float64, shape (tables, len(MONOTONE_FEATURES))
    """
    samples, gpus = problem.global_batch_size, len(problem.topology.gpus)
    profiles = problem.profile.tables
    lookups = np.array([p.table.lookups_per_sample for p in profiles]) * samples
    unique = np.array([p.unique(n) for p, n in zip(profiles, lookups.tolist(), strict=True)])
    row_bytes = np.array([p.table.bytes_per_row() for p in profiles], dtype=np.float64)
    weight_bytes = np.array([p.table.weight_bytes_per_row() for p in profiles], dtype=np.float64)
    table_bytes = np.array([p.table.total_bytes for p in profiles], dtype=np.float64)
    context = [
        problem.batch_size,
        len(profiles),
        gpus,
        table_bytes.sum() / gpus,
        lookups.sum() / gpus,
        (lookups * weight_bytes).sum() / gpus,
    ]
    own = np.array([_of_table(profile) for profile in profiles])
    kinds = [(p.table.dim, p.table.dtype, p.table.optimizer) for p in profiles]
    number = Counter(kinds)
    alike = [number[kind] for kind in kinds]
    logs = (_log2(lookups), _log2(table_bytes), _log2(alike))
    free = np.column_stack((own, *logs, np.tile(_log2(context), (len(profiles), 1))))
    outside = np.array([_outside(profile) for profile in profiles])
    touched = unique * row_bytes
    monotone = np.column_stack(
        (
            outside,
            unique / np.maximum(lookups, 1e-9),
            _log2(touched),
            np.full(len(profiles), _log2(touched.sum() / gpus)),
        )
    )
    return free, monotone


def _of_table(profile: TableProfile) -> list[float]:
    """The free features that a table has whatever the problem is."""
    table = profile.table
    bags = sum(feature.coverage for feature in table.features)
    lookups = table.lookups_per_sample
    unpooled = sum(f.lookups_per_sample for f in table.features if f.pooling == "none")
    sizes = [
        float(table.rows),
        float(table.dim),
        float(table.weight_bytes_per_row()),
        float(table.state_bytes_per_row()),
    ]
    return [
        *_log2(sizes).tolist(),
        float(table.element_bytes == 2),
        *(float(table.optimizer == name) for name in OPTIMIZERS),
        float(len(table.features)),
        float(_log2(lookups / bags if bags else 0.0)),
        bags / len(table.features) if table.features else 0.0,
        unpooled / lookups if lookups else 0.0,
    ]


def _outside(profile: TableProfile) -> Float:
    """Shares of the lookups outside the hottest rows; 0 for a table that nobody reads."""
    shares: Float = profile.cdf.shares[-1] - profile.cdf.share(HEAD_ROWS)
    return shares


def _log2(values: npt.ArrayLike) -> Float:
    """Logarithms of values from 0 on, which are 0 at 0."""
    logs: Float = np.log2(1.0 + np.asarray(values, dtype=np.float64))
    return logs
