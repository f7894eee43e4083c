"""`placer sweep`: which placement trains a DLRM fastest, over models and machines.

It repeats the study of Acun et al. (HPCA 2021, arXiv:2011.05497) with cost models instead of
servers. docs/sweep.md lists the assumptions.
"""

from cost_models.sweep.models_and_machines import (
    AXES,
    DEFAULT_AXES,
    MODELS,
    Platform,
    Setting,
    axes_of,
    axis_values,
    platform,
    with_overrides,
)
from cost_models.sweep.placements import PLACEMENTS
from cost_models.sweep.run import PARAMETER_SERVERS, Point, Sweep, distinct, sweep

__all__ = [
    "AXES", "DEFAULT_AXES", "MODELS", "PARAMETER_SERVERS", "PLACEMENTS", "Platform",
    "Point", "Setting", "Sweep", "axes_of", "axis_values", "distinct", "platform", "sweep",
    "with_overrides",
]  # fmt: skip
