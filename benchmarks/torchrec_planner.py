"""TorchRec's own planner on our problems, and our plans rated by TorchRec.

    python benchmarks/torchrec_planner.py [--prefetch] [--proposers default,dynamic,placer,...]
                                          [WORKLOAD:HBM ...]

such as ``mlperf-dcnv2:8GiB``; by default those of `PROBLEMS` and DCNv2. Hours, on two cores. Every
run is a row of a file in benchmarks/results/, in place of the row of an earlier one.

Both sides are told the same: tables on the meta device with their optimizer, mean ids per
sample, distinct rows of a global batch and misses of a cache over load factors (from the
profile's CDF), HBM of each rank net of everything else (nothing is reserved beyond it), and
TorchRec's default bandwidths. Host memory is each rank's part of its host's, which is how
TorchRec takes it. TorchRec rates every plan, by its perf model: the time of the slowest rank.

Replicas are left out on both sides. A table whose load factor is left open gets TorchRec's default
cache of a fifth of its rows,
and then the planner forgets to charge the misses. So the factor is told, unless --open, and
what is reported is the time with misses either way.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import RESULTS, machine, slug, versions
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.planners import (
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

from cost_models import TableShard, TorchRec, shards_of
from cost_models.torchrec.estimates import MODULE_PATHS, OPTIMIZERS, Estimates, input_lengths
from placer import Plan, Problem, Topology
from placer.adapters.torchrec.sharding import sharding_of
from placer.files.atomic import write_text
from placer.units import format_bytes, format_seconds
from placer.workloads import named_workload
from solvers import PlacerPlanner

LOAD_FACTOR = UVM_CACHING_RATIO

PROPOSERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,  # Grid search, two greedies, uniform.
    "greedy": GreedyProposer,
    "dynamic": DynamicProgrammingProposer,
    "scale-up": EmbeddingOffloadScaleupProposer,
}

PLACER = "placer"
"""In the place of a proposer: `PlacerPlanner`, whose load factors are open."""

SHARDING_TYPES = [
    "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise"
]  # fmt: skip
"""Replicas are left out: TorchRec does not apply an optimizer of the backward pass to them."""

PROBLEMS = {
    # Of a thousand seeds, those whose tables come closest to 369 and 807 GiB.
    **{f"random-400@{seed}": "23GiB" for seed in (422, 369, 833)},
    **{f"random-856@{seed}": "50GiB" for seed in (916, 202, 529)},
}
"""Drawn workloads, and the HBM of each rank."""

DCNV2_HBM = ("8GiB", "16GiB", "80GiB")
"""Of each rank, for the workload ``mlperf-dcnv2``."""


def server(workload: str, hbm: str) -> Problem:
    """A workload on eight ranks, 8,192 samples each."""
    return Problem(named_workload(workload), Topology.parse("8xh100", hbm=hbm), 8192)


@dataclass(frozen=True, slots=True)
class Rating:
    """What TorchRec says of a plan: the slowest rank's time, storage by rank, whether it fits.

    `sharding_plan` is the plan as TorchRec takes it, whose own checks have passed, and `options`
    the plan as its planner has it.
    """

    step_time_s: float
    hbm_bytes: tuple[int, ...]
    ddr_bytes: tuple[int, ...]
    fits: bool
    sharding_plan: ShardingPlan
    options: list[ShardingOption]


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """One run of TorchRec's planner: its plan, or why there is none.

    `claimed_s` is the rating by which the planner chose, and `seconds` what it took, from the
    model on the meta device to the plan.
    """

    proposer: str
    rating: Rating | None
    claimed_s: float | None
    seconds: float
    message: str = ""


class Contender:
    """TorchRec's planner and estimators for one problem.

    Parameters
    ----------
    load_factor : float or None
        Of caches, where the proposer does not choose it; None leaves it open.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        prefetch_pipeline: bool = False,
        load_factor: float | None = LOAD_FACTOR,
        min_partition: int | None = None,
        bandwidths: Any = "torchrec",
    ) -> None:
        self.problem = problem
        self.estimates = Estimates(problem, prefetch_pipeline, bandwidths)
        self.topology = self.estimates.topology
        self.model = torchrec_model(problem)
        self.sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        self._min_partition = min_partition
        self._load_factor = load_factor

    def constraints(self, load_factor: float | None) -> dict[str, ParameterConstraints]:
        """What TorchRec is told of each table; None leaves load factors open."""
        return {
            profile.name: ParameterConstraints(
                sharding_types=SHARDING_TYPES,
                min_partition=self._min_partition,
                pooling_factors=input_lengths(profile.table)[0],
                cache_params=self.estimates.cache_params(profile, load_factor),
            )
            for profile in self.problem.profile
        }

    def run(self, proposer: str, timeout_s: int | None = None) -> PlannerRun:
        """Plan with one of `PROPOSERS` or `PLACER`; enumeration is part of the time."""
        started = time.perf_counter()
        ours = proposer == PLACER
        planner = (PlacerPlanner if ours else EmbeddingShardingPlanner)(
            topology=self.topology,
            batch_size=self.problem.batch_size,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=None if ours else PROPOSERS[proposer](),
            constraints=self.constraints(None if ours else self._load_factor),
            stats=[],
            debug=False,
            timeout_seconds=timeout_s,
        )
        try:
            planner.plan(self.model, self.sharders)
        except PlannerError as error:
            message = str(error).strip().splitlines()[0]
            return PlannerRun(proposer, None, None, time.perf_counter() - started, message)
        seconds = time.perf_counter() - started
        options = planner._best_plan
        claimed_s = NoopPerfModel(self.topology).rate(options) / 1000
        for option in options:
            # What the kernel will take, so that its misses are charged.
            if option.compute_kernel == "fused_uvm_caching" and option.cache_load_factor is None:
                option.cache_params.load_factor = LOAD_FACTOR
        return PlannerRun(proposer, self.rate(options), claimed_s, seconds)

    def rate(self, options: list[ShardingOption]) -> Rating:
        """Have TorchRec estimate, check and rate placed options."""
        self.estimates.estimate(options)
        sharding_plan = to_sharding_plan(options, self.topology)
        validate_modules_inclusion_in_sharding_plan(sharding_plan, self.model, self.sharders)
        validate_rank_assignment(sharding_plan, self.topology)
        validate_compute_kernels(options)
        ranks = range(self.topology.world_size)
        hbm, ddr = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        for option in options:
            for shard in option.shards:
                hbm[shard.rank] += shard.storage.hbm
                ddr[shard.rank] += shard.storage.ddr
        return Rating(
            NoopPerfModel(self.topology).rate(options) / 1000,
            tuple(hbm.values()),
            tuple(ddr.values()),
            all(
                hbm[device.rank] <= device.storage.hbm and ddr[device.rank] <= device.storage.ddr
                for device in self.topology.devices
            ),
            sharding_plan,
            options,
        )

    def rate_plan(self, plan: Plan) -> Rating:
        """TorchRec's rating of a plan of ours; PlanMismatchError if it has no such placement."""
        topology, options = self.problem.topology, []
        for profile in self.problem.profile:
            sharding = sharding_of(topology, profile.table, plan.shards_by_table[profile.name])
            options.append(self.estimates.option(profile, sharding))
        return self.rate(options)


def torchrec_model(problem: Problem) -> nn.Module:
    """The problem's tables as TorchRec's modules on the meta device."""
    pooled, unpooled = [], []
    for profile in problem.profile:
        table = profile.table
        shared: dict[str, Any] = {
            "name": table.name,
            "num_embeddings": max(1, table.rows),
            "embedding_dim": table.dim,
            "feature_names": [f"{table.name}/{feature.name}" for feature in table.features],
            "data_type": DataType[table.dtype.replace("bfloat", "BF").replace("float", "FP")],
        }
        if input_lengths(table)[1]:
            mean = any(feature.pooling == "mean" for feature in table.features)
            pooling = PoolingType.MEAN if mean else PoolingType.SUM
            pooled.append(EmbeddingBagConfig(**shared, pooling=pooling))
        else:
            unpooled.append(EmbeddingConfig(**shared))
    model, where = nn.Module(), torch.device("meta")
    if pooled:
        model.add_module(MODULE_PATHS[True], EmbeddingBagCollection(tables=pooled, device=where))
    if unpooled:
        model.add_module(MODULE_PATHS[False], EmbeddingCollection(tables=unpooled, device=where))
    for name, parameter in model.named_parameters():
        table = problem.profile[name.split(".")[-2]].table
        parameter._optimizer_classes = [OPTIMIZERS[table.optimizer]]  # As TorchRec marks them.
    return model


def pooled_bound_s(problem: Problem, model: TorchRec) -> float:
    """A lower limit of the slowest rank's time over plans with load factors of the curves' points.

    All HBM is one pool, every table takes any mixture of its options, and the ranks share the
    sum of the times evenly. A plan with load factors in between may be below it.
    """
    ranks = len(problem.topology.gpus)
    hbm = float(sum(gpu.memory_bytes for gpu in problem.topology.gpus))
    total_s, steps = 0.0, []
    for number in range(len(problem.profile)):
        corners = _hull(np.array(sorted(_option_points(problem, model, number, ranks))))
        hbm -= corners[0, 0]
        total_s += corners[0, 1]
        steps.extend(np.diff(corners, axis=0))
    for extra, saved in sorted(steps, key=lambda step: step[1] / step[0]):
        part = min(1.0, hbm / extra) if hbm > 0 else 0.0
        hbm -= extra
        total_s += part * saved
    return total_s / ranks


def _option_points(
    problem: Problem, model: TorchRec, number: int, ranks: int
) -> Iterable[tuple[float, float]]:
    rows = problem.profile.tables[number].table.rows
    for option in model.sharding_options(problem, number):
        if option.replicated_rows:
            shards = [TableShard.replica(number, option)] * ranks
        else:
            shards = shards_of(number, option, rows)
        curves = [model.cost_curve(problem, shard, 0) for shard in shards]
        largest = curves[0]
        shares = largest.hot_rows / max(1, largest.hot_rows[-1])
        hbm = sum(
            np.interp(shares * curve.hot_rows[-1], curve.hot_rows, curve.hbm_bytes)
            for curve in curves
        )
        yield from zip(hbm, largest.gpu_s * len(curves), strict=True)


def _hull(points: Any) -> Any:
    """Corners of the lower convex hull of (bytes, seconds), while seconds fall."""
    corners: list[Any] = []
    for point in points:
        if corners and point[1] >= corners[-1][1]:
            continue
        if corners and point[0] == corners[-1][0]:
            corners.pop()
        while len(corners) > 1:
            (a, s), (b, t) = corners[-2:]
            if (t - s) * (point[0] - a) < (point[1] - s) * (b - a):
                break
            corners.pop()
        corners.append(point)
    return np.array(corners)


def quiet() -> None:
    """Silence TorchRec's advice on how to set it up."""
    warnings.filterwarnings("ignore", module="torchrec")
    logging.getLogger().setLevel(logging.ERROR)  # Its checks log to the root.


def keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row of results, in place of an earlier one of the same run."""
    asked = ("workload", "hbm", "prefetch", "open", "proposer")
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    rows = [one for one in rows if any(one[key] != row[key] for key in asked)]
    rows.append(
        row | {"versions": versions("torch", "torchrec"), "date": f"{datetime.now(UTC):%F}"}
    )
    rows.sort(key=lambda one: [str(one[key]) for key in asked])
    data = {"benchmark": "planners under TorchRec's perf model", "machine": machine(), "runs": rows}
    write_text(path, json.dumps(data, indent=1) + "\n")


def main() -> None:
    """Run the planner on problems and print what TorchRec says of its plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", metavar="WORKLOAD:HBM")
    parser.add_argument("--proposers", default=",".join((*PROPOSERS, PLACER)))
    parser.add_argument("--prefetch", action="store_true", help="with the prefetching pipeline")
    parser.add_argument("--open", action="store_true", help="leave load factors open")
    parser.add_argument("--timeout", type=int, help="seconds for each run of the planner")
    results = RESULTS / f"torchrec-planner-{slug()}.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    quiet()
    chosen = [tuple(name.rsplit(":", 1)) for name in options.problems] or [
        *PROBLEMS.items(),
        *(("mlperf-dcnv2", hbm) for hbm in DCNV2_HBM),
    ]
    for name, hbm in chosen:
        problem = server(name, hbm)
        bound_s = pooled_bound_s(problem, TorchRec(prefetch_pipeline=options.prefetch))
        print(
            f"{name}: {len(problem.profile)} tables of "
            f"{format_bytes(problem.profile.total_bytes)} on {len(problem.topology.gpus)} ranks "
            f"of {format_bytes(problem.topology.gpus[0].memory_bytes)}, "
            f"pooled bound {format_seconds(bound_s)}",
            flush=True,
        )
        factor = None if options.open else LOAD_FACTOR
        contender = Contender(problem, prefetch_pipeline=options.prefetch, load_factor=factor)
        for proposer in options.proposers.split(","):
            run = contender.run(proposer, options.timeout)
            row: dict[str, Any] = {
                "workload": name,
                "hbm": hbm,
                "prefetch": options.prefetch,
                "open": options.open,
                "proposer": proposer,
                "seconds": round(run.seconds, 2),
                "step_time_s": run.rating and run.rating.step_time_s,
                "fits": run.rating and run.rating.fits,
                "pooled_bound_s": bound_s,
                "message": run.message,
            }
            keep(options.output, row)
            if run.rating is None:
                print(f"  {proposer:<10}{run.seconds:>9.1f} s  {run.message}", flush=True)
                continue
            print(
                f"  {proposer:<10}{run.seconds:>9.1f} s"
                f"{format_seconds(run.rating.step_time_s):>12}"
                f"{run.rating.step_time_s / bound_s:>8.3f}x  claimed "
                f"{format_seconds(run.claimed_s or 0.0)}, fits: {run.rating.fits}",
                flush=True,
            )


if __name__ == "__main__":
    main()
