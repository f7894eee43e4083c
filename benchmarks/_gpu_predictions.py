"""`gpu.py --predict`: what the roofline cost model says of steps that were measured."""

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
    """Each step of a placed model, measured and predicted; then how far off those are.

    `report` is what `gpu.py` wrote, and `machine` a topology whose GPU it ran on.
    """
    print(
        f"{'batch':>7} {'skew':<10}{'HBM rows':>9}  {'kind':<22}{'measured ms':>12}"
        f"{'predicted ms':>13}{'ratio':>7}"
    )
    ratios = defaultdict(list)
    for record, predicted_s in predictions(report, machine):
        ratio = predicted_s / record["step_s"]
        ratios[record["batch_size"], record["contender"]].append(ratio)
        print(
            f"{record['batch_size']:>7} {record['skew']:<10}{record['hbm_row_share']:>9.1%}  "
            f"{record['contender']:<22}{record['step_s'] * 1e3:>12.2f}{predicted_s * 1e3:>13.2f}"
            f"{ratio:>7.2f}"
        )
    print()
    for (batch_size, kind), found in sorted(ratios.items()):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(
            f"batch {batch_size:>6}, {kind:<20} predicted / measured {mean:.2f} "
            f"({min(found):.2f} to {max(found):.2f})"
        )


def predictions(
    report: Mapping[str, Any], machine: str
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each record of a placed model, and the seconds that are predicted for its step."""
    kinds = {kind.name: kind for kind in KINDS}
    host_bytes = report["machine"]["host_memory_bytes"]
    topology = Topology.parse(machine).with_memory(dram=host_bytes)
    # Rows cross the link at the rate of a whole server's memory; cores pool at that of their part.
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
        plan = make_plan(model, kind.lookup, record["hbm_row_share"], samples)
        server = topology if kind.lookup == "host" else unshared
        problem = Problem(
            Profile(model.profiles),
            server,
            batch_size=samples,
            pipeline="look-ahead" if kind.ahead else "serial",
        )
        costs = Roofline(EXECUTOR).evaluate(problem, replace(plan, topology=server))
        yield record, cast(float, costs.step_time_s)
