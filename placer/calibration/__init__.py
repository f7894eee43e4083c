"""Measures what plans take on this machine: cases, measurements of them, and files of those."""

from placer.calibration.cases import Case
from placer.calibration.dataset import Dataset, Measurement, collect, repeated
from placer.calibration.draw import random_cases
from placer.calibration.measure import (
    QUICK,
    Effort,
    Measured,
    Measurer,
    Setting,
    measure_plan,
)

__all__ = [
    "QUICK",
    "Case",
    "Dataset",
    "Effort",
    "Measured",
    "Measurement",
    "Measurer",
    "Setting",
    "collect",
    "measure_plan",
    "random_cases",
    "repeated",
]
