"""Topology files: what people write, what placer writes, and what is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer import Topology
from placer.errors import TopologyError
from placer.topology.devices import Drive, Gpu, Host, Link
from placer.topology.file import dumps, parse_rate

DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs" / "topology.md"

SMALL = """\
gpus:
- {id: "gpu:0", host: "host:0", memory: 4GiB, hbm_bandwidth: 500GB/s}
hosts:
- {id: "host:0", memory: 64GiB, dram_bandwidth: 20GB/s}
links:
- {a: "gpu:0", b: "host:0", kind: pcie, bandwidth: 12GB/s}
"""


MORE = (
    '\n- {id: "more:[0-65535]", host: "host:0", memory: 4GiB, hbm_bandwidth: 500GB/s}',
    '\n- {id: "more:[0-65535]", memory: 64GiB, dram_bandwidth: 20GB/s}',
)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documented_example(tmp_path: Path) -> None:
    page = DOCUMENTATION.read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml.*?\n(.*?)```", page, re.S)
    lab = Topology.parse(str(write(tmp_path, example)))
    assert lab.name == "lab"
    assert [gpu.host for gpu in lab.gpus] == ["host:0"] * 4 + ["host:1"] * 4
    assert lab.gpus[7] == Gpu("gpu:7", "host:1", 20 * 2**30, 800e9)
    assert lab.hosts[1] == Host("host:1", 460 * 2**30, 180e9, Drive(2 << 40))
    assert lab.peer_bytes_per_s("gpu:3") == 45e9
    assert lab.peer_bytes_per_s("gpu:4") == 25e9
    assert lab.network_bytes_per_s("gpu:4") == 12.5e9 / 4
    assert lab.sources == {"pcie bandwidth": "measured with a pinned copy"}


def test_a_drive_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    server = '- {id: "host:1", memory: 64GiB, dram_bandwidth: 20GB/s, drive: {memory: 1TiB}}'
    text = SMALL.replace("links:", f"{server}\nlinks:")
    text += '- {a: "host:0", b: network, kind: network, bandwidth: 1GB/s}\n'
    text += '- {a: "host:1", b: network, kind: network, bandwidth: 1GB/s}\n'
    words = r"mine\.yaml: .*the drive of host:1, a host without GPUs: leave"
    with pytest.raises(TopologyError, match=words):
        Topology.load(write(tmp_path, text))
    assert Topology.load(write(tmp_path, text.replace(", drive: {memory: 1TiB}", ""))).servers
    elsewhere = text.replace('host: "host:0"', 'host: "host:9"')
    with pytest.raises(TopologyError, match="gpu:0 is attached to 'host:9', which is none of"):
        Topology.load(write(tmp_path, elsewhere))


def test_small_file_and_its_defaults(tmp_path: Path) -> None:
    topology = Topology.load(write(tmp_path, SMALL))
    assert topology == Topology(
        "mine",
        (Gpu("gpu:0", "host:0", 4 * 2**30, 500e9, 5e-6),),
        (Host("host:0", 64 * 2**30, 20e9),),
        (Link("gpu:0", "host:0", "pcie", 12e9),),
    )


def test_budgets_override_a_file(tmp_path: Path) -> None:
    topology = Topology.parse(str(write(tmp_path, SMALL)), hbm="1GiB", dram="2GiB")
    assert (topology.gpus[0].memory_bytes, topology.hosts[0].memory_bytes) == (2**30, 2**31)


@pytest.mark.parametrize("name", ["8xh100", "16x8xh200", "3x5xa100-40", "1xt4", "2xzion"])
def test_a_saved_preset_loads_equal(tmp_path: Path, name: str) -> None:
    topology = Topology.parse(name)
    path = tmp_path / "machine.yaml"
    topology.save(path)
    assert Topology.load(path) == topology


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Machines whose devices differ in all that a file can say."""
    size = st.integers(0, 2**42)
    rate = st.floats(1.0, 1e13, allow_nan=False)
    pool = st.sampled_from([draw(rate), draw(rate)])
    hosts = tuple(
        Host(f"h{number}", draw(size), draw(pool)) for number in range(draw(st.integers(1, 4)))
    )
    numbers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True))
    gpus, links = [], [Link(host.id, "network", "network", draw(pool)) for host in hosts]
    for number in numbers:
        host, size = draw(st.sampled_from(hosts)).id, draw(st.sampled_from([0, 2**30, 2**30 + 1]))
        launch_s, latency_s = draw(st.sampled_from([0.0, 5e-6])), draw(st.sampled_from([0.0, 1e-6]))
        gpus.append(Gpu(f"gpu:{number}", host, size, draw(pool), launch_s))
        links.append(Link(f"gpu:{number}", host, "pcie", draw(pool)))
        if draw(st.booleans()):
            links.append(Link(f"gpu:{number}", host, "nvlink", draw(pool), latency_s))
    is_emulated = draw(st.booleans())
    return Topology("drawn", tuple(gpus), hosts, tuple(links), is_emulated, {"why": "it's: so"})


@given(topologies())
def test_any_topology_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, topology: Topology
) -> None:
    path = tmp_path_factory.mktemp("topology") / "drawn.yaml"
    topology.save(path)
    assert Topology.load(path) == topology


def test_equal_devices_share_an_entry() -> None:
    assert len(dumps(Topology.parse("8xh100")).splitlines()) < 45
    assert "gpu:[0-7]" in dumps(Topology.parse("8xh100"))


def test_only_consecutive_numbers_share_an_entry(tmp_path: Path) -> None:
    names = ("rack", "rack0", "rack1", "rack01", "rack3", "rack4", "other5")
    hosts = tuple(Host(name, 2**30, 1e9) for name in names)
    links = (Link("gpu", "rack", "pcie", 1e9), *(Link(n, "network", "network", 1) for n in names))
    topology = Topology("odd", (Gpu("gpu", "rack", 2**30, 1e9),), hosts, links)
    assert re.findall("- id: (.*)", dumps(topology)) == [
        "rack", "rack[0-1]", "rack01", "rack[3-4]", "other5", "gpu",
    ]  # fmt: skip
    topology.save(tmp_path / "odd.yaml")
    assert Topology.load(tmp_path / "odd.yaml") == topology


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("55GB/s", 55e9), ("400Gbit/s", 50e9), ("1.5TB/s", 1.5e12), ("2GiB/s", 2.0**31), (7, 7.0)],
)
def test_bandwidths(text: str | int, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('b: "host:0"', 'b: "host:7"'), "no device is called 'host:7'; there are gpu:0, host:0"),
        (('host: "host:0"', "host: elsewhere"), "elsewhere"),
        (("4GiB", "4 elephants"), "gpus[0].memory: '4 elephants'"),
        (("12GB/s", "12Gb/s"), "links[0].bandwidth: '12Gb/s': not a bandwidth"),
        (("4GiB", "yes"), "gpus[0].memory: True: not a size; write it like 8GiB"),
        (("12GB/s", "yes"), "links[0].bandwidth: True: not a bandwidth"),
        (("4GiB", "80"), "gpus[0].memory: 80: 80 has no unit: write 80GiB, or 80B if bytes"),
        (("64GiB", "512.5"), "hosts[0].memory: 512.5: 512.5 has no unit: write 512.5GiB"),
        (("500GB/s", "900"), "hbm_bandwidth: 900: it has no unit: write 900GB/s, or 900B/s"),
        (("20GB/s", "'0.5'"), "hosts[0].dram_bandwidth: '0.5': it has no unit: write 0.5GB/s"),
        (("12GB/s", "-1.5"), "links[0].bandwidth: -1.5"),
        (("12GB/s", ".nan"), "links[0].bandwidth: nan"),
        (("kind: pcie", "kind: string"), "links[0].kind: 'string'"),
        (("kind: pcie", "kind: nvlink"), "no pcie link"),
        (("kind: pcie", "kind: network"), "a network link joins a host to network"),
        ((", memory: 64GiB", ""), "hosts[0].memory: Field required"),
        (("links:", "cables: []\nlinks:"), "cables: no such field"),
        (
            ('id: "gpu:0"', 'id: "gpu:0", chp: t4'),
            "chp: no such field; docs/topology.md lists them; did you mean chip?",
        ),
        (('id: "gpu:0"', 'id: "gpu:0", chip: H100'), "for another; did you mean h100?"),
        (('id: "gpu:0"', 'id: "gpu:[3-1]"'), "must ascend"),
        (('id: "gpu:0"', 'id: "gpu:[1-65537]"'), "at most 65536 devices"),
        (('id: "gpu:0"', 'id: "gpu:[a]"'), "not an id"),
        (('a: "gpu:0", b: "host:0"', 'a: "gpu:[0-999]", b: "host:[0-99]"'), "has 100000 links"),
        (("gpus:", f"gpus:{MORE[0]}"), "has 65537 GPUs, and at most 65536 are read"),
        (("hosts:", f"hosts:{MORE[1]}"), "has 65537 hosts, and at most 65536 are read"),
        (("gpus:", "gpus: {"), "is not a topology file"),
        ((SMALL, "just words"), "holds a str"),
        ((SMALL, ""), "it is empty"),
        ((SMALL, "# nothing"), "gpus: Field required"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    assert change[0] in SMALL
    path = write(tmp_path, SMALL.replace(*change))
    with pytest.raises(TopologyError) as error:
        Topology.load(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gpu_may_have_no_memory_for_tables(tmp_path: Path) -> None:
    for nothing in ("0", "0GiB"):
        topology = Topology.load(write(tmp_path, SMALL.replace(" 4GiB", f" {nothing}")))
        assert topology.gpus[0].memory_bytes == 0
    with pytest.raises(TopologyError, match=r"gpus\[0\]\.memory"):  # GiB were meant.
        Topology.load(write(tmp_path, SMALL.replace(" 4GiB", " 4")))


def test_missing_file_and_wrong_endings(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="No such file"):
        Topology.load(tmp_path / "nowhere.yaml")
    with pytest.raises(TopologyError, match=r"ends in one of \.yaml"):
        Topology.load(tmp_path / "machine.txt")
    with pytest.raises(TopologyError, match=r"end the name in \.yaml"):
        Topology.parse("1xt4").save(tmp_path / "machine.toml")
    with pytest.raises(TopologyError, match="is not a topology file"):
        Topology.load(write(tmp_path, "gpus = [", "broken.toml"))
