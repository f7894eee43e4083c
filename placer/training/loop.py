"""Train a DLRM on a log with a plan: resumable, and deterministic for a seed."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from placer.data.log import Chunk, Log
from placer.data.reader import EncodedLog
from placer.errors import CheckpointError, DataError, PlanMismatchError, check_kinds
from placer.executor.backends import usable_device
from placer.executor.distributed import serve_tables
from placer.executor.local.hit_rates import HitRates
from placer.executor.local.lookahead import on_every_rank
from placer.executor.streams import threads_for, using_threads
from placer.files.locks import one_run
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
from placer.training.trainer import Trainer, step_work_s


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training run: losses, metrics and times."""

    # Mean log loss of each batch that this run trained on, before its update.
    losses: tuple[tuple[int, float], ...]
    # On the held-out samples. None without such samples, if all their labels are equal (AUC only),
    # or if the run was interrupted.
    auc: float | None
    log_loss: float | None
    eval_samples: int  # Number of held-out samples.
    steps: int  # Steps taken, including steps before a resumed checkpoint.
    samples: int  # Samples that this run trained on.
    # Samples that this run skipped because they have no label, counted in every pass. They are
    # neither trained on nor evaluated.
    unlabelled_samples: int
    # Seconds of the training loop: reading and steps, without evaluation and checkpoints.
    train_s: float
    # Seconds of `train_s` that the loop waited for the log. A thread reads the log ahead.
    read_s: float
    interrupted: bool  # Whether Ctrl-C ended it.
    checkpoint: Path | None = None  # Last checkpoint written.
    # Key counters of each table that grows, including steps before a resumed checkpoint.
    keys: Mapping[str, KeyCounts] = field(default_factory=dict)
    # Lookups of this run that HBM served, without the evaluation. None if the backend reads all
    # rows in place.
    hit_rates: HitRates | None = None
    # Summary of the requested trace; None if the run ended before the trace began.
    trace: TraceSummary | None = None
    # Step time that the plan predicts for its machine; None if batches have another size.
    planned_step_s: float | None = None
    # Machine of `planned_step_s`, if it has real GPUs but these steps ran on the CPU.
    planned_on: str | None = None

    @property
    def step_s(self) -> float | None:
        """Mean seconds of this run's steps, with reading and dense layers; None without a step."""
        return self.train_s / len(self.losses) if self.losses else None

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second, with reading; 0 without a step."""
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
    """Train a DLRM on a log, in the log's order, with embeddings placed by a plan.

    A batch has `batch_size` consecutive samples of the log, without samples that lack a label.
    Every tenth batch (`TrainConfig.holdout_every`) is held out: the model does not train on it but
    is evaluated on it at the end.

    The run has its own random state, seeded by the configuration. On Ctrl-C, it finishes the
    current step, writes a checkpoint if `checkpoints` is given, and returns the result so far.
    Under torchrun, or if `torch.distributed` is initialised, all processes must call this with the
    same arguments. Each holds its shards, trains on its part of each batch, and returns the result
    that one process would have with the whole batch. Ranks beyond the number of GPUs serve tables
    on hosts without a GPU; their result has no losses.

    Raises PlanMismatchError if the log lacks a feature of the plan or its tables have other sizes.
    Raises CheckpointError if the checkpoint is damaged or of another model, or if a new run would
    write into a folder with checkpoints. Raises DataError if no sample has a label, or a label is
    outside 0 to 1. Raises PlacerError if the loss is not finite. Raises BackendError if another
    process is lost.

    Parameters
    ----------
    log : Log
        A log with labels, opened with the id mapping of the plan's profile.
    eval_log : Log, optional
        Evaluate on this log, and hold out no samples of `log`.
    checkpoints : CheckpointPolicy, optional
        Where to save checkpoints. By default, none are saved.
    resume : Path, optional
        A checkpoint, or a folder whose newest checkpoint is taken. Its plan may differ.
    trace : TraceRequest, optional
        Write a profiler's trace of some steps.
    metrics : sequence of MetricLog
        Logs that receive the metrics of each step, from the first rank.
    """
    check_kinds(plan=(plan, Plan), log=(log, Log), config=(config, TrainConfig | None))
    config = config or TrainConfig()
    if eval_log is not None:
        config = replace(config, holdout_every=0)
    with joined_ranks(config, plan) as ranks, contextlib.ExitStack() as held:
        first = ranks.rank == 0
        if ranks.world > 1:  # From now on, a batch is the batch of all ranks.
            size, device = config.batch_size * ranks.world, device_of_rank(config.device)
            config = replace(config, batch_size=size, device=device)
        if checkpoints is not None:  # Keep other runs from writing there.
            folder = Path(checkpoints.folder)
            ranks.everyone.together(lambda: _hold(folder, held) if first else None)
        other = config.other_data
        ranks.everyone.together(lambda: _check(plan, log, eval_log, checkpoints, resume, other))
        if ranks.rank < 0:
            with deferred_interrupt() as interrupt:
                serve_tables(plan)
            return TrainResult((), None, None, 0, 0, 0, 0, 0.0, 0.0, interrupt.requested)
        metrics = metrics if first else ()
        with _own_random_state(config):
            run = Run(plan, log, config, checkpoints, ranks, metrics)
            try:
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
            except Exception as error:
                if on_every_rank(error):  # All training ranks have and report it: let servers end.
                    run.embeddings.close()
                raise
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


def _hold(folder: Path, held: contextlib.ExitStack) -> None:
    """Lock a folder of checkpoints, and remove what a killed run left there."""
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
    """Raise if the run cannot start, before anything is built."""
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
    """Predict the held-out batches of a log, or all batches of `eval_log`.

    Each rank predicts its part of a batch, and returns the result of all parts.

    Raises DataError if `eval_log` has no label at all.
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
                held_out.add(np.concatenate(ranks.objects(logits)), labels)
    if eval_log is not None and config.eval_samples and not held_out.samples:
        raise DataError("no sample of the evaluation log has a label; evaluate on another log")
    return held_out


def check_log(plan: Plan, log: Log, other_data: bool = False) -> None:
    """Raise PlanMismatchError unless a log's features read the tables that the plan places.

    With `other_data`, ids may be mapped to rows in another way than in the plan's profile.
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
            # Another size means another mapping of ids, so the plan's hot rows would not be hot.
            if log.tables[name] != table.rows:
                raise PlanMismatchError(
                    f"feature {feature.name!r} reads {log.tables[name]} rows in the log and "
                    f"{table.rows} in the plan; open the log with the profile's id mapping"
                )
    if not any(table.features for table in plan.tables):
        raise PlanMismatchError("no table of the plan has a feature to train with")


@contextlib.contextmanager
def _own_random_state(config: TrainConfig) -> Iterator[None]:
    """Seed torch for a run, and restore the caller's random state afterwards."""
    on_gpu = usable_device(config.device).type == "cuda"
    gpus = [torch.cuda.current_device()] if on_gpu else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(config.seed)
        yield
