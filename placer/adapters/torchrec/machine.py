"""TorchRec's topology as ours."""

from typing import Any

from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

_MS = 1e-3


def topology_of(topology: Any) -> Topology:
    """The machine of TorchRec's planner as our topology.

    Rank r is ``gpu:r``. TorchRec takes host memory as a cap for each rank; ours is one for each
    host, the sum of its ranks'. Where ranks compute on CPUs, each rank's memory is taken for its
    GPU's, because it is the only tier that there is.

    Parameters
    ----------
    topology : torchrec.distributed.planner.types.Topology
        Its bandwidths are in bytes per millisecond.

    Returns
    -------
    Topology
        With bandwidths in bytes per second, and no launch time, which TorchRec has not.
    """
    local = topology.local_world_size
    on_cpu = topology.compute_device == "cpu"
    hosts: dict[str, int] = {}
    gpus = []
    for device in topology.devices:
        host = f"host:{device.rank // local}"
        own = device.storage.ddr if on_cpu else device.storage.hbm
        hosts[host] = hosts.get(host, 0) + (0 if on_cpu else max(0, int(device.storage.ddr)))
        bandwidth = topology.ddr_mem_bw if on_cpu else topology.hbm_mem_bw
        gpus.append(Gpu(f"gpu:{device.rank}", host, max(0, int(own)), bandwidth / _MS, 0.0))
    links = []
    for gpu in gpus:
        links.append(Link(gpu.id, gpu.host, "pcie", topology.hbm_to_ddr_mem_bw / _MS))
        links.append(Link(gpu.id, gpu.host, "nvlink", topology.intra_host_bw / _MS))
    if len(hosts) > 1:
        links += [
            Link(host, "network", "network", topology.inter_host_bw / _MS * local) for host in hosts
        ]
    return Topology(
        f"{topology.world_size} ranks of TorchRec",
        tuple(gpus),
        tuple(Host(name, size, topology.ddr_mem_bw / _MS) for name, size in hosts.items()),
        tuple(links),
        emulated=on_cpu,
    )
