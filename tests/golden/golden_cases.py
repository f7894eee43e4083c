"""Small problems, plans and replays whose results are recorded; and how results become JSON.

All that is taken from modules below the public packages is imported here, and used here alone.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from click.testing import CliRunner
from golden_store import DATA
from safetensors.numpy import load_file

from cli import main
from cost_models import CostModel, CostReport, cost_model
from cost_models.dense import CPU_FLOPS, GPU_FLOPS, dense_cost
from cost_models.step_equation.work import work_of_group
from placer import (
    AccessCdf,
    Constraints,
    Feature,
    Plan,
    Problem,
    Profile,
    Table,
    TableProfile,
    Topology,
)
from placer.dense import DenseLayers, DenseNetwork, dense_memory
from placer.errors import PlacerError
from placer.profile.counts import RowCounts
from placer.seal import sealed
from solvers import SOLVERS, solve

CALIBRATED = f"calibrated:{DATA / 'calibration.json'}"
MODELS = {
    "roofline": "roofline",
    "calibrated": CALIBRATED,
    "torchrec": "torchrec",
    "torchrec-prefetch": "torchrec-prefetch",
}
"""Cost models by the name under which their results are recorded."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


# Tables and machines


def zipf(
    name: str,
    rows: int,
    dim: int = 16,
    *,
    lookups: float = 1.0,
    coverage: float = 1.0,
    exponent: float = 1.0,
    optimizer: str = "rowwise_adagrad",
    dtype: str = "float32",
    pooling: Sequence[str] = ("sum",),
) -> TableProfile:
    """A table whose accesses follow Zipf's law, with one feature for each pooling."""
    features = tuple(
        Feature(f"{name}.{number}", lookups + number, coverage, kind)  # type: ignore[arg-type]
        for number, kind in enumerate(pooling)
    )
    table = Table(name, rows, dim, dtype, optimizer, features)  # type: ignore[arg-type]
    return TableProfile(table, AccessCdf.zipf(rows, exponent))


def counted(
    name: str, rows: int, dim: int = 16, *, lookups: float = 1.0, seed: int = 0
) -> TableProfile:
    """A table whose rows were counted: skewed, in no order, a third of them never read."""
    rng = np.random.default_rng(seed)
    counts = rng.zipf(1.4, rows).clip(0, 10_000) * (rng.random(rows) > 1 / 3)
    counts = counts.astype(np.int64)
    return TableProfile(
        Table(name, rows, dim, features=(Feature(name, lookups),)),
        AccessCdf.from_counts(counts, rows),
        RowCounts.from_dense(counts),
    )


def machine(
    gpus: int = 2,
    hosts: int = 1,
    *,
    hbm: int = GIB,
    dram: int = 64 * GIB,
    pcie: float = 1e10,
    network: float = 1e10,
    launch_s: float = 1e-6,
    slow: bool = False,
) -> Topology:
    """`hosts` hosts of `gpus` GPUs each; `slow`: the last host's GPUs are smaller and slower."""
    lines: dict[str, Any] = {"name": f"{hosts}x{gpus}", "hosts": [], "gpus": [], "links": []}
    for host in range(hosts):
        at = f"host:{host}"
        lines["hosts"].append({"id": at, "memory": dram, "dram_bandwidth": 1e11})
        if hosts > 1:
            lines["links"].append({"a": at, "b": "network", "kind": "network",
                                   "bandwidth": network, "latency_s": 5e-6})  # fmt: skip
        worse = slow and host == hosts - 1
        for gpu in range(host * gpus, (host + 1) * gpus):
            lines["gpus"].append(
                {
                    "id": f"gpu:{gpu}",
                    "host": at,
                    "memory": hbm // 3 if worse else hbm,
                    "hbm_bandwidth": 5e11 if worse else 1e12,
                    "launch_s": launch_s,
                }
            )
            for kind, rate in (("pcie", pcie), ("nvlink", 1e11)):
                lines["links"].append({"a": f"gpu:{gpu}", "b": at, "kind": kind,
                                       "bandwidth": rate})  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(yaml.safe_dump(lines), encoding="utf-8")
        return Topology.parse(str(path))


def constraints(**asked: Any) -> Constraints:
    """Constraints as a file has them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(yaml.safe_dump(asked), encoding="utf-8")
        return Constraints.load(path)


def problem(
    *tables: TableProfile,
    topology: Topology,
    batch_size: int = 64,
    asked: Constraints | None = None,
) -> Problem:
    """A problem of these tables."""
    return Problem(Profile(tables, source="golden"), topology, batch_size, asked or Constraints())


# What solvers are asked


@dataclass(frozen=True)
class SolverCase:
    """A problem, the cost model that judges, and limits that no clock has a part in."""

    make: Callable[[], Problem]
    model: str = "roofline"
    steps: int = 40
    seed: int = 0
    gap: float = 1e-3
    solvers: tuple[str, ...] = field(default_factory=lambda: tuple(SOLVERS))


FEW = ("auto", "greedy-size", "greedy-cost", "ilp", "beam", "dp")


def _mixed() -> tuple[TableProfile, ...]:
    return (
        zipf("a", 4000, 32, lookups=3.0, exponent=1.1),
        zipf("b", 2500, 16, lookups=1.0, exponent=0.8),
        zipf("c", 900, 64, lookups=5.0, exponent=1.3, coverage=0.7),
        zipf("d", 300, 16, lookups=1.0, optimizer="adam"),
        zipf("e", 40, 8, lookups=2.0, dtype="float16", optimizer="adagrad"),
    )


def _forbidding(*kinds: str) -> Constraints:
    return constraints(tables={"*": {"forbid": list(kinds)}})


SOLVER_CASES: dict[str, SolverCase] = {
    "roomy": SolverCase(lambda: problem(*_mixed(), topology=machine(2))),
    "tight-staged": SolverCase(
        lambda: problem(*_mixed(), topology=machine(2, hbm=420 * KIB, launch_s=1e-8)), seed=1
    ),
    "uva": SolverCase(
        lambda: problem(
            *_mixed(),
            topology=machine(2, hbm=380 * KIB),
            asked=_forbidding("staged", "cached", "host"),
        ),
        solvers=FEW,
    ),
    "cached": SolverCase(
        lambda: problem(
            counted("a", 3000, 32, lookups=4.0, seed=1),
            counted("b", 2000, 16, lookups=2.0, seed=2),
            zipf("c", 700, 16, lookups=1.0),
            topology=machine(2, hbm=280 * KIB, pcie=2e9),
            asked=_forbidding("staged", "host", "split"),
        ),
        solvers=FEW,
    ),
    "row-orders": SolverCase(
        lambda: problem(
            counted("a", 3000, 32, lookups=4.0, seed=1),
            counted("b", 2000, 16, lookups=2.0, seed=2),
            topology=machine(2, hbm=200 * KIB, pcie=2e9, launch_s=1e-8),
        ),
        solvers=("greedy-size", "greedy-cost", "beam"),
    ),
    "host": SolverCase(
        lambda: problem(
            *_mixed(),
            topology=machine(2, hbm=300 * KIB),
            asked=_forbidding("staged", "uva", "cached"),
        ),
        solvers=FEW,
    ),
    "constraints": SolverCase(
        lambda: problem(
            *_mixed(),
            zipf("f1", 1200, 16, exponent=1.2),
            zipf("f2", 800, 16, lookups=2.0),
            topology=machine(2, 2, hbm=512 * KIB, dram=8 * MIB),
            asked=constraints(
                tables={
                    "a": {"devices": ["host:1"]},
                    "b": {"tier": "dram", "forbid": ["uva"]},
                    "d": {"devices": ["gpu:0", "gpu:2"], "tier": "hbm"},
                    "f*": {"forbid": ["row-wise", "column-wise", "replicated"]},
                },
                together=[["f1", "f2"], ["c", "e"]],
                reserve={"gpu": 32 * KIB, "gpu:0": 64 * KIB, "host": MIB},
            ),
        ),
        seed=3,
    ),
    "unequal-hosts": SolverCase(
        lambda: problem(
            *_mixed(),
            zipf("g", 1500, 128, lookups=2.0, exponent=0.6),
            topology=machine(2, 2, hbm=960 * KIB, launch_s=1e-7, slow=True),
            batch_size=48,
        ),
        seed=2,
        solvers=("auto", "greedy-size", "greedy-cost", "beam", "dp"),
    ),
    "columns": SolverCase(
        lambda: problem(
            zipf("wide", 3000, 256, lookups=2.0, exponent=0.2),
            zipf("wider", 500, 512, lookups=6.0, exponent=0.4),
            zipf("narrow", 2000, 16),
            topology=machine(4, hbm=2 * MIB, pcie=1e9, launch_s=1e-8),
            asked=_forbidding("row-wise"),
        ),
        solvers=FEW,
    ),
    "rows-and-replicas": SolverCase(
        lambda: problem(
            zipf("hot", 200, 64, lookups=20.0, exponent=1.5),
            zipf("long", 9000, 32, lookups=8.0, exponent=1.0),
            zipf("tiny", 10, 64, lookups=4.0),
            topology=machine(2, 2, hbm=1200 * KIB, network=1e9, launch_s=1e-8),
            batch_size=32,
        )
    ),
    "row-slices": SolverCase(
        lambda: problem(
            zipf("long", 9000, 32, lookups=4.0),
            zipf("longer", 12_000, 16, lookups=2.0, exponent=0.7),
            zipf("tiny", 10, 64, lookups=4.0),
            topology=machine(2, 2, hbm=900 * KIB, launch_s=1e-8),
            batch_size=32,
            asked=constraints(tables={"long*": {"tier": "hbm", "forbid": ["column-wise"]}}),
        ),
        solvers=FEW,
    ),
    "features": SolverCase(
        lambda: problem(
            zipf("shared", 2500, 32, lookups=2.0, pooling=("sum", "mean", "sum")),
            zipf("unpooled", 1500, 32, lookups=5.0, coverage=0.5, pooling=("none",)),
            zipf("both", 600, 16, lookups=1.5, pooling=("none", "max")),
            counted("log", 1200, 16, lookups=1.0, seed=5),
            zipf("unread", 500, 16, pooling=()),
            topology=machine(3, hbm=640 * KIB, launch_s=1e-8),
            batch_size=32,
        ),
        seed=4,
    ),
    "calibrated": SolverCase(
        lambda: problem(*_mixed(), topology=machine(2, hbm=420 * KIB)), model="calibrated"
    ),
    "torchrec": SolverCase(
        lambda: problem(
            *_mixed(),
            zipf("wide", 700, 256, lookups=2.0),
            topology=machine(2, hbm=700 * KIB),
        ),
        model="torchrec",
        steps=20,
        solvers=("auto", "greedy-size", "greedy-cost", "beam", "dp"),
    ),
    "torchrec-prefetch": SolverCase(
        lambda: problem(*_mixed(), topology=machine(2, hbm=500 * KIB)),
        model="torchrec-prefetch",
        steps=20,
        solvers=("greedy-cost", "dp"),
    ),
    "infeasible": SolverCase(
        lambda: problem(*_mixed(), topology=machine(2, hbm=8 * KIB, dram=200 * KIB))
    ),
    "one-gpu": SolverCase(
        lambda: problem(*_mixed(), topology=machine(1, hbm=700 * KIB)), solvers=FEW
    ),
}

SOLVER_RUNS = [(case, name) for case, asked in SOLVER_CASES.items() for name in asked.solvers]


def model_of(name: str) -> CostModel:
    """A cost model by its name in `MODELS`."""
    return cost_model(MODELS[name])


def solved(case: str, solver: str) -> dict[str, Any]:
    """What a solver makes of a case: plan, times and why it ended."""
    asked = SOLVER_CASES[case]
    found = solve(
        asked.make(),
        solver,
        model_of(asked.model),
        time_limit_s=3600.0,
        gap=asked.gap,
        seed=asked.seed,
        threads=1,
        max_steps=asked.steps,
    )
    ended = found.termination
    return {
        "plan": None if found.plan is None else plan_record(found.plan),
        "step_time_s": found.step_time_s,
        "bound_s": found.bound_s,
        "reason": ended.reason,
        "limit": ended.limit,
        "shortages": [[s.device, s.resource, s.short_bytes] for s in ended.shortages],
    }


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan's file without what differs from run to run; of its row orders, hashes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        document = json.loads(path.read_text(encoding="utf-8"))
        orders = {}
        for name, order in sorted(document["row_order"].items()):
            orders[name] = [order["kind"]]
            if order["file"] is not None:
                ids = load_file(path.with_name(order["file"]))[name]
                orders[name].append(hashlib.sha256(ids.tobytes()).hexdigest())
    solver = document["solver"]
    return {
        # Compact: a list for each shard, of the values of its keys in their order.
        "shard_keys": list(document["shards"][0]) if document["shards"] else [],
        "shards": [list(shard.values()) for shard in document["shards"]],
        "row_order": orders,
        "batch_size": document["batch_size"],
        "status": solver["status"],
        "solver": solver["name"],
        "step_time_s": solver["step_time_s"],
        "bound_s": solver["bound_s"],
        "problem_sha256": document["provenance"]["problem_sha256"],
    }


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
        shards.append(
            {
                "table": table.name,
                "rows": list(rows),
                "cols": list(cols),
                "devices": [serving],
                "memory": "hbm" if lookup == "device" else "dram",
                "lookup": lookup,
                "cache_rows": cached,
                "staging_rows": staged,
                "buffer_bytes": int(rng.integers(0, 5000)),
            }
        )

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
            count = len(range(*slice_))
            if not count:
                continue
            shards.append(
                {
                    "table": table.name,
                    "rows": list(slice_),
                    "cols": list(strip),
                    "devices": list(gpus) if kind == "replicated" else [devices[number]],
                    "memory": "hbm" if lookup == "device" else "dram",
                    "lookup": lookup,
                    "cache_rows": max(1, round(count * share)) if lookup == "cached" else 0,
                    "staging_rows": 0,
                    "buffer_bytes": int(rng.integers(0, 5000)),
                }
            )
    return shards


def write_plan(base: Plan, shards: list[dict[str, Any]], path: Path) -> Path:
    """Write a plan of the same tables, devices and row orders with other shards."""
    base.save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["shards"] = shards
    path.write_text(json.dumps(sealed(document)), encoding="utf-8")
    return path


# What cost models are asked


def _costed() -> dict[str, Problem]:
    tables = (
        *_mixed(),
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


@cache
def costed_problems() -> dict[str, Problem]:
    """The problems that random plans are costed in; they are made once."""
    return _costed()


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


def batched_costs(problem_name: str, model_name: str) -> list[list[float]]:
    """Seconds of the shards of random plans, each alone on the last GPU.

    Replicas and shards on hosts are left out.
    """
    asked, model = costed_problems()[problem_name], model_of(model_name)
    gpus = [gpu.id for gpu in asked.topology.gpus]
    last, names = len(gpus) - 1, asked.profile.table_names
    found = []
    for plan in random_plans(problem_name)[:12]:
        shards = [s for s in plan.shards if len(s.devices) == 1 and s.devices[0] in gpus]
        columns = {s.table: {o.cols for o in shards if o.table == s.table} for s in shards}
        seconds = []
        for shard in shards:
            table, alone = names.index(shard.table), replace(shard, devices=(gpus[last],))
            costs = model.unit_costs(asked, table, last)  # type: ignore[attr-defined]
            works = work_of_group(asked, table, [alone], column_slices=len(columns[shard.table]))
            seconds.append(sum(sum(w.read_s(costs)[:2]) + w.extras.gpu_s(costs) for w in works))
        found.append(seconds)
    return found


CURVES = 40


def curves(problem_name: str, model_name: str) -> dict[str, Any]:
    """Cuts of each table, what one costs at least, and curves of some of their pieces."""
    from cost_models import shards_of

    asked, model = costed_problems()[problem_name], model_of(model_name)
    rng = np.random.default_rng(COST_PROBLEMS.index(problem_name))
    pieces, cuts = [], []
    for number, profile in enumerate(asked.profile):
        found = model.sharding_options(asked, number)
        cuts.append([cut_record(cut) for cut in found])
        pieces += [p for cut in found for p in shards_of(number, cut, profile.table.rows)]
    chosen = sorted(rng.choice(len(pieces), min(CURVES, len(pieces)), replace=False).tolist())
    last = len(asked.topology.gpus) - 1
    return {
        "cuts": hashlib.sha256(json.dumps(cuts).encode()).hexdigest(),
        "cuts_per_table": [len(found) for found in cuts],
        "first_cuts": [found[0] for found in cuts],
        "extra_cut_s": model.sharding_overhead_s(asked),
        "curves": [
            curve_record(model, asked, pieces[place], gpu)
            for turn, place in enumerate(chosen)
            for gpu in ([0, last] if turn % 8 == 0 and last else [turn % (last + 1)])
        ],
    }


def cut_record(cut: Any) -> list[Any]:
    """How a table is cut."""
    return [
        cut.row_slices,
        list(cut.column_widths),
        cut.replicated_rows,
        cut.cold,
        cut.blocked,
        float(cut.share),
    ]


def curve_record(model: CostModel, asked: Problem, piece: Any, gpu: int) -> dict[str, Any]:
    """The curve of a piece on a GPU: of each array its length, its sum and a few values."""
    curve = model.cost_curve(asked, piece, gpu)
    arrays = (curve.hot_rows, curve.gpu_s, curve.dram_s, curve.hbm_bytes, curve.dram_bytes)
    shown = np.unique(np.linspace(0, len(curve.hot_rows) - 1, 5).astype(int))
    return {
        "piece": [piece.table, cut_record(piece.option), piece.row_slice, piece.column_slice, gpu],
        "points": len(curve.hot_rows),
        "sums": [float(np.sum(array)) for array in arrays],
        "values": [array[shown].tolist() for array in arrays],
        "split": [float(curve.split_s), float(curve.split_hbm_bytes)],
    }


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
    return found


def memory_record(use: Any) -> list[int]:
    """Bytes on a device: what it has, by purpose, all, and what is left."""
    return [
        use.capacity_bytes, use.weight_bytes, use.state_bytes, use.cache_bytes,
        use.row_map_bytes, use.buffer_bytes, use.total_bytes, use.free_bytes,
    ]  # fmt: skip


# Replays


@dataclass(frozen=True)
class Replay:
    """A plan, and the other options of `placer simulate`; "LATER" and such stand for files."""

    plan: str
    options: tuple[str, ...]


_DAY = ("--data", "DAY")
_DRIFT = ("--data", "DAY", "--then", "NEXT")

REPLAYS: dict[str, Replay] = {
    **{
        f"cached-{policy}": Replay("cached", (*_DAY, "--cache-policy", policy))
        for policy in ("lfu", "rank")
    },
    **{
        f"random-{policy}": Replay(f"random-{number}", (*_DAY, "--cache-policy", policy))
        for number, policy in enumerate(("lfu", "rank"))
    },
    "planned": Replay("planned", _DAY),
    "planned-alone": Replay("planned", (*_DAY, "--no-look-ahead")),
    "planned-calibrated": Replay("planned", (*_DAY, "--cost-model", CALIBRATED)),
    "drawn": Replay("planned", ("--batches", "12", "--seed", "4")),
    "drawn-random": Replay("random-5", ("--batches", "9", "--seed", "1", "--batch-size", "5")),
    "drift": Replay("planned", (*_DRIFT, "--windows", "3")),
    "drift-rank": Replay("random-6", (*_DRIFT, "--windows", "2", "--cache-policy", "rank")),
    "against": Replay("planned", (*_DRIFT, "--against", "roomy", "--windows", "2")),
    "against-random": Replay(
        "random-7", (*_DRIFT, "--against", "cached", "--no-look-ahead", "--batches", "8")
    ),
    "two-hosts": Replay("hosts", _DAY),
    "two-hosts-random": Replay("random-hosts", (*_DAY, "--cache-policy", "rank")),
}

_SAMPLES = 600


def _write_log(path: Path, seed: int, shift: int) -> None:
    """A Parquet log of five features, of which one has bags; `shift` moves the hot rows."""
    rng = np.random.default_rng(seed)

    def ids(rows: int, number: int) -> np.ndarray:
        hot = (rows * rng.random(number) ** 3).astype(np.int64)
        return (hot * 7 + shift) % rows

    lengths = rng.integers(0, 5, _SAMPLES)
    flat = ids(400, int(lengths.sum())).tolist()
    ends = np.cumsum(lengths).tolist()
    bags = [flat[end - size : end] for end, size in zip(ends, lengths.tolist(), strict=True)]
    columns: dict[str, Any] = {"label": rng.integers(0, 2, _SAMPLES).astype(np.float32)}
    columns |= {f"C{n}": ids(rows, _SAMPLES) for n, rows in enumerate((800, 300, 60, 9))}
    columns["bags"] = pa.array(bags, pa.list_(pa.int64()))
    pq.write_table(pa.table(columns), path)


def make_replay_folder(folder: Path) -> Path:
    """Two logs, a profile of the first one, and plans for `REPLAYS`."""
    _write_log(folder / "day.parquet", 1, 0)
    _write_log(folder / "next.parquet", 2, 37)
    _run("profile", folder / "day.parquet", "--id-mapping", "hash", "--rows", "500",
         "--dim", "8", "-o", folder / "profile")  # fmt: skip
    _write_machine(folder / "one.yaml", hosts=1)
    _write_machine(folder / "two.yaml", hosts=2)
    made = {
        "planned": ("one.yaml", "40KiB", ()),
        "roomy": ("one.yaml", "70KiB", ()),
        "cached": ("one.yaml", "44KiB", ("--constraints", folder / "cached.yaml")),
        "hosts": ("two.yaml", "30KiB", ()),
    }
    (folder / "cached.yaml").write_text(
        yaml.safe_dump({"tables": {"*": {"forbid": ["staged", "host", "split"]}}}),
        encoding="utf-8",
    )
    for name, (topology, hbm, more) in made.items():
        _run("plan", "--profile", folder / "profile", "--topology", folder / topology,
             "--hbm", hbm, "--batch-size", "16", "--solver", "greedy-cost", "--steps", "20",
             "--time-limit", "3600", *more, "-o", folder / f"{name}.json")  # fmt: skip
    for number in range(8):
        _write_random(folder, "planned", f"random-{number}", number)
    _write_random(folder, "hosts", "random-hosts", 8)
    return folder


def _write_machine(path: Path, hosts: int) -> None:
    lines: dict[str, Any] = {
        "name": "golden",
        "hosts": [{"id": f"host:[0-{hosts - 1}]", "memory": "1GiB", "dram_bandwidth": "50GB/s"}],
        "gpus": [
            {"id": f"gpu:[{2 * h}-{2 * h + 1}]", "host": f"host:{h}", "memory": "1GiB",
             "hbm_bandwidth": "200GB/s", "launch_s": 1e-8}
            for h in range(hosts)
        ],
        "links": [
            {"a": f"gpu:[{2 * h}-{2 * h + 1}]", "b": f"host:{h}", "kind": "pcie",
             "bandwidth": "0.1GB/s"}
            for h in range(hosts)
        ],
    }  # fmt: skip
    if hosts > 1:
        lines["links"].append({"a": f"host:[0-{hosts - 1}]", "b": "network", "kind": "network",
                               "bandwidth": "1GB/s"})  # fmt: skip
    path.write_text(yaml.safe_dump(lines), encoding="utf-8")


def _write_random(folder: Path, base: str, name: str, seed: int) -> None:
    plan = Plan.load(folder / f"{base}.json")
    shards = random_shards(plan.tables, plan.topology, np.random.default_rng([99, seed]))
    for shard in shards:  # A host with GPUs serves through the first of them.
        attached = plan.topology.gpus_of(shard["devices"][0])
        shard["devices"] = [attached[0].id] if attached else shard["devices"]
    write_plan(plan, shards, folder / f"{name}.json")


def _run(*arguments: str | Path) -> str:
    """What a command prints, in this process; it has to end well."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def replayed(folder: Path, name: str) -> dict[str, Any]:
    """What `placer simulate` counts and times, of steps in a compact form."""
    replay = REPLAYS[name]
    files = {"DAY": "day.parquet", "NEXT": "next.parquet", "roomy": "roomy.json",
             "cached": "cached.json"}  # fmt: skip
    options = [folder / files[text] if text in files else text for text in replay.options]
    printed = _run("simulate", folder / f"{replay.plan}.json", *options, "--format", "json")
    found: dict[str, Any] = json.loads(printed)
    steps = found.pop("steps_in_order")
    found["step_keys"] = list(steps[0])
    found["steps_in_order"] = [list(step.values()) for step in steps]
    for window in found.get("windows", []):
        del window["window"]
    return found
