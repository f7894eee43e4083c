"""`gpu.py --predict`: what plans and the roofline cost model say of steps that were measured."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from _gpu_check import KINDS
from _gpu_model import dcnv2, make_plan

from cost_models.roofline import EXECUTOR, Roofline
from placer import Problem, Profile, Topology

_SERVER_GPUS = 8


def print_predictions(report: Mapping[str, Any], machine: str) -> None:
    """Memory and time of each placed model's step, measured and predicted; then how far off.

    `report` is what `gpu.py` wrote, and `machine` a topology whose GPU it ran on.
    """
    print(
        f"{'batch':>7} {'skew':<10}{'HBM rows':>9}  {'kind':<22}{'used GB':>9}{'planned':>9}"
        f"{'ratio':>7}{'measured ms':>13}{'predicted':>11}{'ratio':>7}"
    )
    ratios = defaultdict(list)
    memory_ratios = []
    for record, predicted_s, planned_bytes in predictions(report, machine):
        ratio, used_bytes = predicted_s / record["step_s"], record["hbm_peak_bytes"]
        ratios[record["batch_size"], record["contender"]].append(ratio)
        memory_ratios.append(planned_bytes / used_bytes)
        print(
            f"{record['batch_size']:>7} {record['skew']:<10}{record['hbm_row_share']:>9.1%}  "
            f"{record['contender']:<22}{used_bytes / 1e9:>9.3f}{planned_bytes / 1e9:>9.3f}"
            f"{memory_ratios[-1]:>7.3f}{record['step_s'] * 1e3:>13.2f}{predicted_s * 1e3:>11.2f}"
            f"{ratio:>7.2f}"
        )
    print(f"\nmemory, planned / used {min(memory_ratios):.3f} to {max(memory_ratios):.3f}")
    for (batch_size, kind), found in sorted(ratios.items()):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(
            f"batch {batch_size:>6}, {kind:<20} predicted / measured {mean:.2f} "
            f"({min(found):.2f} to {max(found):.2f})"
        )


def predictions(
    report: Mapping[str, Any], machine: str
) -> Iterator[tuple[Mapping[str, Any], float, int]]:
    """Each record of a placed model, seconds predicted for its step, and bytes planned in HBM."""
    kinds = {kind.name: kind for kind in KINDS}
    host_bytes = report["machine"]["host_memory_bytes"]
    topology = Topology.parse(machine).with_memory(dram=host_bytes)
    # Copies have the memory of the whole server; cores that pool, that of their part of it.
    whole = [
        replace(host, dram_bytes_per_s=host.dram_bytes_per_s * _SERVER_GPUS / len(topology.gpus))
        for host in topology.hosts
    ]
    unshared = replace(topology, hosts=tuple(whole))
    models = {}
    for record in report["records"]:
        kind = kinds.get(record["contender"])
        if kind is None or record["step_s"] is None:
            continue
        skew, samples = record["skew"], record["batch_size"]
        model = models.setdefault(skew, dcnv2(skew, report["options"]["scale"]))
        plan = make_plan(model, kind.lookup, record["hbm_row_share"], samples, kind.pipeline)
        profile = Profile(model.profiles)
        server = topology if kind.lookup == "host" else unshared
        problem = Problem(profile, server, batch_size=samples, pipeline=kind.pipeline)
        costs = Roofline(EXECUTOR).evaluate(problem, replace(plan, topology=server))
        yield record, cast(float, costs.step_time_s), costs.memory["gpu:0"].total_bytes
