"""Report simulations and calibrations, and the expected shares of lookups that HBM serves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cost_models.calibrated.model import Calibration
from cost_models.roofline import Roofline
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section, attributes, columns, table_of
from placer.report.training import keys_section
from placer.units import counted, format_seconds

if TYPE_CHECKING:
    from cost_models.simulation import Simulated
    from placer.simulator.counts import StepCounts
    from placer.simulator.summary import DeviceTotals, StepRecord, Window


def simulate_report(simulated: "Simulated") -> Report:
    """Report facts of all steps, and tables of devices, exchanged bytes, windows and steps."""
    totals, served, options = simulated.totals, simulated.served, simulated.options
    times, sums = simulated.step_times, simulated.sum_times
    steps = totals.steps
    share = served.hbm_lookups / served.lookups if served.lookups else 1.0
    facts: Row = {
        **form.attributes(totals, "steps", "samples"),
        **form.attributes(options, "cache_policy", "look_ahead"),
        **form.attributes(served, "lookups", "hbm_lookups"),
        "hbm_share": share,
        "slow_lookups_per_step": served.slow_lookups / steps,
        "slow_rows_per_step": served.slow_rows / steps,
        **{f"step_{name}": value for name, value in asdict(times).items()},
        **{f"sum_{name}": value for name, value in asdict(sums).items()},
        "dense_s": simulated.dense_s,
    }
    dense = "steps are embeddings alone"
    if simulated.dense_s is not None:
        dense = f"{format_seconds(simulated.dense_s)} of each are dense layers"
    overlap = "beside the step before" if options.look_ahead else "within the step"
    headline = (
        f"{counted(steps, 'step')}, {counted(totals.samples, 'sample')}; HBM served "
        f"{form.share(share)} of {form.count(served.lookups)} lookups",
        f"a step: mean {format_seconds(times.mean_s)}, median {format_seconds(times.p50_s)}, "
        f"p99 {format_seconds(times.p99_s)}, copies {overlap}; without any overlap "
        f"{format_seconds(sums.mean_s)}; {dense}",
    )
    devices = _devices(simulated.devices, steps, simulated.gpu_s.tolist())
    # A device that sends but has no HBM is a server.
    has_servers = any(one.sent_bytes and not one.hbm_bytes for one in simulated.devices)
    sections = [devices, _exchange(totals, "between devices" if has_servers else "between GPUs")]
    if simulated.keys:
        sections.append(keys_section(simulated.keys))
    windows = simulated.windows
    if len(windows) > 1 or any(one.other is not None for one in windows):
        sections.append(_windows(windows))
    sections.append(_steps(simulated.records))
    return Report("Simulated", tuple(sections), facts, headline)


def _devices(devices: "Sequence[DeviceTotals]", steps: int, gpu_s: Sequence[float]) -> Section:
    rows: list[Row] = [
        {
            "device": one.device,
            **{name: getattr(one, name) / steps for name in _PER_STEP},
            "hbm_share": one.hbm_share,
            "pool_entries": one.cache_entries,
            **form.attributes(one, "most_held", "most_needed", "hbm_bytes", "most_hbm_bytes"),
            "work_s": gpu_s[number] if number < len(gpu_s) else None,
        }
        for number, one in enumerate(devices)
    ]
    shown = (
        *columns(device="device", work_s="work", lookups="lookups", rows="rows"),
        *columns(hbm_share="in HBM", staged_rows="copied in", written_back_rows="back"),
        *columns(in_place_rows="in place", link_in_bytes="link in", link_out_bytes="out"),
        *columns(sent_bytes="sent", received_bytes="received"),
        Column("dram_read_bytes", "DRAM read", spare=True),
        Column("pool_entries", "entries", form.count, spare=True),
        Column("most_held", "most used", form.count, spare=True),
        Column("most_needed", "most asked", form.count, spare=True),
    )
    return Section("devices", "A step of each device (means)", shown, tuple(rows))


_PER_STEP = (
    "lookups", "rows", "hbm_lookups", "staged_rows", "in_place_rows", "written_back_rows",
    "hbm_read_bytes", "hbm_written_bytes", "link_in_bytes", "link_out_bytes", "sent_bytes",
    "received_bytes", "dram_read_bytes", "dram_written_bytes",
)  # fmt: skip


def _exchange(totals: "StepCounts", between: str) -> Section:
    kept = {kind: int(sent.diagonal().sum()) for kind, sent in totals.sent.items()}
    return table_of(
        [
            (kind, (int(sent.sum()) - kept[kind]) / totals.steps, kept[kind] / totals.steps)
            for kind, sent in totals.sent.items()
        ],
        "exchange",
        "Exchanged in a step",
        *columns(kind="what", to_others_bytes=between, to_self_bytes="within one"),
    )


def _windows(windows: "Sequence[Window]") -> Section:
    def of_other(name: str) -> Callable[["Window"], Any]:
        return lambda one: getattr(one.other, name, None)

    def pays_after(one: "Window") -> str | None:
        return None if one.other is None else break_even(one.break_even_steps, one.migration_s)

    return table_of(
        windows,
        "windows",
        "Over time",
        Column("window", "window", of=lambda one: one.name),
        Column("steps", "steps", form.count),
        *columns(hbm_share="in HBM", lost_share="lost", slow_lookups="slow lookups"),
        Column("slow_rows"),
        Column("step_mean_s", "step", of=lambda one: one.mean_s),
        Column("step_p99_s", "p99", of=lambda one: one.p99_s),
        Column("ratio", "vs first", of=lambda one: form.ratio(one.mean_s, one.first.mean_s)),
        Column("other_hbm_share", "other: in HBM", of=of_other("hbm_share")),
        Column("other_step_mean_s", "step", of=of_other("mean_s")),
        Column("migration_s", "to move"),
        Column("break_even_steps"),
        Column("break_even", "pays after", of=pays_after),
    )


def break_even(steps: float | None, cost: float | None) -> str:
    """Say after how many steps a move of this cost pays for itself.

    >>> break_even(None, 1.0), break_even(0.0, 0.0), break_even(1.5, 2.0)
    ('never', 'never needed', '2 steps')
    """
    if steps is None:
        return "never"
    return counted(math.ceil(steps), "step") if cost else "never needed"


def _steps(records: "Sequence[StepRecord]") -> Section:
    """List each step's numbers; the table shows the first steps' times."""
    return table_of(
        records,
        "steps_in_order",
        "Steps",
        *columns(lookups=None, hbm_lookups=None, slow_rows=None),
        Column("entries_held", of=lambda one: one.held),
        Column("entries_needed", of=lambda one: one.needed),
        *columns(step_s="step", sum_s="sum"),
        shown=3,
        order="first ones",
    )


def calibration_report(calibration: Calibration) -> Report:
    """Report constants with error bars, their errors, and how the machine's speed varied."""
    noise = calibration.noise
    headline = [
        f"{calibration.cases} cases; of the step times of cases that a fit had not seen, half are "
        f"off by more than {form.share(calibration.relative_error)}, one of ten by more than "
        f"{form.share(calibration.p90_error)}",
        f"steps of one case vary by {form.share(noise.spread)}, and one measured repeatedly "
        f"by {form.share(noise.drift)}; waiting for the processor added {form.share(noise.wait)}",
    ]
    if calibration.noisy:
        other = "" if calibration.setting.get("clock") == "cpu" else ", or with --clock cpu"
        headline.append(
            "THE MACHINE WAS TOO NOISY to trust these constants: calibrate again with nothing else "
            f"running{other}"
        )
    constants = table_of(
        [(name, one.value_s, one.low_s, one.high_s) for name, one in calibration.constants.items()],
        "constants",
        "Constants",
        *columns(constant="constant", value_s="time of a unit", low_s="at least", high_s="at most"),
    )
    facts = {
        **attributes(calibration, "cases", "relative_error", "p90_error"),
        **attributes(noise, "spread", "drift", "wait"),
        "noisy": calibration.noisy,
    }
    backend = calibration.setting.get("backend", "?")
    return Report(f"Calibration of backend {backend}", (constants,), facts, tuple(headline))


def hbm_shares(plan: Plan, profile: Profile | None) -> dict[str | None, float]:
    """Return the expected share of lookups in HBM, by table; of all tables under the key None.

    The shares depend on the profile's counts and the rows in HBM, not on the cost model. Without a
    profile, the result is empty.
    """
    if profile is None:
        return {}
    problem = Problem.of_plan(plan, profile).in_plan_order(plan)
    cost = Roofline().evaluate(problem, plan)
    return {None: cost.hbm_lookup_share} | {
        table: own.hbm_lookup_share for table, own in cost.tables.items()
    }
