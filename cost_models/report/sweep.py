"""`placer sweep`: which placement is the fastest, over models and machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cost_models.sweep.run import Point, Sweep
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from placer.units import significant

Case = tuple[tuple[str, float], ...]


def sweep_report(sweep: Sweep) -> Report:
    """Report all points and the fastest placement of each case, as JSON and CSV show them."""
    points: list[Row] = [_point_row(point) for point in sweep.points]
    facts: Row = {
        "cost_model": sweep.cost_model,
        "base": asdict(sweep.base),
        "axes": {axis: list(values) for axis, values in sweep.axes.items()},
        "grid": sweep.grid,
        "placements": list(sweep.placements),
        "platforms": [{"name": one.name, "sources": dict(one.sources)} for one in sweep.platforms],
    }
    return Report(
        "Sweep",
        (
            Section("points", "Points", (), tuple(points)),
            Section("winners", "Fastest placements", (), tuple(_winner_rows(sweep))),
        ),
        facts,
    )


def sweep_tables(sweep: Sweep) -> Report:
    """Return samples per second of each placement, machine by machine, for people."""
    sections: list[Section] = []
    winners = {(row["platform"], row["varied"]): row for row in _winner_rows(sweep)}
    by_case = _by_case(sweep.points)
    for platform in sweep.platforms:
        rows: list[Row] = []
        for (name, case), members in by_case.items():
            if name != platform.name:
                continue
            cells: dict[str, Any] = {point.placement: point.samples_per_s for point in members}
            rows.append({**winners[name, _words(case)], **cells})
        columns = (
            Column("varied", "model"),
            *(Column(name, name, form.count) for name in sweep.placements),
            Column("winner", "fastest"),
            Column("lead", "ahead by", form.times, spare=True),
            Column("waits_for", "waits for", spare=True),
        )
        title = f"{platform.name}: samples/s by placement"
        sections.append(Section(platform.name, title, columns, tuple(rows)))
    if len(sweep.platforms) > 1:
        sections.append(_machines(sweep, winners))
    impossible = _impossible(sweep)
    if impossible:
        reasons = (
            Column("platform", "machine"),
            Column("placement", "placement"),
            Column("cases", "model", wraps=True),
            Column("detail", "why not", wraps=True),
        )
        sections.append(Section("impossible", "Not possible", reasons, tuple(impossible)))
    base = ", ".join(
        f"{axis} {significant(value, 6)}" for axis, value in asdict(sweep.base).items()
    )
    return Report(
        "Sweep over placements",
        tuple(sections),
        headline=(
            f"where nothing else is said: {base}",
            f"cost model {sweep.cost_model}; remote needs further machines, and is the fastest "
            "only where nothing else is possible",
        ),
    )


def _point_row(point: Point) -> Row:
    lacks = point.shortage
    return {
        "platform": point.platform,
        "placement": point.placement,
        "varied": _words(_case(point)),
        **asdict(point.setting),
        "feasible": point.samples_per_s is not None,
        "step_time_s": point.step_time_s,
        "samples_per_s": point.samples_per_s,
        "waits_for": point.waits_for or None,
        "hbm_lookup_share": point.hbm_lookup_share,
        "short_device": lacks.device if lacks else None,
        "short_resource": lacks.resource if lacks else None,
        "short_bytes": lacks.short_bytes if lacks else None,
        "extra_servers": point.extra_servers,
        "detail": point.detail,
    }


def _case(point: Point) -> Case:
    return tuple(point.varied.items())


def _words(case: Case) -> str:
    return " ".join(f"{axis}={significant(value, 6).replace(',', '')}" for axis, value in case)


def _by_case(points: Sequence[Point]) -> dict[tuple[str, Case], list[Point]]:
    cases: dict[tuple[str, Case], list[Point]] = {}
    for point in points:
        cases.setdefault((point.platform, _case(point)), []).append(point)
    return cases


def _winner_rows(sweep: Sweep) -> list[Row]:
    rows: list[Row] = []
    for platform, case in _by_case(sweep.points):
        ranked = sweep.ranked(platform, dict(case))
        first = ranked[0] if ranked else None
        best = (first.samples_per_s or 0.0) if first else 0.0
        # What fits into GPUs is the same split or not: no rival of itself.
        later = (one for one in ranked if (one.samples_per_s or 0.0) < best * (1 - 1e-9))
        second = next(later, None)
        rows.append(
            {
                "platform": platform,
                "varied": _words(case),
                **dict.fromkeys(sweep.axes, None),
                **dict(case),
                "winner": first.placement if first else None,
                "samples_per_s": first.samples_per_s if first else None,
                "waits_for": first.waits_for if first else None,
                "runner_up": second.placement if second else None,
                "lead": best / second.samples_per_s if second and second.samples_per_s else None,
            }
        )
    return rows


def _machines(sweep: Sweep, winners: Mapping[tuple[Any, Any], Row]) -> Section:
    """Return the best of each machine side by side."""
    cases = dict.fromkeys(case for _, case in winners)
    rows: list[Row] = []
    for case in cases:
        best = {one.name: winners.get((one.name, case)) for one in sweep.platforms}
        rows.append(
            {
                "varied": case,
                **{
                    name: f"{form.count(row['samples_per_s'])} ({row['winner']})"
                    if row and row["winner"]
                    else None
                    for name, row in best.items()
                },
            }
        )
    columns = (Column("varied", "model"), *(Column(p.name, p.name) for p in sweep.platforms))
    return Section("machines", "The fastest placement of each machine", columns, tuple(rows))


def _impossible(sweep: Sweep) -> list[Row]:
    """List placements that some case rules out: the cases, and why the last of them does."""
    impossible: dict[tuple[str, str], dict[str, Any]] = {}
    for point in sweep.points:
        if point.samples_per_s is None:
            row = impossible.setdefault((point.platform, point.placement), {"cases": []})
            row["cases"].append(_words(_case(point)))
            row["detail"] = point.detail
    total = len(_by_case(sweep.points)) // max(1, len(sweep.platforms))
    return [
        {
            "platform": platform,
            "placement": placement,
            "cases": "all" if len(row["cases"]) == total else ", ".join(row["cases"]),
            "detail": row["detail"],
        }
        for (platform, placement), row in impossible.items()
    ]
