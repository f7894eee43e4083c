"""The steps of `placer demo`: profile a log, compare solvers, plan, and train with the plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cost_models import cost_model
from placer.data.files.stores import shown
from placer.data.options import LogOptions
from placer.data.reader import EncodedLog
from placer.errors import BackendError
from placer.plan.memory import exchange_buffer_bytes, index_buffer_bytes
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from placer.profile.count import profile_log
from placer.profile.profile import Profile
from placer.report import parity_lines, profile_report
from placer.report.console import print_report, print_stderr, print_title, progress_bar
from placer.topology.topology import Topology
from placer.training import TrainConfig, compare_training
from placer.units import format_bytes
from placer.workloads.synthetic_log import write_synthetic_log
from solvers.analysis.compare import compare
from solvers.registry import solver
from solvers.report.compare import compare_report, plot_compare
from solvers.report.progress import verdict
from solvers.result import Limits, SolveResult

MACHINE, BATCH_SIZE, DIM = "4xt4", 128, 64
# A tenth of the batches is held out. A model that sees only a few batches again and again memorises
# them before the last step.
_LEAST_BATCHES = 60


def demo_problem(profile: Profile) -> Problem:
    """Return the problem of a log's tables on four small GPUs with room for a quarter of them.

    >>> from placer.workloads import named_workload
    >>> problem = demo_problem(named_workload("criteo-kaggle"))
    >>> hbm_bytes = sum(gpu.memory_bytes for gpu in problem.topology.gpus)
    >>> 0.25 < hbm_bytes / problem.profile.total_bytes < 0.26
    True
    """
    gpus = len(Topology.parse(MACHINE).gpus)
    batch_size = max(1, min(BATCH_SIZE, profile.samples // (_LEAST_BATCHES * gpus)))
    samples = batch_size * gpus
    buffers = 0.0
    for table in (one.table for one in profile):
        lookups = samples * table.lookups_per_sample
        buffers += exchange_buffer_bytes(table, samples, lookups, DIM)
        buffers += index_buffer_bytes(table, lookups, DIM)
    hbm_bytes = int((profile.total_bytes / 4 + 1.5 * buffers) / gpus)
    return Problem(profile, Topology.parse(MACHINE, hbm=hbm_bytes), batch_size)


def log_step(logs: Sequence[str], folder: Path, samples: int, scale: float) -> tuple[str, ...]:
    """Return the log files; without any, generate one in Criteo's format."""
    print_title("1. A click log")
    if logs:
        print(", ".join(map(shown, logs)))
        return tuple(logs)
    file = folder / "generated.tsv"
    with progress_bar("samples") as update:
        how: Any = {"samples": samples, "scale": scale}
        write_synthetic_log(file, **how, on_samples=lambda done: update(done, samples))
    print(
        f"This log is GENERATED, not real: {samples:,} samples in Criteo's format, the "
        f"published cardinalities × {scale:g}, a skew fitted to a real sample, and a label "
        f"that the features explain. For a log of your own: make demo DATA=path"
    )
    return (str(file),)


def profile_step(
    logs: Sequence[str], folder: Path, format: Any, options: LogOptions
) -> tuple[EncodedLog, Profile]:
    """Open a log, count its accesses and save the profile."""
    print_title("\n2. Profile: how often is each row of each table read?")
    with progress_bar("ids") as update:
        schema = options.schema(format, "vocabulary")
        log = schema.open(logs, update)
    for note in log.notes:
        print_stderr(note)
    with progress_bar("samples") as update:
        profile = profile_log(log, dim=DIM, pooling=schema.poolings, progress=update)
    profile.save(folder / "profile")
    print_report(profile_report(profile))
    return log, profile


def compare_step(profile: Profile, folder: Path, limits: Limits) -> Problem:
    """Compare solvers on a machine without room for all tables; return the problem."""
    print_title("\n3. Compare: which strategy places the tables best?")
    problem = demo_problem(profile)
    gpus = problem.topology.gpus
    print(
        f"The tables and their optimizer state take {format_bytes(profile.total_bytes)}; "
        f"the {len(gpus)} GPUs get {format_bytes(gpus[0].memory_bytes)} each, with the buffers "
        f"of a step of {problem.global_batch_size:,} samples."
    )
    with progress_bar("solvers") as update:
        rows = compare(problem, limits=limits, on_solved=update)
    try:
        plot_compare(rows, folder / "compare.png")
    except BackendError as error:
        (folder / "compare.png").unlink(missing_ok=True)  # It may be of another log.
        print_stderr(f"no picture: {error}")
    print_report(compare_report(rows, f"The log's tables on {MACHINE}"))
    return problem


def plan_step(problem: Problem, file: Path, limits: Limits) -> SolveResult:
    """Make a plan, save it beside its profile, and verify the file."""
    print_title("\n4. Plan")
    result = solver("auto").solve(problem, cost_model("roofline"), limits)
    if result.plan is not None:
        provenance = replace(result.plan.provenance, profile="profile")
        replace(result.plan, provenance=provenance).save(file)
        broken = violations(Plan.load(file))
        print(f"{verdict(result)}; verified: {broken[0].message if broken else 'sound'}")
    return result


def train_step(plan: Plan, log: EncodedLog, steps: int) -> bool:
    """Train with and without the plan, print both losses, and return if they are equal."""
    print_title("\n5. Train a DLRM with the plan, and the same model without it")
    batch_size = plan.batch_size * len(plan.topology.gpus)
    config = TrainConfig(batch_size=batch_size, epochs=steps, max_steps=steps)
    with progress_bar("steps") as update:
        parity = compare_training(plan, log, config, on_step=lambda done: update(done, steps))
    skipped = parity.unlabelled_samples
    more = f"; {skipped:,} samples without a label were passed over" if skipped else ""
    print(f"{parity.steps} steps of {batch_size} samples; every tenth batch is held out{more}")
    print("\n".join(parity_lines(parity)))
    return parity.equal


def closing_words(folder: Path, log: str) -> str:
    """Return the names of the files that the demo has written, and commands to try next."""
    made = [name for name in ("profile/", "plan.json", "compare.png") if (folder / name).exists()]
    plan = folder / "plan.json"
    return (
        f"\nIn {folder}: {', '.join(made)}. Go on with `placer show {plan}`, or "
        f"`placer train --plan {plan} --data {log}`."
    )
