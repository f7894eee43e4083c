"""Which rank stands for which device of a plan."""

from collections.abc import Mapping

from placer.errors import PlanMismatchError
from placer.plan.shard import Shard
from placer.topology.topology import Topology


def ranks_of_devices(topology: Topology, world: int) -> dict[str, int]:
    """The rank of each GPU and host.

    GPU i of N is rank ``i · world // N``. With fewer ranks than GPUs, neighbouring GPUs share a
    rank. With more, some ranks have no rows and only contribute samples. What a host serves by
    itself is served by the rank of its first GPU.

    Parameters
    ----------
    topology : Topology
    world : int
        Number of ranks.

    Raises
    ------
    PlanMismatchError
        If there is no rank.
    """
    if world < 1:
        raise PlanMismatchError(f"{world} ranks cannot hold a plan; start at least one")
    gpus = topology.gpus
    ranks = {gpu.id: index * world // len(gpus) for index, gpu in enumerate(gpus)}
    for index, host in enumerate(topology.hosts):
        attached = topology.gpus_of(host.id)
        spread = index * world // len(topology.hosts)
        ranks[host.id] = ranks[attached[0].id] if attached else spread
    return ranks


def holders_of(shard: Shard, ranks: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks that hold a shard, each once, in order; replicas on devices of one rank are one."""
    return tuple(sorted({ranks[device] for device in shard.devices}))
