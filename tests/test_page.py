"""`placer report`: a page whose figures are those of `placer show`, and that loads nothing."""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from browser_cases import Browser, browser, needs_chromium
from cli_cases import Workbench, fail, json_of, make_workbench, succeed
from dense_cases import DLRM
from plan_cases import machine
from problem_cases import zipf_table

from cost_models import Roofline
from placer import Feature, Plan, Problem, Profile, Shard, Table, TableProfile, Topology
from placer.constraints.constraints import Constraints
from placer.profile.cdf import AccessCdf
from placer.report import section as form
from placer.report.picture import MARKERS, SERIES
from placer.workloads import named_workload
from solvers import Limits, solve
from solvers.analysis.whatif import FrontPoint, front
from solvers.bounds.binding import Binding, Resource
from solvers.registry import solver as solver_called
from solvers.report import plan_report
from solvers.report.page import Answers, ask, write_page
from solvers.report.page.figures import front_charts, memory_charts, time_chart
from solvers.report.page.render import charts_of, script_json
from solvers.report.page.tables import table_map
from solvers.report.page.verdict import advice, summary
from solvers.report.whatif import front_section

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "{{ 7 * 7 }} <b>bold</b> &amp;",
    "a\x00b\x1b[31m\u202etxt\u2028end\r\n",
    "'-->]]>\\u003c/script>",
)


def hostile_answers() -> Answers:
    """Tables of names that would do harm, two of them split, on a machine of such a name."""
    machine = replace(Topology.parse("2xh100", hbm="1MiB"), name=HOSTILE[0])
    tables = [Table(name, 1000, 8, features=(Feature(name),)) for name in HOSTILE]
    shards = [
        Shard(name, (0, 200, 1), (0, 8), (f"gpu:{n % 2}",), "hbm", "device")
        for n, name in enumerate(HOSTILE)
    ] + [
        Shard(name, (200, 1000, 1), (0, 8), (f"gpu:{n % 2}",), "dram", "staged", staging_rows=100)
        for n, name in enumerate(HOSTILE)
    ]
    plan = Plan(tuple(tables), machine, tuple(shards), batch_size=16)
    profile = Profile(tuple(TableProfile(one, AccessCdf.zipf(1000, 1.1)) for one in tables))
    return answers_of(Problem(profile, machine, 16), plan)


def answers_of(problem: Problem, plan: Plan) -> Answers:
    """What `ask` answers, without a file."""
    cost = Roofline().evaluate(problem, plan)
    return Answers(
        plan,
        problem,
        cost,
        plan_report(plan, cost),
        Binding("hbm bandwidth", f"waits for {cost.bottleneck}; half of it is work"),
    )


class Elements(HTMLParser):
    """The elements of a page as a browser would take them, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [v or "" for name, v in attrs if name in ("src", "href", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script" and self.scripts[-1] == "":
            self.scripts[-1] = data


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_cannot_leave_a_script(name: str) -> None:
    assert script_json([float("inf"), {"gap": float("nan")}]) == '[null,{"gap":null}]'
    packed = script_json({name: [name]})
    assert json.loads(packed) == {name: [name]}
    assert not set("<>&\u2028\x00\x1b") & set(packed)


def test_bars_lines_and_hatches_of_a_palette_are_all_different() -> None:
    script = resources.files("solvers.report.page") / "templates/page.js"
    patterns = re.search(r"PATTERNS = (\[.*\])", script.read_text())
    for one in (SERIES, MARKERS, json.loads(patterns[1])):
        assert len(set(one)) == len(one) == len(SERIES)


def test_every_chart_has_the_figures_of_its_table_and_says_what_they_show() -> None:
    for chart in (one for group in charts_of(hostile_answers()).values() for one in group):
        made = chart.data()
        assert len(made["bars"]) == len(chart.table.rows) > 0
        assert chart.words.endswith(".")
        for part, column in zip(made["parts"], chart.parts, strict=True):
            values = [row[column.key] for row in chart.table.rows]
            assert part["values"] == [value / chart.scale for value in values]
            assert part["texts"] == [column.cell(row) for row in chart.table.rows]
        for line in made["lines"]:
            values = (part["values"] for part in made["parts"])
            assert line["value"] >= max(map(sum, zip(*values, strict=True)))


def test_budgets_are_drawn_up_to_their_step_times() -> None:
    (chart,) = front_charts(front_section([FrontPoint(1 << 30, 0.03, 0.02, 0.5)], 8))
    assert [part["values"] for part in chart.data()["parts"]] == [[20.0], [pytest.approx(10.0)]]
    assert front_charts(front_section([FrontPoint(1 << 30, detail="no room")], 8)) == []


def test_phases_and_waits_of_each_gpu_make_up_the_step() -> None:
    answers = hostile_answers()
    chart = charts_of(answers)["time"][0]
    for row in chart.table.rows:
        parts = [value for key, value in row.items() if key != "device"]
        assert sum(parts) == pytest.approx(answers.cost.step_time_s)


@pytest.mark.parametrize("resource", get_args(Resource))
def test_there_is_advice_for_whatever_binds(resource: Resource) -> None:
    """Of plans that drives limit, no page could be made."""
    gains: dict[Resource, float] = {"link": 1e-9, resource: 0.2}
    first, *others = advice(hostile_answers().shown.facts, Binding(resource, "waits", gains), ())
    assert first.endswith(".")
    more = f"A tenth more would gain, in samples a second: {resource} 20%."
    assert others == ([] if resource == "free hbm" else [more])


@pytest.mark.parametrize(
    ("gap", "solver", "words"),
    [(0.01, "auto", "at most 1% more than"), (0.5, "greedy-cost", "no placement can take less")],
)
def test_a_verdict_says_how_near_the_best_and_what_to_do(
    gap: float, solver: str, words: str
) -> None:
    answers = hostile_answers()
    step_s = answers.cost.step_time_s
    facts = {**answers.shown.facts, "solver": solver, "gap": gap, "bound_s": step_s / (1 + gap)}
    said = advice(facts, Binding("link", "waits"), ({"total_bytes": 2, "capacity_bytes": 1},))
    assert words in summary(facts)
    assert "no bound" in summary({**facts, "gap": None})
    assert said[0].startswith("1 device")
    assert ("--solver auto" in " ".join(said)) == (gap > 0.05)
    room = f"can save at most {form.share(gap / (1 + gap))} of the step"
    assert (room in " ".join(said)) == (gap > 0.05)


def test_a_plan_of_one_gpu_has_a_chart_of_its_memory() -> None:
    table = Table("t", 1000, 8, features=(Feature("t"),))
    plan = Plan(
        (table,),
        Topology.parse("1xh100"),
        (Shard("t", (0, 1000, 1), (0, 8), ("gpu:0",), "hbm", "device"),),
    )
    memory = plan_report(plan).sections[0]
    (chart,) = memory_charts(memory, plan.topology)
    made = chart.data()
    assert made["bars"] == ["gpu:0"]
    assert {part["name"] for part in made["parts"] if any(part["values"])} == {"weights", "state"}
    assert chart.words == f"{form.share(memory.rows[0]['used_share'])} of gpu:0 is in use."


def test_all_parts_of_a_page_name_the_same_slowest_gpu() -> None:
    """The verdict, the chart of the time and the table of the work named three."""
    profile, machine = named_workload("random-12@4"), Topology.parse("4xa100-40", hbm="512MiB")
    problem = Problem(profile, machine, 512)
    for solver in ("greedy-size", "greedy-lookup", "greedy-cost"):
        plan = solve(problem, solver).plan
        assert plan is not None
        answers = answers_of(problem, plan)
        slowest = machine.gpus[answers.cost.slowest_gpu].id
        assert answers.cost.bottleneck.startswith(f"{slowest} ")
        assert f"{slowest} is busy longest" in time_chart(answers.cost, None).words
        work = next(one for one in answers.shown.sections if one.name == "time")
        assert max(work.rows, key=lambda row: row["of_slowest"])["device"] == slowest
        assert max(row["of_slowest"] for row in work.rows) == 1


def thousands() -> tuple[Problem, Plan]:
    """2,002 tables on 128 GPUs, each whole on one or with a part of its rows on every eighth."""
    profile, machine = named_workload("nvidia-colossal"), Topology.parse("16x8xh100")
    shards = []
    for number, one in enumerate(profile):
        table, ids = one.table, [f"gpu:{number % 8 + 8 * n}" for n in range(16)]
        parts = 16 if number % 3 == 0 and table.rows > 16 else 1
        shards += [
            Shard(table.name, (n, table.rows, parts), (0, table.dim), (ids[n],), "hbm", "device")
            for n in range(parts)
        ]
    tables = tuple(one.table for one in profile)
    return Problem(profile, machine, 64), Plan(tables, machine, tuple(shards), batch_size=64)


@pytest.mark.slow
def test_a_map_of_thousands_of_tables_is_compact_and_whole() -> None:
    problem, plan = thousands()
    tables = next(s for s in plan_report(plan).sections if s.name == "tables")
    made = table_map(plan, problem.profile, tables)
    assert len(made["rows"]) == len(tables.rows) == 2002
    assert len(script_json(made)) < 1_500_000
    for row, strip in zip(tables.rows, made["strips"], strict=True):
        assert sum((last - first + 1) * hbm for first, last, hbm, _ in strip) == row["hbm_bytes"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_workbench(tmp_path_factory.mktemp("page"))


@pytest.mark.slow
def test_names_of_a_plan_cannot_leave_their_place(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write_page(hostile_answers(), tmp_path / "page.html", command=HOSTILE[0])
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)
    found = Elements(text)
    assert found.names.count("script") == 3
    assert found.handlers == []
    assert "img" not in found.names
    assert all(one.startswith(("#", "data:")) for one in found.addresses)
    names = {row[0][0] for row in json.loads(found.scripts[0])["map"]["rows"]}
    assert names == {row["table"] for row in map_rows(found)}
    assert "default-src 'none'" in html.unescape(text)


def map_rows(found: Elements) -> list[dict[str, Any]]:
    """Rows of the page's own map, by column."""
    made = json.loads(found.scripts[0])["map"]
    keys = [column["key"] for column in made["columns"]]
    return [dict(zip(keys, (cell[0] for cell in row), strict=True)) for row in made["rows"]]


def test_a_plan_without_its_profile_says_what_is_missing(tmp_path: Path) -> None:
    hostile_answers().plan.save(tmp_path / "plan.json")
    line = fail("report", tmp_path / "plan.json", "-o", tmp_path / "page.html")
    assert "a page needs the profile" in line
    assert "--profile" in line
    assert not (tmp_path / "page.html").exists()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(bench: Workbench) -> Path:
    """A page with all parts: a second plan, budgets, changes of the machine, alternatives."""
    file, other = bench.folder / "page.html", bench.folder / "other.json"
    machine = ("--topology", bench.folder / "machine.yaml", "--hbm", "60KiB", "--batch-size", "8")
    solver = ("--solver", "greedy-cost", "--steps", "2")
    succeed("plan", "--profile", bench.profile, *machine, *solver, "-o", other)
    asked = ("--hbm-steps", "60KiB,1MiB", "--whatif")
    more = ("--solver", "greedy-size", "--explain", "1", "--steps", "2")
    succeed("report", bench.plan, other, *asked, *more, "-o", file)
    return file


PARTS = ("time", "memory-gpus", "front")


@pytest.mark.slow
@needs_chromium
def test_figures_in_the_page_are_those_of_show(bench: Workbench, page: Path, tab: Browser) -> None:
    known = json_of("show", bench.plan)
    tab.open(page)
    facts = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-fact]')]"
        ".map(one => [one.dataset.fact, one.dataset.value]))"
    )
    assert {name: float(value) for name, value in facts.items() if value} == {
        name: known[name] for name, value in facts.items() if value
    }
    assert {"step_time_s", "gap", "hbm_used_bytes"} <= facts.keys()
    shown = figures(tab, "#map")
    tab.evaluate("document.getElementById('next').click()")
    shown |= figures(tab, "#map")
    assert len(shown) == len(known["tables"])
    assert shown == expected(known["tables"], shown)
    for section in ("memory", "time"):
        shown = figures(tab, f"[data-section={section}]")
        assert shown == expected(known[section], shown)


def figures(tab: Browser, table: str) -> dict[str, dict[str, float]]:
    """Numbers of a table in the page, by the names of its rows and columns."""
    rows = tab.evaluate(
        f"[...document.querySelectorAll('{table} tbody tr')].map(row => "
        "[row.querySelector('th').textContent, "
        "Object.fromEntries([...row.querySelectorAll('[data-value]')]"
        ".map(one => [one.dataset.key, one.dataset.value]))])"
    )
    assert rows
    return {name: {k: float(v) for k, v in values.items() if v} for name, values in rows}


def expected(
    rows: list[dict[str, Any]], shown: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """The same numbers as `show` has them, of every row."""
    by_name = {next(iter(row.values())): row for row in rows}
    return {name: {key: row[key] for key in shown[name]} for name, row in by_name.items()}


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(
    ("width", "dark"), [(400, False), (400, True), (1280, True), (1920, False)]
)
def test_a_page_is_whole_at_every_width_by_day_and_night(
    page: Path, tab: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    tab.complaints.clear()
    tab.open(page, width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    drawn = tab.evaluate(
        "[...document.querySelectorAll('[data-chart]')].filter(one => one.querySelector("
        "'svg.main-svg') && one.getBoundingClientRect().width > 200).map(one => one.dataset.chart)"
    )
    assert set(PARTS) <= set(drawn)
    ink, paper = tab.evaluate(
        "(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] > light[1]) == dark
    assert len(tab.screenshot(tmp_path / "page.png")) > 10_000
    assert tab.complaints == []
    assert tab.requests == []


@pytest.mark.slow
@needs_chromium
def test_placement_is_seen_on_a_narrow_screen(page: Path, tab: Browser) -> None:
    tab.open(page, 400)
    left, right, words = tab.evaluate(
        "(cell => [cell.getBoundingClientRect().left, cell.getBoundingClientRect().right, "
        "cell.textContent])(document.querySelector('#map td[data-key=placement]'))"
    )
    assert 0 < left < right <= 400
    assert words


@pytest.mark.slow
@needs_chromium
def test_a_page_can_be_heard_and_used_by_keyboard(page: Path, tab: Browser) -> None:
    tab.open(page)
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    levels = tab.evaluate(
        "[...document.querySelectorAll('h1, main h2, main h3')].map(one => +one.tagName[1])"
    )
    assert all(after <= before + 1 for before, after in pairwise(levels))
    unnamed = "[...document.querySelectorAll('[role=img], [role=region]')].filter(" \
        "one => !one.getAttribute('aria-label')).length"  # fmt: skip
    assert tab.evaluate(unnamed) == 0
    assert tab.evaluate("[...document.querySelectorAll('table')].every(one => one.caption)")
    assert tab.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id).every("
                        "(id, at, ids) => ids.indexOf(id) === at)")  # fmt: skip
    tab.evaluate("document.querySelector('#map th[data-column=time_s] button').click()")
    tab.evaluate("document.querySelector('#map tbody th button').focus()")
    name = tab.evaluate("document.activeElement.textContent")
    tab.key("Enter")
    assert tab.evaluate("document.getElementById('drawer').open")
    assert tab.evaluate("document.getElementById('drawer-title').textContent") == f"Table {name}"
    words = tab.evaluate("document.getElementById('drawer-body').textContent")
    assert "byte of HBM" in words  # It is the slowest table, which is explained.
    assert "Shards" in words
    assert tab.evaluate("!!document.querySelector('#drawer .main-svg')")
    tab.key("Escape")
    assert not tab.evaluate("document.getElementById('drawer').open")
    tab.evaluate("document.querySelector('#map th[data-column=size_bytes] button').focus()")
    tab.key("Enter")
    head = "document.querySelector('#map th[data-column=size_bytes]')"
    assert tab.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
    sizes = [values["size_bytes"] for values in figures(tab, "#map").values()]
    assert sizes == sorted(sizes, reverse=True)
    assert tab.evaluate("document.activeElement.closest('th') === " + head)


@pytest.mark.slow
@needs_chromium
def test_hostile_names_are_texts_in_a_browser_too(tab: Browser, tmp_path: Path) -> None:
    tab.complaints.clear()
    write_page(hostile_answers(), tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    assert tab.evaluate("window.hacked === undefined")
    assert len(figures(tab, "#map")) == len(HOSTILE)
    names = tab.evaluate(
        "[...document.querySelectorAll('#map tbody th')].map(one => one.textContent)"
    )
    assert HOSTILE[0] in names
    tab.evaluate("document.querySelector('#map tbody th button').click()")
    assert tab.evaluate("window.hacked === undefined")
    assert tab.complaints == []


@pytest.mark.slow
@needs_chromium
def test_thousands_of_tables_are_searched_and_leafed_through(tab: Browser, tmp_path: Path) -> None:
    tab.complaints.clear()
    problem, plan = thousands()
    write_page(answers_of(problem, plan), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size <= 5_000_000
    tab.open(tmp_path / "page.html")
    painted, ready = tab.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0].startTime, performance.now()]"
    )
    assert painted < ready  # The words come before the charts: how long before, the docs say.
    assert tab.evaluate("document.getElementById('status').textContent") == "1–25 of 2,002 tables"
    tab.evaluate("document.getElementById('next').click()")
    assert tab.evaluate("document.getElementById('status').textContent").startswith("26–50")
    tab.evaluate(
        "(box => { box.value = 't1234'; box.dispatchEvent(new Event('input')) })"
        "(document.getElementById('search'))"
    )
    assert list(figures(tab, "#map")) == ["t1234"]
    assert tab.evaluate("document.querySelector('#map canvas').width") >= 2 * 128
    assert tab.complaints == []


@pytest.mark.slow
def test_a_question_to_a_file_is_answered_in_values(bench: Workbench) -> None:
    answers = ask(bench.plan, explained=1)
    assert len(answers.explanations) == 1
    assert answers.shown.facts["bound_s"] == answers.plan.solver.bound_s
    assert answers.parts == {}


def test_budgets_are_before_what_is_reserved_and_dense_layers_take(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("reserve: {gpu: 1KiB}\n")
    limits = Limits(max_steps=1)

    def problem(hbm_bytes: int) -> Problem:
        profile = Profile((zipf_table("t", 1000),))
        kept = Constraints(reserve=(("gpu", 1 << 10),))
        return Problem(
            profile, machine(1, hbm_bytes=hbm_bytes), 4, kept, dense=replace(DLRM, flops_per_s=1e12)
        )

    profile, plan = tmp_path / "profile", tmp_path / "plan.json"
    problem(1 << 20).profile.save(profile)
    made = solve(problem(1 << 20), "greedy-cost").plan
    made.save(plan)
    budgets = [10 << 10, 20 << 10, 30 << 10]
    shown = ask(
        plan,
        hbm_steps=",".join(f"{one}B" for one in budgets),
        explained=0,
        profile_path=profile,
        constraints_path=rules,
        limits=limits,
    )
    expected = front(
        problem, budgets, lambda one: solver_called("greedy-cost").solve(one, Roofline(), limits)
    )
    (section,) = shown.parts["budgets"].sections
    assert section.rows == front_section(expected, 4).rows
