"""The command `placer`: parse, call, print. Results go to stdout, progress and notes to stderr.

Exit codes: 0 done, 1 error, 2 usage, 3 no placement exists, 4 none was found within the limits,
130 a training run that was interrupted, and saved if it was told to.
"""

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

import placer
from cost_models import cost_model, is_model_name, model_names
from cost_models import report as cost_reports
from cost_models.sweep import (
    AXES,
    DEFAULT_AXES,
    MODELS,
    PARAMETER_SERVERS,
    PLACEMENTS,
    axis_values,
    platform,
    with_overrides,
)
from cost_models.sweep import sweep as sweep_placements
from placer import report
from placer.constraints.unmet import unmet
from placer.data import FORMATS, ID_MAPPINGS, EncodedLog, open_log
from placer.errors import BackendError, PlacerError, PlanMismatchError, ProfileError
from placer.files import write_text
from placer.interrupt import deferred_interrupt
from placer.plan.buffers import exchange_buffer_bytes, index_buffer_bytes
from placer.plan.diff import diff as diff_plans
from placer.plan.verify import violations
from placer.profile.count import profile_log
from placer.profile.from_counts import profile_counts
from placer.simulator.policy import CACHE_POLICIES
from placer.tables import DTYPE_BYTES, OPTIMIZERS
from placer.topology.presets import preset_help
from placer.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from placer.workloads import named_workload
from solvers import SOLVERS, Limits, SolveResult, solve
from solvers import report as solver_reports
from solvers.analysis.explain import explain
from solvers.analysis.replan import HORIZON_STEPS
from solvers.analysis.replan import replan as follow_up
from solvers.analysis.whatif import front
from solvers.analysis.whatif import whatif as effects_of_changes

OutputFormat = Literal["table", "json", "csv"]

_EXIT_NO_PLACEMENT = 3
_EXIT_LIMIT = 4
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_CLASSIC = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")


def _stdout() -> Console:
    # Off a terminal there is no width to fit: a log or a pager keeps every column.
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _print_stderr(text: str, style: str) -> None:
    """A line on stderr as it is: not wrapped, and brackets in a path are no markup."""
    Console(stderr=True, highlight=False).print(text, style=style, markup=False, soft_wrap=True)


def _note(text: str) -> None:
    _print_stderr(text, "dim")


class _Update(Protocol):
    """Moves a progress bar: how much is done, of how much, and a remark to show beside it."""

    def __call__(self, done: float, total: float | None, remark: str = "") -> None: ...


@contextmanager
def _bar(words: str) -> Iterator[_Update]:
    """A progress bar on stderr, on a terminal only; yields how to move it."""
    console = Console(stderr=True)
    parts = (TextColumn(words), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
             TextColumn("{task.description}"))  # fmt: skip
    with Bar(*parts, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(done: float, total: float | None, remark: str = "") -> None:
            bar.update(task, completed=done, total=total, description=remark)

        yield update


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C ends a search with its best plan so far; a second one acts as ever.

    Yields what a search asks whether to stop. All later searches stop at once, too.
    """
    with deferred_interrupt() as interrupt:
        yield lambda: interrupt.requested
    if interrupt.requested:
        _note("stopped: the best plan so far")


def _print_report(shown: report.Report, output: OutputFormat) -> None:
    if output == "json":
        click.echo(json.dumps(shown.to_json(), indent=1))
    elif output == "csv":
        click.echo(shown.to_csv(), nl=False)
    else:
        _stdout().print(shown.renderable())


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, listed in help in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _bundled(kind: type[Any], name: str) -> Callable[[Any], Any]:
    """Hand a command some of its options as one value of a dataclass."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_value(**options: Any) -> None:
            value = kind(**{field.name: options.pop(field.name) for field in fields(kind)})
            command(**{name: value}, **options)

        return with_value

    return decorate


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of `_problem_options`: what is to be placed, and where."""

    profile_path: Path | None
    workload: str | None
    topology: str
    dram: str | None
    batch_size: int
    dim: int | None
    dtype: Any
    optimizer: Any
    constraints_path: Path | None

    def profile(self) -> placer.Profile:
        """The profile or workload, with the tables that were asked for."""
        if (self.profile_path is None) == (self.workload is None):
            raise click.UsageError("give either --profile or --workload")
        if self.profile_path is not None:
            loaded = placer.Profile.load(self.profile_path)
        else:
            loaded = named_workload(str(self.workload))
        return loaded.with_tables(dim=self.dim, dtype=self.dtype, optimizer=self.optimizer)

    def problem(
        self, profile: placer.Profile, hbm: str | None, topology: str | None = None
    ) -> placer.Problem:
        """The problem at a budget, on the machine asked for or on another one."""
        machine = placer.Topology.parse(topology or self.topology, hbm=hbm, dram=self.dram)
        return placer.Problem(profile, machine, self.batch_size, self.constraints())

    def constraints(self) -> placer.Constraints:
        """What is asked of tables and devices; nothing, where no file is given."""
        if self.constraints_path is None:
            return placer.Constraints()
        return placer.Constraints.load(self.constraints_path)


@dataclass(frozen=True, slots=True)
class _Effort:
    """The options of `_solve_options`: how long and how well a solver is to search."""

    time_limit: float = 20.0
    gap: float = 1e-3
    seed: int = 0
    steps: int | None = None

    def limits(self, stop: Callable[[], bool]) -> Limits:
        """The same as a solver is told it."""
        return Limits(self.time_limit, self.gap, self.seed, max_steps=self.steps, stop=stop)

    def solve(
        self,
        problem: placer.Problem,
        solver: str,
        model: str,
        stop: Callable[[], bool] | None = None,
    ) -> SolveResult:
        """What a solver makes of a problem."""
        return solve(
            problem,
            solver,
            model,
            time_limit_s=self.time_limit,
            gap=self.gap,
            seed=self.seed,
            max_steps=self.steps,
            stop=stop,
        )


_PATH = click.Path(path_type=Path)
_OUTPUTS = click.Choice(["table", "json", "csv"])
_output_option = click.option("--format", "output", type=_OUTPUTS, default="table",
                              show_default=True, help="How the result is printed.")  # fmt: skip


def _detailed_output(what: str) -> Callable[[Any], Any]:
    """`--format` of a command whose JSON has more than its table, and no rows for CSV."""
    return click.option("--format", "output", type=click.Choice(["table", "json"]), default="table",
                        show_default=True,
                        help=f"How the result is printed; json has {what}.")  # fmt: skip


_constraints_option = click.option(
    "--constraints", "constraints_path", type=_PATH, metavar="FILE",
    help="Pins, tiers and groups of tables, memory to keep free: YAML or TOML.")  # fmt: skip


class _ModelName(click.ParamType):  # type: ignore[type-arg]
    """A cost model's name, or that of a kind of them and a file."""

    name = "model"

    def convert(self, value: Any, param: Any, context: Any) -> str:
        if not is_model_name(value):
            self.fail(f"{value!r} is not one of {model_names()}", param, context)
        return str(value)


_model_option = click.option("--cost-model", "model", type=_ModelName(), default="roofline",
                             show_default=True, metavar=f"[{model_names()}]")  # fmt: skip
_data_format_option = click.option("--data-format", type=click.Choice(FORMATS),
                                   help="By default what the file's suffix says.")  # fmt: skip
_table_options = _options(
    click.option("--dim", type=click.IntRange(1), help="Columns of every table."),
    click.option("--dtype", type=click.Choice(sorted(DTYPE_BYTES)), help="Of the weights."),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="Of the embeddings."),
)
_column_options = (
    click.option("--label", help="Column of the clicks, in Parquet; by default label or click."),
    click.option("--ignore", multiple=True,
                 help="Column of Parquet that is no feature, such as a sample's id; repeatable."),
)  # fmt: skip
_log_options = _options(
    click.option(
        "--format",
        "log_format",
        type=click.Choice([*FORMATS, "counts"]),
        help="Of the log; by default what the file's suffix says.",
    ),
    click.option("--id-mapping", type=click.Choice(ID_MAPPINGS), default="auto", show_default=True,
                 help="How raw ids become rows."),
    click.option("--rows", type=int, help="Rows of every table, for hash and vocabulary."),
    click.option("--min-count", type=click.IntRange(1), default=1, show_default=True,
                 help="A vocabulary leaves out ids that are read less often."),
    *_column_options,
)  # fmt: skip
_problem_options = _options(
    click.option("--profile", "profile_path", type=_PATH, help="Made by `placer profile`."),
    click.option("--workload", help="A named workload; `placer workloads` lists them."),
    click.option("--topology", default="auto", show_default=True,
                 help="8xh100, 2x8xa100-80, a YAML/TOML file, or auto for this machine."),
    click.option("--dram", help="DRAM budget of each host, such as 512GiB."),
    click.option("--batch-size", type=click.IntRange(1), default=8192, show_default=True,
                 help="Samples per GPU and step."),
    _table_options,
    _constraints_option,
    _bundled(_Asked, "asked"),
)  # fmt: skip
_solve_options = _options(
    click.option("--time-limit", type=click.FloatRange(0, min_open=True), default=20.0,
                 show_default=True, help="Seconds for each solver."),
    click.option("--gap", type=click.FloatRange(0), default=1e-3, show_default=True,
                 help="Stop when proven this close to the best possible."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--steps", type=click.IntRange(0),
                 help="Stop after so many steps of search: on any machine the same plan."),
    _bundled(_Effort, "effort"),
)  # fmt: skip


class _Commands(click.Group):
    """Errors that placer raises on purpose are one line, not a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PlacerError as error:
            _print_stderr(f"placer: {error}", "red")
            context.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(placer.__version__, prog_name="placer")
def main() -> None:
    """Decide where the embedding tables of a recommendation model live, and train with it.

    \b
    placer profile day_0.gz --format criteo --id-mapping hash --rows 1000000 -o profile
    placer plan --profile profile --topology 8xh100 --hbm 8GiB -o plan.json
    placer train --plan plan.json --data day_0.gz
    """


@main.command()
@click.argument("logs", nargs=-1, required=True, type=_PATH)
@_log_options
@_options(
    click.option("--dim", type=click.IntRange(1), default=64, show_default=True,
                 help="Columns of the tables, which a log does not tell."),
    click.option("--dtype", type=click.Choice(sorted(DTYPE_BYTES)), default="float32"),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="rowwise_adagrad"),
    click.option("--sample", type=click.FloatRange(0, 1, min_open=True),
                 help="Read about this share of the samples."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the sample."),
    click.option("--samples", type=click.IntRange(1),
                 help="Samples of the log, for --format counts."),
    click.option("--report", "output", type=_OUTPUTS, default="table", show_default=True,
                 help="How the result is printed."),
    click.option("-o", "--output", "folder", type=_PATH, required=True,
                 help="Folder to write the profile to."),
)  # fmt: skip
def profile(
    logs: tuple[Path, ...],
    log_format: Any,
    id_mapping: Any,
    rows: int | None,
    min_count: int,
    label: str | None,
    ignore: tuple[str, ...],
    dim: int,
    dtype: Any,
    optimizer: Any,
    sample: float | None,
    seed: int,
    samples: int | None,
    output: OutputFormat,
    folder: Path,
) -> None:
    """Count how often a training log reads each row of each table.

    \b
    placer profile train.tsv --format criteo --id-mapping hash --rows 1000000 -o profile
    placer profile clicks.parquet --id-mapping vocabulary --min-count 5 -o profile
    placer profile counts.parquet --format counts --samples 1000000000 -o profile
    """
    if log_format == "counts":
        if samples is None:
            raise click.UsageError("--format counts needs --samples: the samples of the log")
        result = profile_counts(logs, samples=samples, dim=dim, dtype=dtype, optimizer=optimizer)
    else:
        with _bar("ids") as update:
            log = open_log(logs, log_format, id_mapping=id_mapping, rows=rows,
                           min_count=min_count, label=label, ignore=ignore,
                           progress=update)  # fmt: skip
        with _bar("samples") as update:
            result = profile_log(log, dim=dim, dtype=dtype, optimizer=optimizer, sample=sample,
                                 seed=seed, progress=update)  # fmt: skip
    result.save(folder)
    _print_report(report.profile_report(result), output)
    _note(f"profile written to {folder}")


@main.command()
@click.argument("profiles", nargs=-1, required=True, type=_PATH)
@click.option("-o", "--output", "folder", type=_PATH, required=True, help="Folder to write to.")
@_output_option
def merge(profiles: tuple[Path, ...], folder: Path, output: OutputFormat) -> None:
    """Join profiles of parts of one log into the profile of all of it.

    \b
    placer merge day_0.profile day_1.profile -o profile
    """
    merged = placer.Profile.merge(placer.Profile.load(path) for path in profiles)
    merged.save(folder)
    _print_report(report.profile_report(merged), output)
    _note(f"profile written to {folder}")


@main.command()
@click.argument("name", required=False)
@_output_option
def workloads(name: str | None, output: OutputFormat) -> None:
    """List the named workloads, or the tables of one.

    \b
    placer workloads
    placer workloads mlperf-dcnv2
    """
    shown = report.workloads_report() if name is None else report.profile_report(
        named_workload(name), fit=False
    )  # fmt: skip
    _print_report(shown, output)


@main.command(
    help=f"""Show a machine, its constants and where they come from.

\b
{preset_help()}

\b
placer topology 8xh100 --hbm 8GiB
placer topology auto --hbm 2GiB -o machine.yaml
"""
)
@click.argument("machine", default="auto")
@click.option("--hbm", help="Memory budget of each GPU, such as 8GiB.")
@click.option("--dram", help="DRAM budget of each host, such as 512GiB.")
@click.option("-o", "--output", "file", type=_PATH, help="Write it as a YAML file to edit.")
@_output_option
def topology(
    machine: str, hbm: str | None, dram: str | None, file: Path | None, output: OutputFormat
) -> None:
    """Show a machine; the help text is given to the decorator, which fills in the presets."""
    parsed = placer.Topology.parse(machine, hbm=hbm, dram=dram)
    if file is not None:
        parsed.save(file)
        _note(f"topology written to {file}")
    _print_report(report.topology_report(parsed), output)


@main.command()
@_problem_options
@click.option("--hbm", help="Memory budget of each GPU, such as 8GiB.")
@click.option("--solver", type=click.Choice(list(SOLVERS)), default="auto", show_default=True)
@_model_option
@_solve_options
@click.option("-o", "--output", "file", type=_PATH, required=True, help="Plan file to write.")
@_output_option
def plan(
    asked: _Asked,
    hbm: str | None,
    solver: str,
    model: str,
    effort: _Effort,
    file: Path,
    output: OutputFormat,
) -> None:
    """Place the tables of a profile or workload on a machine.

    \b
    placer plan --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB -o plan.json
    placer plan --profile profile --topology auto --hbm 2GiB --batch-size 1024 -o plan.json
    """
    problem = asked.problem(asked.profile(), hbm)
    with _stoppable() as stop:
        result = effort.solve(problem, solver, model, stop)
    if result.plan is None:
        _refuse(result)
    found = result.plan
    name = str(asked.workload)
    if asked.profile_path is not None:
        name = _relative(asked.profile_path, file)
    found = replace(found, provenance=replace(found.provenance, profile=name))
    found.save(file)
    evaluate = functools.partial(cost_model(model).evaluate, problem)
    _print_report(solver_reports.plan_report(found, evaluate, end=result.termination), output)
    _note(_verdict(result) + f"; plan written to {file}")


def _relative(path: Path, file: Path) -> str:
    """How a plan names its profile: from the plan's folder, so that both can move together."""
    return os.path.relpath(path.resolve(), file.resolve().parent)


def _refuse(result: SolveResult) -> NoReturn:
    """Say why there is no plan, and exit."""
    end = result.termination
    short = [
        f"{short.device} short of {format_bytes(short.short_bytes)} ({short.short_bytes} bytes) of "
        f"{short.resource.upper()} ({short.detail})"
        for short in end.shortages
    ]
    _print_stderr("; ".join([f"placer: no plan ({end.reason}): {end.detail}", *short]), "red")
    sys.exit(_EXIT_LIMIT if end.limit else _EXIT_NO_PLACEMENT)


def _verdict(result: SolveResult) -> str:
    """How good a plan is, in words."""
    seconds = f"found in {format_seconds(result.stats.get('seconds', 0.0))}"
    step = f"step {format_seconds(result.step_time_s or 0.0)}"
    if result.gap is None:
        return f"{step}, no bound was proven, {seconds}"
    return f"{step}, at most {result.gap:.2%} above the best possible, {seconds}"


@main.command()
@_problem_options
@click.option("--hbm", help="Memory budgets of each GPU, such as 4GiB,8GiB.")
@click.option(
    "--solvers",
    "names",
    default=",".join([*_CLASSIC, "greedy-cost", "ilp"]),
    show_default=True,
    help="Comma-separated.",
)
@click.option(
    "--cost-models", "models", default="roofline", show_default=True, help="Comma-separated."
)
@_solve_options
@click.option(
    "--price",
    "price_text",
    help="Of machines per hour, such as 8xh100=98,8xa100-40=32; adds the cost of "
    "a billion samples.",
)
@click.option("--plot", type=_PATH, help="Write a picture: png, pdf or svg.")
@_output_option  # fmt: skip
def compare(
    asked: _Asked,
    hbm: str | None,
    names: str,
    models: str,
    effort: _Effort,
    price_text: str | None,
    plot: Path | None,
    output: OutputFormat,
) -> None:
    """Compare solvers over machines, cost models and memory budgets on one workload.

    \b
    placer compare --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB,80GiB
    placer compare --profile profile --hbm 2GiB --solvers greedy-size,ilp --plot compare.png
    placer compare --workload mlperf-dcnv2 --topology 8xa100-40,8xh100 --price 8xh100=98
    """
    loaded = asked.profile()
    solvers, cost_models = _names(names, SOLVERS, "solver"), _model_names(models)
    machines = [name.strip() for name in asked.topology.split(",") if name.strip()]
    prices = _prices(price_text, machines)
    rows = []
    with _stoppable() as stop:
        for name, budget in itertools.product(machines, hbm.split(",") if hbm else [None]):
            problem = asked.problem(loaded, budget, name)
            rows += _compared(problem, solvers, cost_models, effort, prices.get(name), stop)
    if plot is not None:
        solver_reports.plot_compare(rows, plot)
        _note(f"picture written to {plot}")
    title = f"{len(loaded)} tables on {asked.topology}"
    _print_report(solver_reports.compare_report(rows, title), output)
    if all(row.step_time_s is None for row in rows):
        sys.exit(_EXIT_NO_PLACEMENT)


def _prices(text: str | None, machines: list[str]) -> dict[str, float]:
    """Prices per hour by machine, from ``8xh100=98,8xa100-40=32``."""
    prices: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = (word.strip() for word in part.rpartition("="))
        try:
            prices[name] = float(value)
        except ValueError:
            raise click.UsageError(f"--price {part!r} is not MACHINE=PRICE, as 8xh100=98") from None
        if name not in machines:
            raise click.UsageError(
                f"--price names {name!r}, which --topology does not: {', '.join(machines)}"
            )
        if not 0 <= prices[name] < float("inf"):
            raise click.UsageError(f"--price of {name} must be at least 0, not {value}")
    return prices


def _model_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not is_model_name(name):
            raise click.UsageError(f"no model is called {name!r}; choose from {model_names()}")
    return names


def _names(text: str, known: dict[str, Any], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise click.UsageError(f"no {what} is called {name!r}; choose from {', '.join(known)}")
    return names


def _compared(
    problem: placer.Problem,
    solvers: list[str],
    models: list[str],
    effort: _Effort,
    price_per_hour: float | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[solver_reports.CompareRow]:
    """A row for each cost model and solver; one bound for all solvers.

    All solvers search parts of one space, so the best bound that one of them proves holds
    for all.
    """
    rows: list[solver_reports.CompareRow] = []
    with _bar("solvers") as update:
        for model in models:
            results: list[SolveResult] = []
            for name in solvers:
                results.append(effort.solve(problem, name, model, stop))
                update(len(rows) + len(results), len(models) * len(solvers))
            bound = max((r.bound_s for r in results if r.bound_s is not None), default=None)
            for name, result in zip(solvers, results, strict=True):
                cost = cost_model(model).evaluate(problem, result.plan) if result.plan else None
                shared = replace(result, bound_s=bound)
                rows.append(
                    solver_reports.compare_row(
                        problem, name, model, shared, cost, price_per_hour=price_per_hour
                    )
                )
    return rows


@main.command()
@click.argument("path", type=_PATH)
@click.option(
    "--profile",
    "profile_path",
    type=_PATH,
    help="Of the plan's tables; by default the one that the plan names.",
)
@_model_option
@click.option(
    "--top",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Tables listed of a plan of many.",
)
@click.option("--explain", "explained", metavar="TABLE", help="Say what decided its placement.")
@_constraints_option
@_output_option
def show(
    path: Path,
    profile_path: Path | None,
    model: str,
    top: int,
    explained: str | None,
    constraints_path: Path | None,
    output: OutputFormat,
) -> None:
    """Show a plan: memory and time of each device, placement of each table; or a profile.

    \b
    placer show plan.json
    placer show plan.json --explain C10 --constraints rules.yaml
    placer show profile
    """
    if path.is_dir() or path.name == "profile.json":
        if explained is not None:
            raise click.UsageError("--explain needs a plan, and this is a profile")
        _print_report(report.profile_report(placer.Profile.load(path)), output)
        return
    loaded = placer.Plan.load(path)
    known = _profile_of(loaded, path, profile_path)
    evaluate = None
    if known is None:
        if explained is not None:
            raise PlanMismatchError(
                f"--explain needs the profile that {path} was made from, and "
                f"{loaded.provenance.profile!r} is not there; give --profile"
            )
        _note("times need the profile: give --profile")
    else:
        asked = placer.Constraints()
        if constraints_path is not None:
            # What is to be kept free is not in the plan's machine any more.
            asked = replace(placer.Constraints.load(constraints_path), reserve=())
        problem = placer.Problem(known, loaded.topology, loaded.batch_size, asked)
        if problem.sha256 != loaded.provenance.problem_sha256:
            _note("the profile, machine or constraints are not those that the plan was made for")
        if explained is not None:
            found = explain(problem, loaded, explained, cost_model(model))
            _print_report(solver_reports.explain_report(found), output)
            return
        # Times are those of the rows that the plan has in HBM, hot or not any more.
        evaluate = functools.partial(cost_model(model).evaluate, problem.in_plan_order(loaded))
    _print_report(solver_reports.plan_report(loaded, evaluate, top=top), output)


def _profile_of(plan: placer.Plan, path: Path, profile_path: Path | None) -> placer.Profile | None:
    """The profile given, or the one that the plan names, with the plan's tables; or None."""
    if profile_path is not None:
        found = placer.Profile.load(profile_path)
    else:
        named = path.resolve().parent / plan.provenance.profile
        try:
            inside = bool(plan.provenance.profile) and named.exists()
            found = placer.Profile.load(named) if inside else named_workload(
                plan.provenance.profile
            )  # fmt: skip
        except ProfileError:
            return None
    by_name = {profile.name: profile for profile in found}
    missing = [table.name for table in plan.tables if table.name not in by_name]
    if missing:
        raise PlanMismatchError(
            f"the profile has no table {missing[0]!r} of the plan; it has {', '.join(by_name)}; "
            "give the profile that the plan was made from with --profile"
        )
    for table in plan.tables:
        if by_name[table.name].table.rows != table.rows:
            raise PlanMismatchError(
                f"table {table.name!r} has {by_name[table.name].table.rows} rows in the profile "
                f"and {table.rows} in the plan; give the profile that the plan was made from"
            )
    return replace(
        found,
        tables=tuple(
            replace(
                by_name[table.name],
                table=replace(
                    by_name[table.name].table,
                    dim=table.dim,
                    dtype=table.dtype,
                    optimizer=table.optimizer,
                ),
            )
            for table in plan.tables
        ),
    )


@main.command()
@click.argument("path", type=_PATH)
@_constraints_option
@_output_option
def verify(path: Path, constraints_path: Path | None, output: OutputFormat) -> None:
    """Prove from a plan's file alone that it is sound: coverage, capacities, row orders.

    \b
    placer verify plan.json
    placer verify plan.json --constraints rules.yaml
    """
    loaded = placer.Plan.load(path)
    found = violations(loaded)
    if constraints_path is not None:
        constraints = placer.Constraints.load(constraints_path)
        if constraints.reserve:
            _note("reserve is not checked: a plan tells the memory that was left, not what was")
        # Of malformed shards, nobody can tell how they place a table.
        if not any(violation.rule == "shard" for violation in found):
            found += unmet(loaded, constraints)
    if output == "table":
        for violation in found:
            click.echo(f"{violation.rule}: {violation.message}")
        if not found:
            click.echo(
                f"{path} is sound: {len(loaded.shards)} shards cover {len(loaded.tables)} tables "
                "exactly once, and every device holds no more than it has"
                + ("" if constraints_path is None else f"; it meets {constraints_path}")
            )
    else:
        rows = [{"rule": v.rule, "where": v.where, "message": v.message} for v in found]
        if output == "csv":
            click.echo(report.rows_to_csv(rows) or "rule,where,message\n", nl=False)
        else:
            click.echo(json.dumps({"sound": not found, "violations": rows}, indent=1))
    if found:
        sys.exit(1)


class _Backend(click.ParamType):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """One of the executor's backends, which are imported, torch with them, only where asked for."""

    name = "backend"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._known())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self._known():
            self.fail(f"{value!r} is none of {', '.join(self._known())}", param, ctx)
        return str(value)

    def _known(self) -> tuple[str, ...]:
        from placer.executor.backends import BACKENDS

        return BACKENDS


@main.command()
@click.option("--plan", "plan_path", type=_PATH, required=True)
@click.option(
    "--data",
    "logs",
    type=_PATH,
    multiple=True,
    required=True,
    help="Log files to train on; may be given more than once.",
)
@click.option(
    "--eval-data",
    "eval_logs",
    type=_PATH,
    multiple=True,
    help="Evaluate on these; by default every tenth batch is held out.",
)
@_data_format_option
@click.option(
    "--profile",
    "profile_path",
    type=_PATH,
    help="Whose id mapping to use; by default the profile that the plan names.",
)
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(0), help="Stop after so many steps.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples per step and process; by default those of the plan's GPUs that it stands for.",
)
@click.option("--lr", type=float, default=0.01, show_default=True)
@click.option("--embedding-lr", type=float, help="By default --lr.")
@click.option(
    "--dense-optimizer",
    type=click.Choice(["adagrad", "sgd", "adam"]),
    default="adagrad",
    show_default=True,
    help="Of the MLPs.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--backend", type=_Backend(), default="auto", show_default=True, help="The executor's kernels."
)
@click.option(
    "--cache-policy",
    type=click.Choice(["lfu", "rank"]),
    default="lfu",
    show_default=True,
    help="Which cached rows make room: those least looked up, or those last in the plan's order.",
)
@click.option("--compile", "compiles", is_flag=True, help="Compile the MLPs with torch.compile.")
@click.option("--amp", type=click.Choice(["bfloat16"]), help="Compute the MLPs in this type.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Under torchrun, how long processes wait for one another; by default as PyTorch does.",
)
@click.option(
    "--trace",
    "trace_path",
    type=_PATH,
    metavar="FILE",
    help="Write a trace of some steps, for chrome://tracing or Perfetto; .gz compresses it.",
)
@click.option(
    "--trace-steps",
    type=click.IntRange(1),
    help="Steps in the trace, after 5 others; by default 10.",
)
@click.option("--checkpoints", type=_PATH, help="Folder to save checkpoints to.")
@click.option("--every", type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@_detailed_output("every loss")
def train(
    plan_path: Path,
    logs: tuple[Path, ...],
    eval_logs: tuple[Path, ...],
    data_format: Any,
    profile_path: Path | None,
    epochs: int,
    steps: int | None,
    batch_size: int | None,
    lr: float,
    embedding_lr: float | None,
    dense_optimizer: Any,
    seed: int,
    device: str,
    backend: str,
    cache_policy: Any,
    compiles: bool,
    amp: Any,
    timeout_s: float | None,
    trace_path: Path | None,
    trace_steps: int | None,
    checkpoints: Path | None,
    every: int | None,
    resume: bool,
    output: str,
) -> None:  # fmt: skip
    """Train the bundled DLRM on a log, its tables where a plan puts them.

    \b
    placer train --plan plan.json --data train.tsv
    placer train --plan plan.json --data train.tsv --checkpoints runs/a --every 1000 --resume
    placer train --plan plan.json --data train.tsv --steps 20 --trace trace.json
    torchrun --nproc-per-node 2 --no-python placer train --plan plan.json --data train.tsv
    """
    if trace_steps is not None and trace_path is None:
        raise click.UsageError("--trace-steps needs --trace: the file to write to")
    # Else the profiler's library tells on stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from placer.executor import keep_freed_memory
    from placer.training import CheckpointPolicy, TraceRequest, TrainConfig
    from placer.training import train as train_dlrm
    from placer.training.checkpoint import exist
    from placer.training.ranks import rank_of_launcher, world_of_launcher

    speaks, world = rank_of_launcher() == 0, world_of_launcher()
    if resume and checkpoints is None:
        raise click.UsageError("--resume needs --checkpoints: the folder to resume from")
    keep_freed_memory()
    loaded = placer.Plan.load(plan_path)
    log = _training_log(loaded, plan_path, profile_path, logs, data_format)
    eval_log = (
        _training_log(loaded, plan_path, profile_path, eval_logs, data_format)
        if eval_logs
        else None
    )
    config = TrainConfig(
        epochs=epochs,
        max_steps=steps,
        batch_size=batch_size or max(loaded.batch_size * len(loaded.topology.gpus) // world, 1),
        lr=lr,
        embedding_lr=embedding_lr,
        optimizer=dense_optimizer,
        seed=seed,
        device=device,
        backend=backend,
        cache_policy=cache_policy,
        compile="inductor" if compiles else None,
        amp=amp,
        timeout_s=timeout_s,
    )
    trace = None
    if trace_path is not None:
        trace = TraceRequest(trace_path, *(() if trace_steps is None else (trace_steps,)))
    policy = None if checkpoints is None else CheckpointPolicy(checkpoints, every)
    resumes = resume and checkpoints is not None and exist(checkpoints)
    if resume and not resumes and speaks:
        _note(f"no checkpoint in {checkpoints} yet: the run starts from its beginning")
    # Of many processes one speaks.
    with _bar("steps") if speaks else nullcontext(_nothing) as update:
        result = train_dlrm(
            loaded,
            log,
            config,
            eval_log=eval_log,
            checkpoints=policy,
            resume=checkpoints if resumes else None,
            trace=trace,
            on_progress=lambda progress: update(
                progress.step,
                steps,
                f"pass {progress.epoch + 1}, loss {progress.loss:.4f}, "
                f"{progress.samples_per_s:,.0f} samples/s",
            ),
        )
    if not speaks:
        sys.exit(_EXIT_INTERRUPTED if result.interrupted else 0)
    values = {
        "steps": result.steps,
        "samples": result.samples,
        "unlabelled_samples": result.unlabelled_samples,
        "train_s": result.train_s,
        "read_s": result.read_s,
        "samples_per_s": result.samples_per_s,
        "first_loss": result.losses[0][1] if result.losses else None,
        "last_loss": result.losses[-1][1] if result.losses else None,
        "held_out_samples": result.eval_samples,
        "auc": result.auc,
        "log_loss": result.log_loss,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "interrupted": result.interrupted,
    }
    reports = {}
    if result.hit_rates is not None:
        reports["hit_rates"] = report.hit_rate_report(result.hit_rates)
    if result.trace is not None:
        reports["trace"] = report.trace_report(result.trace)
    elif trace is not None:
        _note(f"no trace: the run ended within the {trace.warm_up} steps before it")
    if output == "json":
        tables = {name: shown.to_json() for name, shown in reports.items()}
        click.echo(json.dumps({**values, **tables, "losses": result.losses}, indent=1))
    else:
        for name, value in values.items():
            if value is not None:
                click.echo(f"{name.replace('_', ' '):>18}  {_readable(value)}")
        for shown in reports.values():
            click.echo()
            _print_report(shown, "table")
    if result.interrupted:
        saved = f"--resume goes on from {checkpoints}" if checkpoints else (
            "nothing was saved; --checkpoints saves"
        )  # fmt: skip
        _note(f"interrupted after step {result.steps}; {saved}")
        sys.exit(_EXIT_INTERRUPTED)


@main.command()
@click.argument("path", type=_PATH)
@click.option(
    "--data",
    "logs",
    type=_PATH,
    multiple=True,
    help="Log files to replay; may be given more than once.",
)
@click.option(
    "--then",
    "later",
    type=_PATH,
    multiple=True,
    help="A log that follows, as a window of its own; may be given more than once.",
)
@_data_format_option
@click.option(
    "--profile",
    "profile_path",
    type=_PATH,
    help="Whose id mapping to use, and what to draw from without --data; by default "
    "the profile that the plan names.",
)
@click.option(
    "--batch-size", type=click.IntRange(1), help="Samples per GPU and step; by default the plan's."
)
@click.option(
    "--batches",
    type=click.IntRange(1),
    help="At most so many of each log; without --data, so many are drawn.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of drawn batches.")
@click.option(
    "--cache-policy",
    type=click.Choice(CACHE_POLICIES),
    default="lfu",
    show_default=True,
    help="Which rows cached shards keep: lfu and rank as the "
    "executor does, the others as other systems do.",
)
@click.option(
    "--look-ahead/--no-look-ahead",
    default=True,
    show_default=True,
    help="Whether rows are brought while the batch before trains.",
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Equal parts of each log to tell apart.",
)
@click.option(
    "--against",
    "other_path",
    type=_PATH,
    help="Another plan for the same batches, such as one made for today's: when does "
    "going over to it pay?",
)
@_model_option
@_detailed_output("every step")
def simulate(
    path: Path,
    logs: tuple[Path, ...],
    later: tuple[Path, ...],
    data_format: Any,
    profile_path: Path | None,
    batch_size: int | None,
    batches: int | None,
    seed: int,
    cache_policy: Any,
    look_ahead: bool,
    windows: int,
    other_path: Path | None,
    model: str,
    output: OutputFormat,
) -> None:  # fmt: skip
    """Replay a log through a plan and count, on each device, what every batch does there.

    \b
    placer simulate plan.json --data train.tsv
    placer simulate plan.json --data monday.tsv --then tuesday.tsv --against tuesday.json
    placer simulate plan.json --profile profile --batches 100
    """
    from cost_models.replay import (
        Replayed,
        StepTimer,
        TimeSummary,
        replayed,
        step_equation,
    )
    from placer.plan.migration import migration
    from placer.simulator.draws import drawn_batches
    from placer.simulator.logs import log_batches
    from placer.simulator.replay import ReplayOptions, Simulator
    from placer.simulator.summary import device_totals, served
    from placer.simulator.windows import Window, drifted, equal_windows

    if not logs and (later or batches is None):
        raise click.UsageError("give --data, or --batches to draw so many from a profile")
    plans = [placer.Plan.load(path)]
    if other_path is not None:
        plans.append(placer.Plan.load(other_path))
    known = _profile_of(plans[0], path, profile_path)
    size = (batch_size or plans[0].batch_size) * len(plans[0].topology.gpus)
    streams: list[tuple[str, Callable[[], Any]]] = []
    if logs:
        for group in (logs, *((one,) for one in later)):
            log = _training_log(plans[0], path, profile_path, group, data_format)
            read = functools.partial(log_batches, log, plans[0], size, batches)
            streams.append((log.description, read))
    else:
        if known is None:
            raise PlanMismatchError(
                f"{path} does not say what to draw from, or it is not there; give --profile"
            )
        drawn = functools.partial(drawn_batches, known, size, batches or 1, seed=seed)
        streams.append(("drawn", drawn))
    options = ReplayOptions(cache_policy=cache_policy, look_ahead=look_ahead)
    equation = step_equation(cost_model(model))
    simulators, runs = [], []
    over_time: list[list[Window]] = []
    for plan in plans:
        simulator = Simulator(plan, options)
        timer = StepTimer(simulator.arrangement, equation, known)
        done: list[Replayed] = []
        found: list[Window] = []
        for name, stream in streams:
            with _bar("steps") as update:
                limit = None if batches is None else float(batches)
                done.append(
                    replayed(simulator, timer, stream(), lambda n: update(n, limit, name))  # noqa: B023
                )
            found += equal_windows(name, done[-1].records, windows)
        simulators.append(simulator)
        runs.append(Replayed.joined(done))
        over_time.append(found)
    own, simulator = runs[0], simulators[0]
    move_s = None
    if len(plans) > 1:
        move_s = migration(diff_plans(*plans)).seconds
    shown = cost_reports.simulate_report(
        own.totals,
        device_totals(simulator.arrangement, own.totals, simulator.cache_entries),
        served(simulator.arrangement, own.totals.parts),
        own.records,
        TimeSummary.of([one.step_s for one in own.records]),
        TimeSummary.of([one.sum_s for one in own.records]),
        drifted(over_time[0], over_time[1] if len(plans) > 1 else None, move_s),
        policy=cache_policy,
        look_ahead=look_ahead,
        gpu_s=own.gpu_s.tolist(),
    )
    _print_report(shown, output)


def _nothing(done: float, total: float | None, remark: str = "") -> None:
    """A progress bar that nobody sees."""


def _readable(value: Any) -> str:
    """A value of a result for people: whole numbers grouped, others to five digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no"}.get(value, str(value))
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.5g}"


def _training_log(
    plan: placer.Plan,
    plan_path: Path,
    profile_path: Path | None,
    logs: tuple[Path, ...],
    data_format: Any,
) -> EncodedLog:
    """A log opened with the id mapping that the plan's profile was counted with."""
    known = _profile_of(plan, plan_path, profile_path)
    if known is None or known.encoding is None:
        raise PlanMismatchError(
            f"training needs the id mapping that {plan_path} was made with, and its profile "
            f"{plan.provenance.profile!r} has none or is not there; give --profile"
        )
    return open_log(list(logs), data_format, encoding=known.encoding)


@main.command()
@_options(
    click.option("--backend", default="auto", show_default=True,
                 help="Of the executor: numba, torch, tiered or triton."),
    click.option("--device", default="cpu", show_default=True, help="cpu or cuda."),
    click.option("--ranks", type=click.IntRange(1), default=1, show_default=True,
                 help="Processes that train together over gloo: exchanges are measured too."),
    click.option("--threads", type=click.IntRange(1), default=1, show_default=True,
                 help="Of each process."),
    click.option("--budget", default="5min", show_default=True,
                 help="Time to measure: cases once, then again while there is time."),
    click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True,
                 help="cpu takes the processor's time, where others use the machine too."),
    click.option("--resume/--fresh", default=True, show_default=True,
                 help="Go on with the measurements beside the file, or start anew."),
    click.option("--learn", is_flag=True,
                 help="Measure random plans and train networks on them: FILE is then for "
                      "--cost-model learned:FILE."),
    click.option("--learn-only", "datasets", type=_PATH, multiple=True, metavar="MEASUREMENTS",
                 help="The same from files of measurements, measuring nothing."),
    click.option("--calibration", type=_PATH,
                 help="Constants that --learn starts from; those of its own measurements if not "
                      "given."),
    click.option("--workloads", type=click.IntRange(1), default=200, show_default=True,
                 help="Random workloads that --learn measures, two plans of each."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of --learn."),
    _output_option,
    click.option("-o", "--output", "file", type=_PATH, required=True,
                 help="File to write the constants, or the networks, to."),
)  # fmt: skip
def calibrate(
    backend: str,
    device: str,
    ranks: int,
    threads: int,
    budget: str,
    clock: Any,
    resume: bool,
    learn: bool,
    datasets: tuple[Path, ...],
    calibration: Path | None,
    workloads: int,
    seed: int,
    output: OutputFormat,
    file: Path,
) -> None:
    """Measure what embedding work takes on this machine, for --cost-model calibrated:FILE.

    Measurements are kept beside FILE, so that a run that was cut short can be taken up.

    \b
    placer calibrate --backend tiered --budget 3min -o machine.json
    placer show plan.json --profile profile --cost-model calibrated:machine.json
    placer calibrate --learn --backend tiered --budget 9min -o model.safetensors
    """
    from cost_models.calibrated import calibrate as fit_constants
    from placer.measurement import Dataset, Setting, collect, random_cases
    from placer.measurement.designed import designed_cases
    from placer.measurement.times import resolved

    setting = resolved(Setting(backend, device, ranks, threads))
    measured = file.with_suffix(".measurements.jsonl")
    if datasets:
        _train_model(datasets, calibration, clock, seed, output, file)
        return
    if not resume:
        measured.unlink(missing_ok=True)
    limit_s, passes = parse_seconds(budget), 2
    cases = (
        list(random_cases(seed, workloads, plans=2, gpus=ranks))
        if learn
        else list(designed_cases(tiers=setting.tiers, gpus=ranks))
    )
    with _stoppable() as stop, _bar("cases") as update:
        collect(cases, measured, setting, budget_s=limit_s, repeats=passes, stop=stop,
                on_case=lambda done: update(done, passes * len(cases)))  # fmt: skip
    if learn:
        _train_model((measured,), calibration, clock, seed, output, file)
        return
    found = fit_constants(Dataset.load(measured), clock)
    found.save(file)
    if found.noisy:
        _print_stderr("placer: the machine was too noisy to trust these constants; calibrate again "
                      "with nothing else running, or with --clock cpu", "yellow")  # fmt: skip
    _print_report(cost_reports.calibration_report(found), output)
    _note(f"constants written to {file}, measurements to {measured}")


def _train_model(
    measured: tuple[Path, ...],
    calibration: Path | None,
    clock: Any,
    seed: int,
    output: OutputFormat,
    file: Path,
) -> None:
    """Train a learned cost model on files of measurements, and write it."""
    from cost_models.calibrated import Calibration
    from cost_models.learned import learn
    from placer.measurement import Dataset

    constants = None if calibration is None else Calibration.load(calibration)
    with _bar("epochs") as update:
        found = learn(
            [Dataset.load(path) for path in measured], constants, clock=clock, seed=seed,
            on_epoch=lambda epoch, error: update(epoch, None, f"off by {error:.1%}"),
        )  # fmt: skip
    found.save(file)
    _print_report(cost_reports.learned_report(found.facts), output)
    names = ", ".join(str(path) for path in measured)
    _note(f"model written to {file}, learned from {names}")


@main.command("diff")
@click.argument("old", type=_PATH)
@click.argument("new", type=_PATH)
@_output_option
def diff_command(old: Path, new: Path, output: OutputFormat) -> None:
    """Show what moves from one plan to another of the same tables: rows, bytes, and whereto.

    \b
    placer diff old.json new.json
    """
    found = diff_plans(placer.Plan.load(old), placer.Plan.load(new))
    _print_report(report.diff_report(found), output)


@main.command()
@click.argument("path", type=_PATH)
@click.option(
    "--to",
    "target",
    type=click.Choice(["torchrec", "hugectr", "device-map", "shards", "safetensors"]),
    required=True,
    help="Whose trainer it is for, or how the tables of --checkpoint are written.",
)
@click.option(
    "--checkpoint",
    type=_PATH,
    help="Of `placer train`: the tables for --to shards and safetensors.",
)
@click.option(
    "--with-optimizer", is_flag=True, help="Also the optimizer's state, for --to safetensors."
)
@click.option(
    "--staged-as",
    type=click.Choice(["uva", "cached"]),
    help="How TorchRec reads rows that the plan stages, which it cannot; by default it is refused.",
)
@click.option(
    "--module", default="", help="Path of TorchRec's embedding module in the model.", metavar="PATH"
)
@click.option("-o", "--output", "file", type=_PATH, required=True,
              help="JSON or safetensors file to write, or folder of shards.")  # fmt: skip
def export(
    path: Path,
    target: str,
    checkpoint: Path | None,
    with_optimizer: bool,
    staged_as: Any,
    module: str,
    file: Path,
) -> None:
    """Write a plan as another trainer reads it, or a checkpoint's tables as a plan has them.

    What another trainer cannot run is refused.

    \b
    placer export plan.json --to torchrec -o sharding.json
    placer export plan.json --to shards --checkpoint runs/a -o shards
    placer export plan.json --to safetensors --checkpoint runs/a -o tables.safetensors
    """
    plan = placer.Plan.load(path)
    if (target in ("shards", "safetensors")) != (checkpoint is not None):
        raise click.UsageError("--checkpoint goes with --to shards and --to safetensors")
    if with_optimizer and target != "safetensors":
        raise click.UsageError("--with-optimizer goes with --to safetensors; shards have it")
    if checkpoint is not None:
        from placer.storage.shards import write_shards, write_tables
        from placer.training.checkpoint import open_checkpoint

        found = open_checkpoint(checkpoint)
        if target == "shards":
            write_shards(plan, found, file)
        else:
            write_tables(plan, found, file, with_optimizer=with_optimizer)
        click.echo(f"{len(plan.tables)} tables of step {found.position.step} written to {file}")
        return
    from placer.adapters import device_map, hugectr, torchrec

    documents: dict[str, Callable[[], Any]] = {
        "torchrec": lambda: torchrec.document(plan, module=module, staged_as=staged_as),
        "hugectr": lambda: hugectr.to_hugectr(plan),
        "device-map": lambda: device_map.to_device_map(plan),
    }
    write_text(file, json.dumps(documents[target](), indent=1) + "\n")
    click.echo(f"{len(plan.tables)} tables written to {file} for {target}")


@main.command("reshard")
@click.argument("old", type=_PATH)
@click.argument("new", type=_PATH)
@click.option("--shards", type=_PATH, help="Folder that `placer export --to shards` made of OLD.")
@click.option(
    "--no-verify",
    is_flag=True,
    help="Trust the files of --shards: read the rows that are needed and nothing else.",
)
@click.option("-o", "--output", "folder", type=_PATH, help="Folder to make, of NEW.")
@_output_option  # fmt: skip
def reshard_command(
    old: Path,
    new: Path,
    shards: Path | None,
    no_verify: bool,
    folder: Path | None,
    output: OutputFormat,
) -> None:
    """Bring the shards of one plan to another one; what has not changed is kept.

    Without --shards it tells what would be kept and moved.

    \b
    placer reshard old.json new.json
    placer reshard old.json new.json --shards shards -o new-shards
    """
    from placer.storage.shards import reshard, schedule

    if (shards is None) != (folder is None) or (no_verify and shards is None):
        raise click.UsageError("give --shards and -o, or neither; --no-verify goes with both")
    before, after = placer.Plan.load(old), placer.Plan.load(new)
    planned = schedule(before, after)
    if shards is None or folder is None:
        _print_report(report.reshard_report(planned.transfers, planned.migration), output)
        return
    done = reshard(shards, after, folder, old=before, verify_files=not no_verify)
    _print_report(report.reshard_report(done.transfers, planned.migration, done), output)
    _note(f"shards written to {folder}")


@main.command()
@click.option("--from", "old_path", type=_PATH, required=True, help="The plan in use.")
@_problem_options
@click.option("--hbm", help="Memory budget of each GPU, such as 8GiB.")
@click.option(
    "--horizon-steps",
    type=click.IntRange(0),
    default=HORIZON_STEPS,
    show_default=True,
    help="Training steps over which moving rows has to pay.",
)
@click.option(
    "--solver",
    type=click.Choice(list(SOLVERS)),
    default="greedy-cost",
    show_default=True,
    help="Makes the plan from scratch.",
)
@_model_option
@_solve_options
@click.option("-o", "--output", "file", type=_PATH, required=True, help="Plan file to write.")
@_output_option  # fmt: skip
def replan(
    old_path: Path,
    asked: _Asked,
    hbm: str | None,
    horizon_steps: int,
    solver: str,
    model: str,
    effort: _Effort,
    file: Path,
    output: OutputFormat,
) -> None:
    """Follow up a plan when accesses or the machine have changed, at a move that pays.

    \b
    placer replan --from plan.json --profile today --topology 8xh100 --hbm 8GiB -o new.json
    placer replan --from plan.json --profile profile --topology 7xh100 --horizon-steps 20000 \\
        -o new.json
    """
    problem = asked.problem(asked.profile(), hbm)
    with _stoppable() as stop, _bar("candidates") as update:
        done = itertools.count(1)
        found = follow_up(
            problem,
            cost_model(model),
            placer.Plan.load(old_path),
            effort.limits(stop),
            horizon_steps=horizon_steps,
            solver=solver,
            on_candidate=lambda name: update(next(done), None, name),
        )
    if found.chosen is None:
        _refuse(found.fresh)
    chosen = found.chosen.plan
    name = str(asked.workload)
    if asked.profile_path is not None:
        name = _relative(asked.profile_path, file)
    replace(chosen, provenance=replace(chosen.provenance, profile=name)).save(file)
    _print_report(solver_reports.replan_report(found), output)
    _note(f"{found.chosen.name}; plan written to {file}")


@main.command()
@_problem_options
@click.option("--hbm", help="Memory budget of each GPU, such as 8GiB.")
@click.option("--hbm-steps", help="Also the step time at each of these budgets: 2GiB,4GiB,8GiB.")
@click.option(
    "--solver",
    type=click.Choice(list(SOLVERS)),
    default="greedy-cost",
    show_default=True,
    help="A better one leaves smaller gaps, and takes longer.",
)
@_model_option
@_solve_options
@click.option("--plot", type=_PATH, help="Picture of --hbm-steps: png, pdf or svg.")
@_output_option  # fmt: skip
def whatif(
    asked: _Asked,
    hbm: str | None,
    hbm_steps: str | None,
    solver: str,
    model: str,
    effort: _Effort,
    plot: Path | None,
    output: OutputFormat,
) -> None:
    """Tell what more memory, faster links or a larger batch would gain.

    \b
    placer whatif --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB
    placer whatif --profile profile --hbm 8GiB --hbm-steps 2GiB,4GiB,8GiB --plot front.png
    """
    if plot is not None and hbm_steps is None:
        raise click.UsageError("--plot draws the budgets of --hbm-steps: give some")
    budgets = [parse_bytes(text) for text in hbm_steps.split(",")] if hbm_steps else []
    loaded = asked.profile()
    problem = asked.problem(loaded, hbm)
    with _stoppable() as stop:
        with _bar("problems") as update:
            answer = effects_of_changes(
                problem,
                cost_model(model),
                solver=solver,
                time_limit_s=effort.time_limit,
                gap=effort.gap,
                seed=effort.seed,
                max_steps=effort.steps,
                stop=stop,
                on_solved=update,
            )
        if answer.base.plan is None:
            _refuse(answer.base)
        points = front(
            lambda budget: asked.problem(loaded, str(budget)),
            budgets,
            lambda at: effort.solve(at, solver, model, stop),
        )
    if plot is not None:
        solver_reports.plot_front(points, plot)
        _note(f"picture written to {plot}")
    _print_report(solver_reports.whatif_report(problem, answer, points, solver=solver), output)


@main.command(
    help=f"""Tell which placement trains a DLRM fastest, over models and machines.

\b
Axes: {", ".join(AXES)}
Placements: {", ".join(PLACEMENTS)}

\b
placer sweep
placer sweep --platform big-basin,zion --vary sparse=4,16,64,128 --plot sweep.png
placer sweep --model m3 --platform big-basin,16xcpu --vary rows --set pooling=20
placer sweep --vary pooling --vary rows=1e5,1e6,1e7 --grid --format csv
"""
)
@click.option(
    "--platform",
    "names",
    default="big-basin,zion,8xh200,16xcpu",
    show_default=True,
    help="Comma-separated: presets of topologies, 16xcpu for CPU servers, auto.",
)
@click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="AXIS[=VALUES]",
    help=f"Such as sparse=4,16,64; repeatable. By default {', '.join(DEFAULT_AXES)}.",
)
@click.option("--grid", is_flag=True, help="All combinations, not one axis at a time.")
@click.option(
    "--model",
    "preset",
    type=click.Choice(list(MODELS)),
    default="suite",
    show_default=True,
    help="What is not varied: the test suite, or models of its paper.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="AXIS=VALUE",
    help="Another value of the model; repeatable.",
)
@click.option(
    "--placements", default=",".join(PLACEMENTS), show_default=True, help="Comma-separated."
)
@click.option(
    "--parameter-servers",
    type=click.IntRange(1),
    default=PARAMETER_SERVERS,
    show_default=True,
    help="CPU servers of placement remote.",
)
@click.option("--hbm", help="Memory budget of each GPU, such as 8GiB.")
@click.option("--dram", help="DRAM budget of each host, such as 512GiB.")
@_model_option
@click.option("--plot", type=_PATH, help="Write a picture: png, pdf or svg.")
@_output_option  # fmt: skip
def sweep(
    names: str,
    varied: tuple[str, ...],
    grid: bool,
    preset: str,
    overrides: tuple[str, ...],
    placements: str,
    parameter_servers: int,
    hbm: str | None,
    dram: str | None,
    model: str,
    plot: Path | None,
    output: OutputFormat,
) -> None:
    """Compare placements; the help text is given to the decorator, which lists the axes."""
    machines = [platform(name, hbm=hbm, dram=dram) for name in names.split(",") if name.strip()]
    with _stoppable() as stop, _bar("models") as update:
        found = sweep_placements(
            machines,
            dict(axis_values(text) for text in varied or DEFAULT_AXES),
            cost_model(model),
            base=with_overrides(preset, overrides),
            placements=_names(placements, PLACEMENTS, "placement"),
            grid=grid,
            parameter_servers=parameter_servers,
            on_point=update,
            stop=stop,
        )
    if plot is not None:
        cost_reports.plot_sweep(found, plot)
        _note(f"picture written to {plot}")
    shown = (
        cost_reports.sweep_tables(found) if output == "table" else cost_reports.sweep_report(found)
    )
    _print_report(shown, output)


_DEMO_MACHINE, _DEMO_BATCH, _DEMO_DIM = "4xt4", 128, 64
_DEMO_SHARE = 0.25
# Batches that a pass over the demo's log has at least: a tenth is held out, and a few batches
# would be known by heart before the last step.
_DEMO_PASS = 60


@main.command()
@click.option(
    "--data",
    "logs",
    type=_PATH,
    multiple=True,
    help="A log of your own; without one, the demo generates its log.",
)
@click.option(
    "--data-format",
    type=click.Choice(FORMATS),
    help="Of --data; by default what the file's suffix says.",
)
@_options(*_column_options)
@click.option(
    "--samples",
    type=click.IntRange(1000),
    default=150_000,
    show_default=True,
    help="Of the generated log.",
)
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    show_default=True,
    help="Of the generated log's tables: share of the published cardinalities.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Training steps of the placed and of the unplaced model.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds for each solver.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=_PATH,
    default=Path("demo"),
    show_default=True,
    help="Folder for the log, profile, plan and picture.",
)
def demo(
    logs: tuple[Path, ...],
    data_format: Any,
    label: str | None,
    ignore: tuple[str, ...],
    samples: int,
    scale: float,
    steps: int,
    time_limit: float,
    folder: Path,
) -> None:
    """From a log to a trained model: profile, compare solvers, plan, train; a few minutes.

    \b
    placer demo
    placer demo --data train.tsv --steps 100
    placer demo --data avazu.parquet --ignore id
    """
    click.secho("1. A click log", bold=True)
    if logs:
        click.echo(", ".join(map(str, logs)))
    else:
        logs, data_format = (_generated_log(folder / "generated.tsv", samples, scale),), "criteo"

    click.secho("\n2. Profile: how often is each row of each table read?", bold=True)
    with _bar("ids") as update:
        log = open_log(logs, data_format, id_mapping="vocabulary", label=label, ignore=ignore,
                       progress=update)  # fmt: skip
    with _bar("samples") as update:
        profiled = profile_log(log, dim=_DEMO_DIM, progress=update)
    profiled.save(folder / "profile")
    _print_report(report.profile_report(profiled), "table")

    click.secho("\n3. Compare: which strategy places the tables best?", bold=True)
    problem = _demo_problem(profiled)
    rows = _compared(problem, [*_CLASSIC, "greedy-cost", "ilp"], ["roofline"], _Effort(time_limit))
    try:
        solver_reports.plot_compare(rows, folder / "compare.png")
    except BackendError as error:
        _note(f"no picture: {error}")
    _print_report(
        solver_reports.compare_report(rows, f"The log's tables on {_DEMO_MACHINE}"), "table"
    )

    click.secho("\n4. Plan", bold=True)
    result = _Effort(time_limit).solve(problem, "auto", "roofline")
    if result.plan is None:
        _refuse(result)
    found = replace(
        result.plan, provenance=replace(result.plan.provenance, profile="profile")
    )  # fmt: skip
    found.save(folder / "plan.json")
    broken = violations(placer.Plan.load(folder / "plan.json"))
    click.echo(f"{_verdict(result)}; verified: {'sound' if not broken else broken[0].message}")

    click.secho("\n5. Train a DLRM with the plan, and the same model without it", bold=True)
    equal = _demo_training(found, log, steps)
    click.echo(
        f"\nIn {folder}: profile/, plan.json, compare.png. Go on with `placer show "
        f"{folder}/plan.json`, or `placer train --plan {folder}/plan.json --data {logs[0]}`."
    )
    if not equal:
        sys.exit(1)


def _generated_log(path: Path, samples: int, scale: float) -> Path:
    from placer.workloads.synthetic_log import write_synthetic_log

    with _bar("samples") as update:
        made = write_synthetic_log(
            path, samples=samples, scale=scale, on_samples=lambda done: update(done, samples)
        )
    click.echo(
        f"This log is GENERATED, not real: {made.samples:,} samples in Criteo's format, the "
        f"published cardinalities × {made.scale:g}, a skew fitted to a real sample, and a label "
        f"that the features explain. For a log of your own: make demo DATA=path"
    )
    return path


def _demo_problem(profiled: placer.Profile) -> placer.Problem:
    """The log's tables on a few small GPUs that hold a quarter of them, besides buffers."""
    gpus = len(placer.Topology.parse(_DEMO_MACHINE).gpus)
    batch_size = max(1, min(_DEMO_BATCH, profiled.samples // (_DEMO_PASS * gpus)))
    samples = batch_size * gpus
    buffers = 0.0
    for table in (p.table for p in profiled):
        lookups = samples * table.lookups_per_sample
        buffers += exchange_buffer_bytes(table, samples, lookups, _DEMO_DIM)
        buffers += index_buffer_bytes(lookups)
    hbm = int((profiled.total_bytes * _DEMO_SHARE + 1.5 * buffers) / gpus)
    machine = placer.Topology.parse(_DEMO_MACHINE, hbm=hbm)
    click.echo(
        f"The tables and their optimizer state take {format_bytes(profiled.total_bytes)}; "
        f"the {gpus} GPUs get {format_bytes(hbm)} each, with the buffers of a step of "
        f"{samples} samples."
    )
    return placer.Problem(profiled, machine, batch_size)


def _demo_training(plan: placer.Plan, log: EncodedLog, steps: int) -> bool:
    """Train placed and unplaced, print the losses side by side, and say if they are equal."""
    from placer.training import TrainConfig, compare_training

    batch_size = plan.batch_size * len(plan.topology.gpus)
    config = TrainConfig(batch_size=batch_size, epochs=steps, max_steps=steps)
    with _bar("steps") as update:
        parity = compare_training(plan, log, config, on_step=lambda done: update(done, steps))
    passed_over = parity.unlabelled_samples
    click.echo(
        f"{parity.steps} steps of {batch_size} samples; every tenth batch is held out"
        + (f"; {passed_over:,} samples without a label were passed over" if passed_over else "")
    )
    click.echo(f"{'step':>6} {'placed':>10} {'unplaced':>10} {'difference':>11}")
    shown = sorted({*range(0, parity.steps, max(1, parity.steps // 10)), parity.steps - 1})
    for step in shown:
        placed, unplaced = parity.placed_losses[step], parity.unplaced_losses[step]
        click.echo(
            f"{step + 1:>6} {placed:>10.6f} {unplaced:>10.6f} {abs(placed - unplaced):>11.1e}"
        )
    if parity.placed_auc is not None and parity.unplaced_auc is not None:
        click.echo(f"{'AUC':>6} {parity.placed_auc:>10.6f} {parity.unplaced_auc:>10.6f}  "
                   f"of {parity.eval_samples:,} held-out samples")  # fmt: skip
    click.echo(
        f"largest difference of a loss {parity.max_loss_difference:.1e}: "
        + ("equal to float tolerance, step for step" if parity.equal else "NOT EQUAL")
        + f"; a step takes {format_seconds(parity.placed_step_s)} placed, "
        f"{format_seconds(parity.unplaced_step_s)} unplaced on this CPU"
    )
    return parity.equal


if __name__ == "__main__":
    main()
