"""Measure this machine's GPUs, memory and links for ``--topology auto``, in under a second.

Without a GPU, emulate one: a part of host memory stands in for the GPU's memory. So a plan for a
small GPU can be made, trained and tested on a laptop.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placer.errors import TopologyError
from placer.topology.devices import Gpu, Host, Link, TopologyFields
from placer.topology.presets import RESERVED_DRAM_SHARE, RESERVED_HBM_SHARE, chip_called
from placer.units import format_bytes, parse_bytes

_ROW_BYTES = 512  # 128 float32, the row of MLPerf DLRM
_TABLE_ROWS = 2**18
_GATHERED_ROWS = 2**16
_COPY_BYTES = 2**26
_REPEATS = 3

_DRAM_CORES = 16
"""Random reads scale up to about this many cores, which saturate the memory channels."""

_NVLINK_OVER_PCIE = 1.5
"""Peers have NVLink if they copy faster than this multiple of the host link."""


def detect(*, hbm: str | int | None = None, dram: str | int | None = None) -> TopologyFields:
    """Measure and return the machine that this runs on.

    CUDA GPUs have their memory less 15%, and measured bandwidths of their memory, of pinned copies
    and of copies between peers. Without CUDA, the machine has one emulated GPU with `hbm` bytes of
    host memory, and `emulated` is set.
    """
    try:
        import torch
    except ImportError as error:
        raise TopologyError(
            f"GPUs of this machine are found by PyTorch, which cannot be imported ({error}); "
            "install torch, or name a machine, such as --topology 8xh100"
        ) from error
    if torch.cuda.is_available():
        return _cuda_machine()
    if hbm is None:
        raise TopologyError(
            "this machine has no GPU; give --hbm, such as --hbm 2GiB, to emulate one of that "
            "much memory, or name a machine, such as --topology 8xh100"
        )
    return _emulated_machine(parse_bytes(hbm), None if dram is None else parse_bytes(dram))


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or a cgroup's limit.

    `root` is the folder that has ``sys/fs/cgroup`` and ``proc``.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _cgroup_limits(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        # Without a limit, v2 writes "max", and v1 about 2^63, which the minimum discards.
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _cgroup_limits(root: Path) -> list[Path]:
    """Return files that may limit this process: those of its cgroup and of all parent cgroups."""
    folder = root / "sys/fs/cgroup"
    files = [folder / "memory.max", folder / "memory/memory.limit_in_bytes"]
    try:
        membership = (root / "proc/self/cgroup").read_text()
    except OSError:
        return files
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(1, len(parts) + 1):
            inner = "/".join(parts[:depth])
            if controllers == "":
                files.append(folder / inner / "memory.max")
            elif "memory" in controllers.split(","):
                files.append(folder / "memory" / inner / "memory.limit_in_bytes")
    return files


def best_rate(amount: int, work: Callable[[], object]) -> float:
    """Return `amount` a second in the fastest of a few repetitions, after a warm-up."""
    work()
    fastest = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return amount / fastest


def measure_host() -> tuple[float, float]:
    """Measure bytes a second of random rows and of a plain copy in host memory, on one thread.

    Rows of 512 bytes are gathered from a table larger than common caches. Reads and writes both
    count. The copy counts each byte once, like a link.
    """
    table = np.ones((_TABLE_ROWS, _ROW_BYTES // 4), dtype=np.float32)
    picked = np.random.default_rng(0).integers(0, _TABLE_ROWS, _GATHERED_ROWS)
    gathered = np.empty((_GATHERED_ROWS, table.shape[1]), dtype=np.float32)
    rows_per_s = best_rate(
        2 * gathered.nbytes, lambda: np.take(table, picked, axis=0, out=gathered, mode="clip")
    )
    source = table.reshape(-1)[: _COPY_BYTES // 4]
    target = np.empty_like(source)
    return rows_per_s, best_rate(source.nbytes, lambda: np.copyto(target, source))


def _emulated_machine(hbm_bytes: int, dram_bytes: int | None) -> TopologyFields:
    usable = int(host_memory_bytes() * (1 - RESERVED_DRAM_SHARE))
    if hbm_bytes + (dram_bytes or 0) > usable:
        raise TopologyError(
            f"an emulated GPU of {format_bytes(hbm_bytes)}"
            + (f" beside {format_bytes(dram_bytes)} of DRAM" if dram_bytes else "")
            + f" needs more than the {format_bytes(usable)} that this machine can give; ask for "
            "less with --hbm and --dram"
        )
    rows_per_s, copy_per_s = measure_host()
    return TopologyFields(
        name="auto",
        gpus=(Gpu("gpu:0", "host:0", hbm_bytes, rows_per_s),),
        hosts=(
            Host("host:0", usable - hbm_bytes if dram_bytes is None else dram_bytes, rows_per_s),
        ),
        links=(Link("gpu:0", "host:0", "pcie", copy_per_s),),
        emulated=True,
        sources={
            "gpu": "emulated: this machine has no GPU, a part of host memory plays its memory",
            "gpu memory": "as asked for",
            "host memory": f"this machine's, less {RESERVED_DRAM_SHARE:.0%} for the system and "
            "less the emulated GPU's"
            if dram_bytes is None
            else "as asked for",
            "hbm bandwidth": "random rows of 512 bytes in host memory, one thread, measured",
            "dram bandwidth": "the same: both tiers are host memory",
            "pcie bandwidth": "a copy within host memory, one thread, measured",
        },
    )


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What the driver reports of one GPU, and its measured bandwidths."""

    name: str
    memory_bytes: int
    rows_bytes_per_s: float  # Bandwidth of random rows in its memory, reads and writes together.
    copy_bytes_per_s: float  # Bandwidth of pinned copies from the host.
    # Bandwidth of copies to the next GPU; None with one GPU.
    peer_bytes_per_s: float | None


def machine(
    readings: Sequence[GpuReading], host_bytes: int, dram_bytes_per_s: float
) -> TopologyFields:
    """Return the topology of a host with these GPUs."""
    names = [reading.name for reading in readings]
    sources = {
        "gpu": ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)),
        "gpu memory": f"as the driver reports it, less {RESERVED_HBM_SHARE:.0%} for dense "
        "weights, activations and context",
        "hbm bandwidth": "random rows of 512 bytes in GPU memory, measured",
        "pcie bandwidth": "pinned copies host to GPU, one GPU at a time, measured",
        "host memory": f"this machine's or its cgroup's, less {RESERVED_DRAM_SHARE:.0%}",
        "dram bandwidth": f"one thread's random rows, times the cores up to {_DRAM_CORES}; an "
        "estimate",
    }
    gpus = tuple(
        Gpu(
            f"gpu:{number}",
            "host:0",
            int(reading.memory_bytes * (1 - RESERVED_HBM_SHARE)),
            reading.rows_bytes_per_s,
            chip=chip_called(reading.name, reading.memory_bytes),
        )
        for number, reading in enumerate(readings)
    )
    links = [
        Link(gpu.id, gpu.host, "pcie", reading.copy_bytes_per_s)
        for gpu, reading in zip(gpus, readings, strict=True)
    ]
    peers = [one.peer_bytes_per_s for one in readings if one.peer_bytes_per_s is not None]
    if peers and min(peers) > _NVLINK_OVER_PCIE * max(link.bytes_per_s for link in links):
        links.extend(Link(gpu.id, gpu.host, "nvlink", min(peers)) for gpu in gpus)
        sources["nvlink bandwidth"] = "the slowest copy between neighbours, measured"
    host = Host("host:0", int(host_bytes * (1 - RESERVED_DRAM_SHARE)), dram_bytes_per_s)
    return TopologyFields("auto", gpus, (host,), tuple(links), sources=sources)


def _cuda_machine() -> TopologyFields:
    import torch

    count = torch.cuda.device_count()
    readings = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        rows, copy = _measure_gpu(number)
        peer = _measure_peer(number, (number + 1) % count) if count > 1 else None
        readings.append(GpuReading(properties.name, properties.total_memory, rows, copy, peer))
    rows_bytes_per_s, _ = measure_host()
    cores = min(_DRAM_CORES, os.cpu_count() or 1)
    return machine(readings, host_memory_bytes(), rows_bytes_per_s * cores)


def _measure_gpu(number: int) -> tuple[float, float]:
    """Measure bytes a second of random rows in a GPU's memory, and of pinned copies to it."""
    import torch

    with torch.cuda.device(number):
        table = torch.ones(_TABLE_ROWS, _ROW_BYTES // 4, device="cuda")
        picked = torch.randint(0, _TABLE_ROWS, (_TABLE_ROWS,), device="cuda")
        gathered = torch.empty_like(table)
        pinned = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        landed = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")

        def gather() -> None:
            torch.index_select(table, 0, picked, out=gathered)
            torch.cuda.synchronize()

        def copy() -> None:
            landed.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        moved = 2 * gathered.numel() * gathered.element_size()
        return best_rate(moved, gather), best_rate(_COPY_BYTES, copy)


def _measure_peer(source: int, target: int) -> float:
    """Measure bytes a second of copies from one GPU to another."""
    import torch

    sent = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    received = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")

    def copy() -> None:
        received.copy_(sent)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return best_rate(_COPY_BYTES, copy)
