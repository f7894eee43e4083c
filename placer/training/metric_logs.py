"""Where a run writes its metrics: a file of JSON lines, TensorBoard, Weights & Biases."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from placer.errors import PlacerError
from placer.files import StrPath, replacing
from placer.read_files import open_file


class MetricLog(Protocol):
    """Takes the metrics of a run, as they come."""

    def begin(self, step: int) -> None:
        """Go on behind a step: what is there of later ones was not in the checkpoint."""

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Metrics of a step, or at last of the whole run after so many."""


class JsonLines:
    """A file with an object a line, each of which is written before the run goes on.

    A step has ``step``, ``loss`` and ``samples_per_s``; the last line has ``steps``, and ``auc``
    and ``log_loss`` of held-out samples.

    Raises PlacerError if the file's folder is not there, or the file has other lines.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise PlacerError(f"cannot write {path}: its folder is not there; make it first")
        try:
            self._known = list(self._steps()) if self._path.exists() else []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PlacerError(f"{path} has no metrics of a run; name another file") from error

    def begin(self, step: int) -> None:
        with replacing(self._path) as temporary:
            temporary.write_text("".join(line for at, line in self._known if at <= step))

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"steps" if is_last else "step": step, **metrics}) + "\n")
        except OSError as error:
            raise PlacerError(f"cannot write {self._path}: {error.strerror}") from error

    def _steps(self) -> Iterator[tuple[int, str]]:
        """Yield the lines of steps; a last one that was cut short is none."""
        with open_file(self._path) as file:
            lines = file.read().decode().splitlines(keepends=True)
        for line in lines:
            record = json.loads(line) if line.endswith("\n") else {"steps": 0}
            if "steps" not in record:
                yield int(record["step"]), line


class _Shown:
    """What another package keeps and shows."""

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
            self._events = self._package.SummaryWriter(self._place, purge_step=step + 1)

    def add(self, step: int, metrics: Mapping[str, Any], *, is_last: bool = False) -> None:
        if self._kind == "wandb":
            self._run.log(dict(metrics), step=step)
            return
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()


def metric_logs(file: StrPath | None, others: Iterable[str] = ()) -> list[MetricLog]:
    """Return a file's, and those of ``tensorboard:FOLDER`` and ``wandb:PROJECT``.

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
