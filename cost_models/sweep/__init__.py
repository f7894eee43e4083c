"""`placer sweep`: which placement trains a DLRM fastest, over models and machines.

The characterisation of Acun et al. (HPCA 2021, arXiv:2011.05497) with a cost model in place of
their servers. `cost_models` says what the embeddings of each placement's plan cost, and
`cost_models.dense` what the rest does. A step takes as long as what it waits for most: the GPUs,
their host links, the hosts' memory, the network or the memory of parameter servers. docs/sweep.md
says what of this is assumed.
"""

from cost_models.sweep.models_and_machines import (
    AXES,
    DEFAULT_AXES,
    MODELS,
    Platform,
    Setting,
    axis_values,
    platform,
    with_overrides,
)
from cost_models.sweep.placements import PLACEMENTS, Placement
from cost_models.sweep.run import PARAMETER_SERVERS, Point, Sweep, sweep

__all__ = [
    "AXES", "DEFAULT_AXES", "MODELS", "PARAMETER_SERVERS", "PLACEMENTS", "Placement", "Platform",
    "Point", "Setting", "Sweep", "axis_values", "platform", "sweep", "with_overrides",
]  # fmt: skip
