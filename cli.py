"""The command `placer`: parse, call, print. Results go to stdout, progress and notes to stderr.

Exit codes: 0 done, 1 error, 2 usage, 3 no placement exists, 4 none was found within the limits,
130 a training run that was interrupted, and saved if it was told to. A command's options are the
parameters of its function, see `placer.knobs`. Packages import their names when they are used, so
that help needs neither torch nor OR-Tools: nothing that is imported here may need them either.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

import cost_models
import placer
import solvers
from cost_models import report as cost_reports
from placer import report
from placer.click_options import QUIET, Commands, add_command, refuse_others, refuse_without
from placer.click_types import Choice, InputPath, Name, Number, OutputPath
from placer.data.layout import FORMATS
from placer.data.options import LogOptions, TextOptions, dims_of, number_of
from placer.errors import ProblemError, TopologyError
from placer.knobs import argument, option
from placer.units import counted, parse_bytes, parse_sizes
from solvers import options as shared
from solvers import report as solver_reports
from solvers import training_options as trained
from solvers.growing_options import GrowingOptions, GrowingRows
from solvers.report import page

_EXIT_NO_PLACEMENT = 3
_EXIT_LIMIT = 4
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@click.group(
    cls=Commands,
    params=[QUIET],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(placer.__version__, prog_name="placer")
def main() -> None:
    """Decide where the embedding tables of a recommendation model live, and train with it.

    \b
    placer profile day_0.gz --log-format criteo --id-mapping hash --rows 1000000 -o profile
    placer plan --profile profile --topology 8xh100 --hbm 8GiB -o plan.json
    placer train --plan plan.json --data day_0.gz
    """


_command = partial(add_command, main)


def _refuse(result: solvers.SolveResult) -> NoReturn:
    """Say why there is no plan, and exit."""
    report.print_stderr(f"placer: {solver_reports.refusal(result)}", "red")
    sys.exit(_exit_code([result.termination.reason]))


def _exit_code(reasons: Iterable[str]) -> int:
    """Return the code of searches without a plan: there is none, or none was found."""
    return _EXIT_NO_PLACEMENT if "infeasible" in reasons else _EXIT_LIMIT


# Options that commands share --------------------------------------------------------------------

_COMPARED = "greedy-size,greedy-lookup,greedy-size-lookup,greedy-dim,greedy-cost,ilp,auto"
_ANY_FORMAT, _SHARE = Choice([*FORMATS, "counts"]), Number(0, 1, min_open=True)
_PLATFORMS = "big-basin,zion,8xh200,16xcpu"
_PLACEMENTS = "gpu,row-wise,hot-cold,cached,host-staged,host-read,host-pooled,remote,cpu"
_SOLVERS = Choice(list(solvers.SOLVERS))
_PLACEMENT_LIST = Name("placement", _PLACEMENTS.split(","), several=True)

_SHOWN = "path path_by_place output"
"""Parameters of `show` that have an effect on whatever is shown."""

Output = Literal["table", "json", "csv"]
Brief = Literal["table", "json"]
Target = Literal["torchrec", "hugectr", "dynamicemb", "safetensors"]
StagedAs = Literal["uva", "cached"] | None
Preset = Literal["suite", "m1", "m2", "m3"]
File = Path | None
Text = str | None
Count = int | None
Paths = tuple[Path, ...]
Texts = tuple[str, ...]

INPUT, FILE, FOLDER = InputPath(), OutputPath("file"), OutputPath("folder")
IMAGE, YAML = OutputPath("file", (".png", ".pdf", ".svg")), OutputPath("file", (".yaml", ".yml"))
OUTPUT = option("table", "Print the result in this format.", "--format")
HBM = option(None, "Memory budget of each GPU, such as 8GiB.", heading="Problem", kind=parse_bytes)
PLAN = option(None, "The plan; or give it as PLAN.", "--plan", kind=INPUT)
PROFILE = option(None, "Profile of the log; by default the plan's.", "--profile", kind=INPUT)
PROFILE_FOLDER = option(None, "Folder to write the profile to.", "-o --output", kind=FOLDER)
PLAN_FILE = option(
    None, "File to write the plan to.", "-o --output", kind=OutputPath("file", follows="old_path")
)
HBM_STEPS = option(None, "Also show step times with budgets: 2GiB,4GiB.", kind=parse_sizes)
PICTURE = option(None, "Write a picture to this file: png, pdf or svg.", kind=IMAGE)
OTHER_DATA = option(False, "Accept a profile with other tables or ids than the plan's.")
BUNDLE: Any = None  # Of a dataclass whose fields are options.


# Logs, profiles and machines --------------------------------------------------------------------


@_command
def profile(
    logs: Texts = argument(...),
    log_format: Any = replace(shared.LOG_FORMAT, kind=_ANY_FORMAT),
    options: LogOptions = BUNDLE,
    infer: File = option(
        None, "Write a schema of the log's columns to this file.", kind=FILE, metavar="FILE"
    ),
    dims: Texts = option(
        (), "Columns of tables, 64 by default.", "--dim", kind=number_of, metavar="[TABLE=]N"
    ),
    dtype: str = option("float32", "Type of the tables' weights.", kind=shared.DTYPES),
    optimizer: str = option(
        "rowwise_adagrad", "Optimizer of the tables.", kind=shared.TABLE_OPTIMIZERS
    ),
    sample: float | None = option(None, "Read about this share of the samples.", kind=_SHARE),
    seed: int = option(0, "Seed of the random choice of --sample.", least=0),
    samples: Count = option(None, "Samples in the log, for --log-format counts.", least=1),
    window: Count = option(
        None, "Count the ids of each window of this many samples, such as a day's.", least=1
    ),
    output: Output = OUTPUT,
    like: File = option(
        None,
        "Read the log as this profile did, with the same rows for ids.",
        kind=INPUT,
        metavar="PROFILE",
    ),
    folder: File = PROFILE_FOLDER,
) -> None:
    """Count how often a training log reads each row of each table.

    A log is files, folders, patterns, URIs such as s3://bucket/day_0, or - for standard input.
    Without -o, the result is printed and not kept.

    \b
    placer profile clicks.csv --infer schema.toml
    placer profile clicks.csv --schema schema.toml -o profile
    placer profile train.tsv --log-format criteo --id-mapping hash --rows 1000000 -o profile
    placer profile clicks.parquet --id-mapping vocabulary --min-count 5 -o profile
    placer profile counts.parquet --log-format counts --samples 1000000000 -o profile
    placer profile tuesday.tsv --like profile -o tuesday
    """
    tables: Any = {"dtype": dtype, "optimizer": optimizer}
    found = None
    if like is not None:
        from placer.profile.count import profile_like

        refuse_others("--like", "logs log_format sample seed output like folder")
        earlier = placer.Profile.load(like)
        with report.progress_bar("samples") as update:
            how: Any = {"sample": sample, "seed": seed, "progress": update}
            result = profile_like(earlier, logs, log_format, **how)
    elif log_format == "counts":
        from placer.profile.from_counts import profile_counts

        if samples is None:
            raise click.UsageError("--log-format counts needs --samples")
        known = "logs log_format samples schema_path dims rows pooling dtype optimizer output"
        refuse_others("--log-format counts", f"{known} folder")
        schema = options.schema()
        tables |= {"dim": dims_of(dims, schema.dims), "pooling": schema.poolings}
        result = profile_counts(logs, samples=samples, rows=schema.rows, **tables)
    elif samples is not None:
        raise click.UsageError("--samples is for --log-format counts; other logs are counted")
    else:
        from placer.profile.count import profile_log

        schema = options.schema(log_format)
        tables |= {"dim": dims_of(dims, schema.dims), "pooling": schema.poolings}
        if infer is not None:
            if folder is None:
                refuse_without("--output", "dtype optimizer sample seed window output")
            replace(schema, dims=tables["dim"]).infer(logs, infer)
            report.print_stderr(f"schema written to {infer}; edit it, and give it as --schema")
            if folder is None:
                return
        with report.progress_bar("ids") as update:
            log = schema.open(logs, update)
        for note in log.notes:
            report.print_stderr(note)
        with report.progress_bar("samples") as update:
            result = profile_log(log, progress=update, sample=sample, seed=seed, **tables)
        if window is not None:
            from placer.growing import working_sets
            from placer.profile.growing_tables import with_hit_rates

            found = working_sets(log, window)
            result = with_hit_rates(result, found)
    _keep_profile(result, folder, output, found)


def _keep_profile(
    profile: placer.Profile, folder: File, output: Output, ids_in_use: Any = None
) -> None:
    """Print a profile, and write it where that is asked for."""
    if folder is not None:
        profile.save(folder)
    report.print_report(report.profile_report(profile, ids_in_use=ids_in_use), output)
    report.print_stderr(_written("profile", folder))


def _written(what: str, file: File) -> str:
    """Return words for where a result is."""
    return f"the {what} is not kept: -o writes it" if file is None else f"{what} written to {file}"


@_command
def merge(
    profiles: Paths = argument(kind=INPUT),
    folder: File = PROFILE_FOLDER,
    output: Output = OUTPUT,
) -> None:
    """Join profiles of parts of one log into the profile of all of it.

    \b
    placer merge day_0.profile day_1.profile -o profile
    """
    if len({path.resolve() for path in profiles}) < len(profiles):
        raise click.UsageError(
            "a profile is given twice, which would double its counts; leave one out"
        )
    parts = [placer.Profile.load(path) for path in profiles]
    if any(table.hit_rates for part in parts for table in part):
        report.print_stderr("the merged profile lacks what --window measured in its parts")
    _keep_profile(placer.Profile.merge(parts), folder, output)


@_command
def workloads(name: Text = argument(None), output: Output = OUTPUT) -> None:
    """List the named workloads, or the tables of one.

    \b
    placer workloads
    placer workloads mlperf-dcnv2
    """
    from placer.workloads import named_workload

    if name is None:
        report.print_report(report.workloads_report(), output)
    else:
        with shared.usage_errors("NAME"):
            found = named_workload(name)
        report.print_report(report.profile_report(found), output)


@_command
def topology(
    machine: str = argument("auto", shared.A_MACHINE),
    hbm: Text = HBM,
    dram: Text = shared.DRAM,
    ssd: Text = shared.SSD,
    file: File = option(None, "Write the machine as YAML, to edit it.", "-o --output", kind=YAML),
    output: Output = OUTPUT,
) -> None:
    """Show a machine, its constants and where they come from.

    \b
    {presets}

    \b
    placer topology 8xh100 --hbm 8GiB
    placer topology auto --hbm 2GiB --ssd 1TiB -o machine.yaml
    """
    parsed = placer.Topology.parse(machine, hbm=hbm, dram=dram, ssd=ssd)
    if file is not None:
        parsed.save(file)
        report.print_stderr(f"topology written to {file}")
    report.print_report(report.topology_report(parsed), output)


# Plans ------------------------------------------------------------------------------------------


@_command
def plan(
    options: shared.ProblemOptions = BUNDLE,
    hbm: Text = HBM,
    solver: str = option("auto", "Method that searches for the plan.", kind=_SOLVERS),
    model: str = shared.MODEL,
    effort: shared.Effort = BUNDLE,
    grown: GrowingOptions = BUNDLE,
    file: File = PLAN_FILE,
    output: Output = OUTPUT,
) -> None:
    """Place the tables of a profile or workload on a machine.

    Without -o, the result is printed and no plan is kept.

    \b
    placer plan --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB -o plan.json
    placer plan --profile profile --topology auto --hbm 2GiB --batch-size 1024 -o plan.json
    placer plan --profile profile --growing user=2000000:lru:admit=2,item=99% -o plan.json
    placer plan --profile profile --growing user,item --miss-price 50us -o plan.json
    """
    from placer.plan.origin import save_with_profile

    began = time.monotonic()
    costs, profile = cost_models.cost_model(model), options.profile()
    grows, chosen = grown.of(profile)
    problem = options.problem(profile, hbm, growing=grows)
    if chosen:
        problem = solvers.choose_capacities(problem, chosen, costs, grown.miss_price)
    for line in report.growing_words(profile, problem):
        report.print_stderr(line)
    with (
        report.stoppable() as stop,
        solver_reports.search_progress(effort.limits(stop, began)) as limits,
    ):
        result = solvers.solver(solver).solve(problem, costs, limits)
    if result.plan is None:
        _refuse(result)
    made = result.plan
    if file is not None:
        made = save_with_profile(made, file, options.profile_path or str(options.workload))
    shown = solver_reports.plan_report(made, costs.evaluate(problem, made), end=result.termination)
    report.print_report(shown, output)
    report.print_stderr(f"{solver_reports.verdict(result)}; {_written('plan', file)}")


@_command
def compare(
    options: shared.MachinesOptions = BUNDLE,
    hbm: Text = replace(HBM, help="Budgets of each GPU: 8GiB,16GiB.", kind=parse_sizes),
    names: Any = option(_COMPARED, "Solvers to compare.", "--solvers", kind=shared.SOLVER_LIST),
    models: Any = option("roofline", "Cost models.", "--cost-models", kind=shared.MODEL_LIST),
    effort: shared.Effort = BUNDLE,
    grown: GrowingRows = BUNDLE,
    price_text: Text = option(None, "Dollars an hour by machine: 8xh100=98,4xt4=2.", "--price"),
    plot: File = PICTURE,
    output: Output = OUTPUT,
) -> None:
    """Compare solvers over machines, cost models and memory budgets on one workload.

    \b
    placer compare --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB,80GiB
    placer compare --profile profile --hbm 2GiB --solvers greedy-size,ilp --plot compare.png
    placer compare --workload mlperf-dcnv2 --topology 8xa100-40,8xh100 --price 8xh100=98
    """
    from solvers.analysis.compare import refused_rows

    loaded = options.profile()
    problem_on = partial(options.problem_on, loaded, grown.rows(loaded))
    machines = options.machines() or ["auto"]
    budgets = hbm.split(",") if hbm else [None]
    prices = shared.prices_of(price_text, machines)
    rows: list[solvers.CompareRow] = []
    refused: list[ProblemError | TopologyError] = []
    with report.stoppable() as stop:
        for name, budget in itertools.product(machines, budgets):
            try:
                problem = problem_on(name, budget)
            # Other machines may have the GPU that a rule names, or cards with that much memory.
            except (ProblemError, TopologyError) as error:
                hbm_bytes = parse_bytes(budget) if budget else None
                found = refused_rows(placer.Topology.parse(name), hbm_bytes, names, models, error)
                refused.append(error)
            else:
                with report.progress_bar("solvers") as update:
                    how: Any = {"price_per_hour": prices.get(name), "on_solved": update}
                    found = solvers.compare(problem, names, models, effort.limits(stop), **how)
            # Files may describe machines of one name.
            rows += [row if name == "auto" else replace(row, topology=name) for row in found]
    if len(refused) == len(machines) * len(budgets):
        raise refused[0]
    title = f"{counted(len(loaded), 'table')} on {', '.join(machines)}"
    shown = solver_reports.compare_report(rows, title)
    _print_compared(rows, shown, output, solver_reports.plot_compare, rows, plot)


def _print_compared(
    rows: list[solvers.CompareRow], shown: Any, output: str, draws: Any, drawn: Any, plot: File
) -> None:
    """Print and draw a comparison, and exit if no row has a plan."""
    found = any(row.step_time_s for row in rows)
    report.print_drawn(shown, output, draws, drawn, plot if found else None)
    if not found:
        if plot is not None:
            report.print_stderr("no picture is written, as no solver found a plan")
        sys.exit(_exit_code(row.status.split()[0] for row in rows))


@_command
def fleet(
    options: shared.MachinesOptions = BUNDLE,
    solver: str = option("greedy-cost", "Method that searches for the plans.", kind=_SOLVERS),
    model: str = shared.MODEL,
    asked: shared.FleetOptions = BUNDLE,
    grown: GrowingRows = BUNDLE,
    plot: File = PICTURE,
    output: Output = OUTPUT,
) -> None:
    """Show training time and price of a workload on many machines, and the cheapest one.

    Without --topology, twenty machine types are compared.

    \b
    placer fleet --workload mlperf-dcnv2 --plot fleet.png
    placer fleet --workload recshard-rm3 --topology 8xh100,2x8xl4 --price h100=2.5 --within 12h
    """
    from solvers.analysis import compare as machines

    names, loaded = options.machines() or machines.FLEET, options.profile()
    # A file that cannot be read is an error, and not a machine that is too small.
    for name in names:
        placer.Topology.parse(name)
    if options.constraints_path is not None:
        placer.Constraints.load(options.constraints_path)
    problem_on = partial(options.problem_on, loaded, grown.rows(loaded))
    searched = solvers.solver(solver), cost_models.cost_model(model)
    with report.stoppable() as stop, report.progress_bar("machines") as update:
        limits, prices = asked.limits(stop), asked.prices(names)
        rows = machines.fleet(names, problem_on, *searched, limits, prices, on_solved=update)
    answer, title = machines.cheapest(rows, asked.within), counted(len(loaded), "table")
    shown = solver_reports.fleet_report(rows, answer, asked.within, title)
    _print_compared(rows, shown, output, solver_reports.plot_fleet, (rows, answer), plot)


@_command
def show(
    path: Path = PLAN,
    profile_path: File = PROFILE,
    other_data: bool = OTHER_DATA,
    model: str = shared.MODEL,
    top: int = option(20, "List this many tables.", least=1),
    explained: Text = option(None, "Explain a table's placement.", "--explain", metavar="TABLE"),
    memory: bool = option(False, "Show the memory of each phase of a training step."),
    constraints_path: File = shared.RULES,
    output: Output = OUTPUT,
) -> None:
    """Show a plan (memory and time of devices, placement of tables), or a profile.

    \b
    placer show plan.json
    placer show plan.json --explain C10 --constraints rules.yaml
    placer show profile
    """
    from placer.plan.drift import assumed_even
    from placer.plan.origin import profile_of
    from placer.plan.verify import check_shards
    from solvers.analysis.explain import explain
    from solvers.bounds.binding import binding

    if path.is_dir() or path.name == "profile.json":
        refuse_others("a profile", _SHOWN)
        return report.print_report(report.profile_report(placer.Profile.load(path)), output)
    loaded = placer.Plan.load(path)
    check_shards(loaded)
    needed_for = "--memory" if memory else None if explained is None else "--explain"
    known = profile_of(loaded, path, profile_path, needed_for=needed_for, other_data=other_data)
    if memory and known is not None:
        refuse_others("--memory", f"{_SHOWN} profile_path other_data memory")
        return report.print_report(solver_reports.memory_report(loaded, known), output)
    if known is None:
        report.print_stderr("times need the profile: give --profile")
        return report.print_report(solver_reports.plan_report(loaded, None, top=top), output)
    rules = None if constraints_path is None else placer.Constraints.load(constraints_path)
    problem = placer.Problem.of_plan(loaded, known, rules)
    if problem.sha256 != loaded.provenance.problem_sha256:
        report.print_stderr(
            "the profile, machine or constraints are not those that the plan was made for"
        )
    costs = cost_models.cost_model(model)
    if explained is not None:
        refuse_others(
            "--explain", f"{_SHOWN} profile_path other_data model explained constraints_path"
        )
        explanation = explain(problem, loaded, explained, costs)
        return report.print_report(solver_reports.explain_report(explanation), output)
    # Times are those of the rows that the plan has in HBM, hot or not any more.
    ordered = problem.in_plan_order(loaded)
    cost = costs.evaluate(ordered, loaded)
    binds = binding(ordered, loaded, costs, cost)
    how: Any = {"even": assumed_even(loaded, known), "problem_sha256": problem.sha256}
    shown = solver_reports.plan_report(loaded, cost, top=top, binds=binds, **how)
    report.print_report(shown, output)


@_command
def report_command(
    path: Path = PLAN,
    second: File = argument(None, INPUT),
    profile_path: File = PROFILE,
    rules: File = shared.RULES,
    model: str = shared.MODEL,
    hbm_steps: Text = HBM_STEPS,
    changes: bool = option(False, "Also show what a larger or faster machine gains.", "--whatif"),
    solver: str = option("greedy-cost", "Solver for --hbm-steps and --whatif.", kind=_SOLVERS),
    explained: int | None = option(
        None, "Explain this many tables; by default 3 if the plan is small.", "--explain", least=0
    ),
    effort: shared.Effort = BUNDLE,
    file: Path = option(..., "HTML file to write.", "-o --output", kind=FILE),
) -> None:
    """Write a web page about a plan, and with a SECOND plan, about what moves to it.

    \b
    placer report plan.json -o report.html
    placer report plan.json next.json --hbm-steps 4GiB,8GiB,16GiB --whatif -o report.html
    """
    with report.stoppable() as stop, report.progress_bar("parts") as update:
        how: Any = {"hbm_steps": hbm_steps, "changes": changes, "solver": solver}
        how |= {"explained": explained, "limits": effort.limits(stop), "on_progress": update}
        answers = page.ask(path, second, profile_path, rules, model, **how)
    page.write_page(answers, file, command=report.this_command())
    click.echo(f"page written to {file}")


@_command
def verify(
    path: Path = PLAN,
    constraints_path: File = shared.RULES,
    seal: bool = option(False, "Accept a plan that you edited, and update its hash."),
    output: Output = OUTPUT,
) -> None:
    """Prove from a plan's file alone that it is sound: coverage, capacities, row orders.

    \b
    placer verify plan.json
    placer verify plan.json --constraints rules.yaml
    """
    from placer.constraints.unmet import unmet
    from placer.plan import file
    from placer.plan.verify import violations

    loaded = placer.Plan(**file.read(path, edited=True)) if seal else placer.Plan.load(path)
    broken = violations(loaded)
    if constraints_path is not None:
        constraints = placer.Constraints.load(constraints_path)
        if constraints.reserve:
            report.print_stderr("reserve is not checked: a plan tells only the memory that is left")
        # Of malformed shards, nobody can tell how they place a table.
        if not any(violation.rule == "shard" for violation in broken):
            broken += unmet(loaded, constraints)
    if seal and not broken:
        file.seal(path)
    meets = "" if constraints_path is None else f"; it meets {constraints_path}"
    report.print_violations(broken, loaded, f"{path} is sound", meets, output)
    if seal and broken:
        report.print_stderr(f"placer: {path} was not sealed, as it is not sound", "red")
    if broken:
        sys.exit(1)


@_command
def diff_command(
    old: Path = argument(kind=INPUT), new: Path = argument(kind=INPUT), output: Output = OUTPUT
) -> None:
    """Show which rows move from one plan to another, where, and how long the machine takes.

    \b
    placer diff old.json new.json
    """
    from placer.plan.diff import diff

    difference = diff(placer.Plan.load(old), placer.Plan.load(new))
    report.print_report(report.diff_report(difference), output)


@_command
def replan(
    old_path: Path = replace(PLAN, flags="--from --plan"),
    options: shared.FollowingOptions = BUNDLE,
    hbm: Text = replace(HBM, help="Memory budget of each GPU; by default the old plan's."),
    horizon_steps: int = option(100_000, "Steps in which moving rows must pay off.", least=0),
    other_data: bool = OTHER_DATA,
    solver: str = option("greedy-cost", "Method that plans from scratch.", kind=_SOLVERS),
    model: str = shared.MODEL,
    effort: shared.Effort = BUNDLE,
    file: File = PLAN_FILE,
    output: Output = OUTPUT,
) -> None:
    """Make the plan that follows another one when accesses or the machine have changed.

    What is not given is as in the old plan. Without -o, the result is printed and no plan is kept.

    \b
    placer replan --from plan.json --profile tuesday -o new.json
    placer replan --from plan.json --profile today --topology 8xh100 --hbm 8GiB -o new.json
    placer replan --from plan.json --profile profile --topology 7xh100 --horizon-steps 20000 \\
        -o new.json
    """
    from placer.plan.origin import save_with_profile
    from solvers.analysis.replan import replan as follow_up

    began, old = time.monotonic(), placer.Plan.load(old_path)
    problem = options.following(old, hbm, other_data)
    rules = options.constraints_path
    if rules is not None and options.topology is None and placer.Constraints.load(rules).reserve:
        report.print_stderr(
            "the reserve is taken off what --hbm and --dram give; the old plan's machine has only "
            "what its own reserve left"
        )
    with report.stoppable() as stop, report.progress_bar("candidates") as update:
        done = itertools.count(1)
        replanned = follow_up(
            problem,
            cost_models.cost_model(model),
            old,
            effort.limits(stop, began),
            horizon_steps=horizon_steps,
            solver=solver,
            on_candidate=lambda name: update(next(done), None, name),
        )
    if replanned.chosen is None:
        _refuse(replanned.fresh)
    if file is not None:
        source = options.profile_path or str(options.workload)
        save_with_profile(replanned.chosen.plan, file, source)
    report.print_report(solver_reports.replan_report(replanned), output)
    report.print_stderr(f"{replanned.chosen.name}; {_written('plan', file)}")


@_command
def whatif(
    options: shared.ProblemOptions = BUNDLE,
    hbm: Text = HBM,
    hbm_steps: Text = HBM_STEPS,
    solver: str = option("greedy-cost", "Method that searches for plans.", kind=_SOLVERS),
    model: str = shared.MODEL,
    effort: shared.Effort = BUNDLE,
    grown: GrowingRows = BUNDLE,
    plot: File = replace(PICTURE, help="Write a picture of --hbm-steps: png, pdf or svg."),
    output: Output = OUTPUT,
) -> None:
    """Show what more memory, faster links or a larger batch would gain.

    \b
    placer whatif --workload mlperf-dcnv2 --topology 8xh100 --hbm 8GiB
    placer whatif --profile profile --hbm 8GiB --hbm-steps 2GiB,4GiB,8GiB --plot front.png
    """
    from solvers.analysis.whatif import front
    from solvers.analysis.whatif import whatif as effects_of_changes

    if plot is not None and hbm_steps is None:
        raise click.UsageError("--plot draws the budgets of --hbm-steps: give some")
    budgets = parse_sizes(hbm_steps) if hbm_steps else []
    loaded = options.profile()
    problem_with = partial(options.problem, loaded, growing=grown.rows(loaded))
    problem = problem_with(hbm)
    with shared.usage_errors("--hbm-steps"):  # Before the search, which takes longer.
        at_budget = {budget: problem_with(f"{budget}B") for budget in budgets}
    with report.stoppable() as stop:
        limits = effort.limits(stop)
        with report.progress_bar("problems") as update:
            costs = cost_models.cost_model(model)
            answer = effects_of_changes(problem, costs, limits, solver=solver, on_solved=update)
        if answer.base.plan is None:
            _refuse(answer.base)
        search = solvers.solver(solver)
        points = front(at_budget.__getitem__, budgets, lambda at: search.solve(at, costs, limits))
    shown = solver_reports.whatif_report(problem, answer, points, solver=solver)
    report.print_drawn(shown, output, solver_reports.plot_front, points, plot)


# Training and other trainers --------------------------------------------------------------------


@_command
def train(
    plan_path: Path = PLAN,
    logs: Texts = trained.TRAIN_LOGS,
    eval_logs: Texts = trained.EVAL_LOGS,
    data_format: Any = shared.LOG_FORMAT,
    lines: TextOptions = BUNDLE,
    profile_path: File = PROFILE,
    settings: dict[str, Any] = trained.TRAINING,
    run: trained.RunOptions = BUNDLE,
    output: Brief = option("table", "Format of the result; json has every loss.", "--format"),
) -> None:
    """Train the bundled DLRM on a log, with its tables placed by a plan.

    \b
    placer train --plan plan.json --data train.tsv
    placer train --plan plan.json --data train.tsv --checkpoints runs/a --every 1000 --resume
    placer train --plan plan.json --data train.tsv --steps 20 --trace trace.json
    torchrun --nproc-per-node 2 --no-python placer train --plan plan.json --data train.tsv
    """
    from placer.plan.origin import open_log_of, profile_of

    run.check()
    loaded = placer.Plan.load(plan_path)
    opened = partial(open_log_of, loaded, plan_path, format=data_format, profile=profile_path)
    opened = partial(opened, options=lines, other_data=settings["other_data"])
    log, eval_log = opened(logs), opened(eval_logs) if eval_logs else None
    # PyTorch takes seconds to import: files that are missing are named before.
    from placer import executor, training
    from placer.training.distributed import batch_size_per_process, rank_of_launcher

    speaks = rank_of_launcher() == 0  # Of many processes one speaks.
    executor.keep_freed_memory()
    config = trained.train_config(settings, batch_size_per_process(loaded))
    with report.progress_bar("steps", shown=speaks) as update:
        result = training.train(
            loaded,
            log,
            config,
            eval_log=eval_log,
            **run.arguments(speaks),
            on_progress=lambda now: update(now.step, now.last_step, str(now)),
        )
    if speaks:
        known = profile_of(loaded, plan_path, profile_path, other_data=True)
        planned = cost_reports.hbm_shares(loaded, known) if result.hit_rates else None
        report.print_training(result, config, output, run.trace, run.checkpoints, planned)
    sys.exit(_EXIT_INTERRUPTED if result.interrupted else 0)


@_command
def pilot(
    options: trained.PilotOptions = BUNDLE,
    lines: TextOptions = BUNDLE,
    settings: dict[str, Any] = trained.PILOT,
    output: Output = OUTPUT,
) -> None:
    """Train models with several types of cold rows, and compare AUC and log loss.

    \b
    placer pilot --profile profile --data train.tsv --widths bfloat16,int8
    placer pilot --profile profile --data monday.tsv --eval-data tuesday.tsv --steps 2000
    """
    opened = options.opened(lines)  # Before PyTorch, which takes seconds to import.
    from placer.training.distributed import rank_of_launcher

    speaks = rank_of_launcher() == 0
    with report.progress_bar("runs", shown=speaks) as update:
        config = trained.train_config(settings, settings["batch_size"])
        candidates = options.trained(opened, config, update)
    if speaks:
        report.print_report(report.pilot_report(candidates), output)


@_command
def simulate(
    path: Path = PLAN,
    asked: trained.SimulateOptions = BUNDLE,
    lines: TextOptions = BUNDLE,
    profile_path: File = PROFILE,
    other_data: bool = OTHER_DATA,
    model: str = shared.MODEL,
    output: Brief = option("table", "Format of the result; json has every step.", "--format"),
) -> None:
    """Replay a log through a plan, and count what each batch reads and moves on each device.

    \b
    placer simulate plan.json --data train.tsv
    placer simulate plan.json --data monday.tsv --then tuesday.tsv --against tuesday.json
    placer simulate plan.json --profile profile --batches 100
    """
    asked.check()
    loaded = placer.Plan.load(path)  # Before PyTorch, which takes seconds to import.
    other = asked.other_plan(loaded, other_data)
    from placer.plan.origin import open_log_of, profile_of
    from placer.simulator.replay import ReplayOptions

    found = partial(profile_of, loaded, path, profile_path, other_data=other_data)
    known = found()
    size = (asked.batch_size or loaded.batch_size) * len(loaded.topology.gpus)
    how: Any = {"other_data": other_data, "options": lines, "ids_alone": True}
    how |= {"format": asked.log_format, "profile": profile_path}
    logs = asked.opened(partial(open_log_of, loaded, path, **how))
    streams = [cost_models.log_stream(loaded, log, size, asked.batches) for log in logs]
    if not streams:
        known = found(needed_for="drawing batches")
        assert known is not None, "else an error says that it is needed"
        streams.append(cost_models.drawn_stream(known, size, asked.batches or 1, seed=asked.seed))
    with report.progress_bar("steps") as update:
        simulated = cost_models.simulate(
            loaded,
            streams,
            cost_models.cost_model(model),
            known,
            other=other,
            options=ReplayOptions(cache_policy=asked.cache_policy, look_ahead=asked.look_ahead),
            windows=asked.windows,
            on_step=lambda name, steps: update(steps, asked.batches, name),
        )
    report.print_report(cost_reports.simulate_report(simulated), output)


@_command
def export(
    path: Path = PLAN,
    target: Target = option(..., "Trainer to write for, or form of a checkpoint's tables.", "--to"),
    checkpoint: File = option(None, "Write the tables of this checkpoint.", kind=INPUT),
    since: File = option(None, "Write only changes since this checkpoint.", kind=INPUT),
    with_optimizer: bool = option(False, "With --to safetensors: write optimizer state, too."),
    staged_as: StagedAs = option(None, "How TorchRec reads staged rows; it cannot stage."),
    module: str = option("", "Path of TorchRec's embedding module in the model.", metavar="PATH"),
    file: Path = option(..., "File to write.", "-o --output", kind=FILE),
) -> None:
    """Write a plan for another trainer, or a checkpoint's tables for servers and other tools.

    A plan that the other trainer cannot run is refused.

    \b
    placer export plan.json --to torchrec -o sharding.json
    placer export plan.json --to safetensors --checkpoint runs/a -o tables.safetensors
    placer export plan.json --to safetensors --checkpoint runs/a/step-000000000200 \\
        --since runs/a/step-000000000100 -o 200.safetensors
    """
    loaded = placer.Plan.load(path)
    if (target == "safetensors") != (checkpoint is not None):
        raise click.UsageError("--to safetensors needs --checkpoint, others do not")
    if with_optimizer and target != "safetensors":
        raise click.UsageError("--with-optimizer goes with --to safetensors")
    if since is not None and (with_optimizer or target != "safetensors"):
        raise click.UsageError("--since goes with --to safetensors, without --with-optimizer")
    if target in ("hugectr", "safetensors"):
        refuse_without("--to torchrec or dynamicemb", "module staged_as")
    if checkpoint is not None:
        from placer.storage.manifest import latest

        # Before PyTorch, which takes seconds to import.
        checkpoint, since = latest(checkpoint), since and latest(since)
        from placer.training.checkpoint import export_tables

        what = export_tables(loaded, checkpoint, file, since=since, with_optimizer=with_optimizer)
        return click.echo(f"{what} written to {file}")
    from placer.adapters import document_for
    from placer.files.atomic import write_text

    document = document_for(target, loaded, module=module, staged_as=staged_as)
    write_text(file, json.dumps(document, indent=1) + "\n")
    click.echo(f"{counted(len(loaded.tables), 'table')} written to {file} for {target}")


@_command
def grow(
    old: Path = argument(kind=INPUT),
    new: Path = argument(kind=INPUT),
    checkpoint: Path = option(..., "Checkpoint of a run with OLD's tables.", kind=INPUT),
    keep: Texts = option((), "TABLE=FILE: a file of the ids that stay, one a line."),
    folder: Path = option(..., "Folder to write the checkpoint to.", "-o --output", kind=FOLDER),
    output: Output = OUTPUT,
) -> None:
    """Give a checkpoint's tables more rows, or fewer: those of another plan.

    Ids keep their rows. Rows of new ids are drawn as in a new table.

    \b
    placer grow old.json new.json --checkpoint runs/a -o runs/b
    placer grow old.json new.json --checkpoint runs/a --keep item=ids.txt -o runs/b
    """
    from placer.storage.manifest import latest

    # Before PyTorch, which takes seconds to import.
    plans, found = (placer.Plan.load(old), placer.Plan.load(new)), latest(checkpoint)
    from placer.training.growing import grow_checkpoint

    done = grow_checkpoint(plans, (old, new), found, folder, keep)
    report.print_report(report.grown_report(done), output)
    report.print_stderr(f"checkpoint written to {folder}")


# Cost models ------------------------------------------------------------------------------------


@_command
def calibrate(
    asked: trained.MeasureOptions = BUNDLE,
    output: Output = OUTPUT,
    file: Path = option(..., "File to write the constants to.", "-o --output", kind=FILE),
) -> None:
    """Measure how long embedding work takes on this machine, for --cost-model calibrated:FILE.

    Measurements are kept beside FILE, so that a run that was cut short can continue.

    \b
    placer calibrate --backend tiered --budget 3min -o machine.json
    placer show plan.json --profile profile --cost-model calibrated:machine.json
    """
    from cost_models.calibrated.fit import calibrate as fit_constants
    from placer.measurement import Dataset
    from placer.measurement.machine import measure_machine

    measured = file.with_suffix(".measurements.jsonl")
    with report.stoppable("the measurements") as stop, report.progress_bar("cases") as update:
        measure_machine(measured, asked.setting(), **asked.effort(), stop=stop, on_case=update)
    constants = fit_constants(Dataset.load(measured), asked.clock)
    constants.save(file)
    report.print_report(cost_reports.calibration_report(constants), output)
    report.print_stderr(f"constants written to {file}, measurements to {measured}")


@_command
def sweep(
    names: str = option(_PLATFORMS, "Machines; 16xcpu is 16 CPU servers.", "--platform"),
    varied: Texts = option((), "Vary an axis: sparse=4,16.", "--vary", metavar="AXIS[=VALUES]"),
    grid: bool = option(False, "Try all combinations of axes, not one axis at a time."),
    preset: Preset = option("suite", "Model to start from.", "--model"),
    overrides: Texts = option((), "Fix an axis: rows=1e6.", "--set", metavar="AXIS=VALUE"),
    placements: Any = option(_PLACEMENTS, "Placements to compare.", kind=_PLACEMENT_LIST),
    parameter_servers: int = option(8, "CPU servers of the placement remote.", least=1),
    hbm: Text = HBM,
    dram: Text = shared.DRAM,
    model: str = shared.MODEL,
    plot: File = PICTURE,
    output: Output = OUTPUT,
) -> None:
    """Show which placement trains a DLRM fastest, for many models and machines.

    \b
    Axes: dense, sparse, rows, width, depth, batch, pooling, dim, skew
    Placements: gpu, row-wise, hot-cold, cached, host-staged, host-read, host-pooled, remote,
    cpu

    \b
    placer sweep
    placer sweep --platform big-basin,zion --vary sparse=4,16,64,128 --plot sweep.png
    placer sweep --model m3 --platform big-basin,16xcpu --vary rows --set pooling=20
    placer sweep --vary pooling --vary rows=1e5,1e6,1e7 --grid --format csv
    """
    from cost_models import sweep as run

    if grid and plot is not None:
        raise click.UsageError(
            "--plot draws one axis at a time: leave --grid, or take --format csv"
        )
    if "remote" not in placements:
        refuse_without("the placement remote", "parameter_servers")
    with shared.usage_errors():
        listed = filter(str.strip, names.split(","))
        machines = run.distinct([run.platform(name, hbm=hbm, dram=dram) for name in listed])
        axes = run.axes_of(varied or run.DEFAULT_AXES)
        base = run.with_overrides(preset, overrides)
    with report.stoppable("the models") as stop, report.progress_bar("models") as update:
        swept = run.sweep(
            machines,
            axes,
            cost_models.cost_model(model),
            base=base,
            placements=placements,
            grid=grid,
            parameter_servers=parameter_servers,
            on_point=update,
            stop=stop,
        )
    make = cost_reports.sweep_tables if output == "table" else cost_reports.sweep_report
    report.print_drawn(make(swept), output, cost_reports.plot_sweep, swept, plot)


# Demo -------------------------------------------------------------------------------------------


@_command
def demo(
    logs: Texts = option((), "Log file of yours; else one is generated.", "--data"),
    data_format: Any = shared.LOG_FORMAT,
    options: LogOptions = BUNDLE,
    samples: int = option(150000, "Samples of the generated log.", least=1000),
    scale: float = option(0.05, "Size of that log's tables; 1 is as published.", kind=_SHARE),
    steps: int = option(60, "Training steps of the placed and of the unplaced model.", least=1),
    time_limit: float = shared.TIME_LIMIT,
    folder: Path = option(Path("demo"), "Folder for all results.", "-o --output", kind=FOLDER),
) -> None:
    """Profile a log, compare solvers, plan, and train with the plan, in a few minutes.

    \b
    placer demo
    placer demo --data train.tsv --steps 100
    placer demo --data avazu.parquet --ignore id
    """
    from solvers.report import demo as steps_of

    data_format = data_format if logs else "criteo"
    logs = steps_of.log_step(logs, folder, samples, scale)
    log, profiled = steps_of.profile_step(logs, folder, data_format, options)
    limits = solvers.Limits(time_limit)
    problem = steps_of.compare_step(profiled, folder, limits)
    result = steps_of.plan_step(problem, folder / "plan.json", limits)
    if result.plan is None:
        _refuse(result)
    equal = steps_of.train_step(placer.Plan.load(folder / "plan.json"), log, steps)
    click.echo(steps_of.closing_words(folder, logs[0]))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
