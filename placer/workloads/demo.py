"""The problem of `placer demo`: a log's tables on GPUs that are too small for them."""

from placer.plan.buffers import exchange_buffer_bytes, index_buffer_bytes
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.topology.topology import Topology

MACHINE, BATCH_SIZE, DIM = "4xt4", 128, 64
_HBM_SHARE = 0.25
# A tenth of a pass's batches is held out, and a model that sees a few batches again and again
# knows them by heart before the last step.
_LEAST_BATCHES = 60


def demo_problem(profile: Profile) -> Problem:
    """A log's tables on four small GPUs that hold a quarter of them, besides a step's buffers.

    Examples
    --------
    >>> from placer.workloads import named_workload
    >>> problem = demo_problem(named_workload("criteo-kaggle"))
    >>> hbm_bytes = sum(gpu.memory_bytes for gpu in problem.topology.gpus)
    >>> 0.25 < hbm_bytes / problem.profile.total_bytes < 0.26
    True
    """
    gpus = len(Topology.parse(MACHINE).gpus)
    batch_size = max(1, min(BATCH_SIZE, profile.samples // (_LEAST_BATCHES * gpus)))
    samples = batch_size * gpus
    buffers = 0.0
    for table in (one.table for one in profile):
        lookups = samples * table.lookups_per_sample
        buffers += exchange_buffer_bytes(table, samples, lookups, DIM)
        buffers += index_buffer_bytes(lookups)
    hbm_bytes = int((profile.total_bytes * _HBM_SHARE + 1.5 * buffers) / gpus)
    return Problem(profile, Topology.parse(MACHINE, hbm=hbm_bytes), batch_size)
