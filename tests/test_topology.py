"""The topology value: what it accepts, its graph, and how long exchanges take."""

from dataclasses import replace
from typing import Any

import pytest

from placer import Topology
from placer.errors import TopologyError
from placer.topology.devices import Drive, Gpu, Host, Link

HOST = Host("host:0", 100, 10.0)
PAIR = (Gpu("gpu:0", "host:0", 10, 100.0), Gpu("gpu:1", "host:0", 10, 100.0))
PCIE = tuple(Link(gpu.id, "host:0", "pcie", 2.0) for gpu in PAIR)
SMALL = Topology("small", PAIR, (HOST,), PCIE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": ()}, "has no GPU"),
        ({"gpus": (PAIR[0], PAIR[0])}, r"more than once: \['gpu:0'\]"),
        ({"gpus": (replace(PAIR[0], host="host:3"),)}, "attached to 'host:3'"),
        ({"gpus": (replace(PAIR[0], memory_bytes=-1),)}, "gpu:0 needs memory"),
        ({"gpus": (replace(PAIR[0], hbm_bytes_per_s=0),)}, "positive HBM bandwidth"),
        ({"hosts": (replace(HOST, dram_bytes_per_s=0),)}, "positive DRAM bandwidth"),
        ({"hosts": (replace(HOST, memory_bytes=-1),)}, "host:0 needs memory"),
        ({"hosts": (replace(HOST, drive=Drive(-1)),)}, "the drive of host:0 needs bytes"),
        ({"hosts": (replace(HOST, drive=Drive(1, 0.0, 1.0)),)}, "the drive of host:0 needs"),
        ({"hosts": (replace(HOST, drive=Drive(1, 1.0, 0.0)),)}, "the drive of host:0 needs"),
        ({"links": PCIE[:1]}, "gpu:1 has no pcie link to host:0"),
        ({"links": (*PCIE, Link("gpu:0", "gpu:9", "nvlink", 1.0))}, "no device is called 'gpu:9'"),
        ({"links": (*PCIE, Link("gpu:0", "gpu:1", "nvlink", 1.0))}, "a GPU to its own host"),
        ({"links": (*PCIE, Link("gpu:0", "network", "network", 1.0))}, "a host to network"),
        ({"links": (*PCIE, Link("gpu:0", "rack:0", "rack", 1.0))}, "a host to a rack such as"),
        ({"links": (*PCIE, Link("host:0", "gpu:0", "rack", 1.0))}, "a host to a rack such as"),
        ({"links": (replace(PCIE[0], bytes_per_s=0.0), PCIE[1])}, "positive bandwidth, not 0"),
        ({"links": (*PCIE, PCIE[0])}, "gpu:0 has two pcie links"),
    ],
)
def test_what_a_topology_refuses(change: dict[str, Any], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        replace(SMALL, **change)


def test_a_gpu_reaches_its_own_host_only() -> None:
    with pytest.raises(TopologyError, match="a GPU to its own host"):
        replace(
            SMALL,
            hosts=(HOST, Host("host:1", 1, 1.0)),
            links=(PCIE[0], replace(PCIE[1], b="host:1")),
        )


def test_sockets_may_be_joined() -> None:
    hosts = (HOST, Host("host:1", 1, 1.0))
    network = tuple(Link(host.id, "network", "network", 1.0) for host in hosts)
    links = (*PCIE, *network, Link("host:0", "host:1", "socket", 5.0))
    topology = replace(SMALL, hosts=hosts, links=links)
    assert topology.graph["host:0"]["host:1"]["socket"]["bytes_per_s"] == 5.0


def test_servers_need_a_network() -> None:
    hosts = (HOST, Host("host:1", 1, 1.0))
    port = Link("host:1", "network", "network", 1.0)
    with pytest.raises(TopologyError, match="host:0 has no network link, but host:1, without GPU"):
        replace(SMALL, hosts=hosts, links=(*PCIE, port))
    both = replace(SMALL, hosts=hosts, links=(*PCIE, port, replace(port, a="host:0")))
    assert both.servers == (hosts[1],)


def test_servers_of_unequal_memory_are_of_different_kinds() -> None:
    servers = (Host("host:1", 1, 1.0), Host("host:2", 9, 1.0), Host("host:3", 1, 2.0))
    ports = tuple(Link(host.id, "network", "network", 1.0) for host in (HOST, *servers))
    topology = replace(SMALL, hosts=(HOST, *servers), links=(*PCIE, *ports))
    assert topology.kind_of_gpu == (0, 0, 1, 1, 2)


def test_the_graph_has_everything() -> None:
    topology = Topology.parse("2x4xa100-40")
    graph = topology.graph
    assert graph.number_of_nodes() == 8 + 2 + 1
    assert graph.number_of_edges() == len(topology.links) == 8 + 8 + 2
    assert graph.nodes["gpu:5"]["device"] == topology.gpus_by_id["gpu:5"]
    assert graph.nodes["host:1"]["device"] == topology.hosts_by_id["host:1"]
    assert set(graph["gpu:5"]["host:1"]) == {"pcie", "nvlink"}


def test_an_exchange_within_a_host_leaves_out_what_stays() -> None:
    # Half of 8 bytes goes to the one peer, over PCIe at 2 bytes a second.
    assert SMALL.exchange_s("gpu:0", 8) == 2.0
    nvlink = tuple(Link(gpu.id, "host:0", "nvlink", 8.0) for gpu in PAIR)
    assert replace(SMALL, links=(*PCIE, *nvlink)).exchange_s("gpu:0", 8) == 0.5
    hosts = (replace(HOST, memory_bytes=0),)  # All may be in HBM.
    alone = replace(SMALL, gpus=PAIR[:1], hosts=hosts, links=PCIE[:1])
    assert alone.exchange_s("gpu:0", 8) == 0


def two_hosts(network: float) -> Topology:
    gpus = tuple(Gpu(f"gpu:{n}", f"host:{n // 2}", 10, 100.0) for n in range(4))
    hosts = (HOST, replace(HOST, id="host:1"))
    links = [Link(gpu.id, gpu.host, "pcie", 2.0) for gpu in gpus]
    links += [Link(host.id, "network", "network", network) for host in hosts]
    return Topology("two", gpus, hosts, tuple(links))


def test_an_exchange_between_hosts_shares_the_network() -> None:
    # Of 8 bytes 2 go to the peer at 2 bytes a second, and 4 to the other host, at half of
    # the network's bandwidth for each of a host's two GPUs; both move at once.
    assert two_hosts(1.0).exchange_s("gpu:3", 8) == 8.0
    assert two_hosts(100.0).exchange_s("gpu:3", 8) == 1.0


def test_a_sum_over_all_gpus_goes_around_rings() -> None:
    # Two GPUs: twice half of 8 bytes over PCIe at 2 bytes a second.
    assert SMALL.allreduce_s(8) == 4.0
    assert replace(SMALL, gpus=PAIR[:1], links=PCIE[:1]).allreduce_s(8) == 0
    slower = (PCIE[0], replace(PCIE[1], bytes_per_s=1.0))
    assert replace(SMALL, links=slower).allreduce_s(8) == 8.0
    # 2 · 3/4 of 8 bytes from peer to peer at 2 bytes a second, and through each host's network.
    assert two_hosts(100.0).allreduce_s(8) == 6.0
    assert two_hosts(1.0).allreduce_s(8) == 12.0


def test_only_links_that_a_collective_uses_slow_it() -> None:
    machine = two_hosts(1.0)
    racks = [Link(host.id, f"rack:{host.id}", "rack", 0.1, 9.0) for host in machine.hosts]
    alone = replace(machine, links=(*machine.links, *racks))  # Each host is alone in its rack.
    assert alone.allreduce_s(8) == machine.allreduce_s(8)
    assert alone.exchange_latency_s == machine.exchange_latency_s == 0
    # The GPUs of one host reach each other over PCIe; the other host has one GPU.
    links = [replace(link, latency_s=7.0) for link in machine.links if link.kind == "pcie"]
    three = replace(machine, gpus=machine.gpus[:3], links=(*links[:3], *machine.links[4:]))
    assert three.exchange_latency_s == 7.0
    # A server's network slows exchanges with the server alone.
    port = Link("host:9", "network", "network", 1.0, 9.0)
    hosts = (*machine.hosts, Host("host:9", 1, 1.0))
    served = replace(machine, hosts=hosts, links=(*machine.links, port))
    assert (served.gpu_exchange_latency_s, served.exchange_latency_s) == (0.0, 9.0)


def test_hosts_without_a_network_cannot_exchange() -> None:
    preset = Topology.parse("2x1xt4")
    apart = replace(preset, links=tuple(link for link in preset.links if link.kind == "pcie"))
    assert apart.network_bytes_per_s("gpu:0") == 0
    with pytest.raises(TopologyError, match="no network link"):
        apart.exchange_s("gpu:0", 8)
    with pytest.raises(TopologyError, match=r"gpu:0 is on another host.* no network link"):
        apart.allreduce_s(8)
