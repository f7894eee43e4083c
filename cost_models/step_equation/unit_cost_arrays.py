"""Unit costs as rows of numbers: to add, multiply and look up those of many tables at once."""

import math
from dataclasses import fields

import numpy as np

from cost_models.base import Float
from cost_models.step_equation.unit_costs import READ_KINDS, Rates, ReadCosts, UnitCosts

_RATES = tuple(field.name for field in fields(Rates))
_RESOURCES = ("hbm", "link", "dram")

OTHERS = (
    "output_vector_s",
    "output_byte_s",
    "exchange_byte_s",
    "piece_s",
    "shard_s",
    "cache_row_s",
    "strip_s",
    "pool_s",
    "split_s",
    "split_lookup_s",
)
"""The last numbers of a row."""

SHAPE = (len(READ_KINDS), len(_RESOURCES), len(_RATES))
"""The first numbers of a row: by kind of read, by resource (HBM, link, DRAM), by rate."""

READS = math.prod(SHAPE)


def as_array(costs: UnitCosts) -> Float:
    """Unit costs as one row of numbers: by kind, resource and rate, then the others."""
    reads = [
        getattr(getattr(costs.read(kind), resource), rate)
        for kind in READ_KINDS
        for resource in _RESOURCES
        for rate in _RATES
    ]
    return np.array(reads + [getattr(costs, other) for other in OTHERS], dtype=np.float64)


def from_array(values: Float) -> UnitCosts:
    """The inverse of `as_array`."""
    numbers = values.tolist()
    step = len(_RATES)
    rates = [Rates(*numbers[start : start + step]) for start in range(0, READS, step)]
    device, staged, uva, host, hit, miss = (
        ReadCosts(*rates[start : start + 3]) for start in range(0, len(rates), 3)
    )
    return UnitCosts(device, staged, uva, host, hit, miss, *numbers[READS:])


def gpu_rates(costs: Float) -> tuple[Float, Float]:
    """Rates of a GPU's memory and link together, and the other costs, of rows of `as_array`.

    Returns
    -------
    rates : shape (n, kinds of read, rates)
    others : shape (n, len(OTHERS))
    """
    reads = costs[:, :READS].reshape(-1, *SHAPE)
    return reads[:, :, :2].sum(axis=2), costs[:, READS:]
