"""``--topology auto`` on the machine that the tests run on."""

import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

from placer import Topology
from placer.errors import TopologyError
from placer.topology.detect import GpuReading, host_memory_bytes, machine, measure_host

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@without_gpu
def test_a_gpu_is_emulated_and_says_so() -> None:
    topology = Topology.parse("auto", hbm="64MiB", dram="128MiB")
    assert topology.emulated
    assert "emulated" in topology.sources["gpu"]
    (gpu,), (host,) = topology.gpus, topology.hosts
    assert (gpu.memory_bytes, host.memory_bytes) == (64 * 2**20, 128 * 2**20)
    assert gpu.hbm_bytes_per_s == host.dram_bytes_per_s
    assert topology.host_link_bytes_per_s(gpu.id) > 0


@without_gpu
def test_both_tiers_fit_in_the_machine() -> None:
    topology = Topology.parse("auto", hbm="64MiB")
    used = topology.gpus[0].memory_bytes + topology.hosts[0].memory_bytes
    assert used <= 0.9 * host_memory_bytes()


@without_gpu
def test_emulation_needs_a_budget_that_fits() -> None:
    with pytest.raises(TopologyError, match="give --hbm"):
        Topology.parse("auto")
    with pytest.raises(TopologyError, match=r"needs more than .* that this machine can give"):
        Topology.parse("auto", hbm="5000TiB")
    with pytest.raises(TopologyError, match="of DRAM"):
        Topology.parse("auto", hbm="1MiB", dram="5000TiB")


@with_gpu
def test_real_gpus_are_measured() -> None:
    topology = Topology.parse("auto", hbm="1GiB")
    assert not topology.emulated
    assert len(topology.gpus) == torch.cuda.device_count()
    for gpu in topology.gpus:
        assert gpu.memory_bytes == 2**30
        assert gpu.hbm_bytes_per_s > topology.host_link_bytes_per_s(gpu.id) > 1e9


def test_a_machine_of_what_was_measured() -> None:
    alone = GpuReading("A100", 40 * 2**30, 1.4e12, 25e9, None)
    assert machine([alone], 100 * 2**30, 80e9).gpus[0].chip == "a100-40"
    topology = Topology(**vars(machine([alone], 100 * 2**30, 80e9)))
    assert topology.gpus[0].memory_bytes == 34 * 2**30
    assert topology.hosts[0].memory_bytes == 90 * 2**30
    assert {link.kind for link in topology.links} == {"pcie"}
    assert topology.sources["gpu"] == "1 × A100"
    assert not topology.emulated


def test_peers_that_outrun_the_host_link_have_nvlink() -> None:
    def readings(peer: float) -> list[GpuReading]:
        return [GpuReading("A100", 2**30, 1.4e12, 25e9, peer), GpuReading("A100", 1, 1, 12e9, 9e11)]

    fast = Topology(**vars(machine(readings(240e9), 2**30, 80e9)))
    assert fast.peer_bytes_per_s("gpu:1") == 240e9
    assert "nvlink bandwidth" in fast.sources
    slow = Topology(**vars(machine(readings(20e9), 2**30, 80e9)))
    assert slow.peer_bytes_per_s("gpu:1") == 12e9
    assert "nvlink bandwidth" not in slow.sources


def test_bytes_of_rows_and_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    # Each repetition takes a second: 65,536 rows of 512 bytes are read and written, 64 MiB copied.
    assert measure_host() == (2 * 2**16 * 512, 2**26)


def test_control_groups_limit_memory(tmp_path: Path) -> None:
    whole = host_memory_bytes(tmp_path)
    assert whole > 2**28
    group = tmp_path / "sys/fs/cgroup/kubepods/pod:1"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    membership = tmp_path / "proc/self/cgroup"
    membership.write_text("0::/kubepods/pod:1\n")
    (group / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path) == whole
    (group.parent / "memory.max").write_text("268435456\n")
    assert host_memory_bytes(tmp_path) == 2**28
    (group / "memory.max").write_text("134217728\n")
    assert host_memory_bytes(tmp_path) == 2**27


def test_older_control_groups_limit_memory(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/\n4:memory:/docker/abc\n")
    group = tmp_path / "sys/fs/cgroup/memory/docker/abc"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1048576\n")
    assert host_memory_bytes(tmp_path) == 2**20


def test_without_torch_a_machine_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TopologyError, match=r"install torch, or name a machine"):
        Topology.parse("auto", hbm="2GiB")
