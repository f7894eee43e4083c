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


def slowdown(topology: Topology, share: float) -> float:
    """By how much all steps are longer where all GPUs have as much to do: at least 1.

    Examples
    --------
    >>> slowdown(Topology.parse("4xh100"), 0.25)
    1.75
    """
    return 1.0 if not share else float(mixing(topology, share).sum(axis=0).min())
