"""Options of commands that train; `placer.knobs` turns fields into options."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from placer.click_types import InputPath, OutputPath
from placer.data.options import TextOptions
from placer.knobs import option, options_of
from placer.training.config import CheckpointPolicy, TraceRequest, TrainConfig
from solvers.options import BACKEND, EXCHANGE, LOG_FORMAT, WIDTHS, names_in

if TYPE_CHECKING:
    from placer.training.pilot import Candidate

LOCAL_FILE = OutputPath("file", is_local=True)
RUNS = OutputPath("folder", is_local=True, makes_folders=True)


TRAIN_LOGS: Any = option(..., "Log files to train on; repeatable.", "--data")
EVAL_LOGS: Any = option((), "Evaluate on these, not on every tenth batch.", "--eval-data")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a training run: the files that it writes, and whether it resumes."""

    trace_path: Path | None = option(
        None, "Write a trace of steps: JSON, or .gz.", "--trace", kind=LOCAL_FILE, metavar="FILE"
    )
    trace_steps: int | None = option(None, "Steps in the trace; by default 10.", least=1)
    checkpoints: Path | None = option(None, "Folder to save checkpoints to.", kind=RUNS)
    every: int | None = option(None, "Steps between two checkpoints.", least=1)
    resume: bool = option(False, "Go on from the newest checkpoint of --checkpoints.")
    metrics: Path | None = option(None, "Write a JSON line of each step.", kind=LOCAL_FILE)
    logs_to: tuple[str, ...] = option(
        (), "tensorboard:FOLDER or wandb:PROJECT; repeatable.", "--log-to"
    )

    def check(self) -> None:
        """Raise UsageError if an option lacks another one; silence the profiler's library."""
        if self.trace_steps is not None and self.trace_path is None:
            raise click.UsageError("--trace-steps needs --trace: the file to write to")
        if self.resume and self.checkpoints is None:
            raise click.UsageError("--resume needs --checkpoints: the folder to resume from")
        # Without this, the library writes to stderr when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    @property
    def trace(self) -> TraceRequest | None:
        """The request to trace steps; None without a file to write to."""
        path = self.trace_path
        return None if path is None else TraceRequest(path, self.trace_steps or 10)

    def arguments(self, speaks: bool) -> dict[str, Any]:
        """Return arguments of `placer.training.train`; only the process that `speaks` prints."""
        from placer.report import print_stderr
        from placer.training.checkpoint import exist
        from placer.training.metrics import metric_logs

        folder = self.checkpoints
        resumes = self.resume and folder is not None and exist(folder)
        if self.resume and not resumes and speaks:
            print_stderr(f"no checkpoint in {folder} yet: the run starts at its beginning")
        return {
            "checkpoints": folder and CheckpointPolicy(folder, self.every),
            "resume": folder if resumes else None,
            "trace": self.trace,
            "metrics": metric_logs(self.metrics, self.logs_to),
        }


@dataclass(frozen=True, slots=True)
class PilotOptions:
    """Options of `placer pilot`: its logs, and the types that it tries."""

    profile_path: Path = option(..., "Profile of the log.", "--profile", kind=InputPath())
    logs: tuple[str, ...] = TRAIN_LOGS
    eval_logs: tuple[str, ...] = EVAL_LOGS
    log_format: Any = LOG_FORMAT
    widths: str = replace(WIDTHS, default="bfloat16,int8", help="Types of cold rows to try.")
    exchange_dtype: Any = replace(EXCHANGE, help="Type of pooled rows between processes to try.")
    hot: float = option(0.1, "Share of each table's rows in HBM.", kind=click.FloatRange(0, 1))
    seeds: int = option(5, "Models that are trained with each type.", least=2)

    def trained(
        self, lines: TextOptions, config: TrainConfig, on_run: Callable[[int, int], object]
    ) -> list[Candidate]:
        """Run `placer.training.pilot.pilot` with these options, and return its result."""
        from placer import Profile
        from placer.plan.origin import open_as_profiled
        from placer.training.pilot import pilot

        profile = Profile.load(self.profile_path)
        opened = partial(open_as_profiled, profile, format=self.log_format, options=lines)
        return pilot(
            profile,
            opened(self.logs),
            names_in(self.widths),
            self.exchange_dtype or "float32",
            config,
            seeds=self.seeds,
            hot_share=self.hot,
            eval_log=opened(self.eval_logs) if self.eval_logs else None,
            on_run=on_run,
        )


def train_config(settings: dict[str, Any], batch_size: int) -> TrainConfig:
    """Return the configuration of `TRAINING`'s options, with a default for the batch size."""
    chosen = {"batch_size": settings["batch_size"] or batch_size}
    compiler = "inductor" if settings["compile"] else None
    return TrainConfig(**{**settings, **chosen, "compile": compiler})


TRAINING = options_of(
    TrainConfig,
    "Training",
    {
        "max_steps": "steps --steps",
        "optimizer": "dense_optimizer --dense-optimizer",
        "timeout_s": "timeout_s --timeout",
    },
    [
        "epochs",
        "lr",
        "embedding_lr",
        "rounding",
        "seed",
        "device",
        "threads",
        "cache_policy",
        "drive",
        "amp",
        "other_data",
    ],
    batch_size=(int, option(None, "Samples per step and process; by default the plan's.", least=1)),
    backend=(str, option("auto", "Kernels that read and update rows.", kind=BACKEND)),
    compile=(bool, option(False, "Compile the MLPs with torch.compile.", "compiles --compile")),
)
PILOT = options_of(
    TrainConfig,
    "Training",
    {"max_steps": "steps --steps", "optimizer": "dense_optimizer --dense-optimizer"},
    ["batch_size", "epochs", "lr", "embedding_lr", "seed", "device", "threads"],
)
