"""Measuring plans, files of measurements, and what constants are made of them."""

import errno
import gzip
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibration_cases import SECONDS, calibration, dataset, first, saved
from cli_cases import fail, invoke, succeed
from fast_and_full import mostly_slow
from plan_cases import machine
from problem_cases import problem_of, zipf_table

from cost_models import Calibrated, Roofline, cost_model
from cost_models.calibrated import fit
from cost_models.calibrated.fit import amounts, calibrate, noise_of, observations
from cost_models.calibrated.model import TERMS, Calibration
from cost_models.report.measured import calibration_report
from placer.errors import DataError, PlacerError
from placer.measurement import (
    QUICK,
    Case,
    Dataset,
    Measured,
    Measurement,
    Measurer,
    Setting,
    collect,
    measure_plan,
    random_cases,
    repeated,
)
from placer.measurement.machine import LEAST_CASES, calibration_cases
from placer.plan.verify import violations
from solvers import solve

TIERED = Setting("tiered", pinned=False)


def small_case(**changes: object) -> Case:
    """Of one small table, in HBM."""
    case = next(random_cases(3, 1))
    table = replace(case.tables[0], rows=500, dim=8)
    shard = replace(case.shards[0], rows=(0, 500, 1), cols=(0, 8), memory="hbm", lookup="device",
                    table=table.name, cache_rows=0, staging_rows=0)  # fmt: skip
    return replace(case, tables=(table,), exponents=(0.7,), shards=(shard,), batch_size=32,
                   **changes)  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2])
def test_random_cases_are_sound_plans_that_files_keep(gpus: int) -> None:
    kinds = set()
    for case in random_cases(11, 12, plans=3, gpus=gpus):
        assert violations(case.plan()) == []
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert case.problem().pipeline == case.plan().pipeline == "serial"
        kinds |= {shard.lookup for shard in case.shards}
        known = {f"gpu:{number}" for number in range(gpus)}
        assert {device for shard in case.shards for device in shard.devices} <= known
    assert kinds == {"device", "staged", "uva", "host", "cached"}


def test_a_random_workload_is_the_same_however_many_are_asked_for() -> None:
    many = list(random_cases(5, 4, plans=2))
    assert list(random_cases(5, 2, plans=2, first=2)) == many[4:]
    assert many[0].tables == many[1].tables != many[2].tables
    assert many[0].shards != many[1].shards
    assert next(random_cases(6, 1)) != many[0]


@pytest.mark.parametrize(
    ("tiers", "gpus"), mostly_slow([(True, 1), (False, 1), (True, 2)], (False, 1))
)
def test_cases_to_calibrate_with_meet_every_constant_early(tiers: bool, gpus: int) -> None:
    cases = first(calibration_cases(Setting("tiered" if tiers else "numba", ranks=gpus)), 100)
    assert all(violations(case.plan()) == [] for case in cases[:80])
    met = sum(amounts(case, tiers=tiers).sum(0) for case in cases[:80]) > 0
    missing = {term for term, seen in zip(TERMS, met, strict=True) if not seen}
    of_tiers = {term for term in TERMS if term.partition(".")[0] in
                ("staged", "hit", "miss", "uva", "host", "cache_row", "arena_cached",
                 "arena_cached_lookup", "arena_pooled_lookup")}  # fmt: skip
    alone = set() if gpus > 1 else {"exchange_byte", "replicas"}
    assert missing == (set() if tiers else of_tiers) | alone
    assert sum(case.kind == "reference" for case in cases) >= 5


def test_a_gpu_is_given_more_to_do() -> None:
    """More lookups in larger tables, of cases that are otherwise the same."""
    load = Setting(device="cuda:0").load
    assert load > Setting().load == 1
    usual = list(itertools.islice(calibration_cases(TIERED), 30))
    of_gpu = calibration_cases(replace(TIERED, device="cuda:0"))
    for case, large in zip(usual, of_gpu, strict=False):
        each = [sum(t.lookups_per_sample for t in c.tables) for c in (case, large)]
        lookups = [case.batch_size * each[0], large.batch_size * each[1]]
        assert large.kind == case.kind
        assert lookups[1] == pytest.approx(load * lookups[0], rel=0.05)
        assert sum(t.rows for t in large.tables) > 4 * sum(t.rows for t in case.tables)
        assert not list(violations(large.plan()))


@pytest.mark.parametrize("backend", ["numba", "tiered"])
def test_steps_of_a_plan_are_timed(backend: str) -> None:
    case = small_case()
    found = measure_plan(case.plan(), case.profile, backend=backend, effort=QUICK)
    assert QUICK.least_steps <= len(found.wall_s) == len(found.cpu_s) <= QUICK.most_steps
    assert all(time > 0 for time in found.wall_s)
    assert min(found.wall_s) <= found.seconds() <= max(found.wall_s)


@pytest.mark.slow
def test_two_ranks_are_timed_together() -> None:
    case = next(random_cases(9, 1, gpus=2))
    small = replace(case, batch_size=8)
    with Measurer(Setting("numba", ranks=2, pinned=False)) as measurer:
        one = measurer.measure(small.plan(), small.profile, effort=QUICK)
        two = measurer.measure(small.plan(), small.profile, effort=QUICK)
    assert len(one.wall_s) == len(two.wall_s) == 2 * QUICK.least_steps


def test_noise_is_told() -> None:
    steady = Measured((1.0,) * 8, (0.99,) * 8)
    assert not steady.noisy
    assert Measured((1.0,) * 8, (0.5,) * 8).noisy
    assert Measured((1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0), (1.0,) * 8).noisy
    assert Measured((3.0, 1.0, 9.0), (1.0,) * 3).seconds() == 1.0


def test_the_least_number_of_cases_is_measured_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Measured((1.0,) * 8, (1.0,) * 8)
    monkeypatch.setattr(Measurer, "measure", lambda *_, **__: times)
    path, cases = tmp_path / "m.jsonl", [small_case(workload=f"w{n}") for n in range(5)]
    for _ in range(2):
        assert not collect(cases, path, TIERED, budget_s=-1, least=3)
        assert len(Dataset.load(path).measurements) == 3
    assert collect(cases, path, TIERED, budget_s=-1, least=9)


@pytest.mark.slow
def test_measurements_are_taken_up_where_they_ended(tmp_path: Path) -> None:
    path, cases = tmp_path / "m.jsonl", [small_case(workload=f"w{n}") for n in range(3)]
    told: list[int] = []
    stop_after_two = lambda: len(told) >= 2  # noqa: E731
    assert not collect(cases, path, TIERED, effort=QUICK, on_case=told.append, stop=stop_after_two)
    assert told == [1, 2]
    with path.open("a") as file:
        file.write('{"case": {"half')
    assert len(Dataset.load(path).measurements) == 2
    assert collect(cases, path, TIERED, effort=QUICK, on_case=told.append, repeats=2)
    assert told == [1, 2, 3, 4, 5, 6]
    loaded = Dataset.load(path)
    assert loaded.setting == TIERED
    found = [(m.case.workload, m.repeat) for m in loaded.measurements]
    assert found == [(case.workload, repeat) for repeat in range(2) for case in cases]
    assert [len(times) for _, times in repeated(loaded.measurements)] == [2, 2, 2]
    assert collect(cases, path, TIERED, budget_s=0, repeats=2)


def test_a_file_of_measurements_begins_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that cannot write its first line leaves nothing that the next run would refuse."""
    path = tmp_path / "m.jsonl"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PlacerError, match=f"cannot write {path}: No space left"):
            collect([], path, TIERED)
    assert [*tmp_path.iterdir()] == []
    assert collect([], path, TIERED)
    assert Dataset.load(path).setting == TIERED


def test_measurements_of_another_setting_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    collect([], path, TIERED)
    with pytest.raises(DataError, match="write to another file"):
        collect([], path, replace(TIERED, backend="numba"))


def test_measurements_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    collect([], path, TIERED)
    before = path.read_text()
    path.write_text(before + '{"case": ')  # An interrupted run wrote no more of a line.
    collect([], path, TIERED)
    assert path.read_text() == before
    header = json.loads(before)
    header["machine"]["cores"] += 1
    path.write_text(json.dumps(header) + "\n")
    before = path.read_text()
    assert collect([], path, TIERED)  # It is read, and nothing is added.
    with pytest.raises(DataError, match=r"another machine: cores was \d+ and is \d+ here"):
        collect([small_case()], path, TIERED)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no file of measurements: .*; name another file, or begin again with --fresh"),
        ('{"format": "other", "version": 1}\n', "'other' of version 1"),
        ('{"format": "placer-measurements", "version": 2}\n', "of version 2"),
    ],
)
def test_other_files_are_no_measurements(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        Dataset.load(path)
    with pytest.raises(DataError, match="cannot read"):
        Dataset.load(tmp_path / "none")


def test_compressed_measurements_are_read_but_not_gone_on_with(tmp_path: Path) -> None:
    path, packed = tmp_path / "m.jsonl", tmp_path / "m.jsonl.gz"
    collect([small_case()], path, TIERED, effort=QUICK)
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert Dataset.load(packed) == Dataset.load(path)
    with pytest.raises(DataError, match="gunzip it"):
        collect([small_case()], packed, TIERED, effort=QUICK)
    for damaged in (b"no gzip", packed.read_bytes()[:-20], packed.read_bytes()[:30] + b"\0" * 30):
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read"):
            Dataset.load(packed)
        packed.write_bytes(gzip.compress(path.read_bytes()))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    collect([], path, TIERED)
    with path.open("a") as file:
        file.write('{"case": {}}\n')
    with pytest.raises(DataError, match="line 2"):
        Dataset.load(path)


def test_constants_are_found_again() -> None:
    """From times that follow them exactly: all that the cases can tell apart."""
    cases = first(calibration_cases(TIERED), 130)
    found = calibrate(dataset(cases, TIERED))
    assert found.relative_error < 1e-3
    assert not found.noisy
    assert "exchange_byte" not in found.constants
    for term, constant in found.constants.items():
        assert constant.low_s <= constant.value_s * (1 + 1e-6)
        assert constant.value_s <= constant.high_s * (1 + 1e-6)
        assert constant.value_s == pytest.approx(SECONDS[term], rel=0.05), term


@pytest.mark.slow
def test_what_exchanges_take_is_found_again() -> None:
    """Of two GPUs the slower one's work counts, and which that is follows from the constants."""
    setting = Setting("numba", ranks=2)
    found = calibrate(dataset(first(calibration_cases(setting), 100), setting))
    assert found.relative_error < 0.02
    for term in ("exchange_byte", "replicas"):
        assert found.constants[term].value_s == pytest.approx(SECONDS[term], rel=0.05)


@pytest.mark.slow
def test_predictions_of_new_plans_are_as_good_as_the_measurements() -> None:
    cases = first(calibration_cases(TIERED), 100)
    measured = dataset(cases, TIERED, noise=0.1)
    model = Calibrated(calibrate(measured))
    unseen = list(random_cases(77, 30))
    errors = []
    for case, measurement in zip(unseen, dataset(unseen, TIERED).measurements, strict=True):
        predicted = model.evaluate(case.problem(), case.plan()).step_time_s
        errors.append(abs(predicted / measurement.measured.seconds() - 1))
    assert np.mean(errors) < 0.1
    assert 0 < model.calibration.relative_error < 0.2
    held_out = fit._held_out_errors(observations(measured, "wall"))
    assert np.median(held_out) != pytest.approx(held_out.mean(), rel=0.01)
    assert model.calibration.relative_error == pytest.approx(np.median(held_out), abs=1e-4)


def test_the_model_says_what_was_fitted() -> None:
    """`evaluate` and the rows of the fit are two ways to the same sum."""
    model = Calibrated(calibration())
    constants = np.array([SECONDS[term] for term in TERMS])
    for gpus in (1, 2):
        for case in random_cases(4, 8, plans=2, gpus=gpus):
            report = model.evaluate(case.problem(), case.plan())
            expected = amounts(case, tiers=True) @ constants - SECONDS["step"]
            assert [gpu.total_s for gpu in report.gpus] == pytest.approx(expected.tolist())
            assert gpus > 1 or report.step_time_s == pytest.approx(expected[0] + SECONDS["step"])


def test_rows_on_the_host_take_time_of_the_link() -> None:
    case = next(random_cases(4, 1))
    costs = Calibrated(calibration()).unit_costs(case.problem(), 0, 0)
    assert costs.uva.hbm == costs.staged.hbm == costs.device.hbm
    assert costs.uva.link.lookup_s == SECONDS["uva.lookup"]
    assert costs.uva.link.row_byte_s == SECONDS["uva.row_byte"]
    assert costs.staged.link.row_s == SECONDS["staged.row"]
    assert costs.miss.link.row_s == SECONDS["miss.row"]


def test_without_exchanges_in_the_measurements_the_links_of_the_topology_count() -> None:
    known = calibration()
    others = {t: c for t, c in known.constants.items() if t != "exchange_byte"}
    without = replace(known, constants=others)
    for case in random_cases(4, 6, plans=2, gpus=2):
        problem, plan = case.problem(), case.plan()
        byte_s = problem.topology.exchange_s("gpu:0", 1.0)
        of_links = Calibrated(without).evaluate(problem, plan).gpus
        measured = Calibrated(known).evaluate(problem, plan).gpus
        for one, two in zip(of_links, measured, strict=True):
            expected = two.communication_s * byte_s / (SECONDS["exchange_byte"] / 2)
            assert one.communication_s == pytest.approx(expected)


def test_where_tiers_are_one_memory_every_lookup_costs_the_same() -> None:
    setting = Setting("numba", pinned=False)
    cases = first(calibration_cases(Setting("numba")), 60)
    flat = {**SECONDS, **{t: 0.0 for t in TERMS if t.startswith(("staged", "host", "uva"))}}
    found = calibrate(dataset(cases, setting, seconds=flat))
    assert not found.tiers
    model = Calibrated(found)
    case = next(random_cases(21, 1))
    problem, plan = case.problem(), case.plan()
    home = {"memory": "hbm", "lookup": "device", "cache_rows": 0, "staging_rows": 0}
    in_hbm = replace(plan, shards=tuple(replace(shard, **home) for shard in plan.shards))
    here, there = (model.evaluate(problem, p).step_time_s for p in (plan, in_hbm))
    assert here == pytest.approx(there)


@pytest.mark.slow
def test_outliers_move_constants_little() -> None:
    cases = first(calibration_cases(TIERED), 120)
    clean = dataset(cases, TIERED)
    slow = tuple(
        replace(m, measured=Measured(*(tuple(4 * t for t in times)
                                       for times in (m.measured.wall_s, m.measured.cpu_s))))
        if number % 12 == 0 else m
        for number, m in enumerate(clean.measurements)
    )  # fmt: skip
    found = calibrate(replace(clean, measurements=slow))
    assert found.constants["lookup"].value_s == pytest.approx(SECONDS["lookup"], rel=0.02)
    assert all(one.low_s <= one.value_s <= one.high_s for one in found.constants.values())


def with_wall_times(data: Dataset, times: Iterable[tuple[float, ...]]) -> Dataset:
    changed = (
        replace(m, measured=replace(m.measured, wall_s=wall_s))
        for m, wall_s in zip(data.measurements, times, strict=True)
    )
    return replace(data, measurements=tuple(changed))


def test_an_unsteady_machine_is_told() -> None:
    cases = first(calibration_cases(TIERED), 45)
    data = dataset(cases, TIERED)

    def slower(m: Measurement, factor: float) -> Measurement:
        times = tuple(t * factor for t in m.measured.wall_s)
        return replace(m, measured=Measured(times, times))

    slowing = tuple(slower(m, 1 + 0.01 * n) for n, m in enumerate(data.measurements))
    drifted = replace(data, measurements=slowing)
    assert noise_of(data).drift == 0
    assert noise_of(drifted).drift > 0.15
    assert calibrate(drifted).noisy
    twice = (tuple(2 * t for t in m.measured.wall_s) for m in data.measurements)
    data = with_wall_times(data, twice)
    assert noise_of(data).wait == pytest.approx(1)
    (*_, warning) = calibration_report(calibrate(data)).headline
    assert warning.startswith("THE MACHINE WAS TOO NOISY")
    assert warning.endswith("running, or with --clock cpu")
    # Waiting is no part of processor time.
    assert "NOISY" not in " ".join(calibration_report(calibrate(data, "cpu")).headline)
    (*_, warning) = calibration_report(calibrate(drifted, "cpu")).headline
    assert warning.endswith("nothing else running")
    unsteady = with_wall_times(data, [(1e-3, 5e-3, 9e-3)] * len(data.measurements))
    by_wall, by_cpu = (noise_of(unsteady, clock) for clock in ("wall", "cpu"))
    assert by_wall.spread > 0.15 > by_cpu.spread
    assert noise_of(replace(data, setting=replace(data.setting, ranks=2))).wait == 0


def test_too_few_cases_are_refused() -> None:
    few = dataset(first(calibration_cases(TIERED), LEAST_CASES - 1), TIERED)
    with pytest.raises(PlacerError, match="run the command again, with a larger budget"):
        calibrate(few)
    assert len(observations(few)) == LEAST_CASES - 1


def test_constants_are_kept_in_a_file(tmp_path: Path) -> None:
    made = replace(calibration(), noisy=True)
    made.save(tmp_path / "m.json")
    assert Calibration.load(tmp_path / "m.json") == made
    assert made.seconds("row_byte.adam") == SECONDS["row_byte.adam"]
    fewer = replace(made, constants={t: c for t, c in made.constants.items() if "adam" not in t})
    assert fewer.seconds("row_byte.adam") == SECONDS["row_byte.adagrad"]
    assert fewer.seconds("cache_row") == SECONDS["cache_row"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "x"}, "'x' of version 2"),
        ({"version": 9}, "of version 9"),
        ({"constants": {"magic": {"value_s": 1, "low_s": 1, "high_s": 1}}}, "magic"),
        ({"constants": {"shard": {"value_s": -1, "low_s": 1, "high_s": 1}}}, "shard"),
        ({"constants": {"shard": {"value_s": float("nan"), "low_s": 1, "high_s": 1}}}, "NaN"),
        ({"constants": {"shard": {"value_s": 1, "low_s": -1, "high_s": 1}}}, "shard"),
        ({"p90_error": "1"}, "damaged"),
        ({"p90_error": -1.0}, "errors or noise are negative"),
        ({"relative_error": 0.25}, "was altered since it was written"),
        ({"constants": {"shard": 3}}, "damaged"),
        ({"surplus": 1}, "damaged"),
        ({"noisi": True}, r"no field 'noisi'; did you mean noisy\?"),
        ({"constants": {"lokup": {"value_s": 1, "low_s": 1, "high_s": 1}}}, "did you mean lookup"),
    ],
)
def test_damaged_constants_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "m.json"
    calibration().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PlacerError, match=words):
        Calibration.load(path)


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(PlacerError, match=r"m\.json: No such file or directory; make one with"):
        Calibration.load(path)
    for text in ('{"schema_version": 1}', "[1]", "3"):
        path.write_text(text)
        with pytest.raises(PlacerError, match=r"m\.json is no calibration; make one with"):
            Calibration.load(path)


def test_a_calibration_without_a_hash_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    calibration().save(path)
    document = json.loads(path.read_text())
    assert len(document.pop("sha256")) == 64
    path.write_text(json.dumps(document | {"relative_error": 0.25}))
    assert Calibration.load(path).relative_error == 0.25


def test_a_calibrated_model_is_named_by_its_file(tmp_path: Path) -> None:
    name = saved(tmp_path / "m.json")
    model = cost_model(name)
    assert model.name == name
    with pytest.raises(PlacerError, match="calibrate"):
        cost_model(f"calibrated:{tmp_path / 'none.json'}")
    with pytest.raises(PlacerError, match="calibrated:FILE"):
        cost_model("calibrated:")


def test_reports_say_how_sure_a_calibrated_time_is() -> None:
    case = next(random_cases(4, 1))
    report = Calibrated(calibration()).evaluate(case.problem(), case.plan())
    assert report.relative_error == 0.12
    # Nobody has published what emulated GPUs do.
    assert Roofline().evaluate(case.problem(), case.plan()).relative_error is None
    # An error that was found on a CPU is none of a GPU's plan.
    gpu = problem_of(zipf_table("t", 1000), topology=machine(1))
    plan = solve(gpu, solver="greedy-size").plan
    for device, error in (("cpu", None), ("cuda:0", 0.12)):
        model = Calibrated(replace(calibration(), setting={"device": device}))
        assert model.evaluate(case.problem(), case.plan()).relative_error == 0.12
        assert model.evaluate(gpu, plan).relative_error == error


@pytest.mark.slow
def test_calibrate_measures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On so few cases and steps that nothing but the way through is tested."""
    monkeypatch.chdir(tmp_path)
    cases = [small_case(workload=f"w{n}", kind="random") for n in range(LEAST_CASES)]
    monkeypatch.setattr("placer.measurement.machine.calibration_cases", lambda _: cases)
    monkeypatch.setattr("placer.measurement.machine.Effort", lambda: QUICK)
    options = ("--backend", "tiered", "--clock", "cpu", "-o", "machine.json")
    # However short the time, there are constants.
    shown = succeed("calibrate", "--budget", "0s", "--format", "json", *options)
    facts = json.loads(shown.stdout)
    assert facts["cases"] == LEAST_CASES
    assert "machine.measurements.jsonl" in shown.stderr
    before = Path("machine.measurements.jsonl").read_text()
    succeed("calibrate", "--budget", "0s", *options)
    assert Path("machine.measurements.jsonl").read_text() == before
    made = Calibration.load("machine.json")
    assert made.noisy == facts["noisy"]
    assert made.setting["backend"] == "tiered"
    succeed("calibrate", "--fresh", "--budget", "0s", *options)
    after = Path("machine.measurements.jsonl").read_text()
    assert len(after.splitlines()) == len(before.splitlines())
    assert after != before
    assert invoke("calibrate", "--budget", "soon", *options).exit_code == 2


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    command = ("calibrate", "-o", tmp_path / "machine.json")
    assert "device 'abacus' cannot be used here" in fail(*command, "--device", "abacus")
    threads = fail(*command, "--ranks", "40", "--threads", "40")
    assert "40 ranks of 40 threads are not from 1 to 1024 threads together" in threads
    assert not list(tmp_path.iterdir())


def test_a_model_keeps_no_costs_of_another_problem() -> None:
    tables = [zipf_table("t", 1000, optimizer=name) for name in ("rowwise_adagrad", "adam")]
    one, other = (problem_of(table, topology=machine(1)) for table in tables)
    model = Calibrated(calibration())
    before, after = (model.unit_costs(problem, 0, 0) for problem in (one, other))
    assert before != after == Calibrated(calibration()).unit_costs(other, 0, 0)
