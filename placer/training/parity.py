"""Compare how the placed and the unplaced model train, step by step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from placer.data.log import Log
from placer.executor import PlacedEmbeddings, UnplacedEmbeddings
from placer.executor.backends import usable_device
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing
from placer.training.config import TrainConfig
from placer.training.loop import check_log, evaluate
from placer.training.reading import no_label_error, readings
from placer.training.trainer import Trainer

LOSS_TOLERANCE = 1e-4
"""Largest difference of two losses that rounding explains.

Both models compute the same float32 sums in different orders, and rounding errors grow from step to
step. Differences measured at usual and high learning rates, over 72 steps of the Criteo sample and
200 of the generated log: 6e-8 to 6e-6 with SGD and row-wise Adagrad, and up to 7e-5 with Adagrad,
whose first step only takes the sign of a gradient's elements. One wrong weight, off by 0.5, made a
difference of 9e-3.
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

    Both use GELU, while `train` uses ReLU by default. At ReLU's kink, a rounding error of 1e-8 can
    change a gradient, and Adagrad updates a new row by the full learning rate in its sign. So two
    correct models differ by 1e-3 within 50 steps. With a smooth activation, larger differences can
    only come from the placement.

    The unplaced model holds whole tables, as `nn.EmbeddingBag` does, with PyTorch's optimizers. The
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
