"""Compute AUC and log loss of predicted clicks, and write the metrics of a run."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from placer.errors import DataError, PlacerError
from placer.files.atomic import StrPath, check_place, write_text
from placer.files.reading import open_file


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """Return the area under the ROC curve: P(click scores above non-click), ties counting ½.

    It is exact, computed from ranks of scores instead of thresholds (the Mann–Whitney statistic,
    Hanley & McNeil 1982, doi:10.1148/radiology.143.1.7063747). Labels are 1 for a click. Returns
    None if all labels are equal. Raises DataError if a score is not a number.
    """
    values = np.asarray(scores)
    clicked = np.asarray(labels) > 0.5
    if np.isnan(values).any():
        raise DataError(
            f"{int(np.isnan(values).sum())} of {values.size} scores are not numbers; "
            "the training has diverged, lower the learning rate"
        )
    clicks = int(clicked.sum())
    others = clicked.size - clicks
    if not clicks or not others:
        return None
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    # Tied scores share their mean rank. Half ranks are exact in float64.
    mean_ranks = np.cumsum(sizes) - (sizes - 1) / 2
    wins = mean_ranks[group[clicked]].sum() - clicks * (clicks + 1) / 2
    return float(wins / (clicks * others))


def log_loss(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """Return the mean binary cross-entropy of logits in nats, or None without samples."""
    z = np.asarray(logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.float64)
    if not z.size:
        return None
    # log(1 + e^z) − y z, without overflow for large |z|.
    return float(np.mean(np.maximum(z, 0) - z * y + np.log1p(np.exp(-np.abs(z)))))


class HeldOut:
    """Collects logits and labels batch by batch, at 5 bytes a sample, for exact metrics."""

    def __init__(self) -> None:
        self._logits: list[npt.NDArray[np.float32]] = []
        self._labels: list[npt.NDArray[np.bool_]] = []

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add the samples of a batch. Both arrays have shape (samples,)."""
        self._logits.append(logits)
        self._labels.append(labels > 0.5)

    @property
    def samples(self) -> int:
        """Number of samples collected so far."""
        return sum(batch.size for batch in self._labels)

    def auc(self) -> float | None:
        """Return the `auc` of the collected samples; None without samples."""
        return auc(*self._joined())

    def log_loss(self) -> float | None:
        """Return the `log_loss` of the collected samples."""
        return log_loss(*self._joined())

    def _joined(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        if not self._logits:
            return np.empty(0, np.float32), np.empty(0, bool)
        return np.concatenate(self._logits), np.concatenate(self._labels)


class MetricLog(Protocol):
    """Receives the metrics of a run as they are computed."""

    def begin(self, step: int) -> None:
        """Continue after a step: drop metrics of later steps, which are not in the checkpoint."""

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Add metrics of a step, or at the end of the whole run, which took `step` steps."""


class JsonLines:
    """Writes each metric to a file as a line of JSON, before the run goes on (docs/training.md).

    Raises PlacerError if the file cannot be written, or has lines of another kind.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = Path(path)
        check_place(path)
        try:
            self._known = list(self._steps()) if self._path.exists() else []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PlacerError(f"{path} has no metrics of a run; name another file") from error

    def begin(self, step: int) -> None:
        write_text(self._path, "".join(line for at, line in self._known if at <= step))

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        with _writing(self._path), self._path.open("a") as file:
            file.write(json.dumps({"steps" if is_last else "step": step, **metrics}) + "\n")

    def _steps(self) -> Iterator[tuple[int, str]]:
        """Yield each step's number and line. Leave out a last line that was cut short."""
        with open_file(self._path) as file:
            lines = file.read().decode().splitlines(keepends=True)
        for line in lines:
            record = json.loads(line) if line.endswith("\n") else {"steps": 0}
            if "steps" not in record:
                yield int(record["step"]), line


class _Shown:
    """Metrics that another package, such as TensorBoard, stores and shows."""

    def __init__(self, kind: str, place: str) -> None:
        module = {"tensorboard": "torch.utils.tensorboard"}.get(kind, kind)
        try:
            self._package: Any = importlib.import_module(module)
        except ImportError as error:
            raise PlacerError(f"--log-to {kind} needs it ({error}): pip install {kind}") from error
        self._kind, self._place = kind, place

    def begin(self, step: int) -> None:
        if self._kind == "wandb":
            self._run = self._package.init(project=self._place)
        else:
            with _writing(self._place):
                self._events = self._package.SummaryWriter(self._place, purge_step=step + 1)

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        if self._kind == "wandb":
            self._run.log(dict(metrics), step=step)
            return
        with _writing(self._place):
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()


@contextmanager
def _writing(place: StrPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlacerError(f"cannot write {place}: {error.strerror or error}") from error


def metric_logs(file: StrPath | None, others: Iterable[str] = ()) -> list[MetricLog]:
    """Return logs that write to a file, ``tensorboard:FOLDER`` and ``wandb:PROJECT``.

    >>> metric_logs(None, ["mlflow:x"])
    Traceback (most recent call last):
    placer.errors.PlacerError: cannot log to 'mlflow:x'; give tensorboard:FOLDER or wandb:PROJECT
    """
    logs: list[MetricLog] = [] if file is None else [JsonLines(file)]
    for where in others:
        kind, _, place = where.partition(":")
        if kind not in ("tensorboard", "wandb") or not place:
            raise PlacerError(f"cannot log to {where!r}; give tensorboard:FOLDER or wandb:PROJECT")
        logs.append(_Shown(kind, place))
    return logs
