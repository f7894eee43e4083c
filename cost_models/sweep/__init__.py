"""`placer sweep`: which placement trains a DLRM fastest, over models and machines.

The characterisation of Acun et al. (HPCA 2021, arXiv:2011.05497) with a cost model in place of
their servers: dense and sparse features, hash size, MLPs, batch and pooling against the places
where tables can be. A plan is built for each placement, `cost_models` says what its embeddings
cost, `cost_models.dense` what the rest does, and a step takes as long as what it waits for most:

* the GPU, which computes, looks up, updates and exchanges, one after the other, and waits for
  rows that it reads in place;
* its host link, over which staged rows, pooled rows and inputs come ahead of the step, beside
  what GPUs without links of their own exchange;
* the host's memory, from which CPUs pool, or staged rows are copied, beside the GPUs' work;
* the network, and the memory of parameter servers, likewise.

Of CPU servers, some are trainers and the others parameter servers, in the best proportion; they
do not wait for one another. docs/sweep.md says what of this is assumed.
"""

from cost_models.sweep.placements import PLACEMENTS, Placement
from cost_models.sweep.platforms import Platform, platform
from cost_models.sweep.run import PARAMETER_SERVERS, Point, Sweep, sweep
from cost_models.sweep.settings import (
    AXES,
    DEFAULT_AXES,
    MODELS,
    Setting,
    axis_values,
    with_overrides,
)

__all__ = [
    "AXES",
    "DEFAULT_AXES",
    "MODELS",
    "PARAMETER_SERVERS",
    "PLACEMENTS",
    "Placement",
    "Platform",
    "Point",
    "Setting",
    "Sweep",
    "axis_values",
    "platform",
    "sweep",
    "with_overrides",
]
