"""Small dense parts, tables and machines of round numbers."""

from placer import Problem, Profile, Topology
from placer.dense import Dense, DenseLayers
from placer.profile.cdf import AccessCdf
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table
from placer.topology.devices import Gpu, Host, Link

DLRM = DenseLayers(top=(3, 1), bottom=(3, 2), dense_features=2)


def table(name: str, dim: int, features: int = 1) -> Table:
    return Table(name, 10, dim, features=tuple(Feature(f"{name}{n}") for n in range(features)))


def machine(gpus: int = 2, *, memory: int = 2**30, link: float = 1e8) -> Topology:
    """GPUs of round numbers: a byte takes a nanosecond in their memory, a launch none."""
    devices = tuple(Gpu(f"gpu:{n}", "host:0", memory, 1e9, 0.0) for n in range(gpus))
    links = [Link(gpu.id, "host:0", "pcie", link) for gpu in devices]
    return Topology("round", devices, (Host("host:0", 2**30, 1e9),), tuple(links))


def problem(layers: Dense | None, topology: Topology) -> Problem:
    tables = [TableProfile(table(n, 2), AccessCdf.zipf(10, 0.0)) for n in "ab"]
    return Problem(Profile(tuple(tables)), topology, 4, dense=layers)
