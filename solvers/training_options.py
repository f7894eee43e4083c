"""Options of commands that train, replay or measure; see `placer.knobs`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from placer.click_options import refuse_without
from placer.click_types import InputPath, Number, OutputPath, Seconds
from placer.data.options import TextOptions
from placer.executor import Policy
from placer.knobs import option, options_of
from placer.training.config import CheckpointPolicy, TraceRequest, TrainConfig
from solvers.options import BACKEND, EXCHANGE, LOG_FORMAT, WIDTHS, usage_errors

if TYPE_CHECKING:
    from placer.data.log import Log
    from placer.data.reader import EncodedLog
    from placer.measurement import Setting
    from placer.plan.plan import Plan
    from placer.profile.profile import Profile
    from placer.training.pilot import Candidate

LOCAL_FILE = OutputPath("file")
RUNS = OutputPath("folder", makes_folders=True)

TRAIN_LOGS: Any = option(..., "Log file to train on; repeatable.", "--data")
EVAL_LOGS: Any = option(
    (),
    "Log file to evaluate on, instead of every tenth batch of --data; repeatable.",
    "--eval-data",
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a training run: the files that it writes, and whether it resumes."""

    trace_path: Path | None = option(
        None,
        "Write a trace of some steps, as .json or .json.gz.",
        "--trace",
        kind=LOCAL_FILE,
        metavar="FILE",
    )
    trace_steps: int | None = option(None, "Steps in the trace; by default 10.", least=1)
    checkpoints: Path | None = option(None, "Folder to save checkpoints to.", kind=RUNS)
    every: int | None = option(None, "Steps between two checkpoints.", least=1)
    resume: bool = option(False, "Continue from the newest checkpoint in --checkpoints.")
    metrics: Path | None = option(None, "Write a JSON line for each step.", kind=LOCAL_FILE)
    logs_to: tuple[str, ...] = option(
        (), "Also send metrics to tensorboard:FOLDER or wandb:PROJECT; repeatable.", "--log-to"
    )

    def check(self) -> None:
        """Raise UsageError if an option lacks another one; silence the profiler's library."""
        if self.trace_steps is not None and self.trace_path is None:
            raise click.UsageError("--trace-steps needs --trace: the file to write to")
        if self.checkpoints is None:
            refuse_without("--checkpoints", "every")
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
class SimulateOptions:
    """Options of `placer simulate`: what is replayed, and how."""

    HEADING: ClassVar[str] = "Replay"

    logs: tuple[str, ...] = option((), "Log file to replay; repeatable.", "--data")
    later: tuple[str, ...] = option(
        (), "Log to replay after --data, with its own result; repeatable.", "--then"
    )
    log_format: Any = LOG_FORMAT
    batch_size: int | None = option(
        None, "Samples per GPU and step; by default the plan's.", least=1
    )
    batches: int | None = option(
        None,
        "Stop after this many batches of each log. Without --data, draw this many batches from the "
        "profile.",
        least=1,
    )
    seed: int = option(0, "Seed of drawn batches.", least=0)
    cache_policy: Policy = option(
        "lfu",
        "Rows that leave a full cache: lfu, the least read ones; rank, the coldest in the plan.",
    )
    look_ahead: bool | None = option(
        None,
        "Copy the rows of a batch during the step before, or within its own step; by default as "
        "the plan says.",
        "--look-ahead/--no-look-ahead",
    )
    windows: int = option(
        1, "Divide each log into this many equal parts, with a result for each.", least=1
    )
    against: Path | None = option(
        None,
        "Replay this plan, too, and show when changing to it pays off.",
        "--against",
        kind=InputPath(),
    )

    def check(self) -> None:
        """Raise UsageError if an option lacks another one, or has no effect."""
        if self.logs and self.seed:
            raise click.UsageError(
                "--seed has no effect with --data, as nothing is drawn; leave it out"
            )
        if self.logs:
            return
        if self.later or self.batches is None:
            raise click.UsageError("give --data, or --batches to draw so many from a profile")
        refuse_without("--data", "log_format separator header quotes columns null")

    def opened(self, open_log: Callable[[Sequence[str]], EncodedLog]) -> list[EncodedLog]:
        """Return the logs to replay: that of all `--data`, and those of `--then`."""
        several = (self.logs, *((one,) for one in self.later)) if self.logs else ()
        return [open_log(files) for files in several]

    def other_plan(self, plan: Plan, other_data: bool) -> Plan | None:
        """Return the plan of `--against`, which has the tables of `plan`."""
        from placer.plan.origin import check_same_tables
        from placer.plan.plan import Plan

        if self.against is None:
            return None
        other = Plan.load(self.against)
        check_same_tables(plan, other, other_data)
        return other


@dataclass(frozen=True, slots=True)
class PilotOptions:
    """Options of `placer pilot`: its logs, and the types that it tries."""

    profile_path: Path = option(..., "Profile of the log.", "--profile", kind=InputPath())
    logs: tuple[str, ...] = TRAIN_LOGS
    eval_logs: tuple[str, ...] = EVAL_LOGS
    log_format: Any = LOG_FORMAT
    widths: Any = replace(WIDTHS, default="bfloat16,int8", help="Types of cold rows to try.")
    exchange_dtype: Any = replace(
        EXCHANGE, help="Also try this type for pooled rows that processes exchange."
    )
    hot: float = option(
        0.1,
        "Share of each table's rows that is in HBM: the hottest ones.",
        kind=Number(0, 1),
    )
    seeds: int = option(
        5, "Number of models to train with each type, each with its own seed.", least=2
    )

    def opened(self, lines: TextOptions) -> tuple[Profile, Log, Log | None]:
        """Return the profile, the log to train on, and the log to evaluate on if there is one."""
        from placer.plan.origin import open_as_profiled
        from placer.profile.profile import Profile

        profile = Profile.load(self.profile_path)
        opened = partial(open_as_profiled, profile, format=self.log_format, options=lines)
        return profile, opened(self.logs), opened(self.eval_logs) if self.eval_logs else None

    def trained(
        self,
        opened: tuple[Profile, Log, Log | None],
        config: TrainConfig,
        on_run: Callable[[int, int], object],
    ) -> list[Candidate]:
        """Run `placer.training.pilot.pilot` with these options, and return its result."""
        from placer.training.pilot import pilot

        profile, log, eval_log = opened
        return pilot(
            profile,
            log,
            tuple(self.widths),
            self.exchange_dtype or "float32",
            config,
            seeds=self.seeds,
            hot_share=self.hot,
            eval_log=eval_log,
            on_run=on_run,
        )


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """Options of `placer calibrate`."""

    HEADING: ClassVar[str] = "Measurement"

    backend: str = option("auto", "Kernels to measure.", kind=BACKEND)
    device: str = option("cpu", "Device to measure: cpu or cuda.")
    ranks: int = option(1, "Number of processes that train together (with gloo).", least=1)
    threads: int = option(1, "Threads of each process.", least=1)
    budget: float = option(
        "5min",
        "Time to measure. Each case is measured once, then again while time is left.",
        kind=Seconds(or_none=True),
    )
    clock: Literal["wall", "cpu"] = option(
        "wall", "Clock to measure with; cpu counts processor time, for machines with other work."
    )
    resume: bool = option(
        True, "Continue with earlier measurements, or start again.", "--resume/--fresh"
    )

    def setting(self) -> Setting:
        """Return the setting in which steps are measured."""
        from placer.measurement import Setting

        return Setting(self.backend, self.device, self.ranks, self.threads)

    def effort(self) -> dict[str, Any]:
        """Return the arguments of `measure_machine` for the time and for old measurements."""
        return {"budget_s": self.budget, "fresh": not self.resume}


def train_config(settings: dict[str, Any], batch_size: int) -> TrainConfig:
    """Return the configuration of `TRAINING`'s options, with a default for the batch size."""
    drive = settings.get("drive")
    chosen = {"batch_size": settings["batch_size"] or batch_size, "drive": drive and str(drive)}
    compiler = "inductor" if settings.get("compile") else None
    with usage_errors():
        return TrainConfig(**{**settings, **chosen, "compile": compiler})


TRAINING = options_of(
    TrainConfig,
    "epochs max_steps batch_size lr embedding_lr optimizer rounding seed device threads backend "
    "cache_policy drive compile amp other_data timeout_s",
    batch_size=(int, option(None, "Samples per step and process; by default the plan's.", least=1)),
    backend=(str, option("auto", "Kernels that read and update rows.", kind=BACKEND)),
    compile=(bool, option(False, "Compile the MLPs with torch.compile.", "compiles --compile")),
)
for _name, _kind in {"drive": OutputPath("folder"), "timeout_s": Seconds()}.items():
    TRAINING[_name] = TRAINING[_name][0], replace(TRAINING[_name][1], kind=_kind)
PILOT = options_of(
    TrainConfig,
    "epochs max_steps batch_size lr embedding_lr optimizer seed device threads",
    max_steps=(
        int | None,
        option(None, "Stop each run after this many steps.", "steps --steps", least=0),
    ),
    seed=(int, option(0, "Seed of the first run; the next runs have the next seeds.")),
)
