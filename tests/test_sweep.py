"""`placer sweep`: step times by hand, sound plans, sane trends, Acun et al., and what it prints."""

import json
import runpy
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import invoke, json_of, misuse, succeed
from fast_and_full import examples, is_fast
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CostReport, Roofline
from cost_models.dense import CPU_FLOPS, GPU_FLOPS, FlopRate, dense_cost
from cost_models.report import plot_sweep, sweep_report
from cost_models.report.sweep import _legend, _short
from cost_models.sweep import (
    AXES,
    DEFAULT_AXES,
    MODELS,
    PLACEMENTS,
    Platform,
    Point,
    Setting,
    axis_values,
    platform,
    sweep,
    with_overrides,
)
from cost_models.sweep.run import CPU_BATCH
from placer.errors import PlacerError, PlanMismatchError, ProblemError, TopologyError
from placer.plan.fields import whole_table_shard
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from placer.topology.devices import Gpu, Host, Link
from placer.topology.kinds import GPU_KINDS, HOST_KINDS, NAMED
from placer.topology.topology import Topology

ON_GPUS = [name for name, make in PLACEMENTS.items() if make is not None]
SMALL = Setting(dense=8, sparse=4, rows=1000, width=16, depth=1, batch=64, pooling=4, dim=16)
BIG_BASIN, ZION = platform("big-basin"), platform("zion")


def two_gpus(*, hbm: int = 2**30, dram: int = 2**32, nvlink: bool = True) -> Platform:
    """Two GPUs of round numbers."""
    gpus = tuple(Gpu(f"gpu:{n}", "host:0", hbm, 1e9, 1e-3) for n in range(2))
    host = Host("host:0", dram, 1e8)
    links = [Link(gpu.id, "host:0", "pcie", 1e7) for gpu in gpus]
    if nvlink:
        links += [Link(gpu.id, "host:0", "nvlink", 1e8) for gpu in gpus]
    topology = Topology("two", gpus, (host,), tuple(links))
    rates = FlopRate(2e9, 0.5, "round"), FlopRate(1e8, 1.0, "round")
    return Platform("two", topology, *rates, host, {}, 1e6)


def points_of(
    machine: Platform, setting: Setting, *placements: str, **options: Any
) -> dict[str, Point]:
    options |= {"base": setting, "placements": placements or tuple(PLACEMENTS)}
    found = sweep([machine], {"batch": [setting.batch]}, Roofline(), **options)
    return {point.placement: point for point in found.points}


def planned(machine: Platform, setting: Setting, name: str) -> tuple[Problem, Plan]:
    """A placement's plan for training; but a sweep prices hosts that send to all of their GPUs."""
    problem = Problem(setting.profile(), machine.topology, setting.batch)
    plan = PLACEMENTS[name](problem, Roofline())
    assert [fault for fault in violations(plan) if "host:0 has GPUs" not in fault.message] == []
    return problem, plan


def rate(machine: Platform, setting: Setting, placement: str) -> float:
    point = points_of(machine, setting, placement)[placement]
    assert point.samples_per_s is not None, point.detail
    return point.samples_per_s


# Dense layers


def test_every_preset_has_flop_rates() -> None:
    assert set(GPU_KINDS) == set(GPU_FLOPS)
    assert set(HOST_KINDS) <= set(CPU_FLOPS)
    without = [kind for kind in GPU_KINDS if "float32" not in GPU_FLOPS[kind]]
    assert without == ["gaudi2", "gaudi3"]
    with pytest.raises(PlacerError, match="nobody states what gaudi2 does in float32"):
        platform("8xgaudi2")
    kinds = [f"8x{kind}" for kind in GPU_KINDS if kind not in without]
    for name in (*kinds, *NAMED, "4xt4", "cpu", "16xcpu"):
        one = platform(name)
        assert 0 < one.cpu.share <= 1
        assert one.gpu.per_s > 0
        assert all("TFLOP/s" in one.sources[key] for key in one.sources if "float32" in key)
    assert platform("4xt4").cpu.per_s == pytest.approx(platform("8xt4").cpu.per_s / 2)
    assert platform("zion").cpu.per_s == pytest.approx(4 * platform("big-basin").cpu.per_s)


# Steps


@pytest.mark.parametrize("nvlink", [True, False])
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_step_on_gpus_is_the_longest_of_its_parts(name: str, nvlink: bool) -> None:
    machine = two_gpus(nvlink=nvlink)
    setting = replace(SMALL, sparse=3)  # The first GPU has two tables, the second one.
    problem, plan = planned(machine, setting, name)
    costs = Roofline().evaluate(problem, plan)
    rest = dense_cost(
        setting.dense_network, machine.topology, problem.topology.gpus[0], 64, machine.gpu.per_s
    )
    gpu = max(
        c.hbm_s + c.launch_s + c.communication_s + (c.link_s if name == "host-read" else 0)
        for c in costs.gpus
    ) + rest.step_s  # fmt: skip
    link = rest.input_s + max(
        c.link_s + (0 if nvlink else c.communication_s + rest.allreduce_s) for c in costs.gpus
    )
    point = points_of(machine, setting)[name]
    expected = {"gpu": gpu, "host link": link, "host memory": costs.hosts[0].dram_s}
    assert point.parts_s == pytest.approx(expected)
    assert point.step_time_s == pytest.approx(max(expected.values()))
    assert expected[point.waits_for] == max(expected.values())
    assert point.samples_per_s == pytest.approx(2 * 64 / max(expected.values()))


def test_hosts_that_pool_send_vectors_and_nothing_is_exchanged() -> None:
    point = points_of(two_gpus(), SMALL, "host-pooled")["host-pooled"]
    # 4 features × 64 samples × 16 columns of float32 to each GPU, gradients back, and its inputs.
    # Each GPU waits for its half of what the host's processors pool and update.
    waits_s = point.parts_s["host memory"] / 2
    assert waits_s > 0
    sent_s = (2 * 4 * 64 * 64 + 64 * 36) / 1e7
    assert point.parts_s["host link"] == pytest.approx(sent_s + waits_s)
    dense = points_of(two_gpus(), replace(SMALL, rows=1), "host-pooled")["host-pooled"]
    assert point.parts_s["gpu"] == pytest.approx(dense.parts_s["gpu"])  # Only dense layers.


def on_servers(setting: Setting, servers: int, samples: int) -> tuple[list[float], dict[str, int]]:
    """Seconds of each server's memory, and bytes, by evaluating the plan on all of them at once."""
    server = platform("cpu").server
    hosts = tuple(replace(server, id=f"ps:{n}") for n in range(servers))
    links = [Link(host.id, "network", "network", 1e9) for host in hosts]
    links += [Link("gpu:0", "ps:0", "pcie", 1e9)]
    topology = Topology("servers", (Gpu("gpu:0", "ps:0", 0, 1e9),), hosts, tuple(links))
    problem = Problem(setting.profile(), topology, samples)
    model = Roofline()
    shards = []
    for number, one in enumerate(problem.profile):
        shard = whole_table_shard(one.table, hosts[number % servers].id, "dram", "host")
        shards.append(model.with_buffers(problem, number, shard, returns_bags=True))
    plan = Plan(tuple(p.table for p in problem.profile), topology, tuple(shards))
    times = [host.dram_s for host in model.evaluate(problem, plan).hosts]
    return times, {name: use.total_bytes for name, use in device_memory(plan).items()}


@pytest.mark.parametrize("nvlink", [True, False])
def test_parameter_servers_cost_what_their_plan_costs(nvlink: bool) -> None:
    setting, machine = replace(SMALL, sparse=5), two_gpus(nvlink=nvlink)
    pcie, *others = machine.topology.links
    links = (replace(pcie, bytes_per_s=1e6), *others)  # The first GPU waits the longest.
    machine = replace(machine, topology=replace(machine.topology, links=links))
    point = points_of(machine, setting, "remote", parameter_servers=2)["remote"]
    rest = dense_cost(
        setting.dense_network, machine.topology, machine.topology.gpus[0], 64, machine.gpu.per_s
    )
    pooled = 64 * 5 * 16 * 4
    link_s = pooled / 1e6 + rest.input_s + (0 if nvlink else rest.allreduce_s)
    assert point.parts_s["host link"] == pytest.approx(link_s)
    assert point.parts_s["gpu"] == pytest.approx(rest.step_s)
    times, _ = on_servers(setting, 2, 128)
    assert point.parts_s["servers' memory"] == pytest.approx(max(times))
    out = 128 * 5 * (4 * 8 + 16 * 4)  # Ids and gradients of all samples of both GPUs.
    assert point.parts_s["network"] == pytest.approx(out / 1e6)
    port = platform("cpu").network_bytes_per_s
    assert point.parts_s["servers' network"] == pytest.approx(out * 3 / 5 / port)
    assert (point.waits_for, point.extra_servers) == ("network", 2)


@pytest.mark.parametrize(("pooling", "width"), [(32, 256), (256, 64), (1, 1024)])
def test_cpu_servers_divide_into_trainers_and_parameter_servers_as_is_best(
    pooling: int, width: int
) -> None:
    servers, setting = 7, Setting(sparse=6, pooling=pooling, width=width)
    machine = platform(f"{servers}xcpu")
    port = machine.network_bytes_per_s
    flops = 6 * setting.dense_network.macs_per_sample * CPU_BATCH
    out = CPU_BATCH * 6 * (setting.pooling * 8 + setting.dim * 4)
    rates = {}
    for trainers in range(1, servers):
        holders = servers - trainers
        times, _ = on_servers(setting, holders, CPU_BATCH)
        most = -(-6 // holders) / 6
        slowest = max(
            flops / machine.cpu.per_s, out / port, trainers * max(times),
            trainers * out * most / port,
        )  # fmt: skip
        rates[trainers] = trainers * CPU_BATCH / slowest
    best = max(rates, key=lambda trainers: rates[trainers])
    point = points_of(machine, setting, "cpu")["cpu"]
    assert point.samples_per_s == pytest.approx(rates[best])
    assert point.detail == f"{best} trainers, {servers - best} parameter servers"


def test_one_cpu_server_needs_no_network() -> None:
    point = points_of(two_gpus(), SMALL, "cpu")["cpu"]
    assert set(point.parts_s) == {"cpu", "host memory"}
    flops = 6 * SMALL.dense_network.macs_per_sample * CPU_BATCH
    assert point.parts_s["cpu"] == pytest.approx(flops / 1e8)


# Memory


def test_all_fits_then_a_split_is_no_different() -> None:
    points = points_of(BIG_BASIN, SMALL, "gpu", "hot-cold", "cached")
    assert points["hot-cold"].step_time_s == pytest.approx(points["gpu"].step_time_s)
    assert points["gpu"].hbm_lookup_share == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["hot-cold", "cached"])
def test_hbm_is_filled_to_the_last_row(name: str) -> None:
    machine = two_gpus(hbm=200_000)
    # The first GPU has two tables, the second one.
    setting = replace(SMALL, sparse=3, rows=20_000, batch=8)
    memory = device_memory(planned(machine, setting, name)[1])
    for gpu in machine.topology.gpus:
        use = memory[gpu.id]
        two_rows = 2 * (setting.dim * 4 + 4 + 52)
        assert 0 <= use.free_bytes < 2 * two_rows
    point = points_of(machine, setting, name)[name]
    assert 0 < point.hbm_lookup_share < 1


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name not in ("remote", "cpu")])
def test_what_is_short_is_named(name: str) -> None:
    machine = two_gpus(hbm=2**16, dram=2**16)
    setting = replace(SMALL, rows=50_000)
    point = points_of(machine, setting, name)[name]
    assert point.samples_per_s is None
    assert point.step_time_s is None
    problem = Problem(setting.profile(), machine.topology, setting.batch)
    memory = device_memory(PLACEMENTS[name](problem, Roofline()))
    worst = min(memory.values(), key=lambda use: use.free_bytes)
    assert (point.shortage.device, point.shortage.short_bytes) == (worst.device, -worst.free_bytes)
    assert point.shortage.resource == ("hbm" if worst.device.startswith("gpu") else "dram")
    assert point.detail.startswith(f"{worst.device} lacks ")


def test_tables_too_large_for_servers_are_named() -> None:
    setting = replace(MODELS["m3"], rows=100_000_000)
    remote = points_of(BIG_BASIN, setting, "remote")["remote"]
    assert remote.samples_per_s is None
    _, held = on_servers(setting, 8, setting.batch * 8)
    assert remote.shortage.short_bytes == held["ps:0"] - platform("cpu").server.memory_bytes
    cpu = points_of(platform("4xcpu"), setting, "cpu")["cpu"]
    _, held = on_servers(setting, 3, CPU_BATCH)
    assert cpu.shortage.short_bytes == held["ps:0"] - platform("cpu").server.memory_bytes


def test_servers_without_gpus_have_one_placement() -> None:
    points = points_of(platform("4xcpu"), SMALL)
    possible = [name for name, point in points.items() if point.samples_per_s]
    assert possible == ["cpu"]
    assert points["gpu"].detail == "4xcpu has no GPUs"


class WithoutHosts(Roofline):
    """A cost model that does not know hosts that pool."""

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        if any(shard.lookup == "host" for shard in plan.shards):
            raise PlanMismatchError("hosts do not pool here")
        return super().evaluate(problem, plan)


def test_a_cost_model_may_not_know_a_placement() -> None:
    found = sweep([BIG_BASIN], {"batch": [64]}, WithoutHosts(), base=SMALL)
    unknown = {point.placement for point in found.points if not point.samples_per_s}
    assert unknown == {"host-pooled", "remote", "cpu"}
    assert {p.detail for p in found.points if not p.samples_per_s} == {"hosts do not pool here"}


# Trends

shapes = st.builds(
    Setting,
    dense=st.sampled_from([64, 512, 4096]),
    sparse=st.integers(1, 12),
    rows=st.sampled_from([100, 10_000, 3_000_000]),
    width=st.sampled_from([16, 128, 512]),
    depth=st.integers(1, 4),
    batch=st.sampled_from([16, 200, 1600]),
    pooling=st.integers(1, 40),
    dim=st.sampled_from([16, 64]),
    skew=st.sampled_from([0.0, 1.05]),
)
machines = st.sampled_from([BIG_BASIN, ZION, platform("5xcpu")])


@examples(25)
@given(shapes, machines, st.sampled_from(["dense", "width", "depth", "pooling"]))
def test_a_larger_model_is_never_faster(setting: Setting, machine: Platform, axis: str) -> None:
    larger = setting.with_values({axis: getattr(setting, axis) * 2})
    before, after = points_of(machine, setting), points_of(machine, larger)
    for name, point in after.items():
        if point.samples_per_s is not None:
            small = before[name].samples_per_s
            assert point.samples_per_s <= small * (1 + 1e-9), name


@examples(10)
@given(shapes, st.sampled_from([BIG_BASIN, ZION]), st.sampled_from(["hbm", "link", "flops"]))
def test_a_better_machine_is_never_slower(setting: Setting, machine: Platform, what: str) -> None:
    topology = machine.topology
    if what == "flops":
        better = replace(machine, gpu=replace(machine.gpu, share=2 * machine.gpu.share))
    elif what == "hbm":
        gpus = tuple(replace(gpu, memory_bytes=2 * gpu.memory_bytes) for gpu in topology.gpus)
        better = replace(machine, topology=replace(topology, gpus=gpus))
    else:
        links = tuple(replace(link, bytes_per_s=2 * link.bytes_per_s) for link in topology.links)
        better = replace(machine, topology=replace(topology, links=links))
    before, after = points_of(machine, setting), points_of(better, setting)
    for name, point in before.items():
        if point.samples_per_s is not None:
            faster = after[name].samples_per_s
            assert faster >= point.samples_per_s * (1 - 1e-9), name


# What Acun et al. found


@pytest.mark.parametrize("batch", [200, 1600, 8192])
def test_gpu_memory_wins_on_big_basin_and_host_memory_on_zion(batch: int) -> None:
    setting = replace(MODELS["m2"], batch=batch)
    assert rate(BIG_BASIN, setting, "gpu") > 1.1 * rate(BIG_BASIN, setting, "host-pooled")
    assert rate(ZION, setting, "host-pooled") > 1.05 * rate(ZION, setting, "gpu")
    # The best of the GPU server is faster than the prototype with its tables in GPUs.
    assert rate(BIG_BASIN, setting, "gpu") > rate(ZION, setting, "gpu")


def test_host_memory_bandwidth_makes_the_flip() -> None:
    setting = MODELS["m2"]
    nvlink = tuple(link for link in BIG_BASIN.topology.links if link.kind == "nvlink")
    linked = replace(ZION.topology, links=ZION.topology.links + nvlink)
    pcie = tuple(link for link in BIG_BASIN.topology.links if link.kind == "pcie")
    wide = replace(ZION, topology=linked)
    narrow = replace(BIG_BASIN, topology=replace(BIG_BASIN.topology, links=pcie))
    # Links among GPUs do not undo it, and taking them away does not bring it about.
    assert rate(wide, setting, "host-pooled") > rate(wide, setting, "gpu")
    assert rate(narrow, setting, "gpu") > rate(narrow, setting, "host-pooled")


def test_the_flip_needs_short_bags() -> None:
    # What the model says against the paper's summary: not for every model.
    assert rate(ZION, Setting(pooling=64), "gpu") > rate(ZION, Setting(pooling=64), "host-pooled")
    assert rate(ZION, Setting(pooling=4), "host-pooled") > rate(ZION, Setting(pooling=4), "gpu")


def test_a_model_too_large_for_the_gpus_is_slower_there_than_on_cpus() -> None:
    setting = MODELS["m3"]
    points = points_of(BIG_BASIN, setting)
    for name in ("gpu", "row-wise", "host-pooled", "host-staged", "cpu"):
        assert points[name].samples_per_s is None, name
    remote = points["remote"].samples_per_s
    assert points["remote"].waits_for == "network"
    assert remote < 0.8 * rate(platform("16xcpu"), setting, "cpu")
    # Which a split of hot and cold rows, not in the paper, changes.
    split = points["hot-cold"].samples_per_s
    assert split > rate(platform("16xcpu"), setting, "cpu")


@pytest.mark.slow
def test_the_results_of_the_paper_are_those_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # docs/sweep.md quotes them: run the script anew, and read that page, when constants change.
    benchmarks = Path(__file__).resolve().parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    monkeypatch.setattr(sys, "argv", ["sweep_paper.py", "--output", str(tmp_path)])
    runpy.run_path(str(benchmarks / "sweep_paper.py"), run_name="__main__")
    today, stored = (
        _values(json.loads((folder / "sweep-paper.json").read_text()))
        for folder in (tmp_path, benchmarks / "results")
    )
    assert today[0] == stored[0]
    assert today[1] == pytest.approx(stored[1], rel=1e-3, abs=2e-3)


def _values(found: Any) -> tuple[list[Any], list[float]]:
    """All texts with the names of what they are in, and all numbers."""
    if isinstance(found, float | int):
        return [], [found]
    if not isinstance(found, dict | list):
        return [found], []
    texts, numbers = list(found) if isinstance(found, dict) else [], []
    for more_texts, more_numbers in map(
        _values, found.values() if isinstance(found, dict) else found
    ):
        texts += more_texts
        numbers += more_numbers
    return texts, numbers


# Sweeps


def test_one_axis_at_a_time_or_all_together() -> None:
    axes = {"dense": (8, 16), "pooling": (1, 2, 3)}
    alone = sweep([BIG_BASIN], axes, Roofline(), base=SMALL, placements=["gpu"])
    assert [dict(point.varied) for point in alone.points] == [
        *({"dense": value} for value in (8, 16)),
        *({"pooling": value} for value in (1, 2, 3)),
    ]
    assert alone.points[3].setting == replace(SMALL, pooling=2)
    together = sweep([BIG_BASIN], axes, Roofline(), base=SMALL, placements=["gpu"], grid=True)
    assert len(together.points) == 6
    assert together.points[5].setting == replace(SMALL, dense=16, pooling=3)


def test_points_do_not_depend_on_what_else_is_swept() -> None:
    names = AXES if not is_fast() else [*AXES][:3]
    axes = {name: (getattr(SMALL, name), 2 * getattr(SMALL, name)) for name in names}
    machines = [BIG_BASIN, ZION, platform("3xcpu")]
    found = sweep(machines, axes, Roofline(), base=SMALL)
    by_name = {machine.name: machine for machine in machines}
    for point in found.points:
        alone = points_of(by_name[point.platform], point.setting, point.placement)
        assert alone[point.placement] == replace(point, varied={"batch": point.setting.batch})


def test_a_stopped_sweep_has_its_points_so_far() -> None:
    done: list[float] = []
    found = sweep(
        [BIG_BASIN], {"dense": (8, 16, 32)}, Roofline(), base=SMALL, placements=["gpu"],
        on_point=lambda number, total, name: done.append(number), stop=lambda: len(done) == 2,
    )  # fmt: skip
    assert [point.varied["dense"] for point in found.points] == [8, 16]


def test_further_machines_come_last_unless_nothing_else_is_possible() -> None:
    found = sweep(
        [BIG_BASIN],
        {"rows": (10_000_000, 40_000_000)},
        Roofline(),
        base=replace(MODELS["m2"], pooling=8),
        placements=["remote", "gpu"],
    )
    first = found.ranked("big-basin", {"rows": 10_000_000})
    assert [point.placement for point in first] == ["gpu", "remote"]
    assert first[1].samples_per_s > first[0].samples_per_s
    large = found.ranked("big-basin", {"rows": 40_000_000})
    assert [point.placement for point in large] == ["remote"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=1", "nothing called 'colour' can be varied; choose from dense"),
        ("sparse=4,many", "'many' is no number"),
        ("sparse=2.5", "sparse must be a whole number, not 2.5"),
        ("rows=0", "rows must be at least 1, not 0"),
        ("skew=-1", "skew must be at least 0, not -1"),
        ("skew=nan", "skew must be at least 0, not nan"),
        ("rows=1e30", "rows must be at most 281474976710656, not 1e\\+30"),
        ("sparse=1e7", "sparse must be at most 10000"),
        ("depth=1e9", "depth must be at most 1000"),
        ("dim=1e9", "dim must be at most 1048576"),
    ],
)
def test_bad_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        axis_values(text)


def test_axes_and_models() -> None:
    assert axis_values("rows=1e5, 2e6,1e5") == ("rows", (100_000, 2_000_000))
    assert axis_values("skew=0.5") == ("skew", (0.5,))
    assert axis_values("dense") == ("dense", AXES["dense"])
    assert set(AXES) == set(asdict(Setting())) >= set(DEFAULT_AXES)
    # The paper's ranges.
    assert (min(AXES["dense"]), max(AXES["dense"])) == (64, 4096)
    assert (min(AXES["sparse"]), max(AXES["sparse"])) == (4, 128)
    assert all(list(values) == sorted(set(values)) for values in AXES.values())
    assert with_overrides("m2", ["pooling=3"]) == replace(MODELS["m2"], pooling=3)
    sizes = {name: one.profile().total_bytes / 1e9 for name, one in MODELS.items()}
    assert 10 < sizes["m2"] < 100
    assert 10 < sizes["m1"] < 100 < sizes["m3"] < 1000
    for changes in (["pooling=1,2"], ["pooling"], ["pooling=1", "pooling=2"]):
        with pytest.raises(ProblemError, match="one value of pooling"):
            with_overrides("m1", changes)
    with pytest.raises(ProblemError, match="no model is called 'm9'; choose from suite"):
        with_overrides("m9", [])


def test_bad_sweeps_are_refused() -> None:
    with pytest.raises(ProblemError, match="no placement is called 'moon'; choose from gpu"):
        sweep([BIG_BASIN], {"dense": (8,)}, Roofline(), placements=["moon"])
    with pytest.raises(ProblemError, match="needs a platform"):
        sweep([], {"dense": (8,)}, Roofline())
    with pytest.raises(ProblemError, match="named more than once: zion, zion"):
        sweep([ZION, ZION], {"dense": (8,)}, Roofline())
    for name in ("nonsense", "lab.yaml", "8xh900"):
        with pytest.raises(TopologyError, match="no machine whose FLOP rates are known"):
            platform(name)
    with pytest.raises(TopologyError, match="name the machine alone: 2xh100, and their number"):
        platform("2xh100+2xcpu")
    with pytest.raises(TopologyError, match="there can be 1 to 1024"):
        platform("5000xcpu")
    assert misuse("sweep", "--vary", "pooling=0") == "pooling must be at least 1, not 0"


COMMAND = ("sweep", "--vary", "sparse=4,8", "--set", "rows=1000", "--set", "batch=64")


def test_json_has_the_values_of_the_library() -> None:
    document = json_of(*COMMAND, "--vary", "rows=5e8")
    assert len(document["points"]) == 4 * 3 * len(PLACEMENTS)
    base = replace(Setting(), rows=1000, batch=64)
    machines = [platform(name) for name in ("big-basin", "zion", "8xh200", "16xcpu")]
    axes = {"sparse": (4.0, 8.0), "rows": (5e8,)}
    found = sweep(machines, axes, Roofline(), base=base)
    assert document == json.loads(json.dumps(sweep_report(found).to_json()))
    short = [point for point in document["points"] if point["short_bytes"]]
    assert {point["short_resource"] for point in short} == {"hbm", "dram"}
    for point in document["points"]:
        assert point["feasible"] == (point["samples_per_s"] is not None)
        assert point["feasible"] or point["detail"]


def test_a_winner_is_ahead_of_the_first_that_is_slower() -> None:
    document = json_of(*COMMAND, "--platform", "big-basin")
    for winner in document["winners"]:
        rates = {
            point["placement"]: point["samples_per_s"]
            for point in document["points"]
            if point["varied"] == winner["varied"] and not point["extra_servers"]
        }
        assert winner["winner"] == max(rates, key=lambda name: rates[name])
        slower = [one for one in rates.values() if one < rates[winner["winner"]] * (1 - 1e-9)]
        assert winner["lead"] == pytest.approx(winner["samples_per_s"] / max(slower))
        assert winner["lead"] > 1


def test_table_csv_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    table = succeed(*COMMAND, "--vary", "rows=5e8", "--plot", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "zion: samples/s by placement" in table.stdout
    assert "16xcpu has no GPUs" in table.stdout
    assert "of HBM for rows" in table.stdout
    assert "The fastest placement of each machine" in table.stdout
    lines = succeed(*COMMAND, "--format", "csv").stdout.splitlines()
    assert lines[0].startswith("section,platform,placement,varied,dense,sparse,rows,")
    assert sum(line.startswith("points,") for line in lines) == 4 * 2 * len(PLACEMENTS)


def test_ticks_have_short_numbers() -> None:
    values = 0.25, 64, 1000, 1500, 1234, 2e6, 5e9
    words = "0.25", "64", "1k", "1.5k", "1234", "2M", "5G"
    assert tuple(map(_short, values)) == words


@pytest.mark.parametrize("width", [1.5, 3.7, 9.0])
def test_no_placement_of_the_legend_lies_outside_of_the_picture(width: float) -> None:
    """A picture of one axis is narrow: all nine names in a line used to be cropped."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(width, 3.0), layout="constrained")
    _legend(figure, [Line2D([], [], marker="o", label=name) for name in PLACEMENTS])
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert len(legend.get_texts()) == len(PLACEMENTS)
    inside, whole = legend.get_window_extent(), figure.bbox
    assert inside.x0 >= whole.x0
    assert inside.x1 <= whole.x1
    assert inside.y0 >= whole.y0


def test_sweeps_that_are_not_drawn(tmp_path: Path) -> None:
    arguments = [*COMMAND, "--platform", "zion", "--grid", "--vary", "pooling=1,8"]
    assert "one axis at a time" in misuse(*arguments, "--plot", tmp_path / "grid.png")
    many = sweep([platform("zion")], {"dense": (8,)}, Roofline(), placements=["gpu"], grid=True)
    with pytest.raises(PlacerError, match="one axis at a time"):
        plot_sweep(many, tmp_path / "grid.png")
    found = sweep([platform("cpu")], {"dense": (8,)}, Roofline(), placements=["gpu"])
    with pytest.raises(PlacerError, match="nothing to draw"):
        plot_sweep(found, tmp_path / "none.png")


def test_this_machine_is_measured() -> None:
    arguments = (*COMMAND, "--platform", "auto", "--format", "json")
    for budget in ((), ("--hbm", "1MiB")):
        document = json.loads(succeed(*arguments, *budget).stdout)
        assert "measured" in document["platforms"][0]["sources"]["CPU float32"]
        rates = {p["placement"]: p["samples_per_s"] for p in document["points"]}
        assert (rates["gpu"] is None) == bool(budget)
        assert rates["cpu"] > 0
        assert rates["remote"] is None


def test_budgets_and_bad_usage() -> None:
    document = json_of(*COMMAND, "--platform", "zion", "--hbm", "1KiB")
    short = {p["placement"]: p["short_resource"] for p in document["points"]}
    assert short["gpu"] == "hbm"
    assert short["cpu"] is None
    wrong = misuse(*COMMAND, "--placements", "moon")
    assert "no placement is called 'moon'; there are gpu" in wrong
    assert "named more than once: zion, zion" in misuse(*COMMAND, "--platform", "zion,zion")
    asked = ("sweep", "--platform", "zion", "--placements", "cpu", "--format", "json")
    both = json.loads(succeed(*asked, "--vary", "sparse=4", "--vary", "sparse=8").stdout)
    assert [point["sparse"] for point in both["points"]] == [4, 8]
    assert "placer sweep --platform" in invoke("sweep", "--help").output


def test_ctrl_c_says_what_a_sweep_has_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> list[Point]:
        signal.raise_signal(signal.SIGINT)
        return sweep(*args, **options)

    monkeypatch.setattr("cost_models.sweep.sweep", interrupted)
    result = succeed("sweep", "--platform", "zion", "--vary", "sparse=4,16")
    assert result.stderr == "stopped: the models so far\n"
