"""Print for commands: results on stdout, notes and progress on stderr."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from placer.interrupt import deferred_interrupt
from placer.report.section import Report, Row, rows_to_csv
from placer.report.training import train_values, training_reports
from placer.units import counted, plain, significant

if TYPE_CHECKING:
    from placer.plan.plan import Plan
    from placer.plan.verify import Violation
    from placer.training.config import TraceRequest, TrainConfig
    from placer.training.loop import TrainResult

Update = Callable[..., None]
"""Updates a progress bar: amount done, total or None, and a remark to show beside it."""

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Print no notes and progress from now on if `quiet`, only errors and results."""
    global _quiet
    _quiet = quiet


def print_stderr(text: str, style: str = "dim") -> None:
    """Print a line on stderr unchanged: without wrapping, markup or emoji codes."""
    if _quiet and style != "red":  # Errors are red.
        return
    console = Console(stderr=True, highlight=False, emoji=False)
    console.print(plain(text), style=style, markup=False, soft_wrap=True)


def print_title(text: str) -> None:
    """Print a heading on stdout."""
    console = Console(highlight=False, emoji=False)
    console.print(plain(text), style="bold", markup=False, soft_wrap=True)


@contextmanager
def progress_bar(words: str, shown: bool = True) -> Iterator[Update]:
    """Show a progress bar on stderr if it is a terminal; yield the function that updates it."""
    console = Console(stderr=True)
    hidden = not shown or _quiet or not console.is_terminal
    remarks = TextColumn("{task.description}")
    columns = TextColumn(words), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), remarks
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("", total=None)

        def update(done: float, total: float | None, remark: str = "") -> None:
            bar.update(task, completed=done, total=total, description=remark)

        yield update


@contextmanager
def stoppable(so_far: str = "the best plan") -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C stop a search early; then print a note that `so_far` is what it had found.

    Yield a function for the search to call: it returns True after Ctrl-C. Searches that start
    after Ctrl-C stop at once. A second Ctrl-C raises KeyboardInterrupt.
    """
    with deferred_interrupt() as interrupt:
        yield lambda: interrupt.requested
    if interrupt.requested:
        print_stderr(f"stopped: {so_far} so far")


def print_report(shown: Report, output: str = "table") -> None:
    """Print a report as a table, JSON or CSV."""
    if output == "json":
        print(json.dumps(shown.to_json(), indent=1))
    elif output == "csv":
        sys.stdout.write(shown.to_csv())
    else:
        # Without a terminal, use a fixed width, so that logs and pagers get every column. If
        # COLUMNS is set, rich uses it.
        console = Console(emoji=False)
        fits = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
        console = console if fits else Console(width=160, emoji=False)
        console.print(shown.renderable())


def print_training(
    result: "TrainResult",
    config: "TrainConfig",
    output: str,
    trace: "TraceRequest | None",
    checkpoints: Path | None,
    planned: Mapping[str | None, float] | None,
) -> None:
    """Print the results of a training run, and notes on requests that it did not fulfil.

    `planned` has the shares of lookups from HBM that the plan expects; see `hit_rate_report`.
    """
    if trace is not None and result.trace is None:
        print_stderr(f"no trace: it begins after {trace.warm_up} steps, and the run ended before")
    values, tables = train_values(result), training_reports(result, planned or {})
    if output == "json":
        shown = {name: table.to_json() for name, table in tables.items()}
        print(json.dumps({**values, **shown, "losses": result.losses}, indent=1))
    else:
        for name, value in values.items():
            if value is not None:
                print(f"{name.replace('_', ' '):>18}  {readable(value)}")
        for table in tables.values():
            print()
            print_report(table)
    if result.interrupted:
        nothing = "nothing was saved; --checkpoints saves"
        saved = nothing if checkpoints is None else f"--resume goes on from {checkpoints}"
        print_stderr(f"interrupted after step {result.steps}; {saved}")
    elif result.losses and result.losses[0][0] > 1:
        print_stderr(f"went on after step {result.losses[0][0] - 1}, where the checkpoint was made")
    if not result.interrupted and (config.max_steps is None or result.steps < config.max_steps):
        again = (
            f"the log ended after step {result.steps}; --epochs {config.epochs + 1} reads it again"
        )
        if not result.losses:
            print_stderr(f"nothing was left to train: {again}")
        elif config.max_steps is not None:
            print_stderr(f"--steps {config.max_steps} was not reached: {again}")
    elif not result.interrupted and not result.losses and result.steps:
        print_stderr(
            f"nothing was left to train: the checkpoint has {result.steps} steps, and --steps is "
            f"{config.max_steps}"
        )


def print_violations(
    broken: "Sequence[Violation]", plan: "Plan", sound: str, meets: str, output: str = "table"
) -> None:
    """Print the rules that a plan breaks, or that it is sound."""
    rows: list[Row] = [{"rule": v.rule, "where": v.where, "message": v.message} for v in broken]
    if output == "csv":
        sys.stdout.write(rows_to_csv(rows) or "rule,where,message\n")
    elif output == "json":
        print(json.dumps({"sound": not broken, "violations": rows}, indent=1))
    elif broken:
        print("\n".join(plain(f"{violation.rule}: {violation.message}") for violation in broken))
    else:
        from placer.plan.drift import assumed_even, even_words

        shards, tables = counted(len(plan.shards), "shard"), counted(len(plan.tables), "table")
        covers = "covers" if len(plan.shards) == 1 else "cover"
        print(
            f"{sound}: {shards} {covers} {tables} exactly once, and every device holds no more "
            f"than it has{meets}"
        )
        if even := assumed_even(plan):
            print(even_words(even))


def readable(value: Any) -> str:
    """Format a value of a result: integers with thousands separators, floats to five digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no"}.get(value, str(value))
    return f"{value:,}" if isinstance(value, int) else significant(value, 5)


def print_drawn(
    shown: Report,
    output: str,
    draws: Callable[[Any, Path], None],
    drawn: Any,
    file: Path | None,
) -> None:
    """Draw a picture into `file`, if there is one. Print the report even if drawing fails."""
    try:
        if file is not None:
            draws(drawn, file)
            print_stderr(f"picture written to {file}")
    finally:
        print_report(shown, output)


def this_command() -> str:
    """Return the running command line, quoted for a shell."""
    return shlex.join(["placer", *sys.argv[1:]])
