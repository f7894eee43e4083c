"""Presets: the grammar, sound constants, and what budgets do to them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from placer import Topology
from placer.errors import TopologyError
from placer.topology.kinds import (
    CPU_SERVER,
    GPU_KINDS,
    HOST_KINDS,
    LIST_PRICES,
    NAMED,
    NETWORK_LATENCY_S,
    Rate,
)
from placer.topology.presets import (
    RESERVED_DRAM_SHARE,
    RESERVED_HBM_SHARE,
    chip_called,
    machine_called,
)

KINDS = sorted(GPU_KINDS)


@given(nodes=st.integers(1, 20), count=st.integers(1, 8), kind=st.sampled_from(KINDS))
def test_grammar_gives_the_machine_it_says(nodes: int, count: int, kind: str) -> None:
    most = HOST_KINDS[kind].most_gpus
    assume(most is None or nodes * count <= most)
    topology = Topology.parse(f"{nodes}x{count}x{kind}")
    assert len(topology.hosts) == nodes
    assert [len(topology.gpus_of(host.id)) for host in topology.hosts] == [count] * nodes
    whole = GPU_KINDS[kind].memory_bytes
    for gpu in topology.gpus:
        assert 0.99 * whole * (1 - RESERVED_HBM_SHARE) < gpu.memory_bytes
        assert gpu.memory_bytes <= whole * (1 - RESERVED_HBM_SHARE)
        # The order of the tiers: own memory, peers over NVLink, host memory, other hosts.
        assert gpu.hbm_bytes_per_s > topology.peer_bytes_per_s(gpu.id)
        assert topology.peer_bytes_per_s(gpu.id) >= topology.host_link_bytes_per_s(gpu.id)
    network = [link for link in topology.links if link.kind == "network"]
    assert len(network) == (nodes if nodes > 1 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_part_of_a_server_has_its_part_of_the_host(kind: str) -> None:
    (whole,) = Topology.parse(f"8x{kind}").hosts
    (half,) = Topology.parse(f"4x{kind}").hosts
    assert half.memory_bytes == pytest.approx(whole.memory_bytes / 2, abs=2**20)
    assert half.dram_bytes_per_s == pytest.approx(whole.dram_bytes_per_s / 2)
    assert whole.memory_bytes <= HOST_KINDS[kind].memory_bytes * (1 - RESERVED_DRAM_SHARE)


def test_servers_without_gpus_come_after_the_hosts_with_them(tmp_path: Path) -> None:
    machine = Topology.parse("2x8xh100+4xcpu", dram="64GiB", ssd="1TiB")
    assert [host.id for host in machine.hosts] == [f"host:{n}" for n in range(6)]
    assert [host.id for host in machine.servers] == ["host:2", "host:3", "host:4", "host:5"]
    assert {host.memory_bytes for host in machine.hosts[:2]} == {64 * 2**30}
    (server,) = {replace(host, id="") for host in machine.servers}
    assert server.memory_bytes == int(CPU_SERVER.memory_bytes * (1 - RESERVED_DRAM_SHARE))
    assert (server.dram_bytes_per_s, server.drive) == (CPU_SERVER.dram.bytes_per_s, None)
    ports = [link.bytes_per_s for link in machine.links if link.kind == "network"]
    assert ports == [360e9] * 2 + [CPU_SERVER.network.bytes_per_s] * 4
    assert machine.gpus == Topology.parse("2x8xh100").gpus
    assert "25 Gbit/s" in machine.sources["server network bandwidth"]
    machine.save(tmp_path / "lab.yaml")
    assert Topology.load(tmp_path / "lab.yaml") == machine
    one = Topology.parse("zion+cpu")
    assert (len(one.hosts), [host.id for host in one.servers]) == (2, ["host:1"])
    for text, words in (("8xh100+4xgpu", "not [+]4xgpu"), ("8xh100+1024xcpu", "1025 hosts")):
        with pytest.raises(TopologyError, match=words):
            Topology.parse(text)


def test_racks_reach_servers_over_the_network() -> None:
    rack = Topology.parse("gb200-nvl72+2xcpu")
    alone = Topology.parse("gb200-nvl72")
    assert rack.exchange_s("gpu:0", 1.0) == pytest.approx(alone.exchange_s("gpu:0", 1.0))
    assert rack.network_bytes_per_s("gpu:0") == pytest.approx(45e9)  # One port of 400 Gbit/s.


def test_a_rack_is_one_nvlink_domain() -> None:
    rack = Topology.parse("gb200-nvl72")
    assert (rack.name, len(rack.hosts), len(rack.gpus)) == ("gb200-nvl72", 36, 72)
    assert rack.network_bytes_per_s("gpu:0") == rack.peer_bytes_per_s("gpu:0") == 720e9
    # The datasheet's totals, less what presets leave: 13.4 TB, 17 TB, 576 TB/s, 130 TB/s.
    assert sum(gpu.memory_bytes for gpu in rack.gpus) == pytest.approx(13.4e12 * 0.85, rel=1e-3)
    assert sum(host.memory_bytes for host in rack.hosts) == pytest.approx(17e12 * 0.9, rel=0.02)
    assert sum(gpu.hbm_bytes_per_s for gpu in rack.gpus) == pytest.approx(576e12 * 0.9)
    assert 2 * 72 * rack.peer_bytes_per_s("gpu:0") == pytest.approx(130e12 * 0.8, rel=0.01)
    with pytest.raises(TopologyError, match="joins up to 72; write 2xgb200-nvl72 for two racks"):
        Topology.parse("37x2xgb200")


def test_racks_exchange_within_themselves_by_nvlink_and_between_them_by_the_network() -> None:
    one, two = Topology.parse("gb200-nvl72"), Topology.parse("2xgb200-nvl72")
    assert (len(two.hosts), len(two.gpus)) == (72, 144)
    assert two.rack_bytes_per_s("gpu:0") == one.network_bytes_per_s("gpu:0") == 720e9
    assert one.rack_bytes_per_s("gpu:0") == 0
    assert two.network_bytes_per_s("gpu:0") == pytest.approx(45e9)
    # Half of the bytes go to the other rack, at 45 GB/s for each GPU.
    assert two.exchange_s("gpu:0", 1e9) == pytest.approx(0.5e9 / 45e9)
    assert two.exchange_latency_s == NETWORK_LATENCY_S > one.exchange_latency_s
    # A ring over all GPUs leaves a host at least once, half of them for the other rack at most.
    assert two.allreduce_s(1e9) == pytest.approx(2 * 143 / 144 * 1e9 / 90e9)
    assert len(set(two.kind_of_gpu)) == 1
    slow = [replace(k, bytes_per_s=1e9) if k.kind == "rack" else k for k in two.links]
    assert replace(two, links=tuple(slow)).allreduce_s(1e9) == pytest.approx(2 * 143 / 144)


def test_a_rack_alone_costs_what_one_network_of_its_speed_does(tmp_path: Path) -> None:
    network = Topology.parse("gb200-nvl72")
    links = tuple(
        replace(link, kind="rack", b="rack:0") if link.kind == "network" else link
        for link in network.links
    )
    rack = replace(network, links=links)
    assert rack.exchange_s("gpu:7", 3e9) == network.exchange_s("gpu:7", 3e9)
    assert rack.allreduce_s(3e9) == network.allreduce_s(3e9)
    assert rack.exchange_latency_s == network.exchange_latency_s
    rack.save(tmp_path / "rack.yaml")
    assert Topology.load(tmp_path / "rack.yaml") == rack


# Of a card: GB of memory, GB/s of it, to the host and to peers. Of 8 of them: GB of host memory,
# GB/s of it and to other hosts, and dollars an hour of each card. Bandwidths are what is reached.
FIGURES = """
v100-16   16.9   747.0   11.97  84.0   549.8  179.2  45.0   3.06
v100-32   34.1   747.0   11.97  84.0   549.8  179.2  45.0   3.90
t4        16.1   220.8   11.97   0.0   412.3  197.1  11.25  0.98
a100-40   42.9  1399.5   24.89 240.0  1099.5  286.7 180.0   2.74
a100-80   85.9  1835.1   24.89 240.0  2199.0  286.7 180.0   3.43
h100      85.5  3015.0   54.81 360.0  2199.0  430.1 360.0   6.88
h200     150.8  4320.0   54.81 360.0  2199.0  430.1 360.0   7.91
b200     192.3  7200.0   54.81 720.0  2199.0  501.8 360.0  14.24
gb200    186.1  7200.0  180.0  720.0  1920.0 1433.6 5760.0 16.0
l4        24.2   207.0   24.89   0.0   824.6  286.7  11.25  1.67
l40s      48.3   596.2   24.89   0.0  1649.3  286.7  45.0   3.77
a10       24.1   414.0   24.89   0.0  2199.0  573.4  22.5   2.0
a10g      24.1   414.0   24.89   0.0   824.6  286.7  11.25  2.04
mi300x   206.2  4240.0   54.81 358.4  2199.0  430.1 360.0   6.0
mi350x   309.2  6400.0   54.81 430.1  3298.5  806.4 360.0   0.0
mi355x   309.2  6400.0   54.81 430.1  3298.5  806.4 360.0   8.6
gaudi2    96.0  1968.0   24.89 210.0  1099.5  286.7 270.0   0.0
gaudi3   128.0  2936.0   54.81 420.0  1924.1  430.1 540.0   0.0
"""


@pytest.mark.parametrize("line", FIGURES.split("\n")[1:-1])
def test_figures_of_every_kind(line: str) -> None:
    name, *figures = line.split()
    gpu, host = GPU_KINDS[name], HOST_KINDS[name]
    price = LIST_PRICES[name].dollars_per_hour if name in LIST_PRICES else 0.0
    rates = (gpu.hbm, gpu.pcie, gpu.nvlink, host.dram, host.network)
    *of_gpu, dram, network = (0.0 if rate is None else rate.bytes_per_s / 1e9 for rate in rates)
    found = (gpu.memory_bytes / 1e9, *of_gpu, host.memory_bytes / 1e9, dram, network, price)
    assert found == pytest.approx(tuple(map(float, figures)), rel=5e-3)


def test_every_kind_has_figures() -> None:
    assert [line.split()[0] for line in FIGURES.split("\n")[1:-1]] == list(GPU_KINDS)
    assert set(LIST_PRICES) <= set(GPU_KINDS)


def test_zion_has_more_host_memory_and_no_peer_links() -> None:
    zion, big_basin = Topology.parse("zion"), Topology.parse("big-basin")
    assert zion.hosts[0].dram_bytes_per_s > 3 * big_basin.hosts[0].dram_bytes_per_s
    more = 8 * big_basin.hosts[0].memory_bytes
    assert zion.hosts[0].memory_bytes == pytest.approx(more, rel=1e-4)
    assert {link.kind for link in zion.links} == {"pcie"}
    assert {link.kind for link in big_basin.links} == {"pcie", "nvlink"}


def test_several_named_servers() -> None:
    topology = Topology.parse("4xbig-basin")
    assert (len(topology.hosts), len(topology.gpus)) == (4, 32)
    assert topology.network_bytes_per_s("gpu:31") == pytest.approx(0.9 * 12.5e9 / 8)


def test_every_constant_has_a_source() -> None:
    for name in [*(f"2x8x{kind}" for kind in KINDS), *NAMED]:
        topology = Topology.parse(name)
        named = {f"{link.kind} bandwidth" for link in topology.links}
        expected = named | {"hbm bandwidth", "dram bandwidth", "gpu memory", "host memory"}
        assert expected | {"kernel launch"} == set(topology.sources)
        assert all(topology.sources.values())
        assert not any("()" in source for source in topology.sources.values())


def test_rate_describes_figure_and_share() -> None:
    rate = Rate(100e9, 0.5, "a datasheet")
    assert rate.bytes_per_s == 50e9
    assert rate.scaled(0.5).describe() == "25 GB/s = 0.5 of 50 GB/s: a datasheet"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xh900", "no GPU is called 'h900'"),
        ("9xh100", "2x8xh100"),
        ("0xh100", "holds 1 to 8"),
        ("0x8xh100", "has 0 hosts"),
        ("5000x8xh100", "1 to 1024"),
        ("0xzion", "has 0 hosts"),
        ("h100", "unknown topology 'h100'"),
        ("", "unknown topology ''"),
    ],
)
def test_bad_presets_say_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(TopologyError) as error:
        Topology.parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_topology_lists_the_presets() -> None:
    with pytest.raises(TopologyError) as error:
        Topology.parse("dgx")
    for word in (*KINDS, *NAMED, "auto", ".yaml"):
        assert word in str(error.value)


@pytest.mark.parametrize("kind", sorted(GPU_KINDS))
def test_no_gpu_has_more_memory_than_its_card(kind: str) -> None:
    """300 GiB on a card of 80 GB were planned for."""
    name, most = f"1x{kind}", GPU_KINDS[kind].memory_bytes
    round_gib = math.ceil(most / 2**30)
    assert Topology.parse(name, hbm=f"{round_gib}GiB").gpus[0].memory_bytes == round_gib << 30
    for more in (1.2 * most, 4 * most):
        with pytest.raises(TopologyError, match=r"its card, .* has .*give it no more"):
            Topology.parse(name, hbm=f"{more:.0f}B")
        with pytest.raises(TopologyError, match="its card"):
            Topology.parse(name).with_memory(hbm=int(more))
    with pytest.raises(TopologyError, match=r"such a host has .*give it no more"):
        Topology.parse(name, dram=int(HOST_KINDS[kind].memory_bytes) + 1)


def test_no_gpu_of_a_file_has_more_memory_than_its_card(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    Topology.parse("2xh100", hbm="64GiB").save(file)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("64GiB", "300GiB"), encoding="utf-8")
    with pytest.raises(TopologyError, match="gpu:0 of '2xh100' would have 300 GiB"):
        Topology.load(file)
    file.write_text(text.replace("64GiB", "300GiB").replace("  chip: h100\n", ""), encoding="utf-8")
    assert Topology.load(file).gpus[0].memory_bytes == 300 << 30


def test_names_of_presets_may_have_blanks_and_capitals() -> None:
    assert machine_called(" 8xH100 ") == machine_called("8xh100")


@pytest.mark.parametrize(
    ("name", "gib", "chip"),
    [
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA A100-PCIE-40GB", 40, ""),
        ("NVIDIA GeForce RTX 4090", 24, ""),
    ],
)
def test_chips_are_known_by_what_drivers_call_them(name: str, gib: int, chip: str) -> None:
    assert chip_called(name, gib * 2**30) == chip
