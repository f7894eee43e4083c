"""Options of commands that search; `placer.knobs` turns fields into options."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

import cost_models
import placer
from placer.click_types import Checked, Choice, InputPath, Name, Seconds
from placer.data.layout import FORMATS
from placer.data.options import POOLING, poolings_of
from placer.errors import PlacerError
from placer.executor import BACKENDS
from placer.knobs import option
from placer.plan.fields import Pipeline
from placer.tables import COLD_DTYPES, DTYPE_BYTES, OPTIMIZERS
from placer.topology.kinds import GPU_KINDS, NAMED
from placer.units import parse_bytes
from solvers.registry import SOLVERS

if TYPE_CHECKING:
    from placer.growing import Growing
    from solvers.result import Limits

_MODELS = cost_models.model_names()
_KNOWN_MODELS = _MODELS.split(", ")
_A_MODEL = Name("cost model", _KNOWN_MODELS, accepts=cost_models.is_model_name)
MODEL = option(
    "roofline", "Model of step times.", "--cost-model", kind=_A_MODEL, metavar=f"[{_MODELS}]"
)
DRAM = option(None, "Memory budget of each host, such as 512GiB.", kind=parse_bytes)
SSD = option(
    None, "Drive of each host for rows that fit nowhere else, such as 2TiB.", kind=parse_bytes
)
WIDTHS = option(
    None,
    "Narrower types that the plan may choose for cold rows: int8,bfloat16,float16.",
    "--widths",
    kind=Name("type", COLD_DTYPES, several=True),
)
EXCHANGE = option(
    None,
    "Type in which pooled rows travel between GPUs; by default float32.",
    "--exchange",
    kind=Choice(sorted(DTYPE_BYTES)),
)
TIME_LIMIT = option(20.0, "Time limit of each search: seconds, 5min or 1h.", kind=Seconds())
BACKEND = Name("backend", BACKENDS)
LOG_FORMAT = option(
    None,
    "Format of the log; by default it is found from the file.",
    "--log-format",
    kind=Choice(FORMATS),
)
DTYPES, TABLE_OPTIMIZERS = Choice(sorted(DTYPE_BYTES)), Choice(OPTIMIZERS)
RULES = option(
    None,
    "YAML or TOML file of rules: pins, tiers and groups of tables, memory to keep free.",
    "--constraints",
    kind=InputPath(),
    metavar="FILE",
)

SOLVER_LIST = Name("solver", SOLVERS, several=True)
MODEL_LIST = Name("cost model", _KNOWN_MODELS, True, cost_models.is_model_name)


@contextmanager
def usage_errors(option: str = "") -> Iterator[None]:
    """Turn errors about the value of an option, if named, into usage errors."""
    try:
        yield
    except PlacerError as error:
        if not option:
            raise click.UsageError(str(error)) from None
        raise click.BadParameter(str(error), param_hint=option) from None


def prices_of(text: str | None, machines: Sequence[str]) -> dict[str, float]:
    """Parse `--price`: hourly prices of machines or GPUs.

    >>> prices_of("8xh100=98, 1xt4=0.5", ["8xh100", "1xt4"])
    {'8xh100': 98.0, '1xt4': 0.5}
    """
    prices: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = (word.strip() for word in part.rpartition("="))
        if name in prices:
            raise click.UsageError(f"--price names {name!r} twice")
        try:
            prices[name] = float(value)
        except ValueError:
            raise click.UsageError(f"--price {part!r} is not MACHINE=PRICE, as 8xh100=98") from None
        if name not in machines:
            known = ", ".join(machines)
            raise click.UsageError(f"--price names {name!r}, which is none of {known}")
        if not 0 <= prices[name] < math.inf:
            raise click.UsageError(f"--price of {name} must be at least 0, not {value}")
    return prices


def _workloads() -> Iterable[str]:
    from placer.workloads import workload_names

    return workload_names()


def _is_file(text: str) -> bool:
    from placer.config_file import SUFFIXES

    return Path(text).suffix.lower() in SUFFIXES


def _check_dense(text: str) -> None:
    """Raise PlacerError unless a text names a dense part or a file."""
    from placer.workloads.dense import dense_part

    if not _is_file(text):
        dense_part(text, "mlperf-dcnv2")


def _check_machines(text: str) -> None:
    """Raise PlacerError unless a text names machines or files, with commas between."""
    from placer.topology.presets import machine_called

    for name in text.split(","):
        if name.strip().lower() != "auto" and not _is_file(name):
            machine_called(name)


_A_WORKLOAD = Checked(suggested=_workloads)
A_MACHINE = Checked(
    _check_machines, lambda: ("auto", *NAMED, *(f"8x{kind}" for kind in GPU_KINDS)), files=True
)


@dataclass(frozen=True, slots=True)
class ProblemOptions:
    """Options of a problem: the tables to place, and the machine."""

    HEADING: ClassVar[str] = "Problem"

    profile_path: Path | None = option(
        None, "Profile that `placer profile` wrote.", "--profile", kind=InputPath()
    )
    workload: str | None = option(
        None, "Named workload instead; `placer workloads` lists them.", kind=_A_WORKLOAD
    )
    topology: str | None = option(
        None,
        "Machine: 8xh100, 2x8xa100-80, a YAML or TOML file; by default this computer.",
        kind=A_MACHINE,
    )
    dram: str | None = DRAM
    ssd: str | None = SSD
    batch_size: int | None = option(None, "Samples per GPU and step; by default 8192.", least=1)
    dim: int | None = option(None, "Columns of every table; by default the profile's.", least=1)
    dtype: Any = option(None, "Type of the tables' weights; by default the profile's.", kind=DTYPES)
    optimizer: Any = option(
        None, "Optimizer of the tables; by default the profile's.", kind=TABLE_OPTIMIZERS
    )
    widths: Any = WIDTHS
    exchange_dtype: Any = EXCHANGE
    pooling: tuple[str, ...] = replace(
        POOLING, help=POOLING.help.replace("by default sum", "by default the profile's")
    )
    constraints_path: Path | None = RULES
    pipeline: Pipeline | None = option(
        None,
        "Whether rows of the next batch are read during a step; by default they are (look-ahead).",
    )
    dense: str | None = option(
        None,
        "Dense layers to count in step time and memory: workload, measured:12ms, a file or none; "
        "by default none.",
        kind=_check_dense,
    )

    def profile(self) -> placer.Profile:
        """Return the profile or workload, with tables changed as the options say."""
        from placer.report import print_stderr, unknown_words
        from placer.workloads import named_workload

        if (self.profile_path is None) == (self.workload is None):
            raise click.UsageError("give either --profile or --workload")
        path = self.profile_path
        if path is not None:
            loaded = placer.Profile.load(path)
        else:
            with usage_errors("--workload"):
                loaded = named_workload(str(self.workload))
        if unknown := unknown_words(loaded):
            print_stderr(f"placer: {unknown}", "yellow")
        return self.changed(loaded)

    def changed(self, profile: placer.Profile) -> placer.Profile:
        """Return a profile with the tables that the options ask for."""
        pooling = poolings_of(self.pooling, {})
        kinds: Any = {"dim": self.dim, "dtype": self.dtype, "optimizer": self.optimizer}
        return profile.with_tables(pooling=pooling, **kinds)

    def machines(self) -> list[str]:
        """Return the machines of the comma-separated `topology`, without repetitions."""
        names = map(str.strip, (self.topology or "").split(","))
        return [*dict.fromkeys(filter(None, names))]

    def problem_on(
        self,
        profile: placer.Profile,
        growing: Mapping[str, Growing],
        machine: str,
        hbm: str | None = None,
    ) -> placer.Problem:
        """Return the problem on `machine`, one of `machines()`."""
        return replace(self, topology=machine).problem(profile, hbm, growing=growing)

    def problem(
        self,
        profile: placer.Profile,
        hbm: str | None,
        old: placer.Plan | None = None,
        growing: Mapping[str, Growing] | None = None,
    ) -> placer.Problem:
        """Return the problem of placing a profile's tables, with `hbm` bytes of each GPU.

        Options that are not given are taken from the old plan, if there is one.
        """
        from placer.problem import before_dense, machine_of
        from placer.workloads.dense import dense_part

        path, budgets = self.constraints_path, {"hbm": hbm, "dram": self.dram, "ssd": self.ssd}
        rules = placer.Constraints() if path is None else placer.Constraints.load(path)
        if old is None or self.topology is not None:
            machine = placer.Topology.parse(self.topology or "auto", **budgets)
        else:
            machine, rules = machine_of(old, rules, **budgets)
        dense = None if old is None else before_dense(old.dense)
        if self.dense is not None:
            dense = dense_part(self.dense, self.workload, self.dim)
        return placer.Problem(
            profile,
            machine,
            self.batch_size or (old.batch_size if old else 8192),
            rules,
            self.pipeline or (old.pipeline if old else "look-ahead"),
            dense,
            (old.widths if old else ()) if self.widths is None else tuple(self.widths),
            old.growing if old else growing or {},
            self.exchange_dtype or (old.exchange_dtype if old else "float32"),
        )


@dataclass(frozen=True, slots=True)
class MachinesOptions(ProblemOptions):
    """Options of a problem on several machines."""

    topology: str | None = option(
        None,
        "Machines, with commas between: 8xh100,lab.yaml; by default this computer, in fleet "
        "twenty types.",
        kind=A_MACHINE,
    )


@dataclass(frozen=True, slots=True)
class FollowingOptions(ProblemOptions):
    """Options of a problem that follows an old plan, which gives the defaults."""

    DEFAULTS: ClassVar[str] = "the old plan's."

    dram: str | None = replace(DRAM, help="Memory budget of each host; by default the old plan's.")

    def following(
        self, old: placer.Plan, hbm: str | None, other_data: bool = False
    ) -> placer.Problem:
        """Return the problem of a plan that follows `old`; `other_data` allows another log."""
        from placer.plan.origin import with_tables_as_in

        profile = with_tables_as_in(old, self.profile(), other_data)
        return self.problem(self.changed(profile), hbm, old)


@dataclass(frozen=True, slots=True)
class Effort:
    """Options of a search: its time, gap, seed and steps."""

    HEADING: ClassVar[str] = "Search"

    time_limit: float = TIME_LIMIT
    gap: float = option(
        1e-3, "Stop when the plan is proven this close to the best possible; 0.01 is 1%.", least=0
    )
    seed: int = option(0, "Seed of the random numbers.", least=0)
    steps: int | None = option(
        None,
        "Stop after this many search steps, which gives the same plan on any machine.",
        least=0,
    )

    def limits(self, stop: Callable[[], bool] | None = None, began: float | None = None) -> Limits:
        """Return the solver's limits, for a command that began at monotonic time `began`."""
        from solvers.result import Limits

        spent_s = 0.0 if began is None else time.monotonic() - began
        how: Any = {"max_steps": self.steps, "stop": stop, "spent_s": spent_s}
        return Limits(self.time_limit, self.gap, self.seed, **how)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of a fleet: the search on each machine, the time to train, and prices."""

    HEADING: ClassVar[str] = "Fleet"

    steps: int = option(30, "Search steps on each machine.", least=0)
    time_limit: float = option("1min", "Time limit of the search on each machine.", kind=Seconds())
    within: float = option(
        "24h",
        "Choose the cheapest machine that trains a billion samples in this time.",
        kind=Seconds(),
    )
    price: str | None = option(
        None,
        "Your prices in dollars an hour, of a GPU (h100=2.5) or a machine (8xh100=20); or a file.",
    )

    def limits(self, stop: Callable[[], bool] | None = None) -> Limits:
        """Return the solver's limits."""
        from solvers.result import Limits

        return Limits(self.time_limit, max_steps=self.steps, stop=stop)

    def prices(self, machines: Sequence[str]) -> dict[str, float]:
        """Return dollars an hour, by machine or by kind of GPU."""
        from placer.config_file import read_mapping

        text = self.price
        if text is not None and _is_file(text):
            read = read_mapping(text, "prices", PlacerError, ("machines",))
            text = ",".join(f"{name}={value}" for name, value in read.items())
        return prices_of(text, [*machines, *GPU_KINDS, "cpu"])
