"""benchmarks/instances: the library, its checker, and its plans."""

import ast
import copy
import functools
import gzip
import json
import operator
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_cases import BENCHMARKS, imported_from
from fast_and_full import fewer
from instance_cases import plan_of, random_plan, random_problem
from problem_cases import whole

from cost_models import Roofline
from placer import Plan, Problem, Shard
from placer.plan.file import to_dict
from placer.plan.memory import device_memory
from placer.plan.verify import verify

FOLDER = BENCHMARKS / "instances"
imported = functools.partial(imported_from, FOLDER)

check, expand, catalogue, plans, step_time = map(
    imported, ("check", "expand", "catalogue", "plans", "step_time")
)
RECIPES = expand.catalogue()["recipes"]


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as its file has it."""
    return json.loads(json.dumps(to_dict(plan)))


def test_the_checker_imports_nothing_of_placer() -> None:
    for name in ("check", "step_time"):
        tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        found = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        for node in ast.walk(tree):
            found |= {one.name for one in node.names} if isinstance(node, ast.Import) else set()
        # What makes an instance by its name is asked for by the command line alone.
        foreign = {each.partition(".")[0] for each in found} - set(sys.stdlib_module_names)
        assert foreign <= {"numpy", "step_time", "expand"}


def test_the_checker_and_the_cost_model_agree_on_random_plans() -> None:
    seen = set()
    for seed in range(fewer(200, 8)):
        rng = random.Random(seed)
        problem = random_problem(rng)
        plan = random_plan(rng, problem)
        instance = expand.document("drawn", problem, catalogue.CONSTANTS)
        verdict = check.check(instance, as_json(plan))
        assert not verdict.faults
        expected = imported("ours").cost_model().evaluate(problem, plan).step_time_s
        assert verdict.step_time_s == pytest.approx(expected, rel=1e-9, abs=0)
        memory = device_memory(plan)
        assert verdict.used_bytes == {name: use.total_bytes for name, use in memory.items()}
        seen |= {shard.lookup for shard in plan.shards}
    assert seen == {"device", "staged", "uva", "cached", "host"}


def as_instance(problem: Problem) -> Any:
    return expand.document("tiny", problem, catalogue.CONSTANTS)


def tiny() -> tuple[Problem, Plan]:
    """Two tables on two GPUs: one split hot/cold and read through a cache, one row-wise."""
    recipe = expand.Recipe(
        "tiny", "random-2@5", "2xt4", "1GiB", batch_size=256,
        constraints={"tables": {"t2": {"forbid": ["uva"]}}},
    )  # fmt: skip
    problem = recipe.problem()
    first, second = (profile.table for profile in problem.profile)
    cols = (0, first.dim)
    shards = [
        Shard("t1", (0, 500, 1), cols, ("gpu:0",), "hbm", "device"),
        Shard("t1", (500, first.rows, 1), cols, ("gpu:0",), "dram", "cached", cache_rows=100),
        Shard("t2", (0, second.rows, 2), (0, second.dim), ("gpu:0",), "dram", "staged"),
        Shard("t2", (1, second.rows, 2), (0, second.dim), ("gpu:1",), "dram", "staged"),
    ]
    return problem, plan_of(problem, shards)


def changed(plan: dict[str, Any], place: str, change: Any) -> dict[str, Any]:
    """A plan with another value at a place such as ``shards.0.rows``; without it, if None."""
    wrong: Any = copy.deepcopy(plan)
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    inside = functools.reduce(operator.getitem, path, wrong)
    if change is None:
        del inside[last]
    else:
        inside[last] = change(inside[last]) if callable(change) else change
    return wrong


def from_on(first: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """A change of all shards from one on."""
    return lambda shards: shards[:first] + [{**shard, **values} for shard in shards[first:]]


IN_HBM = {"memory": "hbm", "lookup": "device", "cache_rows": 0, "staging_rows": 0}

WRONG = (
    ("shards.0.rows.1", lambda stop: stop - 1, "row missing", "1 rows are in no shard"),
    ("shards.1.rows.0", lambda start: start - 1, "covered twice", "rank 499 is in two shards"),
    ("shards.3.rows.2", 3, "covered twice", "rank 4 is in two shards"),
    ("shards", from_on(1, **IN_HBM), "memory", "gpu:0 would hold"),
    ("shards.2", lambda shard: {**shard, "lookup": "uva", "staging_rows": 0},
     "constraint", "table 't2' is placed uva, which is forbidden"),
    ("shards.0.devices", ["gpu:9"], "device", "no device 'gpu:9'"),
    ("shards.0.lookup", "staged", "lookup", "lookup 'staged' does not go with memory 'hbm'"),
    ("shards.1.cache_rows", 0, "lookup", "0 cache_rows with lookup 'cached'"),
    ("shards.2.devices", ["host:0"], "lookup", "host:0 is a host; it serves lookup host alone"),
    ("shards", from_on(2, buffer_bytes=0), "buffers", "0 buffer_bytes on ['gpu:0']"),
    ("shards.2.staging_rows", 0, "buffers", "has 0 staging_rows"),
    ("solver.step_time_s", lambda seconds: seconds * (1 - 1e-6),
     "claim", "the plan says that a step takes"),
    ("tables.0.rows", lambda rows: rows + 1, "problem", "table 't1' is not the instance's"),
    ("batch_size", 1, "problem", "batch_size is 1"),
    ("instance_sha256", "0" * 64, "problem", "instance_sha256"),
    ("topology.devices.0.memory_bytes", lambda size: 2 * size,
     "problem", "devices or their memory"),
    ("shards", None, "format", "no list of shards"),
    ("shards.0.cols", None, "shard", "a shard needs"),
    ("shards.0.rows.1", 500.5, "shard", "whole numbers"),
    ("shards.0.table", "t9", "shard", "no table 't9'"),
)  # fmt: skip
"""Places in a plan, what is there instead, and the kind and words of the fault."""


def test_a_wrong_plan_of_each_kind_is_refused_with_the_reason() -> None:
    problem, plan = tiny()
    instance = as_instance(problem)
    step_time_s = Roofline().evaluate(problem, plan).step_time_s
    sound = as_json(replace(plan, solver=replace(plan.solver, step_time_s=step_time_s)))
    verdict = check.check(instance, sound)
    assert not verdict.faults
    assert verdict.step_time_s == pytest.approx(step_time_s, rel=1e-12)
    for place, change, kind, words in WRONG:
        faults = check.check(instance, changed(sound, place, change)).faults
        assert [fault.kind for fault in faults][:1] == [kind], (place, faults)
        assert words in faults[0].message


def test_constraints_are_checked_as_they_are_documented() -> None:
    problem, plan = tiny()
    instance = as_instance(problem)
    rules = {
        "row-wise": {"tables": {"t2": {"devices": None, "tier": None, "forbid": ["row-wise"]}}},
        "pinned": {"tables": {"t2": {"devices": ["gpu:0"], "tier": None, "forbid": []}}},
        "in hbm alone": {"tables": {"t1": {"devices": None, "tier": "hbm", "forbid": []}}},
        "split": {"tables": {"t1": {"devices": None, "tier": None, "forbid": ["split"]}}},
        "share one device": {"tables": {}, "together": [["t1", "t2"]]},
    }
    for words, constraints in rules.items():
        faults = check.check({**instance, "constraints": constraints}, as_json(plan)).faults
        assert {fault.kind for fault in faults} == {"constraint"}
        assert any(words in fault.message for fault in faults)
    # The hot and the cold part of a slice are one row slice.
    allowed = {"t1": {"devices": None, "tier": None, "forbid": ["row-wise", "column-wise"]}}
    assert not check.check({**instance, "constraints": {"tables": allowed}}, as_json(plan)).faults


def test_slices_of_different_strides_meet_where_they_do() -> None:
    rng = random.Random(1)
    for _ in range(300):
        slices = []
        for _ in range(2):
            start, step = rng.randint(0, 30), rng.choice([1, 2, 3, 4, 6, 8, 12])
            slices.append((start, start + rng.randint(1, 60), step))
        common = set(range(*slices[0])) & set(range(*slices[1]))
        rank = check._common_rank(slices)
        assert rank == min(common, default=None) or rank in common
        assert (rank is None) == (not common)


def test_the_library_is_as_large_as_it_says_and_its_recipes_make_what_was_solved() -> None:
    assert len(RECIPES) >= 150
    assert min(one.tables for one in RECIPES.values()) == 7
    assert max(one.tables for one in RECIPES.values()) == 10_000
    assert {2, 1024} <= {one.gpus for one in RECIPES.values()}
    assert sum(bool(one.constraints) for one in RECIPES.values()) >= 10
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    assert size <= 10e6
    document = expand.document_of("criteo-kaggle-2xt4-50pct")  # Its hash is held against.
    again = expand.problem_of(json.loads(json.dumps(document)))
    assert again.sha256 == expand.recipe_of("criteo-kaggle-2xt4-50pct").problem().sha256


@pytest.mark.slow
def test_the_checker_and_the_cost_model_agree_on_best_known_plans() -> None:
    best = json.loads((FOLDER / "best_known.json").read_text(encoding="utf-8"))["best_known"]
    small = [one for one in best if RECIPES[one["instance"]].tables <= 200]
    for known in random.Random(0).sample(small, min(25, len(small))):
        name, planner = known["instance"], known["planner"]
        problem = expand.recipe_of(name).problem()
        content = plans.read(planner, name)
        verdict = check.check(expand.document_of(name), content)
        assert not verdict.faults
        plan = plans.to_plan(problem, content)
        verify(plan)
        expected = imported("ours").cost_model().evaluate(problem, plan).step_time_s
        assert verdict.step_time_s == pytest.approx(expected, rel=1e-9, abs=0)
        assert known["step_time_s"] == pytest.approx(expected, rel=1e-9, abs=0)
        memory = {name: use.total_bytes for name, use in device_memory(plan).items()}
        assert verdict.used_bytes == memory
        assert known["bound_s"] is None or known["bound_s"] <= known["step_time_s"] * (1 + 1e-9)


@pytest.mark.slow
def test_the_page_is_made_again_from_the_plans(tmp_path: Path, monkeypatch: Any) -> None:
    page = imported("page")
    few = {name: one for name, one in RECIPES.items() if one.tables * one.gpus <= 100}
    monkeypatch.setattr(page, "catalogue", lambda: {"recipes": few, "version": 1})
    for name in ("PAGE", "BEST_KNOWN"):
        monkeypatch.setattr(page, name, tmp_path / name)
    page.write_page()
    text = (tmp_path / "PAGE").read_text(encoding="utf-8")
    recorded = (FOLDER / "LEADERBOARD.md").read_text(encoding="utf-8")
    for name in few:
        (line,) = (each for each in text.splitlines() if each.startswith(f"| {name} |"))
        (known,) = (each for each in recorded.splitlines() if each.startswith(f"| {name} |"))
        assert line.split(" | ")[:7] == known.split(" | ")[:7]


def test_the_command_checks_a_plan_file(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    problem, plan = tiny()
    instance = as_instance(problem)
    (tmp_path / "tiny.json").write_text(json.dumps(instance))
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "argv", ["check", f"{tmp_path}/tiny.json", f"{tmp_path}/plan.json"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 0
    assert "sound: tiny takes" in capsys.readouterr().out


WEIRD = (
    None, True, False, 0, -1, 2.5, float("nan"), float("inf"), 1 << 53, 1 << 64, 10**400, 10**4200,
    "", "gpu:0", "hbm", "\x1b[2J", "\ud800", "=1+1", "a" * 9999, [], [[]], [0, 0], {}, {"a": 1},
    [None], ["hbm"], [10**40, 1, 1],
)  # fmt: skip
"""What a submission may hold anywhere, though no plan does."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a document, with every key in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    inner = [value[key] for key in keys if isinstance(value[key], dict | list)]
    return [(value, key) for key in keys] + [place for one in inner for place in _places(one)]


def _malformed(plan: dict[str, Any], choose: random.Random) -> Any:
    """A plan with a few of its values changed, gone, renamed or doubled."""
    wrong = copy.deepcopy(plan)
    for _ in range(choose.choice([1, 1, 2, 4])):
        places = _places(wrong)
        if not places:
            break
        inside, key = choose.choice(places)
        match choose.choice(["value", "value", "gone", "name", "twice", "wrapped"]):
            case "value":
                inside[key] = choose.choice(WEIRD)
            case "gone":
                del inside[key]
            case "name" if isinstance(inside, dict):
                inside[choose.choice(["", "\x00", "tables", "shards", "kind"])] = inside.pop(key)
            case "twice" if isinstance(inside, list):
                inside.append(copy.deepcopy(inside[key]))
            case _:
                inside[key] = choose.choice([[inside[key]], {"a": inside[key]}, str(inside[key])])
    return wrong


def test_every_malformed_plan_is_answered_with_a_reason() -> None:
    choose = random.Random(3)
    problem, plan = tiny()
    instance = as_instance(problem)
    sound = as_json(plan)
    short = {"instance": "tiny", "shards": sound["shards"], "step_time_s": 1.0}
    for wrong in WEIRD:
        assert check.check(instance, wrong).faults
    sound_ones = 0
    for number in range(fewer(4_000, 800)):
        wrong = _malformed(sound if number % 2 else short, choose)
        verdict = check.check(instance, wrong)
        sound_ones += not verdict.faults
        assert all(fault.message and len(fault.message) < 2000 for fault in verdict.faults)
    # What the checker does not read may be changed.
    assert sound_ones < fewer(4_000, 800) / 2


def test_files_that_are_no_plan_are_answered_with_a_reason(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    problem, plan = tiny()
    instance = tmp_path / "tiny.json"
    instance.write_text(json.dumps(as_instance(problem)))
    plan.save(tmp_path / "plan.json")
    sound = (tmp_path / "plan.json").read_bytes()
    contents: dict[str, bytes] = {
        "empty": b"",
        "text": b"hello",
        "no-utf8": b"\xff\xfe\x00{",
        "deep": b"[" * 100_000,
        "digits": b'{"shards": [' + b"9" * 9999 + b"]}",
        "nan": b'{"shards": [], "step_time_s": NaN}',
        "gzip-cut": gzip.compress(sound)[:-9],
        "gzip-damaged": gzip.compress(sound)[:40] + b"\xff" * 40 + gzip.compress(sound)[80:],
        "gzip-garbage": gzip.compress(sound) + b"x",
        "names": b'{"shards": [{"table": "\\u001b[2J\\ud800\\n", "rows": 1}]}',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    known = str(instance)
    lines = [(known, str(tmp_path / name)) for name in (*contents, "folder", "fifo", "absent")]
    lines += [(str(tmp_path / name), str(tmp_path / "plan.json")) for name in (*contents, "fifo")]
    lines += [(name, known) for name in ("no-such-instance", "", "a" * 5000, "\x1b[2J")]
    lines += [(known, "a" * 5000), (known, known), (known, "/dev/null"), (known, "/dev/zero")]
    for one, other in lines:
        for form in ("text", "json"):
            monkeypatch.setattr(sys, "argv", ["check", one, other, "--format", form])
            with pytest.raises(SystemExit) as ended:
                check.main()
            printed = capsys.readouterr().out
            assert ended.value.code not in (0, None), (one, other)
            has_said_why = "refused" in printed or '"faults"' in printed
            assert has_said_why or isinstance(ended.value.code, str)
            assert "\x1b" not in printed


def outcome_of(plan: Plan, step_time_s: float | None, bound_s: float) -> Any:
    """A planner's answer with this plan."""
    facts = {"options": {"time_limit_s": 1.0}, "seconds": 0.1, "bound_s": bound_s}
    return imported("outcome").Outcome(plans.shards_json(plan), facts, step_time_s)


def test_a_better_plan_and_a_higher_bound_are_kept_and_no_wrong_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    leaderboard = __import__("leaderboard")
    monkeypatch.setattr(plans, "PLANS", tmp_path)
    problem, plan = tiny()
    instance = as_instance(problem)
    slower = [shard for shard in plan.shards if shard.table == "t1"]
    worse = plan_of(problem, [*slower, whole(problem, "staged", "gpu:0", table=1)])
    leaderboard.keep("mine", instance, outcome_of(worse, None, 2e-6))
    first = plans.read("mine", "tiny")
    leaderboard.keep("mine", instance, outcome_of(plan, None, 1e-6))
    better = plans.read("mine", "tiny")
    assert better["step_time_s"] < first["step_time_s"]
    assert better["bound_s"] == 2e-6
    leaderboard.keep("mine", instance, outcome_of(worse, None, 3e-6))
    kept = plans.read("mine", "tiny")
    assert (kept["step_time_s"], kept["bound_s"]) == (better["step_time_s"], 3e-6)
    assert not check.check(instance, kept).faults
    told = leaderboard.keep("boastful", instance, outcome_of(plan, 1e-9, 0.0))
    assert told.startswith("plan refused: claim")
    assert plans.read("boastful", "tiny") is None
    assert "claim" in plans.without_plan("boastful")["tiny"]["reason"]


@pytest.mark.slow
def test_the_integer_program_of_recshard_gains_by_splits(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    recipe = expand.Recipe("few", "random-4@5", "2xt4", "40%", batch_size=256)
    problem = recipe.problem()
    outcome = imported("others").run("recshard", recipe, problem, 5.0, None)
    instance = expand.document("few", problem, catalogue.CONSTANTS)
    verdict = check.check(instance, {"shards": outcome.shards})
    assert not verdict.faults
    assert {shard["lookup"] for shard in outcome.shards} == {"device", "uva"}
    # Better than all rows in host memory, read in place as well.
    cold = [
        {**shard, "rows": [0, problem.profile[shard["table"]].table.rows, 1],
         "memory": "dram", "lookup": "uva"}
        for shard in {one["table"]: one for one in outcome.shards}.values()
    ]  # fmt: skip
    all_cold = check.check(instance, {"shards": cold})
    assert not all_cold.faults
    assert verdict.step_time_s < all_cold.step_time_s
