"""`placer replan`, and `placer show` of plans with constraints or rows that have gone cold."""

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from cli_cases import Workbench, fail, invoke, json_of, misuse, succeed

import placer
from placer.profile.table_profile import RowCounts


def replanned(*arguments: str | Path) -> dict[str, object]:
    """What `placer replan --format json` prints."""
    return json_of("replan", *arguments)


def test_an_unchanged_problem_keeps_its_plan(few_tables: Workbench, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    # Over more steps than these a search that goes on may find a little.
    unchanged = (*few_tables.problem(), "--horizon-steps", "1000")
    result = succeed("replan", "--from", few_tables.plan, *unchanged, "-o", new)
    assert "nothing moves" in result.stdout
    assert "never needed" in result.stdout
    assert "keep; plan written to" in result.stderr
    old = placer.Plan.load(few_tables.plan)
    assert set(placer.Plan.load(new).shards) == set(old.shards)
    assert "is sound" in succeed("verify", new).stdout
    moved = json_of("diff", few_tables.plan, new)
    assert moved["changed_cells"] == 0


def test_a_smaller_machine(workbench: Workbench, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    tighter = [*workbench.problem(), "--hbm", "95KiB"]
    found = replanned("--from", workbench.plan, *tighter, "--horizon-steps", "1000", "-o", new)
    assert found["horizon_steps"] == 1000
    assert found["old_step_time_s"] is None
    assert "bytes too many" in str(found["old_refused"])
    moved = json_of("diff", workbench.plan, new)
    assert moved["moved_bytes"] == found["moved_bytes"] > 0
    plan = placer.Plan.load(new)
    assert plan.solver.step_time_s == found["step_time_s"]
    assert plan.topology.gpus[0].memory_bytes == 95 << 10
    # The profile is named from the new plan's folder.
    assert (tmp_path / plan.provenance.profile).resolve() == workbench.profile.resolve()


def test_one_host_instead_of_two(few_tables: Workbench, tmp_path: Path) -> None:
    """A machine of one host has no network link, but the rows of the other host are needed."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    problem = ("--profile", few_tables.profile, "--batch-size", "64")
    succeed("plan", *problem, "--topology", "2x1xt4", "--solver", "greedy-size", "-o", old)
    after = ("--profile", few_tables.profile, "--topology", "1xt4")
    found = replanned("--from", old, *after, "--steps", "1", "-o", new)
    assert found["migration_s"] > 0
    assert {shard.devices for shard in placer.Plan.load(new).shards} == {("gpu:0",)}


def test_drift(few_tables: Workbench, tmp_path: Path) -> None:
    profile = placer.Profile.load(few_tables.profile)
    rng = np.random.default_rng(1)
    tables = []
    for one in profile:
        dense = np.zeros(one.table.rows, dtype=np.int64)
        dense[one.counts.ids] = one.counts.counts
        counts = RowCounts.from_dense(rng.permutation(dense))
        tables.append(placer.TableProfile(one.table, one.cdf, counts, one.features))
    drifted = tmp_path / "drifted"
    placer.Profile(tuple(tables), profile.samples, source="drifted").save(drifted)
    new, problem = tmp_path / "new.json", ("--profile", drifted, *few_tables.machine())
    roomy = [*problem, "--hbm", "120KiB"]
    found = replanned("--from", few_tables.plan, *roomy, "--horizon-steps", "0", "-o", new)
    assert found["chosen"] == "keep"
    # Its rows have gone cold, which `show` tells as well.
    recorded = placer.Plan.load(few_tables.plan).solver.step_time_s
    assert float(str(found["step_time_s"])) > 1.01 * recorded
    shown = json_of("show", new)
    assert shown["step_time_s"] == pytest.approx(found["step_time_s"])
    later = replanned("--from", few_tables.plan, *roomy, "--horizon-steps", "1000000000", "-o", new)
    assert float(str(later["step_time_s"])) < float(str(found["step_time_s"]))
    shown = json_of("show", new)
    assert shown["step_time_s"] == pytest.approx(later["step_time_s"])


def test_a_budget_alone_is_of_the_old_plans_machine(few_tables: Workbench, tmp_path: Path) -> None:
    """--help said that the machine is as the old plan has it, and --hbm took this machine."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    succeed("plan", *few_tables.problem(), "--solver", "greedy-size", "-o", old)
    again = ("--profile", few_tables.profile, "--hbm", "110KiB", "--steps", "2", "-o", new)
    succeed("replan", "--from", old, *again)
    before, after = (placer.Plan.load(path).topology for path in (old, new))
    assert [gpu.id for gpu in after.gpus] == [gpu.id for gpu in before.gpus]
    assert {gpu.memory_bytes for gpu in after.gpus} == {110 << 10}
    words = " ".join(succeed("replan", "--help").stdout.split())
    assert "this machine" not in words
    assert "8192 by default" not in words


def _memory(plan: Path) -> dict[str, int]:
    topology = placer.Plan.load(plan).topology
    return {one.id: one.memory_bytes for one in (*topology.gpus, *topology.hosts)}


def test_a_reserve_is_taken_off_once(few_tables: Workbench, tmp_path: Path) -> None:
    rules, old = tmp_path / "rules.yaml", tmp_path / "old.json"
    rules.write_text("reserve: {gpu: 4KiB, gpu:0: 8KiB, host: 1MiB}\n")
    asked = ("--constraints", rules, "--solver", "greedy-size", "--steps", "1")
    succeed("plan", *few_tables.problem(), *asked, "-o", old)
    profile = ("--profile", few_tables.profile, *asked)
    before = old
    for day in ("monday", "tuesday"):
        new = tmp_path / f"{day}.json"
        assert "its own reserve left" in succeed("replan", before, *profile, "-o", new).stderr
        assert _memory(new) == _memory(old)
        before = new
    given = {"--hbm": "95KiB", "--dram": "64MiB"}
    for flag, budget in given.items():
        succeed("replan", before, *profile, flag, budget, "-o", before)
    expected = {"gpu:0": 87 << 10, "gpu:1": 91 << 10, "host:0": 63 << 20}
    assert _memory(before) == expected
    succeed("replan", before, *few_tables.problem(), *asked, "-o", before)
    assert _memory(before) == _memory(old)
    rules.write_text("reserve: {gpu:7: 4KiB}\n")
    assert "gpu:7" in fail("replan", old, *profile, "-o", new)


def test_dense_layers_take_their_memory_of_any_machine(
    workbench: Workbench, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    workload = ("--workload", "criteo-kaggle", "--solver", "greedy-size", "--steps", "1")
    machine = ("--topology", "2xt4", "--hbm", "2GiB", "--batch-size", "64")
    dense = ("--dense", "workload")
    succeed("plan", *workload, *machine, *dense, "-o", old)
    left = _memory(old)
    assert left["gpu:0"] < 2 << 30
    for given in ((), machine[2:4], machine, dense):
        succeed("replan", old, *workload, *given, "-o", new)
        assert _memory(new) == left
    succeed("replan", old, *workload, "--dense", "none", "-o", new)
    assert _memory(new)["gpu:0"] == 2 << 30


def test_pooling_is_the_old_plans_unless_it_is_given(few_tables: Workbench, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    quick = ("--profile", few_tables.profile, "--solver", "greedy-size", "--steps", "1")
    given = ("--pooling", "C1=mean", "--pooling", "C2=max")
    succeed("plan", *quick, *few_tables.machine(), *given, "-o", old)

    def pooling(plan: Path) -> dict[str, str]:
        tables = placer.Plan.load(plan).tables
        return {one.name: one.pooling for table in tables for one in table.features}

    succeed("replan", old, *quick, "-o", new)
    assert pooling(new) == pooling(old)
    assert [pooling(old)[name] for name in ("C1", "C2", "C3")] == ["mean", "max", "sum"]
    assert "not those that the plan was made for" not in succeed("show", old).stderr
    succeed("replan", old, *quick, "--pooling", "C1=sum", "-o", new)
    assert pooling(new) == pooling(old) | {"C1": "sum"}


def test_what_goes_wrong(few_tables: Workbench, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    before = ("replan", "--from", few_tables.plan)
    tiny = ("--profile", few_tables.profile, "--topology", "1xt4", "--hbm", "1KiB", "-o", new)
    assert "no plan (infeasible)" in fail(*before, *tiny, exit_code=3)
    assert "either --profile or --workload" in invoke(*before, "-o", new).stderr
    negative = invoke(*before, *few_tables.problem(), "--horizon-steps", "-1", "-o", new)
    assert negative.exit_code == 2
    assert not new.exists()


def test_show_with_constraints(few_tables: Workbench, tmp_path: Path) -> None:
    rules, plan = tmp_path / "rules.yaml", tmp_path / "plan.json"
    rules.write_text("tables: {C3: {devices: [gpu:0]}}\nreserve: {gpu: 4KiB}\n")
    asked = ("--constraints", rules)
    succeed("plan", *few_tables.problem(), *asked, "--solver", "greedy-cost", "-o", plan)
    assert "not those that the plan was made for" not in succeed("show", plan, *asked).stderr
    assert "not those that the plan was made for" in succeed("show", plan).stderr
    text = succeed("show", plan, "--explain", "C3", *asked).stdout
    assert "pinned to gpu:0" in text
    assert "pinned" not in succeed("show", plan, "--explain", "C3").stdout
    assert "no table" in fail("show", plan, "--constraints", _of_another_model(tmp_path))


def _of_another_model(folder: Path) -> Path:
    path = folder / "others.yaml"
    path.write_text("tables: {nope: {tier: hbm}}\n")
    return path


def test_a_profile_of_other_tables_is_refused_unless_it_is_meant(
    few_tables: Workbench, tmp_path: Path
) -> None:
    profile = placer.Profile.load(few_tables.profile)
    first, second, *others = profile.tables
    table = replace(first.table, rows=first.table.rows + 5)
    grown = placer.TableProfile(table, placer.AccessCdf.zipf(table.rows, 1.0))
    named = replace(second, table=replace(second.table, name="new"))
    changed = placer.Profile((grown, named, *others[:-1]))
    changed.save(tmp_path / "other")
    more = ("--profile", tmp_path / "other", "--time-limit", "0.5")
    line = fail("replan", few_tables.plan, *more)
    for words in (
        f"'{first.name}' has {table.rows} rows, not {first.table.rows}",
        f"'{second.name}' is missing",
        f"'{others[-1].name}' is missing",
        "'new' is new",
        "--other-data",
    ):
        assert words in line
    assert "not kept" in succeed("replan", few_tables.plan, *more, "--other-data").stderr


@pytest.mark.parametrize("command", ["show", "simulate", "report", "train"])
def test_a_profile_with_more_tables_than_the_plan_is_refused(
    workbench: Workbench, tmp_path: Path, command: str
) -> None:
    profile = placer.Profile.load(workbench.profile)
    added = replace(profile.tables[0], table=replace(profile.tables[0].table, name="new"))
    replace(profile, tables=(*profile.tables, added)).save(tmp_path / "more")
    words = {
        "simulate": ("--batches", "2"),
        "report": ("-o", tmp_path / "page.html"),
        "train": ("--data", workbench.log),
    }.get(command, ())
    given = (command, workbench.plan, "--profile", tmp_path / "more", *words)
    assert "'new' is new" in fail(*given)


class _Counting(BaseHTTPRequestHandler):
    """Counts what is asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_nothing_is_fetched_from_an_address_that_a_plan_names(
    workbench: Workbench, tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/profile"
        plan, loaded = tmp_path / "plan.json", placer.Plan.load(workbench.plan)
        replace(loaded, provenance=replace(loaded.provenance, profile=address)).save(plan)
        succeed("show", plan)
        succeed("verify", plan)
        succeed("diff", plan, workbench.plan)
        for words in (
            ("report", plan, "-o", tmp_path / "page.html"),
            ("simulate", plan, "--batches", "2"),
            ("show", plan, "--memory"),
            ("train", plan, "--data", workbench.log),
        ):
            assert address in fail(*words)
        succeed("replan", plan, "--profile", workbench.profile, "--time-limit", "0.5")
        misuse("show", plan, "--profile", address)  # Profiles are on this machine.
        assert _Counting.asked == []
        server.shutdown()
