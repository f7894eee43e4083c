"""Render the answers as a page: one HTML file that needs no network.

The page contains Plotly's script in compressed form, and unpacks it after the text is shown. A
content security policy allows only scripts with known hashes and loads nothing. So no name in a
plan can run code.
"""

import base64
import gzip
import hashlib
import importlib.resources
import json
import os
from typing import TYPE_CHECKING, Any

from placer import __version__
from placer.errors import BackendError
from placer.files.atomic import write_text
from placer.report import section as form
from placer.report.picture import SERIES
from placer.report.section import Column, attributes, columns
from placer.units import plain
from solvers.report.page.answers import Answers
from solvers.report.page.figures import Chart, front_charts, memory_charts, time_chart
from solvers.report.page.tables import table_map
from solvers.report.page.verdict import advice, summary

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = "solvers.report.page", "templates"

_TILES = (
    *columns(step_time_s="Step time", gap="Above the bound", hbm_lookup_share="Lookups from HBM"),
    Column("balance", "Balance, at best 1", form.fraction),
    *columns(hbm_used_bytes="In HBM, with buffers", dram_used_bytes="In DRAM, with buffers"),
    *columns(ssd_used_bytes="On SSD"),
)
_ORIGIN = (
    *columns(profile="Profile", pipeline="Pipeline", search_space="Searched"),
    *columns(seed="Seed of the search", search_s="Time of the search"),
    *columns(planned_for="Cost model of the plan", cost_model="Cost model of this page"),
    *columns(created="Plan made", placer_version="Made by placer", version="This page by placer"),
    *columns(problem_sha256="Hash of the problem"),
)


def write_page(answers: Answers, path: str | os.PathLike[str], *, command: str = "") -> None:
    """Write the page as a file, atomically; `command` tells readers how to make it again.

    Raises a `BackendError` if Jinja2 or Plotly is missing, and a `PlacerError` if the file cannot
    be written.
    """
    environment, plotly, script = _environment(), _plotly(), _file("page.js")
    plan, shown = answers.plan, answers.shown
    sections, charts = {section.name: section for section in shown.sections}, charts_of(answers)
    tables, facts = sections["tables"], shown.facts
    origin = {**facts, **attributes(plan.provenance, "created", "placer_version")}
    origin |= {"seed": plan.solver.seed, "search_s": plan.solver.seconds, "version": __version__}
    origin["planned_for"] = plan.solver.cost_model
    data = {
        "charts": {one.name: one.data() for of_part in charts.values() for one in of_part},
        "colours": SERIES,
        "map": table_map(plan, answers.problem.profile, tables),
    }
    numbers = {row["table"]: number for number, row in enumerate(tables.rows)}
    page = environment.get_template("page.html.j2").render(
        answers=answers,
        advice=advice(facts, answers.binding, sections["memory"].rows),
        charts=charts,
        command=command,
        data=script_json(data),
        facts=facts,
        explanations={numbers[name]: one for name, one in answers.explanations.items()},
        origin=[(column.title, column.cell(origin) or "not named") for column in _ORIGIN],
        plotly=base64.b64encode(gzip.compress(plotly.encode(), 9, mtime=0)).decode(),
        policy=_policy(script, plotly),
        script=script,
        sections=sections,
        style=_file("page.css"),
        summary=summary(facts),
        tiles=[tile for tile in _TILES if tile.key in facts],
    )
    write_text(path, page)


def charts_of(answers: Answers) -> dict[str, list[Chart]]:
    """Return the charts of a page by the name of its part."""
    sections = [*answers.shown.sections]
    if "budgets" in answers.parts:
        sections += answers.parts["budgets"].sections
    known = {section.name: section for section in sections}
    return {
        "time": [time_chart(answers.cost, answers.shown.facts["bound_s"])],
        "memory": memory_charts(known["memory"], answers.plan.topology),
        "budgets": front_charts(known["front"]) if "front" in known else [],
    }


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, with any texts in it.

    Numbers that JSON lacks become null, such as a gap above a bound of 1e-300.

    >>> script_json(["</script>", float("inf")])
    '["\\\\u003c/script\\\\u003e",null]'
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _environment() -> "Environment":
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise _missing("Jinja2") from error
    blocks: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    # What is safe already, such as a macro's result, is no plain str.
    escaped: Any = {"finalize": lambda one: plain(one) if type(one) is str else one}
    return Environment(loader=PackageLoader(*_TEMPLATES), autoescape=True, **blocks, **escaped)


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
