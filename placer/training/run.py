"""Run a training: hold its model and position, save them and restore them."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from placer.data.log import Log
from placer.data.reader import EncodedLog
from placer.errors import PlacerError
from placer.executor import BagBatch, look_ahead, make_embeddings
from placer.executor.local.hit_rates import HitRates
from placer.executor.memory.row_cache import RowCacheStats
from placer.executor.optimizers import rounding_of
from placer.interrupt import Interrupt
from placer.plan.plan import Plan
from placer.storage.manifest import Checkpoint, Position, growing_settings, table_settings
from placer.storage.tensor_rows import AnyTensor, TensorRows
from placer.training import checkpoint
from placer.training.config import CheckpointPolicy, TraceRequest, TrainConfig
from placer.training.distributed import ALONE, Ranks
from placer.training.metrics import MetricLog
from placer.training.reading import READ_SAMPLES, Reading, in_background, no_label_error, readings
from placer.training.trace import Tracer, TraceSummary, waiting_for_log
from placer.training.trainer import AnyBatch, Trainer


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, for the callback."""

    # Steps taken, and complete passes over the log, including resumed runs.
    step: int
    epoch: int
    samples: int  # Samples that this run trained on.
    loss: float  # Mean log loss since the last report.
    samples_per_s: float  # In this run so far, with reading.
    epochs: int = 1  # Number of passes of the whole run.
    # Last step of the run, if all samples have labels; None while the log's length is unknown.
    last_step: int | None = None

    def __str__(self) -> str:
        rate = f"{self.samples_per_s:,.0f} samples/s"
        current = min(self.epoch + 1, self.epochs)
        passes = f"pass {current} of {self.epochs}, " if self.epochs > 1 else ""
        return f"{passes}loss {self.loss:.4f}, {rate}"


OnProgress = Callable[[Progress], None] | None


class Run:
    """Trains a placed model from its position on, and saves checkpoints by the policy."""

    def __init__(
        self,
        plan: Plan,
        log: Log,
        config: TrainConfig,
        policy: CheckpointPolicy | None,
        ranks: Ranks = ALONE,
        metrics: Sequence[MetricLog] = (),
    ) -> None:
        self._log, self._config, self._policy, self._ranks = log, config, policy, ranks
        self._metrics = metrics
        options = config.embedding_options()
        if options["drive"] is None and policy is not None:
            options["drive"] = Path(policy.folder).parent
        options["rounding"] = rounding_of(plan.tables, config.rounding)
        self.embeddings = make_embeddings(plan, **options)
        self.embeddings.count_by_table()
        self.trainer = Trainer(
            self.embeddings,
            plan,
            len(log.dense_names),
            config,
            world=ranks.world,
            process_group=ranks.dense_group,
        )
        self._settings = run_settings(plan, log, config)
        self._data = run_data(log)
        ahead = config.look_ahead
        self._looks_ahead = plan.pipeline == "look-ahead" if ahead is None else ahead
        self._pending: list[Tensor] = []
        self._saved_position: Position | None = None
        self.position = Position()
        self.losses: list[tuple[int, float]] = []
        self.samples = self.unlabelled_samples = 0
        self._labels_seen = False
        self._length: int | None = getattr(log, "samples", None)
        self.train_s = self.read_s = 0.0
        self.saved: Path | None = None

    def begin_metrics(self) -> None:
        """Let the metrics continue after the run's position."""
        for each in self._metrics:
            each.begin(self.position.step)

    def train(
        self, interrupt: Interrupt, on_progress: OnProgress, trace: TraceRequest | None = None
    ) -> TraceSummary | None:
        """Take steps until the last epoch ends, the step limit is reached or an interrupt comes."""
        with Tracer(trace, self.trainer.device) as tracer:
            while self.position.epoch < self._config.epochs and self._pass(
                interrupt, on_progress, tracer
            ):
                self.position = Position(self.position.step, self.position.epoch + 1)
        self._collect_losses(on_progress)
        return tracer.summary

    def save(self) -> None:
        """Write a checkpoint if the policy asks for it and none exists at this position."""
        if self._policy is None or self.position == self._saved_position:
            return
        self._collect_losses(None)
        random_state = {"cpu": torch.get_rng_state()}
        if self.trainer.device.type == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state()
        tensors = {"dense": self.trainer.dense_state(), "random": random_state}
        saved = Checkpoint(self.position, self._settings, tensors, self._data)
        folder, keep = Path(self._policy.folder), self._policy.keep
        tables = checkpoint.tables_of(self.embeddings)
        self.saved = checkpoint.save(folder, saved, keep, tables)
        self._saved_position = self.position

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of this model, made under any plan.

        Raises CheckpointError if it is damaged, of another model or trained with other settings.
        """
        saved = checkpoint.open_checkpoint(path, self._ranks)
        self._ranks.together(lambda: self._load(saved))

    def _load(self, saved: Checkpoint) -> None:
        # Settings leave out rounding to the nearest, which was once the only way.
        nearest = {"rounding": "nearest"}
        checkpoint.check_settings(nearest | dict(saved.settings), nearest | self._settings)
        if not self._config.other_data:
            checkpoint.check_data(saved.data, self._data)
        self.trainer.load_dense_state(_whole(saved.tensors["dense"]))
        checkpoint.restore_tables(saved, self.embeddings)
        random_state = _whole(saved.tensors["random"])
        torch.set_rng_state(random_state["cpu"])
        if self.trainer.device.type == "cuda" and "cuda" in random_state:
            torch.cuda.set_rng_state(random_state["cuda"])
        self.position = saved.position
        if _content(saved.data) != _content(self._data):
            for keys in self.embeddings.keys.maps.values():
                keys.forget()
            if saved.position.samples == 0:  # The last pass was complete.
                self.position = Position(saved.position.step)
        self._saved_position = saved.position

    def hit_rates(self) -> HitRates | None:
        """Return how many lookups HBM served on all ranks, which must all call this.

        It waits for the device. Returns None for backends that read all rows in place.
        """
        own_rates = self.embeddings.hit_rates()
        if self.embeddings.world == 1:
            return own_rates
        if not self._ranks.any(own_rates is not None):
            return None
        rates = own_rates or HitRates(0, 0, RowCacheStats())
        numbers = [rates.lookups, rates.home_lookups, *astuple(rates.row_cache)]
        lookups, home, *rest = self._ranks.total(torch.tensor(numbers)).tolist()
        return HitRates(lookups, home, RowCacheStats(*rest))

    def _pass(self, interrupt: Interrupt, on_progress: OnProgress, tracer: Tracer) -> bool:
        """Train on the rest of the current pass; return whether it reached the log's end."""
        config, policy = self._config, self._policy
        with closing(self._batches(interrupt)) as stream:
            # Several ranks agree on where to stop, a batch or two later.
            while (config.max_steps is None or self.position.step < config.max_steps) and not (
                interrupt.requested if self._ranks.world == 1 else self._ranks.stopping
            ):
                started = time.perf_counter()
                item = next(stream, None)
                trained = item is not None and self._take(*item)
                if trained and self.position.step % config.report_every == 0:
                    self._collect_losses(on_progress)
                self.train_s += time.perf_counter() - started
                if item is None:
                    self._length = self.position.samples
                    if self.unlabelled_samples and not self._labels_seen and not self.position.step:
                        raise no_label_error(self.unlabelled_samples)
                    return True
                if trained:
                    tracer.step()
                if trained and policy is not None and policy.is_due(self.position.step):
                    self.save()
        return False

    def _batches(self, interrupt: Interrupt) -> Generator[tuple[AnyBatch | None, Reading]]:
        """Return the remaining batches of the pass, within the step limit, prepared ahead."""
        config, position = self._config, self.position
        limit = None if config.max_steps is None else config.max_steps - position.step
        read = partial(readings, self._log, self.embeddings.feature_names, config, limit=limit)
        read = partial(read, skip=position.samples, ranks=self._ranks)
        # A chunk of the log has many batches. The thread reads the next chunk while one trains.
        depth = max(2, READ_SAMPLES // config.batch_size)
        timed = self._timed(in_background(read, depth) if self._looks_ahead else read())
        agreed = self._ranks.in_step(
            timed, lambda item: item[1].samples, lambda: interrupt.requested
        )
        return look_ahead(agreed, self.embeddings) if self._looks_ahead else agreed

    def _timed(
        self, stream: Generator[tuple[BagBatch | None, Reading]]
    ) -> Generator[tuple[BagBatch | None, Reading]]:
        """Yield the stream's items, and count the time of waiting for them as reading."""
        with closing(stream):
            while True:
                started = time.perf_counter()
                with waiting_for_log():
                    item = next(stream, None)
                self.read_s += time.perf_counter() - started
                if item is None:
                    return
                yield item

    def _take(self, lookups: AnyBatch | None, reading: Reading) -> bool:
        """Move past a batch, and train on it if it has lookups; return whether it trained."""
        self.unlabelled_samples += reading.samples - reading.labelled
        self._labels_seen |= reading.labelled > 0
        if lookups is not None:
            self._pending.append(
                self.trainer.step(lookups, reading.dense, reading.labels, reading.labelled)
            )
            self.samples += reading.labelled
        position, trained = self.position, lookups is not None
        self.position = Position(
            position.step + trained, position.epoch, position.samples + reading.samples
        )
        return trained

    def _collect_losses(self, on_progress: OnProgress) -> None:
        """Read the losses since the last call. Call this rarely: it waits for the GPU."""
        if not self._pending:
            return
        losses: list[float] = self._ranks.total(torch.stack(self._pending)).tolist()
        first = self.position.step - len(losses) + 1
        self._pending.clear()
        rate = self.samples / self.train_s if self.train_s else 0.0
        for step, loss in enumerate(losses, start=first):
            if not math.isfinite(loss):
                raise PlacerError(
                    f"the loss of step {step} is {loss}: the training has diverged; "
                    f"lower the learning rate of {self._config.lr}"
                )
            self.losses.append((step, loss))
            for each in self._metrics:
                each.add(step, {"loss": loss, "samples_per_s": rate})
        if on_progress is not None:
            mean = sum(losses) / len(losses)
            now, last = self.position, self._last_step()
            epochs = self._config.epochs
            on_progress(Progress(now.step, now.epoch, self.samples, mean, rate, epochs, last))

    def _last_step(self) -> int | None:
        """Return the last step of the run; None if the log's length must be known for it."""
        now, config, length = self.position, self._config, self._length
        if now.epoch >= config.epochs:
            return now.step
        if length is None:
            return config.max_steps
        whole = steps_of(config, length)
        rest = whole - steps_of(config, min(now.samples, length))
        last = now.step + rest + (config.epochs - now.epoch - 1) * whole
        return last if config.max_steps is None else min(last, config.max_steps)


def steps_of(config: TrainConfig, samples: int) -> int:
    """Return the steps of a pass over `samples` samples: its batches that are not held out.

    >>> steps_of(TrainConfig(batch_size=10, holdout_every=4), 51)
    5
    """
    batches = -(-samples // config.batch_size)
    return batches - (batches // config.holdout_every if config.holdout_every else 0)


def _whole(tensors: Mapping[str, AnyTensor]) -> dict[str, Tensor]:
    return {name: TensorRows.of(tensor).whole() for name, tensor in tensors.items()}


def run_data(log: Log) -> dict[str, Any]:
    """Return what identifies the log in a checkpoint: its files, and its mapping of ids to rows."""
    if not isinstance(log, EncodedLog):
        return {}
    return {
        "log": [asdict(file) for file in log.identity()],
        "ids_sha256": log.encoding.ids_sha256,
    }


def _content(data: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the size and SHA-256 of each of a log's files, without their names."""
    return [(file["size_bytes"], file["sha256"]) for file in data.get("log", [])]


_SETTINGS = (
    *("batch_size", "lr", "embedding_rate", "optimizer", "eps", "seed", "dim", "bottom_mlp"),
    *("top_mlp", "activation", "holdout_every", "amp"),
)


def run_settings(plan: Plan, log: Log, config: TrainConfig) -> dict[str, Any]:
    """Return the settings that an exact resume must keep. The plan's placement may change."""
    rounding = rounding_of(plan.tables, config.rounding)
    return {
        "tables": table_settings(plan.tables),
        "dense_columns": list(log.dense_names),
        **({"rounding": rounding} if rounding != "nearest" else {}),
        **({"growing": growing_settings(plan.growing)} if plan.growing else {}),
        **{name: getattr(config, name) for name in _SETTINGS},
    }
