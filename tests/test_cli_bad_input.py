"""Bad input ends in one clear line that names it, a non-zero exit, and nothing half-written."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import Workbench, fail, files_of, invoke, misuse, succeed
from fast_and_full import mostly_slow

import cli
import placer
from placer.plan.file import seal


def profile_of(tmp_path: Path, log: Path, *options: str) -> str:
    """Profile a log that cannot be profiled: the error line, nothing being written."""
    (tmp_path / "out").mkdir(exist_ok=True)
    before = files_of(tmp_path)
    line = fail("profile", log, *options, "-o", tmp_path / "out" / "profile")
    assert files_of(tmp_path) == before
    return line


# Logs


def test_a_missing_column(workbench: Workbench, tmp_path: Path) -> None:
    table = pq.read_table(workbench.parquet)
    pq.write_table(table.drop_columns(["C7"]), tmp_path / "other.parquet")
    line = fail("train", "--plan", workbench.plan, "--data", tmp_path / "other.parquet")
    assert f"{tmp_path / 'other.parquet'} has no" in line
    assert "'C7'; it has " in line


@pytest.mark.parametrize("option", ["--label", "--ignore"])
def test_a_column_that_is_not_there(workbench: Workbench, tmp_path: Path, option: str) -> None:
    line = profile_of(tmp_path, workbench.parquet, option, "sold")
    assert f"{workbench.parquet} has no column 'sold'; it has label, " in line
    line = profile_of(tmp_path, workbench.log, option, "sold")
    assert f"{workbench.log} is read as criteo, whose columns have no names" in line


def test_a_log_without_labels_cannot_be_trained_on(workbench: Workbench, tmp_path: Path) -> None:
    lines = workbench.log.read_text().splitlines()
    (tmp_path / "test.tsv").write_text("".join(line.split("\t", 1)[1] + "\n" for line in lines))
    line = fail("train", "--plan", workbench.plan, "--data", tmp_path / "test.tsv")
    assert "no labels to train on" in line
    arguments = ("train", "--plan", workbench.plan, "--data", workbench.log)
    line = fail(*arguments, "--eval-data", tmp_path / "test.tsv")
    assert "the evaluation log has no label column" in line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--dim", "member=0", "0 of 'member' is not from 1 to 9223372036854775807"),
        ("--dim", "0", "0 is not from 1 to 9223372036854775807"),
        ("--rows", "item=many", "'many' of 'item' is no whole number"),
        ("--pooling", "item=most", "'most' is none of sum, mean, max, none"),
        ("--id-mapping", "hsah", "'hsah' is none of auto, identity, hash, vocabulary"),
        ("--feature-table", "item", "'item' is not of the form NAME=VALUE"),
    ],
)
def test_a_number_of_a_table_that_is_none(
    tmp_path: Path, option: str, value: str, said: str
) -> None:
    """Said before the log is read, which may take hours."""
    line = misuse("profile", tmp_path / "missing.csv", option, value, "-o", tmp_path / "out")
    assert line == f"Invalid value for '{option}': {said}"
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize("option", ["-o", "--profile"])
def test_a_path_that_is_empty(workbench: Workbench, option: str) -> None:
    result = invoke("replan", workbench.plan, option, "")
    assert result.exit_code == 2
    assert result.stderr.endswith(": the path is empty\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("export", "PLAN", "--to", "torchrec", "-o", "-"), "output; name a file"),
        (("profile", "LOG", "-o", "-"), "output; name a folder"),
        (("verify", "-"), "input: only logs are read from it; name a file"),
    ],
)
def test_no_file_is_called_as_a_stream(
    workbench: Workbench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"PLAN": workbench.plan, "LOG": workbench.log}
    line = misuse(*(named.get(one, one) for one in arguments))
    assert line.endswith(f": - would be standard {said}")
    assert files_of(tmp_path) == {}


# Topologies and budgets


@pytest.mark.parametrize("size", ["8Gi", "-1GiB", "much", ""])
@pytest.mark.parametrize(("command", "option"), [
    ("plan", "--hbm"), ("replan", "--dram"), ("topology", "--ssd"), ("compare", "--hbm"),
    ("whatif", "--hbm-steps"), ("report", "--hbm-steps"), ("sweep", "--dram"),
])  # fmt: skip
def test_a_budget_that_is_no_size(
    workbench: Workbench, tmp_path: Path, command: str, option: str, size: str
) -> None:
    output = tmp_path / ("machine.yaml" if command == "topology" else "plan.json")
    written = ("-o", output) if command in ("plan", "replan", "report", "topology") else ()
    sizes = f"8GiB,{size}" if command in ("compare", "whatif", "report") else size
    line = misuse(command, f"{option}={sizes}", *written)
    fix = f"not a size in bytes: {size!r}; write it like 8GiB, 24GB or 512MiB"
    assert line == f"Invalid value for '{option}': {fix if sizes else 'it is empty'}"
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("command", "option", "value", "said"),
    [
        ("plan", "--topology", "8xabacus", "no GPU is called 'abacus'"),
        ("compare", "--topology", "8xh100,abacus", "unknown topology 'abacus'"),
        ("plan", "--dense", "measured:soon", "not a duration: 'soon'"),
        ("plan", "--widths", "int8,int4", "no type is called 'int4'; there are float32, "),
        ("plan", "--gap", "nan", "nan is not finite"),
        ("replan", "--solver", "sise", "'sise' is not one of "),
        ("train", "--lr", "0", "0.0 is not in the range x>0"),
        ("pilot", "--embedding-lr", "inf", "inf is not finite"),
    ],
)
def test_a_value_that_an_option_cannot_have(
    command: str, option: str, value: str, said: str
) -> None:
    line = misuse(command, option, value)
    assert line.startswith(f"Invalid value for '{option}': ")
    assert said in line


@pytest.mark.parametrize(
    ("command", "options", "flag", "other"),
    [
        ("train", "--data=x --every=10", "--every", "--checkpoints"),
        ("simulate", "--batches=3 --null=?", "--null", "--data"),
    ],
)
def test_an_option_without_effect(
    workbench: Workbench, command: str, options: str, flag: str, other: str
) -> None:
    said = misuse(command, workbench.plan, *options.split())
    assert said == f"{flag} has no effect without {other}; give {other}, or leave {flag} out"


def test_a_replayed_log_has_no_seed(workbench: Workbench) -> None:
    said = misuse("simulate", workbench.plan, "--data", workbench.parquet, "--seed", "1")
    assert said == "--seed has no effect with --data, as nothing is drawn; leave it out"


def test_values_that_commands_find_wrong(workbench: Workbench) -> None:
    assert "--workload: no workload is called 'nothing'" in misuse("plan", "--workload", "nothing")
    assert "no workload is called 'nothing'" in misuse("workloads", "nothing")
    said = misuse("plan", *workbench.problem(), "--growing", "C1=many")
    assert "--growing 'C1=many': it is of another form. Write TABLE=KEYS" in said
    assert "threads must be at most 1024" in misuse(*workbench.training(), "--threads", "2000")


@pytest.mark.parametrize(
    "solver", mostly_slow(["auto", "greedy-size", "greedy-cost", "ilp"], "auto")
)
def test_a_budget_that_nothing_fits(few_tables: Workbench, tmp_path: Path, solver: str) -> None:
    problem = ("plan", "--profile", few_tables.profile, "--topology", "2xt4", "--solver", solver)
    line = fail(*problem, "--hbm", "1KiB", "-o", tmp_path / "plan.json", exit_code=3)
    assert line.startswith("placer: no plan (infeasible): ")
    assert "2 KiB together" in line
    assert " bytes) of HBM" in line
    assert "Lower --batch-size or raise --hbm" in line
    (tmp_path / "rules.yaml").write_text("reserve: {gpu: 1GiB}")
    rules = ("--hbm", "1GiB", "--constraints", tmp_path / "rules.yaml")
    line = fail(*problem, *rules, exit_code=3)
    assert "0 B together, without what constraints reserve and dense layers take" in line
    (tmp_path / "rules.yaml").write_text('tables: {"*": {tier: hbm}}')
    line = fail(*problem, "--hbm", "30KiB", *rules[2:], exit_code=3)
    assert "as many rows in DRAM as constraints allow, the other rows and the buffers of" in line
    assert "or raise --hbm, or relax constraints" in line
    (tmp_path / "rules.yaml").write_text('tables: {"*": {tier: ssd}}')
    line = fail(*problem, *rules)
    assert "its tier is ssd, but no host has a drive; give hosts one (--ssd)" in line
    (tmp_path / "rules.yaml").write_text('tables: {"*": {tier: ssd, forbid: [ssd]}}')
    assert "forbidden are ssd, and its tier is ssd" in fail(*problem, *rules, "--ssd", "1GiB")
    (tmp_path / "rules.yaml").unlink()
    line = fail(*problem, "--hbm", "60MiB", "--dram", "1KiB", "--dim", "100000", "-o",
                tmp_path / "plan.json", exit_code=3)  # fmt: skip
    assert "short" in line
    assert files_of(tmp_path) == {}


def test_only_a_proof_that_there_is_no_placement_ends_with_3() -> None:
    """Some strategies find none and prove nothing, whatever the limits."""
    assert [cli._exit_code([reason]) for reason in ("infeasible", "no_plan")] == [3, 4]
    assert cli._exit_code(["no_plan", "infeasible"]) == 3


def test_files_that_are_taken_for_others(workbench: Workbench, tmp_path: Path) -> None:
    names = "m.yaml", "e.yaml", "plan.json.gz", "log.jsonl"
    machine, empty, zipped, lines = (tmp_path / name for name in names)
    placer.Topology.parse("1xt4").save(machine)
    empty.touch()
    lines.write_text('{"user": 1}\n{"user": 2}\n')
    zipped.write_bytes(gzip.compress(workbench.plan.read_bytes())[:99])
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "checkpoint.json").write_text('{"epoch": 0}')
    json_file = workbench.profile / "profile.json"
    ruled = ("verify", workbench.plan, "--constraints")
    said = {
        ("verify", workbench.profile): "is a profile and no plan; make one with `placer plan",
        ("verify", json_file): "is a profile and no plan; a plan is what `placer plan` wrote",
        (
            "verify",
            tmp_path / "step",
        ): "is a folder; a plan is the JSON file that `placer plan` wro",
        ("verify", tmp_path / "step" / "checkpoint.json"): "is a checkpoint and no plan",
        ("verify", workbench.log): "is a log or another file, and no plan; a plan is what",
        ("verify", lines): "is a log or another file, and no plan; a plan is what",
        ("verify", empty): "is not JSON of a plan (it is empty)",
        ("verify", zipped): "is not JSON of a plan (it is compressed: gunzip it)",
        ("topology", json_file): "is a profile, and no topology file",
        (*ruled, machine): "is a topology, and no constraints file",
        (*ruled, empty): "is not a constraints file: it is empty",
        ("profile", workbench.log, "--schema", empty): "e.yaml is not a schema file: it is empty",
        ("profile", workbench.profile): "is a profile and no log; name the files of a log",
        ("show", tmp_path / "step"): "step is a folder without profile.json and no profile",
        ("show", workbench.plan, "--cost-model", f"calibrated:{workbench.plan}"): (
            "is a plan and no calibration; make one with"
        ),
        ("show", "--profile", workbench.plan, workbench.plan): "is a plan and no profile",
        ("merge", workbench.log, "-o", tmp_path): "if it is a log, make one with `placer profile",
    }
    for command, words in said.items():
        assert words in fail(*command)
    assert "there is no plan at no:abc:" in fail("show", "no:abc:"), "colons are no emoji"


# Plans


@pytest.fixture
def copy(workbench: Workbench, tmp_path: Path) -> Workbench:
    """A workbench of the test's own, to damage."""
    shutil.copytree(workbench.folder, tmp_path / "copy")
    return Workbench(tmp_path / "copy")


def damaged(plan: Path, change: Callable[[str], str]) -> Path:
    plan.write_text(change(plan.read_text()))
    return plan


def changed_json(change: Callable[[dict], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return apply


@pytest.mark.parametrize("command", ["show", "verify", "train"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: "", "cut short"),
        (changed_json(lambda plan: plan.update(schema_version=99)), "99"),
        (changed_json(lambda plan: plan["shards"][0].update(memory="hbn")), "hbn"),
    ],
)
def test_a_plan_that_cannot_be_read(
    copy: Workbench, command: str, change: Callable[[str], str], message: str
) -> None:
    plan = damaged(copy.plan, change)
    options = ("--plan", plan, "--data", copy.log) if command == "train" else (plan,)
    line = fail(command, *options)
    assert str(plan) in line
    assert message in line


def test_an_edited_plan_that_is_unsound(copy: Workbench) -> None:
    lost = json.loads(copy.plan.read_text())["shards"][0]["table"]
    damaged(copy.plan, changed_json(lambda plan: plan["shards"].pop(0)))
    before = files_of(copy.folder)
    assert "was altered since it was written" in fail("verify", copy.plan)
    result = invoke("verify", copy.plan, "--seal", "--format", "json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["sound"]
    assert any(lost in violation["message"] for violation in report["violations"])
    as_text = invoke("verify", copy.plan, "--seal")
    assert as_text.exit_code == 1
    assert len(as_text.stdout.splitlines()) == len(report["violations"])
    assert f"{copy.plan} was not sealed, as it is not sound\n" in as_text.stderr
    assert files_of(copy.folder) == before
    seal(copy.plan)
    before = files_of(copy.folder)
    line = fail("train", "--plan", copy.plan, "--data", copy.log, "--checkpoints",
                copy.folder / "checkpoints")  # fmt: skip
    assert lost in line
    assert files_of(copy.folder) == before


def test_a_plan_of_another_profile(copy: Workbench, tmp_path: Path) -> None:
    log = tmp_path / "items.parquet"
    pq.write_table(pa.table({"click": [0, 1], "item": [3, 1]}), log)
    succeed("profile", log, "-o", tmp_path / "items")
    for command in (("show", copy.plan), ("train", "--plan", copy.plan, "--data", copy.log)):
        line = fail(*command, "--profile", tmp_path / "items")
        assert "'C1' is missing, 'C2' is missing, " in line
        assert line.endswith("made from, or one of another log that was made --like it")
    succeed("profile", copy.log, "--id-mapping", "hash", "--rows", "77", "-o", tmp_path / "hash")
    rows = placer.Plan.load(copy.plan).tables[0].rows
    for command in (("show", copy.plan), ("train", "--plan", copy.plan, "--data", copy.log)):
        line = fail(*command, "--profile", tmp_path / "hash")
        assert f"'C1' has 77 rows, not {rows}, " in line


@pytest.mark.parametrize("command", [("train", "--plan"), ("simulate",)])
def test_a_log_needs_the_id_mapping(copy: Workbench, command: tuple[str, ...]) -> None:
    shutil.rmtree(copy.profile)
    line = fail(*command, copy.plan, "--data", copy.log)
    assert f"placer: reading {copy.log} needs the id mapping that {copy.plan} was made" in line
    assert line.endswith("give --profile")


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_training_that_cannot_be(workbench: Workbench, device: str) -> None:
    said = fail(*workbench.training(), "--device", device)
    assert f"device '{device}' cannot be used here: " in said


# Outputs


def test_a_name_that_is_too_long() -> None:
    too_long = ("topology", "--hbm", "1GiB", "y" * 300)
    for line in (("show", "x" * 300), ("verify", "x/" * 3000), too_long):
        result = invoke(*line)
        assert result.exit_code in (1, 2)
        assert "did not expect" not in result.stderr
