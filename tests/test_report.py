"""Reports: one source of rows for people and machines, right sums, and what fits a screen."""

import csv
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from problem_cases import counted_table, plan_for, whole
from rich.console import Console

from cost_models import Roofline
from placer import AccessCdf, Feature, Plan, Problem, Profile, Shard, Table, TableProfile, Topology
from placer.errors import BackendError, PlacerError
from placer.executor.local.hit_rates import HitRates
from placer.executor.memory.row_cache import RowCacheStats
from placer.plan.memory import device_memory
from placer.profile.table_profile import RowCounts
from placer.report import profile_report, topology_report, workloads_report
from placer.report import section as form
from placer.report.section import Column, Report, Section
from placer.report.training import hit_rate_report
from placer.workloads import named_workload, workload_names
from solvers import Limits, Termination, solve
from solvers.analysis.compare import CompareRow, compare, compare_row
from solvers.report import compare_report, plan_report, plot_compare
from solvers.report.plan import bound_holds, placement_kind, short_names
from solvers.result import Limit

TOPOLOGY = Topology.parse("4xa100-40", hbm="1GiB")


def shown(report: Report, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(report.renderable())
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def one_table(shards: list[Shard]) -> Plan:
    return Plan((Table("t", 100, 8, features=(Feature("t"),)),), TOPOLOGY, tuple(shards))


Slice = tuple[int, int, int]


def hbm(device: str, rows: Slice = (0, 100, 1), cols: tuple[int, int] = (0, 8)) -> Shard:
    return Shard("t", rows, cols, (device,), "hbm", "device")


def dram(device: str, rows: Slice = (0, 100, 1), cols: tuple[int, int] = (0, 8)) -> Shard:
    return Shard("t", rows, cols, (device,), "dram", "staged")


def everywhere(start: int, stop: int) -> Shard:
    return replace(hbm("gpu:0", (start, stop, 1)), devices=tuple(f"gpu:{n}" for n in range(4)))


@pytest.mark.parametrize(
    ("shards", "kind"),
    [
        ([hbm("gpu:0")], "HBM"),
        ([dram("gpu:0")], "DRAM"),
        ([hbm("gpu:0", (0, 10, 1)), dram("gpu:0", (10, 100, 1))], "hot/cold"),
        ([hbm(f"gpu:{n}", (n, 100, 4)) for n in range(4)], "HBM, row-wise"),
        ([hbm("gpu:0", cols=(0, 4)), hbm("gpu:1", cols=(4, 8))], "HBM, column-wise"),
        ([everywhere(0, 100)], "HBM, replicated"),
        ([everywhere(0, 5), hbm("gpu:0", (5, 100, 1))], "HBM, hot rows replicated"),
        (
            [everywhere(0, 4)]
            + [hbm(f"gpu:{n + c}", (4 + n, 100, 2), (c, c + 4)) for n in (0, 1) for c in (0, 4)],
            "HBM, hot rows replicated, row-wise, column-wise",
        ),
        ([replace(dram("gpu:0"), lookup="cached", cache_rows=5)], "cached"),
        (
            [hbm(f"gpu:{n}", (n, 20, 2)) for n in range(2)]
            + [dram(f"gpu:{n}", (20 + n, 100, 2)) for n in range(2)],
            "hot/cold, row-wise",
        ),
        ([hbm("gpu:0", (0, 100, 2)), dram("gpu:1", (1, 100, 2))], "hot/cold, row-wise"),
        ([], "not placed"),
    ],
)
def test_placements_in_the_words_of_the_field(shards: list[Shard], kind: str) -> None:
    assert placement_kind(one_table(shards), "t") == kind


@given(st.sets(st.integers(0, 40), min_size=1))
def test_short_names_say_the_same(numbers: set[int]) -> None:
    text = short_names(f"gpu:{number}" for number in numbers)
    assert text.startswith("gpu:")
    expanded: list[int] = []
    for part in text.removeprefix("gpu:").split(","):
        first, _, last = part.partition("-")
        expanded += range(int(first), int(last or first) + 1)
    assert expanded == sorted(numbers)


def test_short_names_of_several_kinds() -> None:
    assert short_names(["host:0", "gpu:2", "gpu:1", "box"]) == "box, gpu:1-2, host:0"


@pytest.fixture(scope="module")
def solved() -> tuple[Problem, Plan]:
    problem = Problem(named_workload("random-12@4"), Topology.parse("4xa100-40", hbm="2GiB"), 512)
    plan = solve(problem, "greedy-cost").plan
    assert plan is not None
    return problem, plan


@pytest.mark.parametrize("columns", [[(0, 8)], [(0, 4), (4, 8)]])
def test_caches_are_in_hbm_too(columns: list[tuple[int, int]]) -> None:
    cached = replace(dram("gpu:0"), lookup="cached", cache_rows=5)
    plan = one_table([replace(cached, cols=each) for each in columns])
    (row,) = plan_report(plan).to_json()["tables"]
    assert row["hot_row_share"] == 0.05
    assert row["hbm_bytes"] == row["dram_bytes"] / 20


@pytest.mark.parametrize(
    ("limit", "words"),
    [("time", "feasible (time limit)"), ("stop", "feasible (stopped)"), (None, "feasible")],
)
def test_a_new_plan_says_how_its_search_ended_and_what_binds(
    solved: tuple[Problem, Plan], limit: Limit | None, words: str
) -> None:
    problem, plan = solved
    end = Termination("feasible", limit, "waits for gpu:0 hbm; of which there is no more")
    report = plan_report(plan, Roofline().evaluate(problem, plan), end=end)
    found = report.to_json()
    assert (found["limit"], found["binding"]) == (limit, end.detail)
    assert end.detail in report.headline
    assert any(f": {words}, within" in line for line in report.headline)


def test_a_bound_is_shown_with_the_recorded_time_or_for_the_same_problem(
    solved: tuple[Problem, Plan],
) -> None:
    problem, plan = solved
    evaluate = partial(Roofline().evaluate, problem)
    edited = replace(plan, solver=replace(plan.solver, step_time_s=2 * plan.solver.step_time_s))
    for other, sha256, is_shown in (
        (plan, "another", True),
        (plan, problem.sha256, True),
        (edited, problem.sha256, True),
        (edited, "another", False),
    ):
        facts = plan_report(other, evaluate(other), problem_sha256=sha256).facts
        assert (facts["bound_s"] is not None) is (facts["gap"] is not None) is is_shown
    assert bound_holds(plan, "another", evaluate(plan))
    assert bound_holds(edited, problem.sha256, evaluate(plan))
    assert not bound_holds(edited, "another", evaluate(plan))
    assert not bound_holds(edited, problem.sha256, replace(evaluate(plan), cost_model="mine"))


def test_tables_furthest_below_the_plan_are_listed_first() -> None:
    found = {"as planned": 0.5, "above": 0.9, "below": 0.6, "unknown": 0.2}
    rates = HitRates(100, 40, RowCacheStats(lookups=30, hit_lookups=10), found)
    planned = {None: 0.7, "as planned": 0.5, "above": 0.1, "below": 0.9}
    report = hit_rate_report(rates, planned).to_json()
    assert [row["table"] for row in report["tables"]] == ["below", "as planned", "unknown", "above"]
    assert [row["lookups"] for row in report["served"]] == [40, 10, 20, 30]
    assert [row["share"] for row in report["served"]] == [0.4, 0.1, 0.2, 0.3]
    assert report["hbm_hit_rate"] == 0.5


def test_plan_report_adds_up(solved: tuple[Problem, Plan]) -> None:
    problem, plan = solved
    evaluate = partial(Roofline().evaluate, problem)
    report = plan_report(plan, evaluate(plan)).to_json()
    memory, cost = device_memory(plan), evaluate(plan)
    gpus = plan.topology.gpus_by_id
    for row in report["memory"]:
        parts = ("weight", "state", "cache", "row_map", "buffer")
        assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
        assert row["total_bytes"] == memory[row["device"]].total_bytes
        assert row["capacity_bytes"] == memory[row["device"]].capacity_bytes
    stored = sum(use.weight_bytes + use.state_bytes for use in memory.values())
    assert sum(row["hbm_bytes"] + row["dram_bytes"] for row in report["tables"]) == stored
    chain_s = sum(row["slowest_s"] for row in report["phases"])
    assert chain_s == pytest.approx(cost.step_time_s)
    assert report["step_time_s"] == cost.step_time_s
    assert report["hbm_lookup_share"] == cost.hbm_lookup_share
    of_tables_s = sum(row["time_s"] for row in report["tables"])
    of_gpus_s = sum(row["total_s"] for row in report["time"] if row["device"] in gpus)
    assert of_tables_s == pytest.approx(of_gpus_s)
    assert [row["table"] for row in report["tables"]] == [table.name for table in plan.tables]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_plan_report_is_readable(solved: tuple[Problem, Plan], width: int) -> None:
    problem, plan = solved
    text = shown(plan_report(plan, Roofline().evaluate(problem, plan)), width)
    assert "…" not in text
    assert "Memory by device" in text
    assert "waits for" in text
    for table in plan.tables:
        assert f"{table.name} " in text
    assert ("has more columns" in text) == (width == 80)


def test_plan_report_without_a_cost_model(solved: tuple[Problem, Plan]) -> None:
    _, plan = solved
    report = plan_report(plan)
    assert [section.name for section in report.sections] == ["memory", "tables"]
    assert report.facts["step_time_s"] == plan.solver.step_time_s
    assert "GPU time" not in shown(report)


def test_many_tables_are_summarised() -> None:
    problem = Problem(named_workload("meta-t856"), Topology.parse("16x8xh100"), 256)
    shards = [
        whole(problem, "device" if number % 3 else "staged", f"gpu:{number % 128}", table=number)
        for number in range(len(problem.profile))
    ]
    plan = plan_for(problem, *shards)
    report = plan_report(plan, top=7)
    assert len(report.to_json()["tables"]) == 856
    placements = {row["placement"]: row["tables"] for row in report.to_json()["placements"]}
    assert list(placements.items()) == [("HBM", 570), ("DRAM", 286)]
    text = shown(report)
    assert "7 of 856, largest first" in text
    assert "18 of 144, fullest first" in text
    assert len(text.splitlines()) < 60
    listed = report.to_json()["tables"]
    assert listed[0]["size_bytes"] == max(row["size_bytes"] for row in listed)
    all_bytes = sum(row["size_bytes"] for row in report.to_json()["placements"])
    assert all_bytes == sum(row["size_bytes"] for row in listed)


def test_an_emulated_gpu_is_named_as_such(solved: tuple[Problem, Plan]) -> None:
    _, plan = solved
    emulated = replace(plan, topology=replace(plan.topology, emulated=True))
    assert "emulated" in shown(plan_report(emulated))
    assert "emulated" not in shown(plan_report(plan))
    assert "emulated" in shown(topology_report(emulated.topology))


@pytest.fixture(scope="module")
def comparison() -> list[CompareRow]:
    rows = []
    for budget in ("1MiB", "1GiB", "4GiB"):
        machine = Topology.parse("2xa100-40", hbm=budget)
        problem = Problem(named_workload("random-10@1"), machine, 256)
        for solver in ("greedy-size", "greedy-cost"):
            result = solve(problem, solver, time_limit_s=5)
            rows.append(compare_row(problem, solver, Roofline(), result))
    return rows


def test_compare_rows_are_the_results(comparison: list[CompareRow]) -> None:
    tight, roomy = comparison[1], comparison[5]
    assert tight.hbm_budget_bytes == 2**20
    assert tight.step_time_s is None
    assert tight.status in ("infeasible", "no_plan")
    assert tight.detail
    assert roomy.hbm_budget_bytes == 2**32
    assert roomy.gap == pytest.approx(max(0, roomy.step_time_s / roomy.bound_s - 1))
    assert 0 < roomy.hbm_used_bytes <= 2 * 2**32
    assert 0 <= roomy.hbm_left_bytes < 2**32 - roomy.hbm_used_bytes / 2  # Of the fullest GPU.


def test_every_row_has_the_best_bound_of_all_solvers() -> None:
    machine = Topology.parse("2xa100-40", hbm="1GiB")
    problem = Problem(named_workload("random-10@1"), machine, 256)
    limits = Limits(time_limit_s=3600, max_steps=1)
    rows = compare(problem, ["greedy-size", "ilp"], limits=limits)
    weak = solve(problem, "greedy-size", time_limit_s=3600, max_steps=1)
    assert rows[0].bound_s == rows[1].bound_s > weak.bound_s
    assert [row.status for row in rows] == ["feasible", "feasible (steps limit)"]


def test_compare_report_in_three_formats(comparison: list[CompareRow]) -> None:
    report = compare_report(comparison)
    rows = json.loads(json.dumps(report.to_json()))["comparison"]
    read = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(rows) == len(read) == len(comparison)
    for one, line in zip(rows, read, strict=True):
        assert list(line) == list(one)
        assert line["solver"] == one["solver"]
        time_s = one["step_time_s"]
        assert line["step_time_s"] == ("" if time_s is None else str(time_s))
    for budget in (2**30, 2**32):
        ratios = [row["ratio_to_best"] for row in rows if row["hbm_budget_bytes"] == budget]
        assert min(ratios) == 1
    text = shown(report, 160)
    assert "lack" in text or "short" in text
    assert shown(report, 80)


@pytest.mark.parametrize(
    ("suffix", "magic"),
    mostly_slow([("png", b"\x89PNG\r\n"), ("pdf", b"%PDF"), ("svg", b"<?xml")], ("svg", b"<?xml")),
)
def test_the_picture(
    tmp_path: Path, comparison: list[CompareRow], suffix: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"compare.{suffix}"
    plot_compare(comparison, path)
    content = path.read_bytes()
    assert content.startswith(magic)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == "svg":
        text = content.decode()
        for word in ("greedy-size", "greedy-cost", "1 GiB of HBM per GPU", "proven bound"):
            # Matplotlib draws text as paths and keeps the words as comments.
            assert f"<!-- {word}" in text


def test_pictures_that_cannot_be_drawn(
    tmp_path: Path, comparison: list[CompareRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlacerError, match=r"end its name in one of \.png, \.pdf, \.svg"):
        plot_compare(comparison, tmp_path / "compare.bmp")
    with pytest.raises(PlacerError, match="no solver found a plan"):
        plot_compare(comparison[:1], tmp_path / "compare.png")
    # An entry of None is how Python marks a module that must not be found.
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"embedding-placer\[report\]"):
        plot_compare(comparison, tmp_path / "compare.png")
    assert not list(tmp_path.iterdir())


def counted_profile() -> Profile:
    counts = np.zeros(1000, dtype=np.int64)
    counts[:100] = np.arange(100, 0, -1) * 10
    table = Table("t", 1000, 16, features=(Feature("a", 2.0, 0.5), Feature("b", 4.0, 1.0)))
    tables = (
        TableProfile(table, AccessCdf.from_counts(counts), RowCounts.from_dense(counts)),
        TableProfile(Table("unread", 10, 16), AccessCdf.from_counts(np.zeros(10, np.int64))),
    )
    return Profile(tables, samples=10_000, sampling=0.5, source="a log")


def test_profile_report() -> None:
    report = profile_report(counted_profile(), batch_size=64)
    counted, unread = report.to_json()["tables"]
    assert counted["lookups_per_sample"] == 5
    assert counted["coverage"] == 0.75
    assert counted["pooling_factor"] == pytest.approx(5 / 1.5)
    assert counted["rows_read"] == 100
    assert counted["top_10_percent_share"] == 1
    assert counted["top_1_percent_share"] == pytest.approx(sum(range(91, 101)) / 5050)
    assert 50 < counted["unique_rows"] <= 100
    assert unread["lookups_per_sample"] == unread["unique_rows"] == 0
    assert unread["top_1_percent_share"] is None
    text = shown(report)
    assert "10,000 samples, 50% of the log" in text
    assert "a log" in text


def test_profile_report_of_many_tables() -> None:
    report = profile_report(named_workload("hugectr-t200"))
    assert len(report.to_json()["tables"]) == 200
    assert "60 of 200, largest first" in shown(report, 80)
    assert json.loads(json.dumps(report.to_json()))["size_bytes"] > 0


def test_workloads_report_lists_all() -> None:
    report = workloads_report()
    assert [row["name"] for row in report.to_json()["workloads"]] == list(workload_names())
    text = shown(report)
    assert all(name in text for name in workload_names())


def test_the_top_of_a_tiny_table_is_a_row_at_least() -> None:
    """Of 7 rows, the top 1% had 2.8% of the lookups where one row has 40%."""
    tiny = counted_table("t", [40, 20, 15, 10, 8, 6, 1])
    (row,) = profile_report(Profile((tiny,))).to_json()["tables"]
    assert row["top_1_percent_share"] == row["top_10_percent_share"] == pytest.approx(0.4)


def test_topology_report() -> None:
    report = topology_report(Topology.parse("2x2xh100", hbm="8GiB"))
    devices = report.to_json()["devices"]
    names = [*(f"gpu:{n}" for n in range(4)), "host:0", "host:1"]
    assert [row["device"] for row in devices] == names
    assert devices[0]["memory_bytes"] == 8 * 2**30
    assert devices[4]["host_link_bytes_per_s"] is None
    text = shown(report)
    assert "8 GiB" in text
    assert "datasheet" in text
    assert "18 of 144" in shown(topology_report(Topology.parse("16x8xh100")))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (form.share(0.5), "50%"),
        (form.share(0.99999), ">99.9%"),
        (form.share(1), "100%"),
        (form.share(12.345), "1,234%"),
        (form.share(0.0004), "0.04%"),
        (form.count(999_999), "999,999"),
        (form.count(40_000_000), "40.0 M"),
        (form.count(5e9), "5.0 G"),
        (form.count(1234.5), "1,234"),
        (form.count(2.345), "2.35"),
        (form.rate(3.35e12), "3.35 TB/s"),
        (form.rate(55e9), "55 GB/s"),
        (form.times(1.234), "1.23x"),
        (form.times(1234.5), "1234x"),
        (form.fraction(0.987), "0.99"),
        (form.number(1.0512), "1.05"),
    ],
)
def test_values_for_people(value: str, text: str) -> None:
    assert value == text


def test_a_section_without_rows() -> None:
    report = Report("nothing", (Section("none", "None", (Column("a", "a"),), ()),))
    assert "nothing" in shown(report)
    assert report.to_csv() == ""


@pytest.mark.parametrize("width", [24, 40, 60, 80, 160])
def test_a_number_keeps_its_digits_and_unit_at_any_width(width: int) -> None:
    sizes = [Column(f"size{n}", f"size {n}", form.size) for n in range(6)]
    columns = (Column("budget", "HBM", form.size), Column("name", "name"), *sizes)
    rows = [
        {"budget": budget, "name": name, **{f"size{n}": n * 1.5e9 + 7e8 for n in range(6)}}
        for budget in (2**30, 2**34)
        for name in ("greedy-cost", "ilp")
    ]
    text = shown(Report("r", (Section("s", "S", columns, tuple(rows)),)), width)
    assert "…" not in text
    for column in (*sizes, columns[0]):
        assert text.count(column.cell(rows[0])) >= 2
    assert text.count("16 GiB") == 2 * text.count("HBM")  # Each part has what its rows are of.


def test_a_title_is_not_wrapped_into_the_width_of_a_narrow_table() -> None:
    title = "What a byte of HBM saves, in times of what the least useful byte saves"
    narrow = Section("s", title, (Column("device", "device"),), ({"device": "gpu:0"},))
    assert title in shown(Report("r", (narrow,)), 80).splitlines()


def test_texts_begin_and_numbers_end_below_each_other() -> None:
    columns = Column("name", "name"), Column("row_bytes", "size")
    rows = {"name": "a", "row_bytes": 1}, {"name": "long", "row_bytes": 2**30}
    text = shown(Report("r", (Section("s", "S", columns, rows),)), 80)
    first, last = (line.rstrip() for line in text.splitlines() if "B" in line)
    assert first.index("a") == last.index("long")
    assert len(first) == len(last)


def test_no_line_of_a_headline_ends_before_a_unit() -> None:
    words = "one more would save 12.5 GiB of 30 GB/s in 7 s on 3 GPUs"
    for width in range(12, 60):
        lines = shown(Report("r", (), headline=(words,)), width).splitlines()[1:]
        assert " ".join(line.strip() for line in lines) == words
        assert not any(line.rstrip().endswith(("12.5", "30", "7")) for line in lines)


def test_csv_has_the_rows_of_all_sections() -> None:
    one = Section("one", "One", (), ({"name": "a", "bytes": 1}, {"name": "b", "bytes": 2}))
    two = Section("two", "Two", (), ({"name": "c", "time_s": 0.5},))
    report = Report("both", (one, two))
    lines = ["section,name,bytes,time_s", "one,a,1,", "one,b,2,", "two,c,,0.5"]
    assert report.to_csv().splitlines() == lines
    assert Report("two", (two,)).to_csv().splitlines() == ["name,time_s", "c,0.5"]


def test_names_of_files_change_neither_a_terminal_nor_a_spreadsheet() -> None:
    name = "a\x1b[31m\n=cmd()\t[red]b[/]\x07\u202e"
    row = {name: name, "formula": "\t=cmd()", "below": "x\r\n@cmd()", "=key": 1}
    columns = tuple(Column(key, key) for key in row)
    report = Report(name, (Section("s", name, columns, (row,)),), headline=(name,))
    written = r"a\x1b[31m\n=cmd()\t[red]b[/]\x07\u202e"
    assert columns[0].cell(row) == written
    text = shown(report, 120)
    assert not set(text) & set("\x1b\t\r\x07\u202e")
    assert text.count(written) == 5  # title, headline, title of the section, heading and cell
    assert list(csv.reader(io.StringIO(report.to_csv()))) == [
        [written, "formula", "below", "'=key"],
        [written, r"\t=cmd()", r"x\r\n@cmd()", "1"],
    ]
    assert json.loads(json.dumps(report.to_json()))["s"] == [row]
