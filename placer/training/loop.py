"""Training a DLRM on a log with a plan, resumable and deterministic for a seed."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from placer.data.encoded import EncodedLog
from placer.data.log import Chunk, Log
from placer.errors import CheckpointError, DataError, PlanMismatchError
from placer.executor.backends.threads import threads_for, using_threads
from placer.executor.distributed import serve_tables
from placer.executor.local.hit_rates import HitRates
from placer.executor.local.lookahead import on_every_rank
from placer.file_locks import one_run
from placer.growing import KeyCounts
from placer.interrupt import deferred_interrupt
from placer.plan.origin import check_ids
from placer.plan.plan import Plan
from placer.training import checkpoint
from placer.training.config import CheckpointPolicy, TraceRequest, TrainConfig
from placer.training.distributed import ALONE, Ranks, device_of_rank, joined_ranks
from placer.training.metrics import HeldOut, MetricLog
from placer.training.reading import batches, labelled, labels_of, own_part
from placer.training.run import Progress, Run
from placer.training.trace import TraceSummary
from placer.training.trainer import Trainer, step_work_s, usable_device


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run did."""

    # Mean log loss of each batch that this run trained on, before its update.
    losses: tuple[tuple[int, float], ...]
    # On the held-out samples; None where there were none, where all their labels are alike (AUC),
    # or where the run was interrupted.
    auc: float | None
    log_loss: float | None
    eval_samples: int  # Held-out samples.
    steps: int  # Steps taken, those before a resumed checkpoint included.
    samples: int  # Samples that this run trained on.
    # Samples of the log that this run passed over because they have no label, each pass counted;
    # they are neither trained on nor evaluated.
    unlabelled_samples: int
    # Time of the training loop: reading and steps, without evaluation and checkpoints.
    train_s: float
    # The part of `train_s` that went into waiting for the log, which a thread reads ahead.
    read_s: float
    interrupted: bool = False  # Whether Ctrl-C ended it.
    checkpoint: Path | None = None  # The last one written.
    # What the keys of each table that grows did, steps before a resumed checkpoint included.
    keys: Mapping[str, KeyCounts] = field(default_factory=dict)
    # Lookups of this run that HBM served, those of the evaluation left out; None where the backend
    # reads all rows in place.
    hit_rates: HitRates | None = None
    # What the trace shows that was asked for; None if the run ended before it began.
    trace: TraceSummary | None = None
    # What the plan says a step takes on its machine; None where batches have another size.
    planned_step_s: float | None = None
    # The machine of `planned_step_s`, where these steps ran on the CPU and it has real GPUs.
    planned_on: str | None = None

    @property
    def step_s(self) -> float | None:
        """Mean time of this run's steps, reading and dense layers included; None without a step."""
        return self.train_s / len(self.losses) if self.losses else None

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second, reading included; 0 without a step."""
        return self.samples / self.train_s if self.samples else 0.0


def train(
    plan: Plan,
    log: Log,
    config: TrainConfig | None = None,
    *,
    eval_log: Log | None = None,
    checkpoints: CheckpointPolicy | None = None,
    resume: Path | None = None,
    trace: TraceRequest | None = None,
    metrics: Sequence[MetricLog] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Train a DLRM, its embeddings placed by a plan, on a log in the log's order.

    A batch is `batch_size` consecutive samples of the log less those without a label. Every
    tenth batch (`TrainConfig.holdout_every`) is not trained on; the trained model is evaluated
    on these. They lie among the training samples in time, so that their figures are better than
    those of the next day, which you can pass as `eval_log`.

    The run has a random state of its own, seeded by the configuration. On Ctrl-C the current
    step is finished, a checkpoint is written if `checkpoints` are on, and the result so far is
    returned. Under torchrun, or where `torch.distributed` is initialised, all processes call it
    alike: each holds its shards of the plan and trains on its part of each batch, and each
    returns the result that one process would have with the whole batch. Ranks beyond those of
    the GPUs serve what the plan has on hosts without one; their result has no losses.

    Raises PlanMismatchError if the log lacks a feature of the plan or its tables have other sizes;
    CheckpointError if the checkpoint is damaged or of another model, or a run that does not resume
    would write into a folder that holds checkpoints already; DataError if no sample has a label, or
    one is not within 0 to 1; PlacerError if the loss is no longer finite; BackendError if another
    process is lost.

    Parameters
    ----------
    log : Log
        With labels; opened with the id mapping that the plan's profile was counted with.
    eval_log : Log, optional
        Evaluate on this log; then nothing of `log` is held out.
    checkpoints : CheckpointPolicy, optional
        Where to save; none are written without.
    resume : Path, optional
        A checkpoint, or a folder of them whose newest is taken. The plan may be another.
    trace : TraceRequest, optional
        Write a profiler's trace of some steps.
    metrics : sequence of MetricLog
        Where the metrics of each step go, from the first rank.
    """
    config = config or TrainConfig()
    if eval_log is not None:
        config = replace(config, holdout_every=0)
    with joined_ranks(config, plan) as ranks, contextlib.ExitStack() as held:
        first = ranks.rank == 0
        if ranks.world > 1:  # From here on a batch is that of all ranks.
            size, device = config.batch_size * ranks.world, device_of_rank(config.device)
            config = replace(config, batch_size=size, device=device)
        if checkpoints is not None:  # No other run may write there.
            folder = Path(checkpoints.folder)
            ranks.everyone.together(lambda: _hold(folder, held) if first else None)
        other = config.other_data
        ranks.everyone.together(lambda: _check(plan, log, eval_log, checkpoints, resume, other))
        if ranks.rank < 0:
            with deferred_interrupt() as interrupt:
                serve_tables(plan)
            return TrainResult((), None, None, 0, 0, 0, 0, 0.0, 0.0, interrupt.requested)
        metrics = metrics if first else ()
        with _own_random_state(config), contextlib.ExitStack() as at_error:
            run = Run(plan, log, config, checkpoints, ranks, metrics)
            at_error.push(partial(_close_at_error, run))
            if resume is not None:
                run.restore(resume)
            ranks.together(run.begin_metrics)
            work_s = step_work_s(run.trainer.model, plan, config.batch_size // ranks.world)
            threads = config.threads or threads_for(work_s)
            with using_threads(threads), deferred_interrupt() as interrupt:
                summary = run.train(interrupt, on_progress, trace if first else None)
                run.save()
                rates, keys = run.hit_rates(), run.embeddings.keys.counts()
            interrupted = ranks.any(interrupt.requested)
            held_out = HeldOut()
            if not interrupted:
                with using_threads(threads):
                    held_out = evaluate(run.trainer, log, config, eval_log, ranks)
            run.embeddings.close()
        planned = plan.batch_size, len(plan.topology.gpus)
        is_planned = (config.batch_size // ranks.world, ranks.world) == planned
        is_elsewhere = config.device == "cpu" and not plan.topology.emulated
        figures = {"auc": held_out.auc(), "log_loss": held_out.log_loss()}
        known = {name: value for name, value in figures.items() if value is not None}
        for each in metrics if known else ():
            each.add(run.position.step, known, is_last=True)
        return TrainResult(
            losses=tuple(run.losses),
            **figures,
            eval_samples=held_out.samples,
            steps=run.position.step,
            samples=run.samples,
            unlabelled_samples=run.unlabelled_samples,
            train_s=run.train_s,
            read_s=run.read_s,
            interrupted=interrupted,
            checkpoint=run.saved,
            keys=keys,
            hit_rates=rates,
            trace=summary,
            planned_step_s=(plan.solver.step_time_s or None) if is_planned else None,
            planned_on=plan.topology.name if is_elsewhere else None,
        )


def _close_at_error(
    run: Run, kind: type[BaseException] | None, error: BaseException | None, where: object
) -> None:
    """Let servers end where all ranks that train do, with an error that they say themselves."""
    if isinstance(error, Exception) and on_every_rank(error):
        run.embeddings.close()


def _hold(folder: Path, held: contextlib.ExitStack) -> None:
    """Hold a folder of checkpoints, and remove what a killed run left there."""
    held.enter_context(one_run(folder))
    checkpoint.tidy(folder)


def _check(
    plan: Plan,
    log: Log,
    eval_log: Log | None,
    checkpoints: CheckpointPolicy | None,
    resume: Path | None,
    other_data: bool,
) -> None:
    """Refuse what cannot be trained, before anything is built."""
    if eval_log is not None:
        check_log(plan, eval_log, other_data)
        first = next(iter(eval_log.chunks(1)), None)
        if first is not None and first.labels is None:
            raise DataError("the evaluation log has no label column; evaluate on another log")
    check_log(plan, log, other_data)
    if checkpoints is not None and resume is None and checkpoint.exist(Path(checkpoints.folder)):
        raise CheckpointError(
            f"{checkpoints.folder} holds checkpoints of an earlier run; "
            "resume from it, or save to another folder"
        )


def evaluate(
    trainer: Trainer,
    log: Log,
    config: TrainConfig,
    eval_log: Log | None = None,
    ranks: Ranks = ALONE,
) -> HeldOut:
    """Predict the held-out batches of a log, or all batches of another one.

    Each rank predicts its part of a batch; every rank returns the result of all parts.

    Raises DataError if the other log has no label at all.
    """
    held_out = HeldOut()
    if eval_log is None and not config.holdout_every:
        return held_out

    def read() -> Generator[tuple[Chunk, npt.NDArray[np.float32] | None]]:
        for number, chunk in enumerate(batches(eval_log or log, config.batch_size)):
            usable = labelled(chunk)
            counts = eval_log is not None or config.is_held_out(number)
            yield usable, labels_of(usable) if counts and usable.samples else None

    with closing(ranks.in_step(read(), lambda item: item[0].samples)) as stream:
        for usable, labels in stream:
            if held_out.samples >= config.eval_samples:
                break
            if labels is not None:
                logits = trainer.predict(own_part(usable, ranks))
                held_out.add(ranks.joined(logits), labels)
    if eval_log is not None and config.eval_samples and not held_out.samples:
        raise DataError("no sample of the evaluation log has a label; evaluate on another log")
    return held_out


def check_log(plan: Plan, log: Log, other_data: bool = False) -> None:
    """Check that a log's features read the tables that the plan places.

    With `other_data`, ids may become rows in another way than the plan was made for.
    """
    if isinstance(log, EncodedLog) and not other_data:
        check_ids(plan, log.encoding.ids_sha256, "the log's encoding")
    for table in plan.tables:
        for feature in table.features:
            name = log.feature_tables.get(feature.name)
            if name is None:
                raise PlanMismatchError(
                    f"the plan reads feature {feature.name!r}, which the log lacks; "
                    f"it has {', '.join(log.feature_tables)}"
                )
            # Other sizes are another mapping of ids: the plan's hot rows would not be hot.
            if log.tables[name] != table.rows:
                raise PlanMismatchError(
                    f"feature {feature.name!r} reads {log.tables[name]} rows in the log and "
                    f"{table.rows} in the plan; open the log with the profile's id mapping"
                )
    if not any(table.features for table in plan.tables):
        raise PlanMismatchError("no table of the plan has a feature to train with")


@contextlib.contextmanager
def _own_random_state(config: TrainConfig) -> Iterator[None]:
    """Seed torch for a run, and give the caller's random state back after it."""
    on_gpu = usable_device(config.device).type == "cuda"
    gpus = [torch.cuda.current_device()] if on_gpu else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(config.seed)
        yield
