"""What Acun et al. (HPCA 2021, arXiv:2011.05497) found, by the cost model of `placer sweep`.

    python benchmarks/sweep_paper.py [--output FOLDER]

placements  M1, M2 and M3 of the paper's table II on Big Basin, Zion and 16 CPU servers
flip        M2 on servers between Big Basin and Zion: one's host memory, the other's GPU links
constants   M2 with other shares of peaks, batches and skews: where the flip holds
servers     M3: how many CPU servers are as fast as Big Basin

Nothing is measured: the results follow from docs/sweep.md's constants and repeat exactly. They
go to benchmarks/results/sweep-paper.json.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _machine import RESULTS

from cost_models import cost_model
from cost_models.sweep import MODELS, Platform, Setting, platform, sweep
from placer.files.atomic import write_text

BATCHES = (200, 1600, 8192)
GPU_SHARES = (0.55, 0.75, 0.95)
DRAM_SHARES = (0.5, 0.7, 0.9)
SKEWS = (0.6, 1.05, 1.2)
CPU_SERVERS = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32)
IN_PAPER = ("gpu", "host-pooled", "remote", "cpu")


def rates(
    machines: Sequence[Platform], setting: Setting, placements: Sequence[str]
) -> list[dict[str, Any]]:
    """Samples per second of each placement on each machine."""
    found = sweep(
        machines,
        {"batch": (setting.batch,)},
        cost_model("roofline"),
        base=setting,
        placements=placements,
    )
    return [
        {
            "platform": point.platform,
            "placement": point.placement,
            "samples_per_s": point.samples_per_s,
            "parts_ms": {name: round(1e3 * s, 3) for name, s in point.parts_s.items()},
            "waits_for": point.waits_for,
            "detail": point.detail,
        }
        for point in found.points
    ]


def placements() -> list[dict[str, Any]]:
    """The paper's models on its machines; on CPU servers nothing depends on the batch of a GPU."""
    machines = [platform(name) for name in ("big-basin", "zion", "16xcpu")]
    found: list[dict[str, Any]] = []
    for model, batch in itertools.product(("m1", "m2", "m3"), BATCHES):
        setting = replace(MODELS[model], batch=batch)
        names = (*IN_PAPER, "hot-cold")
        rows = rates(machines, setting, names)
        found += [{"model": model, "batch": batch, **row} for row in rows]
    return [row for row in found if row["platform"] != "16xcpu" or row["placement"] == "cpu"]


def machine_of(name: str, host: Platform, links: Platform) -> Platform:
    """A server with one's host and the other's links among its 8 V100."""
    topology: Any = host.topology
    other: Any = links.topology
    kept = [link for link in topology.links if link.kind != "nvlink"]
    nvlink = [link for link in other.links if link.kind == "nvlink"]
    return replace(host, name=name, topology=replace(topology, links=(*kept, *nvlink)))


def flip() -> list[dict[str, Any]]:
    """What makes Zion differ from Big Basin: its host's memory, or that GPUs have no links."""
    big_basin, zion = platform("big-basin"), platform("zion")
    machines = [
        big_basin,
        machine_of("big-basin, no NVLink", big_basin, zion),
        machine_of("zion, NVLink", zion, big_basin),
        zion,
    ]
    found: list[dict[str, Any]] = []
    for batch in BATCHES:
        setting = replace(MODELS["m2"], batch=batch)
        rows = rates(machines, setting, ("gpu", "host-pooled"))
        found += [{"batch": batch, **row} for row in rows]
    return found


def with_shares(machine: Platform, gpu_share: float, dram_share: float) -> Platform:
    """The same with other shares of the GPUs' peak, and of the host memory's bandwidth."""
    topology: Any = machine.topology
    hosts = tuple(
        replace(host, dram_bytes_per_s=host.dram_bytes_per_s * dram_share / 0.70)
        for host in topology.hosts
    )
    gpu = replace(machine.gpu, share=gpu_share)
    return replace(machine, topology=replace(topology, hosts=hosts), gpu=gpu)


def constants() -> list[dict[str, Any]]:
    """M2 with other constants than those assumed: which placement wins on the two servers."""
    servers = [platform("big-basin"), platform("zion")]
    found: list[dict[str, Any]] = []
    for gpu, dram, batch, skew in itertools.product(GPU_SHARES, DRAM_SHARES, BATCHES, SKEWS):
        machines = [with_shares(one, gpu, dram) for one in servers]
        setting = replace(MODELS["m2"], batch=batch, skew=skew)
        rows = rates(machines, setting, ("gpu", "host-pooled"))
        by_name = {(row["platform"], row["placement"]): row["samples_per_s"] for row in rows}
        found.append(
            {
                "gpu_share": gpu,
                "dram_share": dram,
                "batch": batch,
                "skew": skew,
                **{
                    f"{one.name}_gpu_over_host": by_name[one.name, "gpu"]
                    / by_name[one.name, "host-pooled"]
                    for one in servers
                },
            }
        )
    return found


def servers() -> dict[str, Any]:
    """M3: Big Basin with its tables on parameter servers, beside CPU servers."""
    (remote,) = rates([platform("big-basin")], MODELS["m3"], ("remote",))
    of_cpus = {
        count: rates([platform(f"{count}xcpu")], MODELS["m3"], ("cpu",))[0] for count in CPU_SERVERS
    }
    return {
        "big_basin_remote": remote,
        "cpu_servers": {str(count): row for count, row in of_cpus.items()},
    }


def show(results: dict[str, Any]) -> None:
    """The results for people."""
    for row in results["placements"]:
        rate = row["samples_per_s"]
        words = f"{rate:12,.0f}/s, waits for {row['waits_for']}" if rate else row["detail"]
        print(f"{row['model']} batch {row['batch']:5} {row['platform']:10} "
              f"{row['placement']:12} {words}")  # fmt: skip
    print()
    for row in results["flip"]:
        print(f"m2 batch {row['batch']:5} {row['platform']:21} {row['placement']:12} "
              f"{row['samples_per_s']:12,.0f}/s {row['parts_ms']}")  # fmt: skip
    rows = results["constants"]
    basin = sum(row["big-basin_gpu_over_host"] > 1 for row in rows)
    zion = sum(row["zion_gpu_over_host"] < 1 for row in rows)
    print(f"\nGPU memory wins on Big Basin in {basin} of {len(rows)} cases, "
          f"host memory on Zion in {zion}")  # fmt: skip
    for row in rows:
        if row["zion_gpu_over_host"] >= 1 or row["big-basin_gpu_over_host"] <= 1:
            print("  not:", row)
    remote = results["servers"]["big_basin_remote"]["samples_per_s"]
    print(f"\nm3: Big Basin and 8 parameter servers {remote:,.0f}/s")
    for count, row in results["servers"]["cpu_servers"].items():
        rate = row["samples_per_s"]
        words = f"{rate:,.0f}/s, {remote / rate:.2f}" if rate else row["detail"]
        print(f"    {count:>2} CPU servers {words}")


def main() -> None:
    """Parse the command line, work everything out and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    results = {
        "placements": placements(),
        "flip": flip(),
        "constants": constants(),
        "servers": servers(),
    }
    show(results)
    write_text(options.output / "sweep-paper.json", json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
