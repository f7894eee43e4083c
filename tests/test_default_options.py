"""Options of `placer.toml` and of the environment, and what `-q` and `-v` print."""

import json
from pathlib import Path

import pytest
from cli_cases import fail, invoke, succeed
from click.shell_completion import ShellComplete

from cli import main
from placer.workloads import named_workload

MACHINE = ("topology", "--format", "json")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_gives_options_to_all_commands_and_to_one(in_folder: Path) -> None:
    (in_folder / "placer.toml").write_text(
        'hbm = "8GiB"\nsolver = "greedy-size"\n[topology]\nhbm = "4GiB"\nformat = "json"\n'
    )
    assert f'"memory_bytes": {4 << 30}' in succeed("topology", "8xh100").stdout
    made = succeed("plan", "--workload", "criteo-kaggle", "--topology", "2xh100", "-o", "p.json")
    assert "greedy-size" in made.stdout


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "placer.toml").write_text('[topology]\nhbm = "4GiB"\n')
    monkeypatch.setenv("PLACER_TOPOLOGY_HBM", "3GiB")
    assert f'"memory_bytes": {3 << 30}' in succeed(*MACHINE, "8xh100").stdout
    assert f'"memory_bytes": {2 << 30}' in succeed(*MACHINE, "8xh100", "--hbm", "2GiB").stdout


def test_tables_on_the_command_line_replace_those_of_the_file(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_workload("random-2@1").save(in_folder / "profile")
    (in_folder / "placer.toml").write_text('workload = "random-3@1"\n')
    plan = ("plan", "--topology", "2xh100", "--solver", "greedy-size", "--format", "json")

    def tables(*arguments: str) -> int:
        return len(json.loads(succeed(*plan, *arguments).stdout)["tables"])

    assert tables() == 3
    assert tables("--profile", "profile") == 2
    printed = succeed(*plan, "--profile", "profile", "--print-config").stdout
    assert "# workload =" in printed
    monkeypatch.setenv("PLACER_PLAN_PROFILE", "profile")
    assert tables() == 2
    assert tables("--workload", "random-1@1") == 1
    misused = invoke(*plan, "--workload", "random-1@1", "--profile", "profile")
    assert "either --profile or --workload" in misused.stderr


def test_an_empty_value_of_yaml_is_not_given(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CONFIG", "some.yaml")
    (in_folder / "some.yaml").write_text("hbm: 1GiB\ntopology: {hbm: ~, output: null}\n")
    printed = succeed("topology", "8xh100", "--print-config").stdout
    assert "# hbm =" in printed
    assert "# output =" in printed


def test_a_byte_order_mark_is_no_part_of_the_file(in_folder: Path) -> None:
    (in_folder / "placer.toml").write_bytes(b'\xef\xbb\xbfhbm = "2GiB"\r\n')
    assert f'"memory_bytes": {2 << 30}' in succeed(*MACHINE, "8xh100").stdout


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hbbm = 1", "no command has an option --hbbm"),
        ("[plann]", "[plann] is no command; did you mean plan?"),
        ("[plan]\nprofil = 1", "placer plan has no option --profil"),
        ("[plan]\ntime-limit = {a = 1}", "must be one value"),
        ("hbm = ", "is not a defaults file"),
    ],
)
def test_a_wrong_file_is_refused(in_folder: Path, text: str, named: str) -> None:
    (in_folder / "placer.toml").write_text(text)
    assert named in fail(*MACHINE, "8xh100")


def test_a_file_that_is_named_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACER_CONFIG", "elsewhere.toml")
    assert "elsewhere.toml" in fail(*MACHINE, "8xh100")


def test_quiet_leaves_notes_out_and_errors_in() -> None:
    arguments = ("topology", "8xh100", "-o", "machine.yaml")
    assert "written" in succeed(*arguments).stderr
    assert succeed("-q", *arguments).stderr == ""
    assert "9xh100" in invoke("-q", "topology", "9xh100").stderr


def test_quiet_leaves_warnings_out(in_folder: Path) -> None:
    days = [in_folder / f"{day}.csv" for day in range(2)]
    days[0].write_text("label,user\n0,a\n1,b\n")
    days[1].write_text("label,user\n0,a\n1,c\n")
    succeed("profile", days[0], "-o", "first")
    succeed("-q", "profile", days[1], "--like", "first", "-o", "later")
    plan = ("plan", "--profile", "later", "--topology", "1xh100", "--solver", "greedy-size")
    assert "lookups of ids that the vocabularies lack" in succeed(*plan).stderr
    assert succeed(*plan, "-q").stderr == ""


def test_verbose_says_where_options_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACER_TOPOLOGY_DRAM", "64GiB")
    said = succeed("-v", *MACHINE, "8xh100", "--hbm", "2GiB").stderr
    assert "dram = 64GiB (of the environment)" in said
    assert "hbm = 2GiB (given)" in said
    assert " s, placer " in said


@pytest.mark.parametrize(
    ("text", "named"), [("0s", "not more than 0 seconds"), ("2 weeks", "not a duration")]
)
def test_durations_have_units(text: str, named: str) -> None:
    plan = ("plan", "--workload", "criteo-kaggle", "--topology", "2xh100", "-o", "p.json")
    assert named in invoke(*plan, "--time-limit", text).stderr
    succeed(*plan, "--solver", "greedy-size", "--time-limit", "0.5min")


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("--workload criteo-k", ["criteo-kaggle"]),
        ("--topology 8xh1", ["8xh100"]),
        ("--solver greedy-d", ["greedy-dim"]),
    ],
)
def test_a_shell_completes_values(typed: str, suggested: list[str]) -> None:
    option, begun = typed.split()
    complete = ShellComplete(main, {}, "placer", "_PLACER_COMPLETE")
    items = complete.get_completions(["plan", option], begun)
    assert [item.value for item in items] == suggested
