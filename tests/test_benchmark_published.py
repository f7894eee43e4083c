"""benchmarks/published: files are well-formed, and each row builds its problem and its plan."""

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from benchmark_cases import BENCHMARKS, imported_from

from cost_models import Roofline
from cost_models.roofline import RooflineConstants

imported = partial(imported_from, BENCHMARKS)
published, plans = map(imported, ("_published", "_published_plans"))
fits, figures = map(imported, ("_published_fit", "_published_figures"))


@cache
def sources() -> dict[str, Any]:
    """The sources by title; not read before a test asks, as that takes a second."""
    return {source.title: source for source in published.sources()}


def test_there_are_rows_of_many_sources_and_each_says_where_it_is_from() -> None:
    rows = [row for source in sources().values() for row in source.rows]
    assert len(sources()) >= 6
    assert len(rows) >= 80
    assert len({(row.source, row.name) for row in rows}) == len(rows)
    for source in sources().values():
        assert source.facts["url"].startswith("https://")
        assert len(source.facts["commit"]) == 40
        assert source.rows


def test_plans_cover_every_row_and_column_of_every_table() -> None:
    for row in (row for source in sources().values() for row in source.rows):
        problem = row.problem()
        assert problem.batch_size == row.batch_size
        assert row.measured_s > 0
        if row.placement["placement"] == "greedy-cost":  # Solvers' own tests are elsewhere.
            continue
        plan = plans.plan_of(problem, row.placement)
        gpus = {gpu.id for gpu in problem.topology.gpus}
        for table in plan.tables:
            shards = plan.shards_by_table[table.name]
            area = sum(shard.row_count * shard.width for shard in shards)
            assert area == table.rows * table.dim, (row.name, table.name)
            assert all(gpus.issuperset(shard.devices) for shard in shards)


def test_hottest_rows_of_all_tables_are_those_that_a_sample_reads_most() -> None:
    (row,) = (row for row in sources()["UGache"].rows if row.name == "a100-criteo-replicated")
    problem = row.problem()
    sizes = plans._hottest(problem.profile, 0.12)
    total = sum(profile.table.rows for profile in problem.profile)
    assert sum(sizes.values()) <= 0.12 * total
    assert sum(sizes.values()) > 0.11 * total
    # The last rows that are in are read as often, whatever the table.
    coldest = [
        profile.cdf.row_share[np.searchsorted(profile.cdf.ranks, sizes[profile.name]) - 1]
        for profile in problem.profile
    ]
    largest = [0, 11, 14]
    assert np.ptp([coldest[number] for number in largest]) < 0.1 * coldest[largest[0]]


def test_rows_of_the_sources_share_are_served_as_it_says() -> None:
    (row,) = (row for row in sources()["UGache"].rows if row.name == "a100-syn-ugache")
    problem = row.problem()
    plan = plans.plan_of(problem, row.placement)
    shards = plan.shards_by_table["t1"]
    cdf = problem.profile.tables[0].cdf
    in_place = [shard for shard in shards if shard.lookup == "uva"]
    assert 1 - cdf.share(in_place[0].rows[0]) == pytest.approx(row.placement["host"], rel=0.05)
    on_one = [shard for shard in shards if len(shard.devices) == 1]
    served = float(cdf.share(on_one[0].rows[1]) - cdf.share(on_one[0].rows[0]))
    assert served * 7 / 8 == pytest.approx(row.placement["remote"], rel=0.05)


def test_a_part_of_a_server_has_the_whole_of_its_host() -> None:
    part, whole = published._topology("1 of 8xh100"), published._topology("8xh100")
    assert len(part.gpus) == 1
    assert part.hosts == whole.hosts
    assert part.host_link_bytes_per_s("gpu:0") == whole.host_link_bytes_per_s("gpu:0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": 1.0, "steps_per_s": 2.0}, "one of ms"),
        ({}, "one of ms"),
        ({"ms": 1.0, "kind": "lunch"}, "none of"),
        ({"ms": 1.0, "dense": "d"}, "whole steps alone"),
    ],
)
def test_rows_that_say_too_much_or_too_little_are_refused(
    change: dict[str, object], message: str
) -> None:
    row = {"id": "a", "machine": "1xt4", "batch": 8, "kind": "embedding", "problem": "p"}
    problems, dense = {"p": {}}, {"d": {}}
    with pytest.raises(ValueError, match=message):
        published._row({"source": "S"}, problems, dense, {**row, "placement": "uva", **change})


def test_factors_and_ranks_are_those_of_the_rows() -> None:
    benchmark, source = imported("published"), sources()["UGache"]
    times = (1.0, 2.0, 3.0, 4.0)
    rows = [
        benchmark.Prediction(row, row.measured_s * time, row.measured_s, "")
        for row, time in zip(source.rows, times, strict=False)
    ]
    found = benchmark.summary(rows)
    assert found["median_factor"] == pytest.approx(2.5)
    assert benchmark.summary(rows, left_out=True)["median_factor"] == 1
    (one,) = source.rows[:1]
    assert benchmark.Prediction(one, one.measured_s / 4, 0.0, "").factor == 4
    measured = [row.measurement.measured_s for row in rows]
    predicted = [row.predicted_s for row in rows]
    concordant = np.argsort(np.argsort(measured)), np.argsort(np.argsort(predicted))
    assert found["spearman"] == pytest.approx(np.corrcoef(*concordant)[0, 1])


SMALL = ("hbm-adam", "cache-0.8-sgd", "uvm-sgd-forward", "dlrm-8-amp", "dgx1-8-large-amp")


@pytest.fixture(scope="module")
def asked() -> list[object]:
    """A few rows of each kind, asked."""
    rows = [row for source in sources().values() for row in source.rows if row.name in SMALL]
    return [fits.ask(row) for row in rows]


def test_a_fit_weighs_what_the_model_itself_says(asked: list[object]) -> None:
    """With the constants as they are, and with others, as if the model had been asked again."""
    own = fits.as_they_are()
    other = {**own, "copy_share": 0.5, "update_bytes": 200.0, "probe_bytes": 1000.0, "step_s": 1e-3}
    names = ("copy_share", "update_bytes", "probe_bytes", "step_s")
    constants = replace(RooflineConstants(), **{name: other[name] for name in names})
    for row in asked:
        found = row.measurement
        problem = found.problem()
        plan = plans.plan_of(problem, found.placement)
        for values, model in ((own, Roofline()), (other, Roofline(constants))):
            report = model.evaluate(problem, plan)
            expected = report.step_time_s
            if found.kind == "forward":
                phases = {phase.name: phase.slowest_s for phase in report.phases}
                expected = sum(phases[name] for name in fits.FORWARD)
            assert row.predicted_s(values) == pytest.approx(expected, rel=1e-3), found.name


def test_a_fit_finds_constants_that_made_the_times(asked: list[object]) -> None:
    truth = {**fits.as_they_are(), "update_share": 0.3}
    rows = [
        replace(row, measurement=replace(row.measurement, measured_s=row.predicted_s(truth)))
        for row in asked
    ]
    found = fits.fit(rows)
    assert fits.loss(found, rows) < fits.loss(fits.BEFORE, rows) / 2
    assert found["update_share"] == pytest.approx(0.3, rel=0.25)


def test_figures_are_near_or_have_a_reason() -> None:
    results = json.loads((BENCHMARKS / "results" / "published.json").read_text())
    predicted = {(row["source"], row["name"]): row["predicted_ms"] for row in results["rows"]}
    found = figures.figures(predicted)
    assert len(found) >= 20
    for one in found:
        assert one.explained, (one.facts["what"], one.error)
        assert one.facts["url"].startswith("https://")
    assert sum(abs(one.error) <= figures.NEAR for one in found) >= 20


def test_the_error_that_commands_print_is_that_of_left_out_sources() -> None:
    results = json.loads((BENCHMARKS / "results" / "published.json").read_text())
    factor = results["all"]["left_out"]["median_factor"]
    assert RooflineConstants().relative_error == pytest.approx(factor - 1, abs=0.015)
    assert factor <= 1.5
    own = fits.as_they_are()
    assert results["constants"] == pytest.approx(own)
