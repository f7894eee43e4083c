"""Each command does what its help says, prints results to stdout and the rest to stderr."""

import csv
import io
import itertools
import json
import re
from pathlib import Path
from shutil import copytree

import pytest
from calibration_cases import SECONDS, calibration
from cli_cases import COMMANDS, Workbench, fail, invoke, json_of, misuse, succeed

import placer
from placer.plan.fields import Provenance
from placer.plan.verify import violations
from placer.units import format_seconds
from placer.workloads import named_workload


def rows_of(text: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    assert all(None not in row and None not in row.values() for row in rows)
    return rows


def test_the_program_names_its_commands_and_version() -> None:
    text = succeed("--help").stdout
    assert all(re.search(rf"^  {command} ", text, re.MULTILINE) for command in COMMANDS)
    assert succeed("--version").stdout.strip() == f"placer, version {placer.__version__}"


def test_profile(workbench: Workbench, tmp_path: Path) -> None:
    result = succeed("profile", workbench.log, "--dim", "4", "-o", tmp_path / "p")
    assert "Profile of 26 tables" in result.stdout
    assert result.stderr == f"profile written to {tmp_path / 'p'}\n"
    loaded = placer.Profile.load(tmp_path / "p")
    assert loaded.samples == 1500
    (tmp_path / "log.csv").write_text("user,item\n" + "1,2\n" * 9)
    told = succeed("profile", tmp_path / "log.csv", "-o", tmp_path / "q").stderr
    assert "no column is the label, which training needs" in told
    assert {profile.table.dim for profile in loaded} == {4}
    (tmp_path / "marked.csv").write_text("label,user\n1,2\n0,3\n1,?\n")
    told = succeed("profile", tmp_path / "marked.csv", "--null", "?,x", "-o", tmp_path / "r").stderr
    assert "user 5 (ids up to 3)" in told


def test_columns_of_parquet_can_be_chosen(workbench: Workbench, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(workbench.parquet, columns=["label", "C1", "C2"])
    renamed = table.rename_columns(["bought", "C1", "sample_id"])
    pq.write_table(renamed, tmp_path / "own.parquet")
    succeed("profile", tmp_path / "own.parquet", "--label", "bought", "--ignore", "sample_id",
            "--dim", "4", "-o", tmp_path / "p")  # fmt: skip
    loaded = placer.Profile.load(tmp_path / "p")
    assert [profile.name for profile in loaded] == ["C1"]
    succeed("plan", "--profile", tmp_path / "p", *workbench.machine(), "--solver", "greedy-cost",
            "-o", tmp_path / "plan.json")  # fmt: skip
    data = "--data", tmp_path / "own.parquet"
    assert json_of("train", "--plan", tmp_path / "plan.json", *data)["auc"] is not None


def test_counts_made_elsewhere_become_a_profile(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    counts = {"table": ["a", "a", "b"], "id": [0, 3, 1], "count": [5, 2, 9]}
    pq.write_table(pa.table(counts), tmp_path / "counts.parquet")
    arguments = ("profile", tmp_path / "counts.parquet", "--log-format", "counts")
    assert "--log-format counts needs --samples" in misuse(*arguments, "-o", tmp_path / "p")
    succeed(*arguments, "--samples", "9", "-o", tmp_path / "p")
    assert [profile.table.rows for profile in placer.Profile.load(tmp_path / "p")] == [4, 2]


@pytest.mark.slow
def test_merged_profiles_are_that_of_the_whole_log(workbench: Workbench, tmp_path: Path) -> None:
    lines = workbench.log.read_text().splitlines(keepends=True)
    hashed = ("--id-mapping", "hash", "--rows", "500", "--format", "csv")
    for name, part in {"a": lines[:600], "b": lines[600:], "all": lines}.items():
        (tmp_path / f"{name}.tsv").write_text("".join(part))
        whole = succeed("profile", tmp_path / f"{name}.tsv", *hashed, "-o", tmp_path / name)
    merged = succeed("merge", tmp_path / "a", tmp_path / "b", "--format", "csv",
                     "-o", tmp_path / "merged")  # fmt: skip
    # Distinct rows are counted in windows, which are others in parts of a log.
    assert _without_distinct(merged.stdout) == _without_distinct(whole.stdout)


def _without_distinct(text: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows
    return [{name: row[name] for name in row if name != "unique_rows"} for row in rows]


def test_plan(few_tables: Workbench, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = succeed("plan", *few_tables.problem(), "--solver", "greedy-cost", "-o", file)
    assert "hot/cold" in result.stdout
    said = r"step .* above the best possible, found in .*; plan written to .*plan\.json\n"
    assert re.fullmatch(said, result.stderr)
    made = placer.Plan.load(file)
    assert not violations(made)
    assert {shard.memory for shard in made.shards} == {"hbm", "dram"}


def test_a_plan_keeps_the_type_of_its_exchange(few_tables: Workbench, tmp_path: Path) -> None:
    plan, replanned = tmp_path / "plan.json", tmp_path / "replanned.json"
    arguments = ("--solver", "greedy-cost", "--exchange", "bfloat16", "-o", plan)
    succeed("plan", *few_tables.problem(), *arguments)
    shown = succeed("show", plan)
    assert "pooled rows travel as bfloat16" in shown.stdout
    facts = json_of("show", plan)
    assert facts["exchange_dtype"] == "bfloat16"
    succeed("replan", plan, "--profile", few_tables.profile, "--steps", "1", "-o", replanned)
    assert placer.Plan.load(replanned).exchange_dtype == "bfloat16"
    said = misuse("plan", *few_tables.problem(), "--exchange", "int8")
    assert "'int8' is not one of" in said


def test_a_plan_finds_its_profile_from_its_own_folder(
    workbench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    succeed("profile", workbench.log, "--dim", "8", "-o", tmp_path / "a" / "profile")
    problem = ("--profile", tmp_path / "a" / "profile", *workbench.machine())
    succeed("plan", *problem, "--solver", "greedy-cost", "-o", tmp_path / "a" / "plan.json")
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    result = succeed("show", "b/plan.json")
    assert "step time" in result.stdout
    assert result.stderr == ""


def test_compare(few_tables: Workbench, tmp_path: Path) -> None:
    result = succeed("compare", *few_tables.problem(), "--hbm", "100KiB,1MiB",
                     "--solvers", "greedy-size, greedy-cost", "--format", "csv",
                     "--plot", tmp_path / "c.png")  # fmt: skip
    rows = rows_of(result.stdout)
    assert [(row["hbm_budget_bytes"], row["solver"]) for row in rows] == [
        (str(budget), solver)
        for budget in (100 * 2**10, 2**20)
        for solver in ("greedy-size", "greedy-cost")
    ]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert result.stderr == f"picture written to {tmp_path / 'c.png'}\n"


@pytest.mark.slow
def test_steps_end_a_search(workbench: Workbench, tmp_path: Path) -> None:
    search = ("plan", *workbench.problem(), "--solver", "auto", "--gap", "0",
              "--time-limit", "600", "--steps", "3", "-o", tmp_path / "plan.json")  # fmt: skip
    assert json_of(*search)["limit"] == "steps"
    assert "feasible (steps limit)" in succeed(*search).stdout


def test_show_json_is_what_plan_printed(few_tables: Workbench, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = succeed("plan", *few_tables.problem(), "--solver", "greedy-cost", "-o", file,
                   "--format", "json")  # fmt: skip
    shown = succeed("show", file, "--format", "json")
    found, said = json.loads(made.stdout), json.loads(shown.stdout)
    assert found["limit"] is None
    assert "waits for " in found["binding"]
    # A search has a limit; what gains most is asked of any plan.
    del found["limit"], said["binds"], said["gain"]
    assert said == found
    assert shown.stderr == ""


def test_a_comparison_without_plans_is_shown_and_not_drawn(
    workbench: Workbench, tmp_path: Path
) -> None:
    picture = tmp_path / "compare.png"
    machine = ("--topology", "1xt4", "--hbm", "1KiB", "--solvers", "greedy-size")
    result = invoke("compare", "--profile", workbench.profile, *machine, "--plot", picture)
    assert result.exit_code == 3
    assert "greedy-size  infeasible" in result.stdout
    assert result.stderr.endswith("no picture is written, as no solver found a plan\n")
    assert not picture.exists()


def test_show_without_its_profile_tells_what_is_missing(
    few_tables: Workbench, tmp_path: Path
) -> None:
    for file in few_tables.folder.glob("plan*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    result = succeed("show", tmp_path / "plan.json")
    assert result.stderr == "times need the profile: give --profile\n"
    assert "hot/cold" in result.stdout
    given = succeed("show", tmp_path / "plan.json", "--profile", few_tables.profile)
    assert "step time" in given.stdout
    document = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / document["provenance"]["profile"]).mkdir()  # Of somebody else.
    assert succeed("show", tmp_path / "plan.json").stderr == result.stderr
    document["provenance"]["profile"] = ""
    del document["sha256"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    line = fail("show", tmp_path / "plan.json", "--memory")
    assert line.endswith("was made from, and the plan names none; give --profile")


def test_a_damaged_profile_of_a_plan_is_said_to_be_damaged(
    workbench: Workbench, tmp_path: Path
) -> None:
    folder = copytree(workbench.folder, tmp_path / "copy")
    (counts,) = (folder / "profile").glob("counts-*")
    content = bytearray(counts.read_bytes())
    content[-1] ^= 1
    counts.write_bytes(content)
    for line in (["show"], ["show", "--memory"], ["simulate", "--batches", "2"], ["report"]):
        command, *options = line
        output = ["-o", tmp_path / "page.html"] if command == "report" else []
        said = fail(command, folder / "plan.json", *options, *output)
        assert f"{counts.name} was altered" in said


def test_the_proof_of_an_edited_plan_names_the_step_that_it_is_of(
    workbench: Workbench, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    succeed("plan", *workbench.problem(), "--solver", "greedy-cost", "-o", file)
    before = json.loads(file.read_text())
    assert "that it found" not in succeed("show", file).stdout
    found = json_of("show", file)
    bound_s = before["solver"]["bound_s"]
    assert found["bound_s"] == bound_s
    assert found["gap"] == pytest.approx(found["step_time_s"] / bound_s - 1)
    document = json.loads(file.read_text())
    for shard in document["shards"]:
        if shard["memory"] == "dram":
            shard["lookup"], shard["staging_rows"] = "uva", 0
    file.write_text(json.dumps(document))
    succeed("verify", file, "--seal")
    facts = json_of("show", file)
    found_s = before["solver"]["step_time_s"]
    assert facts["step_time_s"] > found_s
    assert facts["gap"] == pytest.approx(facts["step_time_s"] / bound_s - 1)
    shown = succeed("show", file).stdout
    assert f"of the bound at the step time of {format_seconds(found_s)} that it found" in shown


@pytest.mark.parametrize("changed", ["cost model", "profile"])
def test_show_gives_no_bound_of_another_step_time_as_json(
    workbench: Workbench, tmp_path: Path, changed: str
) -> None:
    if changed == "cost model":
        calibration().save(tmp_path / "machine.json")
        options: tuple[str | Path, ...] = ("--cost-model", f"calibrated:{tmp_path}/machine.json")
    else:
        head = "".join(workbench.log.read_text().splitlines(keepends=True)[:200])
        (tmp_path / "day.tsv").write_text(head)
        day = tmp_path / "day"
        succeed("profile", tmp_path / "day.tsv", "--like", workbench.profile, "-o", day)
        options = ("--profile", day)
    facts = json_of("show", workbench.plan, *options)
    assert facts["step_time_s"] != placer.Plan.load(workbench.plan).solver.step_time_s
    assert facts["bound_s"] is facts["gap"] is None


def test_show_gives_no_bound_of_constants_that_were_measured_again(
    few_tables: Workbench, tmp_path: Path
) -> None:
    machine, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    model = ("--cost-model", f"calibrated:{machine}")
    calibration().save(machine)
    succeed("plan", *few_tables.problem(), *model, "--solver", "greedy-cost", "-o", plan)
    shown = ("show", plan, *model, "--format", "json")
    found = json.loads(succeed(*shown).stdout)
    assert found["bound_s"] == placer.Plan.load(plan).solver.bound_s > 0
    calibration(**{term: 2 * seconds for term, seconds in SECONDS.items()}).save(machine)
    facts = json.loads(succeed(*shown).stdout)
    assert facts["step_time_s"] > found["step_time_s"]
    assert facts["bound_s"] is facts["gap"] is None


@pytest.mark.slow
def test_show_is_readable_at_26_and_at_856_tables(workbench: Workbench, tmp_path: Path) -> None:
    few = succeed("show", workbench.plan).stdout.splitlines()
    assert sum(line.startswith("C") for line in few) == 26
    file = tmp_path / "many.json"
    table_wise_plan("meta-t856", "2x8xh100").save(file)
    many = succeed("show", file, "--top", "12").stdout.splitlines()
    assert "856 tables" in many[0]
    assert len(many) < 80
    assert max(map(len, many)) <= 160
    assert many[-1].startswith("12 of 856")
    everything = json_of("show", file)
    assert len(everything["tables"]) == 856


def table_wise_plan(workload: str, machine: str) -> placer.Plan:
    """Every table whole on one GPU, in turn: a plan of many tables without a search for it."""
    tables = tuple(profile.table for profile in named_workload(workload))
    topology = placer.Topology.parse(machine)
    shards = tuple(
        placer.Shard(table.name, (0, table.rows, 1), (0, table.dim), (gpu.id,), "hbm", "device")
        for table, gpu in zip(tables, itertools.cycle(topology.gpus), strict=False)
    )
    return placer.Plan(tables, topology, shards, provenance=Provenance(profile=workload))


def test_verify(few_tables: Workbench) -> None:
    assert "is sound: " in succeed("verify", few_tables.plan).stdout
    as_json = succeed("verify", few_tables.plan, "--format", "json").stdout
    assert json.loads(as_json) == {"sound": True, "violations": []}
    assert succeed("verify", few_tables.plan, "--format", "csv").stdout == "rule,where,message\n"


def test_topology(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    result = succeed("topology", "2xt4", "--hbm", "8GiB", "-o", file, "--format", "json")
    assert result.stderr == f"topology written to {file}\n"
    devices = json.loads(result.stdout)["devices"]
    (first,) = (device for device in devices if device["device"] == "gpu:0")
    assert first["memory_bytes"] == 8 << 30
    again = json_of("topology", file)
    assert again["devices"] == devices
    assert "gpu:1" in succeed("topology", "2xt4").stdout
    with_drive = succeed("topology", file, "--ssd", "2TiB", "--format", "json").stdout
    (drive,) = json.loads(with_drive)["drives"]
    assert (drive["host"], drive["memory_bytes"]) == ("host:0", 2 * 2**40)
    assert "drives" not in again
    rows = rows_of(succeed("topology", "2xt4", "--format", "csv").stdout)
    names = [row["device"] for row in rows if row["section"] == "devices"]
    assert names == ["gpu:0", "gpu:1", "host:0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "-o", "x"), "give either --profile or --workload"),
        (("report", "plan.json"), "Missing option '-o'"),
        (("plan", "--workload", "avazu", "--solver", "magic", "-o", "x"), "'magic' is not one of"),
        (("plan", "--workload", "avazu", "--batch-size", "0", "-o", "x"), "0 is not in the range"),
        (("compare", "--workload", "avazu", "--solvers", "magic"), "no solver is called 'magic'"),
        (("train", "--plan", "p", "--data", "d", "--resume"), "--resume needs --checkpoints"),
        (("train", "--data", "d"), "Missing option '--plan'"),
        (("profile", "-o", "x"), "Missing argument 'LOGS...'"),
        (("fly",), "No such command 'fly'"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in misuse(*arguments)


def test_one_name_for_the_format_of_results_and_one_for_that_of_logs() -> None:
    shown = {name: succeed(name, "--help").stdout for name in COMMANDS}
    for name, text in shown.items():
        assert "--data-format" not in text
        for line in re.findall(r"^ +--format .*$", text, re.MULTILINE):
            assert re.search(r"\[table\|json(\|csv)?\]", line), f"{name}: {line}"
    readers = ("demo", "pilot", "profile", "simulate", "train")
    assert [name for name in sorted(shown) if "--log-format" in shown[name]] == list(readers)
