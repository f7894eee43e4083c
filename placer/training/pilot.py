"""Compare models by training them: types of rows with each other, placed with unplaced tables."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from placer.data.log import Log
from placer.errors import PlacerError
from placer.executor import PlacedEmbeddings, UnplacedEmbeddings
from placer.executor.backends import usable_device
from placer.plan.fields import RowOrder, Shard
from placer.plan.memory import buffered
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.tables import DTYPE_BYTES, ColdDType, DType
from placer.topology.topology import Topology
from placer.training.config import TrainConfig
from placer.training.distributed import joined_ranks
from placer.training.loop import check_log, evaluate, train
from placer.training.reading import no_label_error, readings
from placer.training.trainer import Trainer


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
                        "no held-out sample (of every tenth batch), or all of one label: lower "
                        "--batch-size, give a longer log, or --eval-data"
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


LOSS_TOLERANCE = 1e-4
"""Largest difference of two losses that rounding explains.

Both models compute the same float32 sums in different orders. docs/training.md has the differences
that were measured, over 72 steps of the Criteo sample and 200 of the generated log.
"""


@dataclass(frozen=True, slots=True)
class ParityResult:
    """How the placed and the unplaced model trained on the same batches."""

    # Mean log loss of each step.
    placed_losses: tuple[float, ...]
    unplaced_losses: tuple[float, ...]
    # On the held-out samples.
    placed_auc: float | None
    unplaced_auc: float | None
    max_weight_difference: float  # Largest absolute difference of a weight of a table at the end.
    # Median seconds of a step without reading. The median, because the first step compiles kernels.
    placed_step_s: float
    unplaced_step_s: float
    # Samples that each model trained on, and samples skipped for lack of a label, counted in every
    # pass.
    samples: int = 0
    unlabelled_samples: int = 0
    eval_samples: int = 0  # Held-out samples.

    @property
    def steps(self) -> int:
        """Number of steps that both models took."""
        return len(self.placed_losses)

    @property
    def loss_differences(self) -> tuple[float, ...]:
        """Absolute difference of the losses in each step."""
        pairs = zip(self.placed_losses, self.unplaced_losses, strict=True)
        return tuple(abs(placed - unplaced) for placed, unplaced in pairs)

    @property
    def max_loss_difference(self) -> float:
        """The largest of `loss_differences`; 0 without a step."""
        return max(self.loss_differences, default=0.0)

    @property
    def equal(self) -> bool:
        """Whether all losses differ by at most `LOSS_TOLERANCE`; false if one is not a number."""
        return all(difference <= LOSS_TOLERANCE for difference in self.loss_differences)


def compare_training(
    plan: Plan,
    log: Log,
    config: TrainConfig | None = None,
    *,
    on_step: Callable[[int], None] | None = None,
) -> ParityResult:
    """Train the placed and the unplaced model on the same batches from the same weights.

    Both use GELU instead of ReLU, so that rounding errors stay small (docs/training.md). The
    unplaced model holds whole tables, as `nn.EmbeddingBag` does, with PyTorch's optimizers. The
    machine must have room for both models. `on_step` is called with the number of steps so far, for
    a progress bar.

    Raises PlanMismatchError if the log does not fit the plan. Raises DataError if no sample has a
    label.
    """
    config = replace(config or TrainConfig(), activation="gelu")
    check_log(plan, log)
    refuse_growing(plan, "the unplaced model")
    usable_device(config.device)
    placed = PlacedEmbeddings(plan, **config.embedding_options())
    unplaced = UnplacedEmbeddings(plan.tables, seed=config.seed).to(config.device)
    optimizers = unplaced.optimizers(lr=config.embedding_rate, eps=config.eps)
    trainers = (
        Trainer(placed, plan, len(log.dense_names), config),
        Trainer(unplaced, plan, len(log.dense_names), config, optimizers),
    )
    losses: tuple[list[float], list[float]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    steps = trained = labelled = unlabelled = 0
    for _ in range(config.epochs):
        left = None if config.max_steps is None else config.max_steps - steps
        if left == 0:
            break
        for lookups, reading in readings(log, placed.feature_names, config, limit=left):
            labelled += reading.labelled
            unlabelled += reading.samples - reading.labelled
            if lookups is None:
                continue
            for trainer, own_losses, own_seconds in zip(trainers, losses, seconds, strict=True):
                start = time.perf_counter()
                own_losses.append(float(trainer.step(lookups, reading.dense, reading.labels)))
                own_seconds.append(time.perf_counter() - start)
            steps, trained = steps + 1, trained + reading.labelled
            if on_step is not None:
                on_step(steps)
        if unlabelled and not labelled:
            raise no_label_error(unlabelled)
    held_out = [evaluate(trainer, log, config) for trainer in trainers]
    return ParityResult(
        placed_losses=tuple(losses[0]),
        unplaced_losses=tuple(losses[1]),
        placed_auc=held_out[0].auc(),
        unplaced_auc=held_out[1].auc(),
        max_weight_difference=_largest_difference(placed, unplaced),
        placed_step_s=median(seconds[0] or [0.0]),
        unplaced_step_s=median(seconds[1] or [0.0]),
        samples=trained,
        unlabelled_samples=unlabelled,
        eval_samples=held_out[0].samples,
    )


def _largest_difference(placed: PlacedEmbeddings, unplaced: UnplacedEmbeddings) -> float:
    weights = placed.state_dict()
    differences = [
        float((weights[f"{name}.weight"].float() - weight.cpu().float()).abs().max())
        for name, weight in unplaced.table_weights().items()
        if weight.numel()
    ]
    return max(differences, default=0.0)
