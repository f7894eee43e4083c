"""Slow-memory accesses, load balance and step time of plans for RecShard's models."""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _problems import Case
from _recshard_report import SOLVERS, plot, print_plans, ratios, tables
from _runs import Effort, solve_apart

from cost_models import cost_model
from cost_models.step_equation.slice_load import slice_load
from placer import Plan, Problem
from placer.data.log import Bags, Chunk
from placer.plan.shard import Shard
from placer.profile.zipf import ZipfMandelbrot
from placer.simulator.replay import ReplayOptions, Simulator
from placer.units import format_bytes

Int = npt.NDArray[np.int64]

__all__ = ["MODELS", "TIME_LIMIT_S", "plot", "run", "tables"]

MODELS = ("rm1", "rm2", "rm3")
MACHINE, DRAM, GPUS, BATCH_SIZE = "16xa100-80.yaml", "2TiB", 16, 4096
CHECKED_SAMPLES = 4096
"""Samples of the batch that goes through the simulator too."""
TIME_LIMIT_S, GREEDY_LIMIT_S = 20.0, 120.0
ROOM = 1.25
"""HBM over bytes of the tables at which everything fits, buffers included."""

PUBLISHED = {
    "source": "Sethi et al., ASPLOS 2022, doi:10.1145/3503222.3507777, abstract",
    "slow_access_ratio": 87.0,
    "balance_ratio": 12.0,
    "throughput_ratio": 6.0,
}


@dataclass(frozen=True, slots=True)
class SlowReads:
    """What a step reads from host memory, in rows of the table's full width.

    Attributes
    ----------
    lookups, rows : float
        Lookups of rows in host memory, and distinct such rows of each shard.
    of_lookups : float
        All lookups of the step.
    """

    lookups: float
    rows: float
    of_lookups: float


def cases(models: Iterable[str]) -> Iterator[tuple[str, str, Case]]:
    """Model, memory, problem: 24 GiB as published; all, half and a quarter of the tables."""
    for model in models:
        whole = Case(f"{model}-24GiB", f"recshard-{model}", MACHINE, "24GiB", DRAM, BATCH_SIZE)
        yield model, "24 GiB", whole
        total = whole.problem().profile.total_bytes
        for memory, share in (("all", ROOM), ("half", 0.5), ("quarter", 0.25)):
            hbm = f"{int(total * share / GPUS) >> 20}MiB"
            yield model, memory, replace(whole, name=f"{model}-{memory}", hbm=hbm)


def expected_reads(problem: Problem, plan: Plan) -> SlowReads:
    """By the access CDFs, as the cost model has them."""
    by_name = {profile.name: profile for profile in problem.profile}
    return _summed(
        plan,
        {
            shard: slice_load(by_name[shard.table], shard.rows, _step_lookups(problem, shard))
            for shard in plan.shards
        },
    )


class DrawnBatch:
    """One batch of independent lookups by rank, drawn from a profile whose skew is Zipf's.

    Attributes
    ----------
    lookups : dict of table name to (ranks, counts)
        Distinct ranks, ascending, and the lookups of each.
    """

    def __init__(self, drawn: Iterable[tuple[str, Int]]) -> None:
        self.lookups = {name: np.unique(ranks, return_counts=True) for name, ranks in drawn}

    def reads(self, plan: Plan) -> SlowReads:
        """Rows of this batch that a plan reads from host memory, counted."""
        cold = {(s.lookup, len(s.devices)) for s in plan.shards if s.memory == "dram"}
        if not cold <= {("staged", 1), ("uva", 1)}:
            raise SystemExit(f"rows in host memory are read by {cold}, which is not counted here")
        return _summed(plan, {shard: self._within(shard) for shard in plan.shards})

    def _within(self, shard: Shard) -> tuple[float, float]:
        ranks, counts = self.lookups[shard.table]
        start, stop, step = shard.rows
        here = slice(*np.searchsorted(ranks, (start, stop)))
        member = (ranks[here] - start) % step == 0
        share = 1 / len(shard.devices)
        return float(counts[here][member].sum()) * share, float(member.sum())


def drawn(problem: Problem, seed: int = 0) -> Iterator[tuple[str, Int]]:
    """Ranks that a batch looks up, table by table."""
    rng = np.random.default_rng(seed)
    for profile in problem.profile:
        assert profile.zipf_exponent is not None, "drawn workloads have one"
        law = ZipfMandelbrot(profile.table.rows, profile.zipf_exponent)
        size = round(problem.global_batch_size * profile.table.lookups_per_sample)
        yield profile.name, law.draw(rng, size)


def simulated(problem: Problem, plan: Plan) -> dict[str, Any]:
    """A smaller batch through the simulator, beside the expectation and the count made here."""
    small = replace(problem, batch_size=CHECKED_SAMPLES // GPUS)
    ids = dict(drawn(small, seed=1))
    samples = small.global_batch_size
    # Bags as even as whole lookups allow: nothing that is compared depends on them.
    bags = {
        plan.tables_by_name[name].features[0].name: Bags(
            ranks, np.linspace(0, ranks.size, samples + 1).astype(np.int64)
        )
        for name, ranks in ids.items()
    }
    simulator = Simulator(plan, ReplayOptions(look_ahead=False))
    chunk = Chunk(samples, bags, np.empty((samples, 0), dtype=np.float32))
    (total,) = simulator.run([chunk])
    slow = np.zeros(2)
    for part, lookups, rows in zip(
        simulator.arrangement.parts, total.parts.lookups, total.parts.rows, strict=True
    ):
        if plan.shards[part.shard].memory == "dram":
            width = (part.cols[1] - part.cols[0]) / plan.tables[part.table].dim
            slow += np.array([lookups, rows]) * width
    counted, expected = DrawnBatch(ids.items()).reads(plan), expected_reads(small, plan)
    return {
        "samples": samples,
        "slow_lookups": float(slow[0]),
        "slow_rows": float(slow[1]),
        "counted_slow_lookups": counted.lookups,
        "counted_slow_rows": counted.rows,
        "expected_slow_lookups": expected.lookups,
        "expected_slow_rows": expected.rows,
    }


def _step_lookups(problem: Problem, shard: Shard) -> float:
    profile = next(profile for profile in problem.profile if profile.name == shard.table)
    return problem.global_batch_size / len(shard.devices) * profile.table.lookups_per_sample


def _summed(plan: Plan, read: Mapping[Shard, tuple[float, float]]) -> SlowReads:
    slow = np.zeros(2)
    everything = 0.0
    for shard, (lookups, rows) in read.items():
        weight = shard.width / plan.tables_by_name[shard.table].dim * len(shard.devices)
        everything += lookups * weight
        if shard.memory == "dram":
            slow += np.array([lookups, rows]) * weight
    return SlowReads(float(slow[0]), float(slow[1]), everything)


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """How unlike the GPUs' times are: standard deviation, and maximum over mean."""
    times = np.array(list(seconds))
    return {
        "mean_s": float(times.mean()),
        "max_s": float(times.max()),
        "min_s": float(times.min()),
        "std_s": float(times.std()),
        "max_over_mean": float(times.max() / times.mean()),
    }


def judged(problem: Problem, plan: Plan, batch: DrawnBatch) -> dict[str, Any]:
    """Everything that is reported of a plan.

    `staged` is as the plan has it; `in_place` as if rows in DRAM were read over the link one
    by one, which is what RecShard's system and its rivals do.
    """
    model = cost_model("roofline")
    in_place = replace(
        plan,
        shards=tuple(
            replace(shard, lookup="uva", staging_rows=0) if shard.lookup == "staged" else shard
            for shard in plan.shards
        ),
    )
    expected, counted = expected_reads(problem, plan), batch.reads(plan)
    record: dict[str, Any] = {
        "split_tables": _split_tables(plan),
        "slow_lookups": counted.lookups,
        "slow_rows": counted.rows,
        "slow_share": counted.lookups / counted.of_lookups,
        "expected_slow_lookups": expected.lookups,
        "expected_slow_rows": expected.rows,
    }
    for name, variant in (("staged", plan), ("in_place", in_place)):
        report = model.evaluate(problem, variant)
        record[name] = {
            "step_time_s": report.step_time_s,
            # Without exchanges and launches: RecShard reports the embedding operators alone.
            "lookups": spread(gpu.hbm_s + gpu.link_s for gpu in report.gpus),
        }
    return record


def _split_tables(plan: Plan) -> int:
    tiers: dict[str, set[str]] = defaultdict(set)
    for shard in plan.shards:
        tiers[shard.table].add(shard.memory)
    return sum(len(found) > 1 for found in tiers.values())


def run(models: Iterable[str], time_limit_s: float) -> dict[str, Any]:
    """Solve, count and judge all cases; a record of each."""
    records: list[dict[str, Any]] = []
    batches: dict[str, DrawnBatch] = {}
    for model, memory, case in cases(models):
        problem = case.problem()
        if model not in batches:
            batches = {model: DrawnBatch(drawn(problem))}  # One at a time: they are large.
        hbm = problem.topology.gpus[0].memory_bytes
        print(f"\n{case.name}: {format_bytes(hbm)} of HBM a GPU", flush=True)
        plans: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="slow-memory-") as folder:
            runs = solve_apart(
                case, problem, SOLVERS[:-1], Effort(GREEDY_LIMIT_S), folder=Path(folder)
            )
            runs += solve_apart(
                case, problem, SOLVERS[-1:], Effort(time_limit_s), folder=Path(folder)
            )
            for one in runs:
                if one.step_time_s is None:
                    print(f"  {one.solver}: no plan: {one.fault or one.detail or one.reason}")
                    continue
                plan = Plan.load(Path(folder) / f"{one.solver}.json")
                plans[one.solver] = judged(problem, plan, batches[model])
                if memory == "half":
                    plans[one.solver]["simulated"] = simulated(problem, plan)
        print_plans(plans)
        records.append(
            {
                "model": model,
                "memory": memory,
                "hbm_bytes_per_gpu": hbm,
                "table_bytes": problem.profile.total_bytes,
                "lookups_per_step": sum(
                    int(counts.sum()) for _, counts in batches[model].lookups.values()
                ),
                "skew": problem.profile.source,
                "plans": plans,
                "ratio_to_best_classic": ratios(plans),
            }
        )
    return {"published": PUBLISHED, "cases": records}
