"""Measure by training how types of cold rows and of the exchange change AUC and log loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from placer.data.log import Log
from placer.errors import PlacerError
from placer.plan.buffers import buffered
from placer.plan.fields import RowOrder
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.tables import DTYPE_BYTES, ColdDType, DType
from placer.topology.topology import Topology
from placer.training.config import TrainConfig
from placer.training.distributed import joined_ranks
from placer.training.loop import train


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice of types, and the held-out metrics of a model for each seed."""

    dtype: ColdDType  # Type of cold rows.
    exchange_dtype: DType  # Type of pooled rows and their gradients between processes.
    table_bytes: int  # Bytes of all rows, hot and cold, with optimizer state.
    # Bytes of pooled rows and their gradients, for a sample with all rows on other GPUs.
    exchanged_bytes: int
    # Metrics by seed.
    aucs: tuple[float, ...] = ()
    log_losses: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The types that differ from float32, in words."""
        changed = {"cold rows": self.dtype, "exchange": self.exchange_dtype}
        words = [f"{what} {dtype}" for what, dtype in changed.items() if dtype != "float32"]
        return ", ".join(words) or "float32"

    def is_within_spread(self, of: "Candidate") -> bool:
        """Whether mean AUC and log loss are no worse than the other candidate's worst seed."""
        return mean(self.aucs) >= min(of.aucs) and mean(self.log_losses) <= max(of.log_losses)


def pilot(
    profile: Profile,
    log: Log,
    widths: Sequence[ColdDType] = ("bfloat16", "int8"),
    exchange_dtype: DType = "float32",
    config: TrainConfig | None = None,
    *,
    seeds: int = 5,
    hot_share: float = 0.1,
    eval_log: Log | None = None,
    on_run: Callable[[int, int], object] = lambda done, runs: None,
) -> list[Candidate]:
    """Train the bundled DLRM with each choice of types and several seeds, and evaluate each model.

    The first candidate is float32 everywhere. Each other candidate changes one type. Otherwise, all
    have the same plan: the hottest rows of each table by `profile` in HBM, a share of `hot_share`,
    and its other rows staged from DRAM.

    `widths` are types of cold rows to try besides float32. `exchange_dtype` is a type of the
    exchange to try, with several processes as torchrun starts them. The first seed is the
    configuration's. The spread over seeds needs at least two. With an `eval_log`, models are
    evaluated on it instead of on held-out batches. `on_run` is called with the number of finished
    runs and of all runs.

    Raises PlacerError if types, seeds or the share are out of range, or nothing can be evaluated.
    """
    config = config or TrainConfig()
    if seeds < 2 or not 0 <= hot_share <= 1:
        raise PlacerError(f"give 2 seeds or more, not {seeds}, and a share of 0 to 1")
    with joined_ranks(config) as ranks:
        if exchange_dtype != "float32" and ranks.world == 1:
            raise PlacerError(
                "one process exchanges nothing: try exchange types with several, as in "
                "torchrun --nproc-per-node 2 --no-python placer pilot ..."
            )
        problem = Problem(
            profile,
            Topology.parse(f"{ranks.world}xh100"),
            config.batch_size,
            widths=tuple(widths),
            exchange_dtype=exchange_dtype,
        )
        asked: list[tuple[ColdDType, DType]] = [("float32", "float32")]
        asked += [(dtype, "float32") for dtype in dict.fromkeys(widths) if dtype != "float32"]
        asked += [("float32", exchange_dtype)] if exchange_dtype != "float32" else []
        plans = [_plan(problem, hot_share, *types) for types in asked]
        results: list[list[tuple[float, float]]] = [[] for _ in plans]
        # Loop over seeds outside, so that other load on the machine affects all candidates.
        for number in range(seeds):
            for at, plan in enumerate(plans):
                own = replace(config, seed=config.seed + number)
                result = train(plan, log, own, eval_log=eval_log)
                if result.interrupted:
                    raise KeyboardInterrupt
                if result.auc is None or result.log_loss is None:
                    raise PlacerError(
                        "no held-out sample, or all of one label: give a longer log or --eval-data"
                    )
                results[at].append((result.auc, result.log_loss))
                on_run(number * len(plans) + at + 1, seeds * len(plans))
    return [
        _candidate(plan, dtype, found)
        for plan, (dtype, _), found in zip(plans, asked, results, strict=True)
    ]


def _plan(problem: Problem, hot_share: float, dtype: ColdDType, exchange_dtype: DType) -> Plan:
    """Place tables on GPUs in turn, each with its hottest rows in HBM and its other rows staged."""
    shards: list[Shard] = []
    row_order: dict[str, RowOrder] = {}
    hot_ids: dict[str, Any] = {}
    for number, profile in enumerate(problem.profile):
        table, gpus = profile.table, problem.topology.gpus
        hot, device = math.ceil(hot_share * table.rows), (gpus[number % len(gpus)].id,)
        columns, cold = (0, table.dim), None if dtype == "float32" else dtype
        shards += [
            Shard(table.name, (0, hot, 1), columns, device, "hbm", "device"),
            Shard(table.name, (hot, table.rows, 1), columns, device, "dram", "staged", dtype=cold),
        ]
        if profile.counts is not None:
            row_order[table.name] = RowOrder("profile")
            hot_ids[table.name] = profile.counts.hottest(hot)
    held = [shard for shard in shards if shard.row_count]
    return Plan(
        tuple(profile.table for profile in problem.profile),
        problem.topology,
        tuple(buffered(held, problem.profile, problem.global_batch_size)),
        row_order,
        hot_ids,
        problem.batch_size,
        exchange_dtype=exchange_dtype,
    )


def _candidate(plan: Plan, dtype: ColdDType, results: Sequence[tuple[float, float]]) -> Candidate:
    aucs, log_losses = zip(*results, strict=True)
    tables = plan.tables_by_name
    columns = sum(table.dim * len(table.features) for table in plan.tables)
    return Candidate(
        dtype,
        plan.exchange_dtype,
        sum(s.row_count * tables[s.table].bytes_per_row(s.width, s.dtype) for s in plan.shards),
        2 * columns * DTYPE_BYTES[plan.exchange_dtype],
        aucs,
        log_losses,
    )
