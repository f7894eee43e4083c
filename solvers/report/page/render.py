"""Render the answers as a page: one HTML file that needs no network.

The page contains Plotly's script in compressed form, and unpacks it after the text is shown. A
content security policy allows only scripts with known hashes and loads nothing. So no name in a
plan can run code.
"""

import base64
import gzip
import hashlib
import importlib.resources
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placer import __version__
from placer.errors import BackendError
from placer.files.atomic import write_text
from placer.plan.fields import Shard
from placer.plan.memory import record_bytes
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.section import Column, Row, Section
from placer.tables import Table
from placer.units import format_bytes, format_seconds, plain
from solvers.report.page import figures, more_figures
from solvers.report.page.answers import Answers
from solvers.report.page.figures import Chart
from solvers.report.page.more_figures import curve
from solvers.report.page.verdict import verdict
from solvers.report.plan import short_names
from solvers.report.whatif import front_section

if TYPE_CHECKING:
    from jinja2 import Environment


_TEMPLATES = "solvers.report.page", "templates"
_ENDS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_page(answers: Answers, path: str | os.PathLike[str], *, command: str = "") -> None:
    """Write the page as a file, atomically; `command` tells readers how to make it again.

    Raises a `BackendError` if Jinja2 or Plotly is missing, and a `PlacerError` if the file cannot
    be written.
    """
    write_text(path, page_html(answers, command=command))


def page_html(answers: Answers, *, command: str = "") -> str:
    """Return the page's HTML; see `write_page`."""
    environment, plotly = _environment(), _plotly()
    script = _file("page.js")
    sections = {section.name: section for section in answers.shown.sections}
    tables, charts = sections["tables"], charts_of(answers, sections)
    map_of_tables = table_map(answers.plan, answers.problem.profile, tables, answers.reasons)
    drawn = {
        chart.name: {"data": chart.traces, "layout": chart.layout, "height": chart.height_px}
        for chart in itertools.chain.from_iterable(charts.values())
    }
    numbers = {row["table"]: number for number, row in enumerate(tables.rows)}
    facts = answers.shown.facts
    holds = answers.bound_holds and facts["bound_s"] is not None
    memory = sections["memory"].rows
    return environment.get_template("page.html.j2").render(
        title=plain(answers.shown.title),
        style=_file("page.css"),
        script=script,
        policy=_policy(script, plotly),
        plotly=base64.b64encode(gzip.compress(plotly.encode(), 9, mtime=0)).decode(),
        data=script_json({"charts": drawn, "map": map_of_tables}),
        verdict=verdict(facts, answers.cost, answers.binding, bound_holds=holds, memory=memory),
        charts=charts,
        sections=sections,
        answers=answers,
        command=command,
        explanations={numbers[name]: one for name, one in answers.explanations.items()},
        provenance=_provenance(answers),
    )


def charts_of(
    answers: Answers, sections: Mapping[str, Section] | None = None
) -> dict[str, list[Chart]]:
    """Return the charts of a page by the name of its part."""
    known = sections or {section.name: section for section in answers.shown.sections}
    machine = answers.plan.topology
    bound_s = answers.shown.facts["bound_s"] if answers.bound_holds else None
    charts: dict[str, list[Chart]] = {
        "time": [figures.time_chart(answers.cost, machine, bound_s)],
        "memory": figures.memory_charts(known["memory"], machine),
        "skew": [more_figures.skew_chart(known["tables"].rows, answers.problem.profile)],
    }
    if answers.front:
        section = front_section(answers.front, answers.problem.global_batch_size)
        charts["front"] = [figures.front_chart(section)]
    if answers.comparison is not None:
        charts["comparison"] = [more_figures.comparison_chart(answers.comparison.sections[0])]
    windows = None if answers.simulated is None else answers.simulated.section("windows")
    if windows is not None:
        charts["drift"] = [more_figures.drift_chart(windows)]
    moves = None if answers.moves is None else answers.moves.section("moves")
    if moves is not None and answers.other is not None:
        charts["moves"] = [more_figures.moves_chart(moves, answers.plan, answers.other)]
    return charts


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, with any texts in it.

    >>> script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(_finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character, escaped in _ENDS.items():
        text = text.replace(character, escaped)
    return text


def _provenance(answers: Answers) -> list[tuple[str, str]]:
    """Return the plan's provenance as names and values for people."""
    plan, facts = answers.plan, answers.shown.facts
    solver, source = plan.solver, plan.provenance
    words = f"{solver.name}, seed {solver.seed}, {format_seconds(solver.seconds)}, {solver.status}"
    known = [
        ("Machine", plan.topology.name + (" (emulated)" if plan.topology.emulated else "")),
        ("Profile", source.profile or "not named"),
        ("Samples per GPU and step", f"{plan.batch_size:,}"),
        ("Pipeline", plan.pipeline),
        ("Pooled rows travel as", plan.exchange_dtype),
        ("Solver", words),
        ("Cost model of the plan", solver.cost_model or "not named"),
        ("Cost model of this page", str(facts["cost_model"])),
        ("Searched", solver.search_space or "not named"),
        ("Plan made", source.created or "not dated"),
        ("Made by placer", source.placer_version or "not named"),
        ("This page by placer", __version__),
        ("Hash of the problem", source.problem_sha256 or "none"),
    ]
    if not answers.bound_holds:
        what = "profile, machine, constraints or cost model"
        known.append(("Bound", f"left out: {what} are not those that the plan was made for"))
    return [(name, plain(value)) for name, value in known]


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None, such as a gap above a bound of 1e-300."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _environment() -> "Environment":
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise _missing("Jinja2") from error
    blocks: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=PackageLoader(*_TEMPLATES), autoescape=True, **blocks)
    environment.filters["plain"] = lambda text: plain(str(text))
    environment.filters["raw_value"] = raw_value
    return environment


def raw_value(row: Row, column: Column) -> str:
    """Return a number as JSON, for programs that read the page; for texts an empty string."""
    value = row[column.key]
    return "" if value is None or isinstance(value, str) else json.dumps(value)


def _file(name: str) -> str:
    package, folder = _TEMPLATES
    return (importlib.resources.files(package) / folder / name).read_text("utf-8")


def _plotly() -> str:
    """Return Plotly's script from its Python package."""
    try:
        script = importlib.resources.files("plotly") / "package_data/plotly.min.js"
        return script.read_text("utf-8")
    except (ImportError, FileNotFoundError) as error:
        raise _missing("Plotly") from error


def _missing(library: str) -> BackendError:
    return BackendError(
        f"a page needs {library}; install it with: pip install 'embedding-placer[report]'"
    )


def _policy(*scripts: str) -> str:
    """Return a content security policy that allows these scripts and loads nothing."""
    hashes = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def table_map(
    plan: Plan, profile: Profile, tables: Section, reasons: Mapping[str, str]
) -> dict[str, Any]:
    """Return columns, rows, devices and access curves for the page's script.

    The profile is over the plan's row order. `tables` is the section of tables of
    `solvers.report.plan_report`, which gives the page's rows and columns.

    Returns
    -------
    dict
        ``columns`` have a key and a title, and ``rows`` a value and a text for each column. Of each
        table, ``strips`` has runs ``[first device, last device, HBM bytes, DRAM bytes]``,
        ``shards`` its shards in words, and ``curve`` the index of its access curve in ``curves``.
    """
    devices = [gpu.id for gpu in plan.topology.gpus]
    number = {device: at for at, device in enumerate(devices)}
    number |= {host.id: len(devices) + at for at, host in enumerate(plan.topology.hosts)}
    hosts = [gpu.host for gpu in plan.topology.gpus]
    starts = [at for at, host in enumerate(hosts) if at == 0 or hosts[at - 1] != host]
    by_name = {one.name: one for one in profile}
    curves: dict[tuple[bytes, bytes], Any] = {}
    rows, strips, shards, used = [], [], [], []
    for row in tables.rows:
        table, own = plan.tables_by_name[row["table"]], plan.shards_by_table[row["table"]]
        values = (row[c.key] for c in tables.columns)
        safe = [plain(one) if isinstance(one, str) else one for one in values]
        rows.append([[one, c.cell(row)] for one, c in zip(safe, tables.columns, strict=True)])
        strips.append(_strip(table, own, number))
        shards.append(_shards(table, own))
        cdf = by_name[row["table"]].cdf
        key = cdf.ranks.tobytes(), cdf.shares.tobytes()
        if key not in curves:
            curves[key] = len(curves), curve(cdf)
        used.append(curves[key][0])
    return {
        "columns": [
            {"key": c.key, "title": c.title, "number": not c.is_text} for c in tables.columns
        ],
        "rows": rows,
        "strips": strips,
        "shards": shards,
        "curve": used,
        "curves": [points for _, points in curves.values()],
        "reasons": [reasons.get(row["table"], "") for row in tables.rows],
        "devices": [plain(device) for device in devices],
        "hosts": starts,  # The first GPU of each host.
    }


def _strip(table: Table, shards: Sequence[Shard], number: dict[str, int]) -> list[list[int]]:
    """Return runs of neighbouring devices with equal bytes of a table in HBM and DRAM."""
    used: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for shard in shards:
        row_bytes = table.bytes_per_row(shard.width)
        for device in shard.devices:
            tiers = used[number[device]]
            tiers[shard.memory != "hbm"] += shard.row_count * record_bytes(table, shard)
            tiers[0] += shard.cache_rows * row_bytes
    runs: list[list[int]] = []
    for at, tiers in sorted(used.items()):
        if runs and runs[-1][1] == at - 1 and runs[-1][2:] == tiers:
            runs[-1][1] = at
        else:
            runs.append([at, at, *tiers])
    return runs


def _shards(table: Table, shards: Sequence[Shard]) -> list[list[str]]:
    """Return tier, devices, rows, columns, lookup and bytes of shards; equal shards as one."""
    alike: dict[tuple[str, str, int, int, int, int], list[str]] = defaultdict(list)
    for shard in shards:
        size = record_bytes(table, shard)
        key = shard.memory, shard.lookup, shard.row_count, shard.width, len(shard.devices), size
        alike[key].extend(shard.devices)
    return [
        [
            memory.upper(),
            plain(short_names(devices)),
            f"{len(devices) // copies} × {form.count(rows)}" if len(devices) > 1 else f"{rows:,}",
            str(width),
            lookup,
            format_bytes(rows * size * len(devices)),
        ]
        for (memory, lookup, rows, width, copies, size), devices in sorted(
            alike.items(), key=lambda item: (item[0][0] != "hbm", -item[0][2])
        )
    ]
