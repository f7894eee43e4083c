"""`placer diff`, `whatif`, `show --explain`, `simulate`; and `compare` over priced machines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Workbench, fail, invoke, json_of, misuse, succeed

import placer
from placer.growing import HitRate


def test_diff(few_tables: Workbench, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    succeed("plan", *few_tables.problem(), "--solver", "greedy-size", "-o", other)
    found = json_of("diff", few_tables.plan, other)
    assert 0 < found["changed_cells"] <= found["compared_cells"]
    assert found["moved_bytes"] == sum(row["moved_bytes"] for row in found["tables"])
    assert found["moved_bytes"] == sum(row["moved_bytes"] for row in found["moves"])
    assert found["new_step_time_s"] == placer.Plan.load(other).solver.step_time_s
    text = succeed("diff", few_tables.plan, few_tables.plan).stdout
    assert "0 B to move" in text
    assert "tables: 7 same" in text
    machine = few_tables.folder / "machine.yaml"
    assert "is a log or another file, and no plan" in fail("diff", few_tables.plan, machine)


@pytest.mark.slow
def test_whatif(workbench: Workbench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "front.png"
    budgets = "--hbm-steps", "100KiB,1MiB"
    found = json_of("whatif", *workbench.problem(), *budgets, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["effects"][0]["change"] == "HBM +10%"
    assert [row["hbm_bytes"] for row in found["front"]] == [100 * 2**10, 2**20]
    assert found["front"][0]["step_time_s"] == found["step_time_s"]


def test_whatif_without_a_plan_or_with_bad_options(few_tables: Workbench) -> None:
    nothing_fits = ("--profile", few_tables.profile, "--topology", "1xt4", "--hbm", "1KiB")
    assert "no plan (infeasible)" in fail("whatif", *nothing_fits, exit_code=3)
    assert "--hbm-steps" in invoke("whatif", *nothing_fits, "--plot", "x.png").stderr
    assert "not a size" in misuse("whatif", *nothing_fits, "--hbm-steps", "much")
    # Said before the search, and of the option that is wrong.
    too_much = misuse("whatif", *nothing_fits, "--hbm-steps", "1MiB,100GiB")
    assert "Invalid value for --hbm-steps: gpu:0 of '1xt4' would have 100 GiB" in too_much


def test_questions_about_tables_that_grow(few_tables: Workbench, tmp_path: Path) -> None:
    """They are about the tables that `plan` places: of few rows, which are not replicated."""
    asked = "--batch-size", "8", "--format", "json", "--growing", "C3=5,C4=9"
    profile = placer.Profile.load(few_tables.profile)
    rates = HitRate(10, "lfu", 0.5), HitRate(100, "lfu", 0.9)
    with_hit_rates = (replace(one, hit_rates=rates) for one in profile)
    replace(profile, tables=tuple(with_hit_rates)).save(tmp_path / "profile")
    of = "--profile", tmp_path / "profile", "--topology", few_tables.folder / "machine.yaml"

    def asked_for(*command: str) -> dict[str, Any]:
        return json.loads(succeed(*command, *of, *asked).stdout)

    plan = asked_for("plan", "--solver", "greedy-cost")
    assert [one["rows"] for one in plan["tables"] if one["table"] in ("C3", "C4")] == [6, 10]
    (row,) = asked_for("compare", "--solvers", "greedy-cost")["comparison"]
    (machine,) = asked_for("fleet")["fleet"]
    what = asked_for("whatif")
    assert {one["step_time_s"] for one in (row, machine, what)} == {plan["step_time_s"]}
    for command in ("compare", "fleet", "whatif"):
        said = misuse(command, *of, "--growing", "C3:lru")
        assert "--growing C3 lacks its rows: write C3=2000000 or C3=99%" in said


def test_show_refuses_options_that_would_have_no_effect(few_tables: Workbench) -> None:
    for flag in (("--memory",), ("--explain", "C3"), ("--top", "3")):
        assert f"{flag[0]} does not go with a profile" in misuse("show", few_tables.profile, *flag)
    both = misuse("show", few_tables.plan, "--memory", "--explain", "C3")
    assert "--explain does not go with --memory" in both
    explained = misuse("show", few_tables.plan, "--explain", "C3", "--top", "3")
    assert "--top does not go with --explain" in explained


def test_options_of_one_target_or_placement_are_refused_with_others(
    few_tables: Workbench, tmp_path: Path
) -> None:
    export = "export", few_tables.plan, "--to", "hugectr", "-o", tmp_path / "x.json"
    for flag, value in (("--module", "ebc"), ("--staged-as", "uva")):
        said = misuse(*export, flag, value)
        assert f"{flag} has no effect without --to torchrec or dynamicemb" in said
    sweep = "sweep", "--placements", "gpu,cpu", "--parameter-servers", "4"
    assert "--parameter-servers has no effect without the placement remote" in misuse(*sweep)


def test_what_is_given_twice_is_not_counted_twice(few_tables: Workbench) -> None:
    again = few_tables.profile / ".." / few_tables.profile.name
    assert "is given twice" in misuse("merge", few_tables.profile, again)
    fleet = "fleet", "--profile", few_tables.profile, "--topology", "1xt4"
    assert "names 't4' twice" in misuse(*fleet, "--price", "t4=1,t4=2")


def test_a_schema_alone_refuses_how_to_count(few_tables: Workbench, tmp_path: Path) -> None:
    asked = ("profile", few_tables.log, "--infer", tmp_path / "schema.toml")
    for flag, value in (("--window", "5"), ("--sample", "0.1"), ("--dtype", "float16")):
        assert f"{flag} has no effect without --output" in misuse(*asked, flag, value)


def test_explain(few_tables: Workbench, tmp_path: Path) -> None:
    text = succeed("show", few_tables.plan, "--explain", "C3").stdout
    assert "Why table C3 is where it is" in text
    assert "What binds it" in text
    found = json_of("show", few_tables.plan, "--explain", "C3")
    plan = placer.Plan.load(few_tables.plan)
    assert found["step_time_s"] == pytest.approx(plan.solver.step_time_s)
    assert "no table 'C99'" in fail("show", few_tables.plan, "--explain", "C99")
    assert invoke("show", few_tables.profile, "--explain", "C3").exit_code == 2
    orphan = tmp_path / "plan.json"
    plan.save(orphan)
    assert "give --profile" in fail("show", orphan, "--explain", "C3")


def test_compare_over_priced_machines(few_tables: Workbench) -> None:
    arguments = (
        "compare", "--profile", few_tables.profile, "--topology", "1xt4,2xt4,8xh100",
        "--solvers", "greedy-cost", "--batch-size", "64",
    )  # fmt: skip
    compared = json_of(*arguments, "--price", "1xt4=0.5,2xt4=1.0")["comparison"]
    rows = {row["topology"]: row for row in compared}
    assert list(rows) == ["1xt4", "2xt4", "8xh100"]
    row = rows["2xt4"]
    assert row["samples_per_s"] == pytest.approx(128 / row["step_time_s"])
    assert row["cost_per_billion_samples"] == pytest.approx(1.0 * 1e9 / row["samples_per_s"] / 3600)
    assert rows["8xh100"]["cost_per_billion_samples"] is None
    assert {row["ratio_to_best"] for row in rows.values()} == {1}
    for price in ("2xt4", "2xt4=much", "9xt4=1", "2xt4=-1"):
        wrong = invoke(*arguments, "--price", price)
        assert wrong.exit_code == 2
        assert "--price" in wrong.stderr
    assert wrong.stdout == ""


def test_machines_in_files_are_called_as_the_files(few_tables: Workbench, tmp_path: Path) -> None:
    """Both are called 2xt4 in the files; the second one is slower."""
    names = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    for name in names:
        succeed("topology", "2xt4", "--hbm", "1GiB", "-o", name)
    text = Path(names[1]).read_text()
    assert "launch_s: 5.0e-06" in text
    Path(names[1]).write_text(text.replace("launch_s: 5.0e-06", "launch_s: 9.0e-06"))
    arguments = (
        "compare", "--profile", few_tables.profile, "--topology", ",".join(names),
        "--solvers", "greedy-size", "--batch-size", "64",
    )  # fmt: skip
    rows = json_of(*arguments)["comparison"]
    assert [row["topology"] for row in rows] == names
    assert rows[0]["step_time_s"] < rows[1]["step_time_s"]
    assert [row["ratio_to_best"] for row in rows] == [1, 1]
    refused = json_of(*arguments, "--hbm", "1GiB,99GiB")
    assert {row["topology"] for row in refused["comparison"]} == set(names)


@pytest.mark.slow
def test_compare_says_what_does_not_fit(workbench: Workbench) -> None:
    asked = "--workload", "mlperf-dcnv2", "--topology", "1xt4,8xh100"
    compared = json_of("compare", *asked, "--solvers", "greedy-cost")["comparison"]
    rows = {row["topology"]: row for row in compared}
    assert rows["1xt4"]["step_time_s"] is None
    assert "all hosts lack 42" in rows["1xt4"]["detail"]
    assert rows["1xt4"]["binding"] == ""
    assert rows["8xh100"]["binding"].startswith(rows["8xh100"]["detail"])
    assert rows["8xh100"]["step_time_s"] > 0


def test_the_picture_of_several_machines_names_them(few_tables: Workbench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "machines.svg"
    succeed(
        "compare", "--profile", few_tables.profile, "--topology", "1xt4,2xt4", "--hbm", "1GiB",
        "--solvers", "greedy-cost", "--plot", picture,
    )  # fmt: skip
    text = picture.read_text()
    for name in ("1xt4", "2xt4"):
        assert f"<!-- {name} · 1 GiB of HBM per GPU · roofline" in text


@pytest.mark.slow
def test_a_plan_with_servers_without_gpus(tmp_path: Path) -> None:
    """Pinned there, and moved when one of them goes."""
    rules, plan, page = (tmp_path / name for name in ("rules.yaml", "plan.json", "page.html"))
    rules.write_text("tables:\n  t5: {devices: [host:2]}\nreserve: {host:3: 229GiB}\n")
    known = ("--workload", "random-6@3", "--batch-size", "4096", "--hbm", "1GiB", "--dram", "1GiB")
    asked = (*known, "--constraints", rules, "--solver", "greedy-cost", "-o", plan)
    succeed("plan", *asked, "--topology", "2x1xh100+2xcpu")
    loaded = placer.Plan.load(plan)
    (shard,) = loaded.shards_by_table["t5"]
    assert (shard.devices, shard.memory, shard.lookup) == (("host:2",), "dram", "host")
    assert loaded.topology.servers[1].memory_bytes < 2**31
    succeed("verify", plan, "--constraints", rules)
    shown = json_of("show", plan)
    times = {row["device"]: row for row in shown["time"]}
    assert times["host:2"]["communication_s"] > 0
    assert times["host:2"]["dram_s"] > 0
    memory = {row["device"]: row for row in shown["memory"]}
    assert memory["host:2"]["weight_bytes"] == loaded.tables_by_name["t5"].rows * 128 * 4
    why = succeed("show", plan, "--explain", "t5", "--constraints", rules).stdout
    assert "is pinned to host:2" in why
    succeed("report", plan, "-o", page)
    assert "host:2" in page.read_text()
    other = tmp_path / "other.json"
    fewer = (*known, "--topology", "2x1xh100+1xcpu", "--solver", "greedy-cost", "-o", other)
    succeed("replan", plan, *fewer[:2], *fewer[4:])
    assert [host.id for host in placer.Plan.load(other).topology.servers] == ["host:2"]
    assert "its pin is to hosts without GPUs, which serve rows in their DRAM alone" in fail(
        "plan", *known, "--topology", "1xh100+cpu", "--constraints", _hbm_on(tmp_path, "host:1")
    )


def _hbm_on(folder: Path, host: str) -> Path:
    rules = folder / "hbm.yaml"
    rules.write_text(f"tables:\n  t5: {{devices: [{host}], tier: hbm}}\n")
    return rules


def found(*arguments) -> dict:
    return json_of("simulate", *arguments)


@pytest.mark.slow
def test_a_log_is_counted_to_the_lookup(workbench: Workbench) -> None:
    result = found(workbench.plan, "--data", workbench.log)
    assert (result["steps"], result["samples"]) == (-(-1500 // 16), 1500)
    # 26 columns; those that a sample lacks are read as id 0.
    assert result["lookups"] == 26 * 1500
    assert len(result["steps_in_order"]) == result["steps"]
    assert 0 < result["hbm_share"] <= 1
    assert 0 < result["step_mean_s"] <= result["sum_mean_s"]
    assert sum(row["lookups"] for row in result["devices"]) * result["steps"] == pytest.approx(
        result["lookups"]
    )
    again = found(workbench.plan, "--data", workbench.parquet)
    assert again["lookups"] == result["lookups"]


def test_a_table_is_for_people(workbench: Workbench) -> None:
    shown = succeed("simulate", workbench.plan, "--batches", "4", "--seed", "2").stdout
    for word in ("Simulated", "4 steps, 64 samples", "gpu:1", "outputs", "p99"):
        assert word in shown


def test_draws_are_seeded_and_look_ahead_saves_time(workbench: Workbench) -> None:
    drawn = workbench.plan, "--batches", "6"
    first, again = found(*drawn), found(*drawn)
    assert first == again
    assert found(*drawn, "--seed", "1")["steps_in_order"] != first["steps_in_order"]
    alone = found(*drawn, "--no-look-ahead")
    assert alone["step_mean_s"] == alone["sum_mean_s"]
    assert alone["lookups"] == first["lookups"]


def test_what_follows_is_told_beside_another_plan(workbench: Workbench) -> None:
    """A plan is compared with one for more memory, over the windows of two logs."""
    other = workbench.folder / "roomy.json"
    machine = ("--topology", workbench.folder / "machine.yaml", "--hbm", "400KiB")
    succeed("plan", "--profile", workbench.profile, *machine, "--batch-size", "8",
            "--solver", "greedy-cost", "-o", other)  # fmt: skip
    logs = ("--data", workbench.log, "--then", workbench.parquet)
    result = found(workbench.plan, *logs, "--against", other, "--windows", "2", "--batches", "20")
    windows = result["windows"]
    assert [window["steps"] for window in windows] == [10] * 4
    assert windows[0]["lost_share"] == 0
    for window in windows:
        assert window["other_hbm_share"] > window["hbm_share"]
        saved = window["step_mean_s"] - window["other_step_mean_s"]
        assert window["break_even_steps"] == pytest.approx(window["migration_s"] / saved)
        assert window["break_even"].endswith(" steps")


def test_a_plan_of_other_tables_or_ids_is_no_plan_to_compare(tmp_path: Path) -> None:
    """Its rows are of other ids, so that its counts would mean nothing."""
    plans, users = [], [f"u{number}" for number in range(50)]
    for place, part in enumerate((users, users[:20], users[::-1])):
        log, profile, plan = (tmp_path / f"{place}{end}" for end in (".csv", "", ".json"))
        log.write_text("user,item\n" + "".join(f"{user},1\n" for user in part * 2))
        succeed("profile", log, "-o", profile)
        succeed("plan", "--profile", profile, "--topology", "2xt4", "--batch-size", "4",
                "--solver", "greedy-cost", "-o", plan)  # fmt: skip
        plans.append(plan)
    asked = ("simulate", plans[0], "--batches", "2", "--against")
    other = fail(*asked, plans[1])
    assert "the other plan has other tables: 'user' has 21 rows, not 51; give a plan" in other
    assert "the other plan maps the ids of user to other rows" in fail(*asked, plans[2])
    succeed(*asked, plans[2], "--other-data")
    for capacity in (8, 9):  # A table that grows may have other capacities.
        succeed("plan", "--profile", tmp_path / "0", "--topology", "2xt4", "--batch-size", "4",
                "--growing", f"user={capacity}", "--solver", "greedy-cost",
                "-o", tmp_path / f"grows_{capacity}.json")  # fmt: skip
    grown = "simulate", tmp_path / "grows_8.json", "--data", tmp_path / "0.csv"
    succeed(*grown, "--against", tmp_path / "grows_9.json")


def test_wrong_use_is_told(workbench: Workbench) -> None:
    usage = invoke("simulate", workbench.plan)
    assert usage.exit_code == 2
    assert "--batches" in usage.stderr
    drawn = ("simulate", workbench.plan, "--batches", "2")
    assert "no constants" in fail(*drawn, "--cost-model", "torchrec")
    assert "2 steps, which do not make 3 windows" in fail(*drawn, "--windows", "3")
    assert "nowhere.tsv" in fail("simulate", workbench.plan, "--data", "nowhere.tsv")
