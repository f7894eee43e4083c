"""Random plans and costs of them that are recorded."""

import json
from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from golden_problems import MIXED, counted, machine, model_of, problem, zipf

from cost_models import CostReport
from cost_models.dense import CPU_FLOPS, GPU_FLOPS, dense_cost
from cost_models.sweep.models_and_machines import AXES
from cost_models.sweep.models_and_machines import MODELS as SWEPT
from placer import Feature, Plan, Problem, Table, Topology
from placer.dense import DenseLayers, DenseNetwork, dense_memory
from placer.errors import PlacerError
from placer.files.atomic import sealed
from placer.topology.kinds import CPU_SERVER, GPU_KINDS, HOST_KINDS, LIST_PRICES, NAMED
from solvers import solve

# Plans that are drawn at random


def random_shards(
    tables: Sequence[Table], topology: Topology, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Shards of a plan file that cover every table once, in all ways that there are."""
    gpus = [gpu.id for gpu in topology.gpus]
    host_of = {gpu.id: gpu.host for gpu in topology.gpus}
    shards: list[dict[str, Any]] = []

    def one(
        table: Table, rows: tuple[int, int, int], cols: tuple[int, int], gpu: str, lookup: str
    ) -> None:
        count = len(range(*rows))
        if lookup == "cached" and not count:
            lookup = "staged"
        serving = host_of[gpu] if lookup == "host" and rng.random() < 0.3 else gpu
        cached = int(rng.integers(1, count + 1)) if lookup == "cached" else 0
        staged = int(rng.integers(0, count + 1)) if lookup in ("staged", "cached") else 0
        shards.append(_shard(table, rows, cols, [serving], lookup, cached, staged, rng))

    def any_lookup() -> str:
        return str(rng.choice(["device", "uva", "staged", "cached", "host"]))

    def strips(table: Table) -> list[tuple[int, int]]:
        if table.dim < 8 or rng.random() < 0.6:
            return [(0, table.dim)]
        half = table.dim // 2
        return [(0, half), (half, table.dim)]

    for table in tables:
        kind = rng.choice(["whole", "strided", "strips", "replicated", "hot-cold", "head", "grid"])
        gpu = str(rng.choice(gpus))
        whole, columns = (0, table.rows, 1), (0, table.dim)
        if kind == "whole":
            one(table, whole, columns, gpu, any_lookup())
        elif kind == "strips":
            for strip in strips(table):
                one(table, whole, strip, str(rng.choice(gpus)), any_lookup())
        elif kind == "replicated":
            one(table, whole, columns, gpu, str(rng.choice(["device", "device", "staged"])))
            shards[-1]["devices"] = list(gpus)
        elif kind == "hot-cold":
            hot = int(rng.integers(1, table.rows))
            one(table, (0, hot, 1), columns, gpu, "device")
            lookup = str(rng.choice(["uva", "staged", "cached", "host"]))
            one(table, (hot, table.rows, 1), columns, gpu, lookup)
        else:
            head = int(rng.integers(1, max(2, table.rows // 4))) if kind == "head" else 0
            if head:
                one(table, (0, head, 1), columns, gpu, "device")
                shards[-1]["devices"] = list(gpus)
            ways = int(rng.integers(1, len(gpus) + 2))
            for strip in strips(table) if kind == "grid" else [columns]:
                for offset in range(ways):
                    rows = (head + offset, table.rows, ways)
                    one(table, rows, strip, str(rng.choice(gpus)), any_lookup())
    return shards


def _shard(
    table: Table,
    rows: Sequence[int],
    cols: Sequence[int],
    devices: list[str],
    lookup: str,
    cached: int,
    staged: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    return {
        "table": table.name,
        "rows": list(rows),
        "cols": list(cols),
        "devices": devices,
        "memory": "hbm" if lookup == "device" else "dram",
        "lookup": lookup,
        "cache_rows": cached,
        "staging_rows": staged,
        "buffer_bytes": int(rng.integers(0, 5000)),
    }  # fmt: skip


def vary(
    shards: list[dict[str, Any]],
    tables: Sequence[Table],
    topology: Topology,
    widths: Sequence[str],
    rng: np.random.Generator,
) -> None:
    """Move some cold rows to drives, narrow types and servers; GPUs serve for their hosts."""
    types = {table.name: table.dtype for table in tables}
    servers = [host.id for host in topology.servers]
    for shard in shards:
        if shard["lookup"] in ("staged", "cached") and widths:
            shard["memory"] = str(rng.choice(["dram", "ssd"]))
            if types[shard["table"]] == "float32":
                shard["dtype"] = (None, *widths)[rng.integers(1 + len(widths))]
        elif shard["lookup"] == "host" and servers and rng.random() < 0.6:
            shard["devices"] = servers[:1]
        elif attached := topology.gpus_of(shard["devices"][0]):
            shard["devices"] = [attached[0].id]


def torchrec_shards(
    tables: Sequence[Table], topology: Topology, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Shards of a plan file of the kinds that TorchRec has."""
    gpus = [gpu.id for gpu in topology.gpus]
    shards: list[dict[str, Any]] = []
    for table in tables:
        kind = rng.choice(["whole", "column", "row", "replicated"])
        lookup = "device" if kind == "replicated" else str(rng.choice(["device", "uva", "cached"]))
        share = float(rng.uniform(0.1, 0.9))
        rows, cols, devices = [(0, table.rows, 1)], [(0, table.dim)], [str(rng.choice(gpus))]
        if kind == "column" and table.dim >= 8 and len(gpus) > 1:
            half = table.dim // 2
            cols, devices = [(0, half), (half, table.dim)], rng.permutation(gpus)[:2].tolist()
        elif kind == "row":
            block = -(-table.rows // len(gpus))
            edges = [min(table.rows, block * number) for number in range(len(gpus) + 1)]
            rows = [(low, high, 1) for low, high in pairwise(edges)]
            devices = gpus
        places = [(r, c) for c in cols for r in rows]
        for number, (slice_, strip) in enumerate(places):
            if count := len(range(*slice_)):
                on = list(gpus) if kind == "replicated" else [devices[number]]
                cached = max(1, round(count * share)) if lookup == "cached" else 0
                shards.append(_shard(table, slice_, strip, on, lookup, cached, 0, rng))
    return shards


def write_plan(base: Plan, shards: list[dict[str, Any]], path: Path) -> Path:
    """Write a plan of the same tables, devices and row orders with other shards."""
    base.save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["shards"] = shards
    path.write_text(json.dumps(sealed(document)), encoding="utf-8")
    return path


# What cost models are asked


@cache
def costed_problems() -> dict[str, Problem]:
    """The problems that random plans are costed in; they are made once."""
    tables = (
        *MIXED,
        zipf("shared", 600, 32, lookups=1.5, pooling=("sum", "sum")),
        zipf("unpooled", 400, 16, lookups=3.0, coverage=0.6, pooling=("none",)),
        counted("log", 500, 64, lookups=2.0, seed=7),
        zipf("wide", 300, 256, exponent=0.0),
    )
    return {
        "1-gpu": problem(*tables, topology=machine(1)),
        "2-gpus": problem(*tables, topology=machine(2), batch_size=128),
        "2x2-unequal": problem(*tables, topology=machine(2, 2, slow=True), batch_size=48),
        "8-gpus": problem(*tables, topology=machine(8), batch_size=32),
        "2x4": problem(*tables, topology=machine(4, 2, network=3e9), batch_size=512),
    }


PLANS_PER_PROBLEM = 40
COST_PROBLEMS = ("1-gpu", "2-gpus", "2x2-unequal", "8-gpus", "2x4")


@cache
def base_plan(name: str) -> Plan:
    """A plan of a costed problem whose shards are of no account."""
    asked = costed_problems()[name]
    found = solve(asked, "greedy-size", time_limit_s=3600.0, max_steps=0).plan
    assert found is not None
    return found


@cache
def random_plans(name: str) -> tuple[Plan, ...]:
    """Random plans of a costed problem, through files; every third is of TorchRec's kinds."""
    base, asked = base_plan(name), costed_problems()[name]
    plans = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        base.save(path)
        document = json.loads(path.read_text(encoding="utf-8"))
        for number in range(PLANS_PER_PROBLEM):
            rng = np.random.default_rng([COST_PROBLEMS.index(name), number])
            drawn = torchrec_shards if number % 3 == 2 else random_shards
            document["shards"] = drawn(base.tables, asked.topology, rng)
            path.write_text(json.dumps(sealed(document)), encoding="utf-8")
            plans.append(Plan.load(path))
    return tuple(plans)


def report_record(report: CostReport) -> dict[str, Any]:
    """All that a cost report says."""
    return {
        "gpus": [
            [g.device, float(g.hbm_s), float(g.link_s), float(g.communication_s),
             float(g.launch_s), float(g.total_s)]
            for g in report.gpus
        ],
        "hosts": [[h.device, float(h.dram_s)] for h in report.hosts],
        "memory": {device: memory_record(use) for device, use in report.memory.items()},
        "hbm_lookup_share": float(report.hbm_lookup_share),
        "step_time_s": float(report.step_time_s),
        "bottleneck": report.bottleneck,
        "balance": float(report.balance),
        "relative_error": report.relative_error,
    }  # fmt: skip


def costs_of_plans(problem_name: str, model_name: str) -> list[Any]:
    """Costs of the random plans of a problem; None for what a model has no price for."""
    asked, model = costed_problems()[problem_name], model_of(model_name)
    found: list[Any] = []
    for plan in random_plans(problem_name):
        try:
            found.append(report_record(model.evaluate(asked, plan)))
        except PlacerError:
            found.append(None)
    return found


def dense_record() -> list[Any]:
    """The dense part of a few models on a few machines."""
    found: list[Any] = []
    for sparse, dim, layers in (
        (26, 64, DenseLayers((512,) * 3 + (1,), (512,) * 3 + (64,), 13)),
        (1, 8, DenseLayers((16, 1), (16, 8), 1)),
        (128, 128, DenseLayers((1024,) * 5 + (1,), (1024,) * 5 + (128,), 400)),
        (26, 128, DenseLayers((1024, 512, 1), (512, 128), 13, "cross", 3, 512, math="bfloat16")),
        (9, 32, DenseLayers((256, 1), (), 10, "concat", concat_stride=7, optimizer="adam")),
    ):
        network = DenseNetwork.of(
            layers, [Table(f"t{n}", 10, dim, features=(Feature("f"),)) for n in range(sparse)]
        )
        found.append([
            [[product.inputs, product.outputs] for product in network.products],
            network.macs_per_sample, network.parameter_bytes, network.input_bytes_per_sample,
            dense_memory(network, 512, 8).total_bytes,
        ])  # fmt: skip
        for preset in ("8xh100", "2x8xa100-80", "1xt4", "big-basin"):
            topology = Topology.parse(preset)
            for rate in (GPU_FLOPS["h100"]["tf32"], CPU_FLOPS["dual-socket"], CPU_FLOPS["b200"]):
                cost = dense_cost(network, topology, topology.gpus[0], 512, rate.per_s)
                found.append([preset, rate.per_s, *astuple(cost), cost.step_s])
    served = Topology.parse("1xt4+1xcpu")  # Its only GPU exchanges no gradients.
    found.append([served.exchange_latency_s,
                  *astuple(dense_cost(network, served, served.gpus[0], 512, 1e13))])  # fmt: skip
    return found


def machines_record() -> dict[str, Any]:
    """The figures of all kinds of machines, without the texts that say where they are from."""
    return {
        "gpus": _figures({name: astuple(kind) for name, kind in GPU_KINDS.items()}),
        "hosts": _figures({name: astuple(kind) for name, kind in HOST_KINDS.items()}),
        "named": _figures({name: [*map(astuple, kinds)] for name, kinds in NAMED.items()}),
        "server": _figures(astuple(CPU_SERVER)),
        "prices": {name: price.dollars_per_hour for name, price in LIST_PRICES.items()},
        "gpu_flops": {name: {math: rate.per_s for math, rate in rates.items()}
                      for name, rates in GPU_FLOPS.items()},
        "cpu_flops": {name: rate.per_s for name, rate in CPU_FLOPS.items()},
        "swept": {name: astuple(setting) for name, setting in SWEPT.items()},
        "axes": AXES,
    }  # fmt: skip


def _figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _figures(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_figures(one) for one in value if not isinstance(one, str)]
    return value


def memory_record(use: Any) -> list[int]:
    """Bytes on a device: what it has, by purpose, all, and what is left."""
    return [
        use.capacity_bytes, use.weight_bytes, use.state_bytes, use.cache_bytes,
        use.row_map_bytes, use.buffer_bytes, use.total_bytes, use.free_bytes,
    ]  # fmt: skip
