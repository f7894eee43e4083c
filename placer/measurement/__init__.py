"""Measures what plans take on this machine: cases, measurements of them, and files of those."""

from placer.measurement.cases import Case, random_cases
from placer.measurement.dataset import Dataset, Measurement, repeated
from placer.measurement.machine import collect
from placer.measurement.measure import Measurer, measure_plan
from placer.measurement.times import QUICK, Effort, Measured, Setting

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
