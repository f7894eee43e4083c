"""What GPUs of one host add to each other's steps.

Processes of one CPU share its caches, its memory and often its cores: while one works, others are
slower. A GPU's time is its own, and a share of what its neighbours take in the same phase. Where
all have as much to do, that is a factor for all of them; where one has all the work, it is nothing.
"""

import numpy as np

from cost_models.base import Float
from placer.topology.topology import Topology


def mixing(topology: Topology, share: float) -> Float:
    """What each GPU's second counts for each other one, shape (GPUs, GPUs); symmetric.

    Parameters
    ----------
    share : float
        Of a neighbour's time: that of another GPU of the same host.
    """
    hosts = np.array([gpu.host for gpu in topology.gpus])
    mix: Float = np.where(hosts[:, None] == hosts, share, 0.0)
    np.fill_diagonal(mix, 1.0)
    return mix


def contended(gpu_s: Float, topology: Topology, share: float) -> Float:
    """Seconds of shape (..., GPUs), with what GPUs of one host add to each other's.

    Examples
    --------
    >>> contended(np.array([4.0, 0.0]), Topology.parse("2xh100"), 0.25)
    array([4., 1.])
    """
    return gpu_s @ mixing(topology, share) if share else gpu_s


def most_work_s(topology: Topology, share: float, step_s: float, launches_s: float) -> float:
    """Own seconds that all GPUs have room for in a step, launches of those with work taken off.

    k GPUs of a host that have work take their own seconds, and a share of those of k - 1 others,
    on average: few GPUs that slow each other little may do more than all of them.

    Examples
    --------
    >>> most_work_s(Topology.parse("4xh100"), 0.25, 7.0, 0.0)
    16.0
    >>> most_work_s(Topology.parse("4xh100"), 1.0, 7.0, 5.0)
    2.0
    """
    most_s = 0.0
    for host in topology.hosts:
        serving = np.arange(1 + sum(gpu.host == host.id for gpu in topology.gpus))
        own_s = step_s / (1 + share * (serving - 1).clip(0)) - launches_s
        most_s += float((serving * own_s).max())
    return most_s
