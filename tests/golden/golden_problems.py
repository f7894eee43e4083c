"""Small problems that solvers are asked; their plans are recorded."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from golden_store import DATA
from safetensors.numpy import load_file

from cost_models import CostModel, cost_model
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
from placer.profile.table_profile import RowCounts
from solvers import SOLVERS, solve

CALIBRATED = f"calibrated:{DATA / 'calibration.json'}"
MODELS = {name: name for name in ("roofline", "calibrated", "torchrec", "torchrec-prefetch")}
MODELS["calibrated"] = CALIBRATED
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
        lines["hosts"].append({"id": at, "memory": f"{dram}B", "dram_bandwidth": 1e11})
        if hosts > 1:
            lines["links"].append({"a": at, "b": "network", "kind": "network",
                                   "bandwidth": network, "latency_s": 5e-6})  # fmt: skip
        worse = slow and host == hosts - 1
        for gpu in range(host * gpus, (host + 1) * gpus):
            memory, rate = (hbm // 3, 5e11) if worse else (hbm, 1e12)
            lines["gpus"].append({"id": f"gpu:{gpu}", "host": at, "memory": f"{memory}B",
                                  "hbm_bandwidth": rate, "launch_s": launch_s})  # fmt: skip
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


MIXED = (
    zipf("a", 4000, 32, lookups=3.0, exponent=1.1),
    zipf("b", 2500, 16, lookups=1.0, exponent=0.8),
    zipf("c", 900, 64, lookups=5.0, exponent=1.3, coverage=0.7),
    zipf("d", 300, 16, lookups=1.0, optimizer="adam"),
    zipf("e", 40, 8, lookups=2.0, dtype="float16", optimizer="adagrad"),
)
COUNTED = counted("a", 3000, 32, lookups=4.0, seed=1), counted("b", 2000, 16, lookups=2.0, seed=2)
TINY = zipf("tiny", 10, 64, lookups=4.0)


@dataclass(frozen=True)
class SolverCase:
    """A problem, the cost model that judges, and limits that no clock has a part in."""

    tables: tuple[TableProfile, ...]
    machine: dict[str, Any]
    """What `machine` is given."""

    asked: dict[str, Any] = field(default_factory=dict)
    """What `constraints` are given."""

    batch_size: int = 64
    model: str = "roofline"
    steps: int = 40
    seed: int = 0
    gap: float = 1e-3
    solvers: tuple[str, ...] = field(default_factory=lambda: tuple(SOLVERS))

    def make(self) -> Problem:
        topology, asked = machine(**self.machine), constraints(**self.asked)
        return problem(*self.tables, topology=topology, batch_size=self.batch_size, asked=asked)


FEW = ("auto", "greedy-size", "greedy-cost", "ilp", "beam", "dp")
FIVE = ("auto", "greedy-size", "greedy-cost", "beam", "dp")


def forbidding(*kinds: str) -> dict[str, Any]:
    return {"tables": {"*": {"forbid": list(kinds)}}}


def in_hbm(tables: str) -> dict[str, Any]:
    return {"tables": {tables: {"tier": "hbm", "forbid": ["column-wise"]}}}


SOLVER_CASES: dict[str, SolverCase] = {
    "roomy": SolverCase(MIXED, {"gpus": 2}),
    "tight-staged": SolverCase(MIXED, {"hbm": 420 * KIB, "launch_s": 1e-8}, seed=1),
    "uva": SolverCase(
        MIXED, {"hbm": 380 * KIB}, forbidding("staged", "cached", "host"), solvers=FEW
    ),
    "cached": SolverCase(
        (*COUNTED, zipf("c", 700, 16, lookups=1.0)),
        {"hbm": 280 * KIB, "pcie": 2e9},
        forbidding("staged", "host", "split"),
        solvers=FEW,
    ),
    "row-orders": SolverCase(
        COUNTED,
        {"hbm": 200 * KIB, "pcie": 2e9, "launch_s": 1e-8},
        solvers=("greedy-size", "greedy-cost", "beam"),
    ),
    "host": SolverCase(
        MIXED, {"hbm": 300 * KIB}, forbidding("staged", "uva", "cached"), solvers=FEW
    ),
    "constraints": SolverCase(
        (*MIXED, zipf("f1", 1200, 16, exponent=1.2), zipf("f2", 800, 16, lookups=2.0)),
        {"hosts": 2, "hbm": 512 * KIB, "dram": 8 * MIB},
        {
            "tables": {
                "a": {"devices": ["host:1"]},
                "b": {"tier": "dram", "forbid": ["uva"]},
                "d": {"devices": ["gpu:0", "gpu:2"], "tier": "hbm"},
                "f*": {"forbid": ["row-wise", "column-wise", "replicated"]},
            },
            "together": [["f1", "f2"], ["c", "e"]],
            "reserve": {"gpu": "32KiB", "gpu:0": "64KiB", "host": MIB},
        },
        seed=3,
    ),
    "unequal-hosts": SolverCase(
        (*MIXED, zipf("g", 1500, 128, lookups=2.0, exponent=0.6)),
        {"hosts": 2, "hbm": 960 * KIB, "launch_s": 1e-7, "slow": True},
        batch_size=48,
        seed=2,
        solvers=FIVE,
    ),
    "columns": SolverCase(
        (
            zipf("wide", 3000, 256, lookups=2.0, exponent=0.2),
            zipf("wider", 500, 512, lookups=6.0, exponent=0.4),
            zipf("narrow", 2000, 16),
        ),
        {"gpus": 4, "hbm": 2 * MIB, "pcie": 1e9, "launch_s": 1e-8},
        forbidding("row-wise"),
        solvers=FEW,
    ),
    "rows-and-replicas": SolverCase(
        (
            zipf("hot", 200, 64, lookups=20.0, exponent=1.5),
            zipf("long", 9000, 32, lookups=8.0, exponent=1.0),
            TINY,
        ),
        {"hosts": 2, "hbm": 1200 * KIB, "network": 1e9, "launch_s": 1e-8},
        batch_size=32,
    ),
    "row-slices": SolverCase(
        (
            zipf("long", 9000, 32, lookups=4.0),
            zipf("longer", 12_000, 16, lookups=2.0, exponent=0.7),
            TINY,
        ),
        {"hosts": 2, "hbm": 900 * KIB, "launch_s": 1e-8},
        in_hbm("long*"),
        batch_size=32,
        solvers=FEW,
    ),
    "counted-slices": SolverCase(
        (counted("long", 9000, 32, lookups=4.0, seed=1), TINY),
        {"hbm": 900 * KIB, "launch_s": 1e-8},
        in_hbm("long"),
        solvers=("greedy-cost",),
    ),
    "features": SolverCase(
        (
            zipf("shared", 2500, 32, lookups=2.0, pooling=("sum", "mean", "sum")),
            zipf("unpooled", 1500, 32, lookups=5.0, coverage=0.5, pooling=("none",)),
            zipf("both", 600, 16, lookups=1.5, pooling=("none", "max")),
            counted("log", 1200, 16, lookups=1.0, seed=5),
            zipf("unread", 500, 16, pooling=()),
        ),
        {"gpus": 3, "hbm": 640 * KIB, "launch_s": 1e-8},
        batch_size=32,
        seed=4,
    ),
    "calibrated": SolverCase(MIXED, {"hbm": 420 * KIB}, model="calibrated"),
    "torchrec": SolverCase(
        (*MIXED, zipf("wide", 700, 256, lookups=2.0)),
        {"hbm": 700 * KIB},
        model="torchrec",
        steps=20,
        solvers=FIVE,
    ),
    "torchrec-prefetch": SolverCase(
        MIXED,
        {"hbm": 500 * KIB},
        model="torchrec-prefetch",
        steps=20,
        solvers=("greedy-cost", "dp"),
    ),
    "infeasible": SolverCase(MIXED, {"hbm": 8 * KIB, "dram": 200 * KIB}),
    "one-gpu": SolverCase(MIXED, {"gpus": 1, "hbm": 700 * KIB}, solvers=FEW),
}

SOLVER_RUNS = [(case, name) for case, asked in SOLVER_CASES.items() for name in asked.solvers]


def model_of(name: str) -> CostModel:
    """A cost model by its name in `MODELS`."""
    return cost_model(MODELS[name])


def solved(case: str, solver: str, steps: int | None = None) -> dict[str, Any]:
    """What a solver makes of a case, in all of its steps or fewer: plan, times, why it ended."""
    asked = SOLVER_CASES[case]
    found = solve(
        asked.make(),
        solver,
        model_of(asked.model),
        time_limit_s=3600.0,
        gap=asked.gap,
        seed=asked.seed,
        threads=1,
        max_steps=steps or asked.steps,
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
