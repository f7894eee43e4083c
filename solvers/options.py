"""Options of commands that search for plans; `placer.knobs` says how fields become options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import cost_models
import placer
from placer.click_options import InputPath, Name, Seconds, Suggested
from placer.data.options import POOLING, poolings_of
from placer.knobs import option
from placer.pipeline import Pipeline
from placer.tables import DTYPE_BYTES, OPTIMIZERS
from placer.topology.kinds import GPU_KINDS, NAMED
from placer.units import parse_prices
from solvers.registry import GONE, SOLVERS, no_solver

if TYPE_CHECKING:
    from solvers.result import Limits

_MODELS = cost_models.model_names()
_A_MODEL = Name("model", cost_models.is_model_name, f"{{!r}} is not one of {_MODELS}")
MODEL = option("roofline", "", "--cost-model", kind=_A_MODEL, metavar=f"[{_MODELS}]")
DRAM = option(None, "DRAM budget of each host, such as 512GiB.")
TIME_LIMIT = option(20.0, "Of each solver: seconds, or such as 5min.", kind=Seconds())
DTYPES, TABLE_OPTIMIZERS = click.Choice(sorted(DTYPE_BYTES)), click.Choice(OPTIMIZERS)
RULES = option(
    None,
    "Pins, tiers and groups of tables, memory to keep free: YAML or TOML.",
    "--constraints",
    metavar="FILE",
)


def names_of(what: str, known: str, accepts: Callable[[str], bool]) -> Name:
    """What parses names between commas, each of which has to be known."""
    return Name("text", accepts, f"no {what} is called {{!r}}; choose from {known}", several=True)


class SolverName(click.Choice):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """The name of a solver."""

    def __init__(self) -> None:
        super().__init__(list(SOLVERS))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in GONE:
            self.fail(no_solver(value), param, ctx)
        return super().convert(value, param, ctx)


SOLVER_LIST = names_of("solver", ", ".join(SOLVERS), SOLVERS.__contains__)
MODEL_LIST = names_of("model", _MODELS, cost_models.is_model_name)


def prices_of(text: str | None, names: Sequence[str]) -> dict[str, float]:
    """Prices by name, of what `--price` says; see `parse_prices`."""
    try:
        return parse_prices(text or "", names)
    except ValueError as error:
        raise click.UsageError(f"--price {error}") from None


def _workloads() -> Iterable[str]:
    from placer.workloads import workload_names

    return workload_names()


_A_WORKLOAD = Suggested(_workloads)
_A_MACHINE = Suggested(lambda: ("auto", *NAMED, *(f"8x{kind}" for kind in GPU_KINDS)), files=True)


@dataclass(frozen=True, slots=True)
class ProblemOptions:
    """What is to be placed, and where."""

    profile_path: Path | None = option(
        None, "Made by `placer profile`.", "--profile", kind=InputPath()
    )
    workload: str | None = option(
        None, "A named workload; `placer workloads` lists them.", kind=_A_WORKLOAD
    )
    topology: str | None = option(
        None, "8xh100, 2x8xa100-80, a YAML/TOML file; else this machine.", kind=_A_MACHINE
    )
    dram: str | None = DRAM
    batch_size: int | None = option(None, "Samples per GPU and step; 8192 by default.", least=1)
    dim: int | None = option(None, "Columns of every table.", least=1)
    dtype: Any = option(None, "Of the weights.", kind=DTYPES)
    optimizer: Any = option(None, "Of the embeddings.", kind=TABLE_OPTIMIZERS)
    pooling: tuple[str, ...] = POOLING
    constraints_path: Path | None = RULES
    pipeline: Pipeline | None = option(None, "serial: rows of the next batch are not read ahead.")
    dense: str | None = option(
        None, "Dense layers to count: workload, a file, measured:12ms, none."
    )

    def profile(self) -> placer.Profile:
        """The profile or workload, with the tables that were asked for."""
        from placer.report import print_stderr, unknown_words
        from placer.workloads import named_workload

        if (self.profile_path is None) == (self.workload is None):
            raise click.UsageError("give either --profile or --workload")
        path = self.profile_path
        loaded = placer.Profile.load(path) if path else named_workload(str(self.workload))
        if unknown := unknown_words(loaded):
            print_stderr(f"placer: {unknown}", "yellow")
        return loaded.with_tables(
            dim=self.dim,
            dtype=self.dtype,
            optimizer=self.optimizer,
            pooling=poolings_of(self.pooling, {}),
        )

    def machines(self) -> list[str]:
        """The names between commas in `topology`, each once."""
        names = (name.strip() for name in (self.topology or "").split(","))
        return list(dict.fromkeys(filter(None, names)))

    def problem_on(
        self, profile: placer.Profile, machine: str, hbm: str | None = None
    ) -> placer.Problem:
        """The problem on one of several machines."""
        return replace(self, topology=machine).problem(profile, hbm)

    def problem(
        self, profile: placer.Profile, hbm: str | None, old: placer.Plan | None = None
    ) -> placer.Problem:
        """The problem of placing a profile's tables within a budget of each GPU.

        What is not given is as in the old plan, if there is one.
        """
        from placer.workloads.dense import dense_part

        path = self.constraints_path
        if old is None or self.topology is not None:
            machine = placer.Topology.parse(self.topology or "auto", hbm=hbm, dram=self.dram)
        else:
            machine = old.topology.with_memory(hbm=hbm, dram=self.dram)
        dense = None if old is None else old.dense
        if self.dense is not None:
            dense = dense_part(self.dense, self.workload, self.dim)
        return placer.Problem(
            profile,
            machine,
            self.batch_size or (old.batch_size if old else 8192),
            placer.Constraints() if path is None else placer.Constraints.load(path),
            self.pipeline or (old.pipeline if old else "look-ahead"),
            dense,
        )


@dataclass(frozen=True, slots=True)
class FollowingOptions(ProblemOptions):
    """The same of a plan that follows an old one, which says what is not given."""

    topology: str | None = option(
        None, "8xh100, 2x8xa100-80, a YAML/TOML file; else the old plan's.", kind=_A_MACHINE
    )
    dram: str | None = option(None, "DRAM budget of each host; else the old plan's.")
    batch_size: int | None = option(None, "Samples per GPU and step; else the old plan's.", least=1)

    def following(self, old: placer.Plan, hbm: str | None) -> placer.Problem:
        """The problem of a plan that follows an old one."""
        from placer.plan.origin import with_tables_as_in

        profile = with_tables_as_in(old, self.profile())
        tables = profile.with_tables(dim=self.dim, dtype=self.dtype, optimizer=self.optimizer)
        return self.problem(tables, hbm, old)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how well a solver is to search."""

    time_limit: float = TIME_LIMIT
    gap: float = option(1e-3, "Stop when proven this close to the best possible.", least=0)
    seed: int = option(0, "Of all that is random.", least=0)
    steps: int | None = option(None, "Stop after so many steps: everywhere the same plan.", least=0)

    def limits(self, stop: Callable[[], bool] | None = None, began: float | None = None) -> Limits:
        """The same as a solver takes it, of a command that `began` then on `time.monotonic`."""
        from solvers.result import Limits

        spent_s = 0.0 if began is None else time.monotonic() - began
        how: Any = {"max_steps": self.steps, "stop": stop, "spent_s": spent_s}
        return Limits(self.time_limit, self.gap, self.seed, **how)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How long to search on each machine of a fleet, what machines cost, and what is asked."""

    steps: int = option(30, "Of search, on each machine.", least=0)
    time_limit: float = option("1min", "Of each machine.", kind=Seconds())
    workers: int = option(
        0, "Processes, each with the workload in memory; 0: as many as cores.", least=0
    )
    within: float = option("24h", "Time for a billion samples.", kind=Seconds())
    price: str | None = option(
        None, "Dollars an hour: h100=2.5 of a GPU, 8xh100=20 of a machine; or a file of these."
    )

    def limits(self, stop: Callable[[], bool] | None = None) -> Limits:
        """The same as a solver takes it."""
        from solvers.result import Limits

        return Limits(self.time_limit, max_steps=self.steps, stop=stop)

    def prices(self, machines: Sequence[str]) -> dict[str, float]:
        """Prices by machine, or by kind of GPU."""
        from placer.config_file import SUFFIXES, read_mapping
        from placer.errors import PlacerError

        text = self.price or ""
        if Path(text).suffix.lower() in SUFFIXES:
            read = read_mapping(text, "prices", PlacerError, ("machines",))
            text = ",".join(f"{name}={value}" for name, value in read.items())
        return prices_of(text, [*machines, *GPU_KINDS])
