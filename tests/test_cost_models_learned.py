"""The learned cost model: contract, training, files, uncertainty, and use by solvers."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibration_cases import SECONDS, calibration
from click.testing import CliRunner
from fast_and_full import mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from problem_cases import problem_of, problems, zipf_table
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from test_cost_models import CostModelContract, examples

from cli import main
from cost_models import Calibrated, CostModel, Roofline, cost_model
from cost_models.learned import Learned, learn
from cost_models.learned import shipped as shipped_models
from cost_models.learned.features import FREE_FEATURES, MONOTONE_FEATURES, features
from cost_models.learned.file import LearnedFile
from cost_models.learned.fit import examples as examples_of
from cost_models.learned.network import BOUND, NOT_NEGATIVE, Networks, shapes
from cost_models.learned.parts import PARTS, contributions, fixed_times, parts_of
from cost_models.learned.shipped import shipped_name
from cost_models.learned.training import Example, Fit, train
from cost_models.step_equation.arena_loads import arena_loads, arena_times
from cost_models.step_equation.contention import contended
from cost_models.step_equation.unit_costs import (
    READ_KINDS,
    Rates,
    ReadCosts,
    UnitCosts,
    as_array,
    from_array,
)
from placer import Problem
from placer.errors import DataError, PlacerError
from placer.measurement import Case, Measured, Setting, random_cases
from placer.measurement.dataset import FORMAT, VERSION, Dataset, Measurement, machine
from placer.measurement.times import resolved
from placer.plan.verify import violations
from solvers import solve
from solvers.model.instance import Instance

FREE, MONOTONE = len(FREE_FEATURES), len(MONOTONE_FEATURES)
LOG2_DIM = FREE_FEATURES.index("log2_dim")
UNIQUE = MONOTONE_FEATURES.index("unique_per_lookup")


def random_networks(seed: int, members: int = 3) -> Networks:
    """Networks that say something of every feature, as no training made them."""
    rng = np.random.default_rng(seed)
    found = {name: rng.normal(size=size) for name, size in shapes(members, len(PARTS)).items()}
    found |= {name: np.abs(found[name]) for name in (*NOT_NEGATIVE, "scale")}
    found["scale"] += 1.0
    found["high"] = found["low"] + 1.0
    return Networks(**{name: values.astype(np.float32) for name, values in found.items()})


def no_change(members: int = 2) -> Networks:
    """Networks whose factors are all 1."""
    found = {name: np.zeros(size) for name, size in shapes(members, len(PARTS)).items()}
    found["scale"] += 1.0
    return Networks(**{name: values.astype(np.float32) for name, values in found.items()})


CALIBRATION = replace(calibration(), setting={"backend": "torch"})


def learned(networks: Networks, residual: float = 0.1) -> Learned:
    return Learned(LearnedFile(networks, CALIBRATION, residual, residual))


@pytest.fixture(scope="module")
def at_random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learned") / "random.safetensors"
    LearnedFile(random_networks(1), CALIBRATION, 0.1, 0.1).save(path)
    return path


class TestLearned(CostModelContract):
    """With networks at random: the contract must not hang on what training finds."""

    upkeep_s = SECONDS["cache_row"] * float(np.exp(random_networks(1).level.max() + BOUND))

    @pytest.fixture(autouse=True)
    def _file(self, at_random: Path) -> None:
        type(self).name = f"learned:{at_random}"


def test_without_factors_it_is_what_it_started_from() -> None:
    case = next(random_cases(1, 1))
    problem, plan = case.problem(), case.plan()
    model, base = learned(no_change()), Calibrated(CALIBRATION)
    found, expected = model.evaluate(problem, plan), base.evaluate(problem, plan)
    for one, two in zip(found.gpus, expected.gpus, strict=True):
        assert one.total_s == pytest.approx(two.total_s, rel=1e-12)
    assert model.sharding_overhead_s(problem) == pytest.approx(base.sharding_overhead_s(problem))


# Parts of unit costs


rates = st.builds(Rates, *(st.floats(0, 1e-6) for _ in Rates._fields))


@st.composite
def unit_costs(draw: st.DrawFn) -> UnitCosts:
    """Any that a calibration may find: cold rows cost what hot ones do and more."""
    device = ReadCosts(draw(rates), draw(rates))
    hit = ReadCosts(device.hbm + draw(rates), device.link)
    staged, uva = (ReadCosts(device.hbm, device.link + draw(rates), draw(rates)) for _ in "ab")
    miss = ReadCosts(hit.hbm, hit.link + draw(rates), draw(rates))
    host = ReadCosts(draw(rates), draw(rates), draw(rates))
    others = [draw(st.floats(0, 1e-6)) for _ in UnitCosts._fields[len(READ_KINDS) :]]
    return UnitCosts(device, staged, uva, host, hit, miss, *others)


@given(unit_costs())
@examples(50)
def test_unit_costs_are_the_sum_of_their_parts(costs: UnitCosts) -> None:
    parts = parts_of(costs)
    assert (parts >= 0).all()
    np.testing.assert_allclose(parts.sum(axis=0), as_array(costs), rtol=1e-12, atol=1e-20)
    assert from_array(as_array(costs)) == costs


@given(unit_costs(), st.lists(st.floats(0.01, 100), min_size=len(PARTS), max_size=len(PARTS)))
@examples(50)
def test_cold_rows_are_never_cheaper_than_hot_ones(costs: UnitCosts, factors: list[float]) -> None:
    changed = from_array(np.array(factors) @ parts_of(costs))

    def together(kind: str) -> np.ndarray:
        read = changed.read(kind)  # type: ignore[arg-type]
        both = read.hbm + read.link
        return np.array([getattr(both, name) for name in Rates._fields])

    slack = 1 + 1e-12
    for kind, floor in (
        ("staged", "device"),
        ("uva", "device"),
        ("hit", "device"),
        ("miss", "hit"),
    ):
        assert (together(kind) * slack >= together(floor)).all()


@pytest.mark.parametrize("gpus", [1, 3])
def test_contributions_add_up_to_the_plan(gpus: int) -> None:
    for case in random_cases(3, 6, gpus=gpus):
        slowed = Calibrated(replace(CALIBRATION, contention=0.3))
        for base in (Roofline(), Calibrated(CALIBRATION), slowed):
            problem, plan = case.problem(), case.plan()
            report = base.evaluate(problem, plan)
            seconds = contributions(base, problem, plan).sum(axis=(1, 2))
            # Arenas are of no table.
            arenas_s = arena_times(base, problem, arena_loads(problem, plan)).sum(axis=0)
            arenas_s = contended(arenas_s, problem.topology, base.contention)
            expected = [
                gpu.total_s - arena_s for gpu, arena_s in zip(report.gpus, arenas_s, strict=True)
            ] + [host.dram_s for host in report.hosts]
            np.testing.assert_allclose(seconds, expected, rtol=1e-9)
            fixed_s = fixed_times(base, problem, plan)
            whole_s = float((seconds + fixed_s).max())
            assert gpus > 1 or whole_s == pytest.approx(report.step_time_s)


# Features and networks


@given(problems())
@examples(40)
def test_features_are_finite_whatever_the_tables(problem: Problem) -> None:
    free, monotone = features(problem)
    assert free.shape == (len(problem.profile), FREE)
    assert monotone.shape == (len(problem.profile), MONOTONE)
    assert np.isfinite(free).all()
    assert np.isfinite(monotone).all()


def test_monotone_features_fall_with_skew_and_others_stay() -> None:
    found = [
        features(problem_of(zipf_table("t", 50_000, lookups=20, exponent=exponent)))
        for exponent in (0.0, 0.5, 1.0, 1.5)
    ]
    for (free, monotone), (same, hotter) in pairwise(found):
        np.testing.assert_array_equal(free, same)
        assert (hotter <= monotone).all()
        assert (hotter < monotone).any()


@given(st.integers(0, 20), st.data())
@examples(60)
def test_factors_never_fall_when_a_monotone_feature_rises(seed: int, data: st.DataObject) -> None:
    networks, rng = random_networks(seed), np.random.default_rng(seed)
    free, monotone = rng.normal(size=(4, FREE)) * 3, rng.normal(size=(4, MONOTONE)) * 3
    raised = monotone.copy()
    raised[:, data.draw(st.integers(0, MONOTONE - 1))] += data.draw(st.floats(0, 5))
    assert (networks.log_factors(free, raised) >= networks.log_factors(free, monotone)).all()


def test_features_move_factors_within_bounds() -> None:
    networks, rng = random_networks(5), np.random.default_rng(5)
    far = networks.log_factors(1e6 * rng.normal(size=(9, FREE)), rng.normal(size=(9, MONOTONE)))
    moved = np.abs(far - networks.level[:, None, :])
    assert moved.max() <= BOUND * (1 + 1e-6)


def test_a_batch_of_tables_has_the_factors_of_each() -> None:
    networks, rng = random_networks(2), np.random.default_rng(2)
    free, monotone = rng.normal(size=(7, FREE)), rng.normal(size=(7, MONOTONE))
    together = networks.log_factors(free, monotone)
    for table in range(7):
        one = networks.log_factors(free[[table]], monotone[[table]])
        np.testing.assert_allclose(together[:, [table]], one, rtol=1e-12, atol=1e-12)


# Training


def true_factors(free: np.ndarray, monotone: np.ndarray) -> np.ndarray:
    """What the machine of these tests makes of unit costs, table by table."""
    factors = np.ones((len(free), len(PARTS)))
    factors[:, PARTS.index("lookup")] = 0.6 + 2.0 * monotone[:, UNIQUE]
    factors[:, PARTS.index("row")] = np.exp(0.3 * (5 - free[:, LOG2_DIM]))
    factors[:, PARTS.index("staged_row")] = 2.0
    factors[:, PARTS.index("shard")] = 8.0
    return factors


def example(case: Case) -> Example:
    problem, plan, base = case.problem(), case.plan(), Calibrated(CALIBRATION)
    free, monotone = features(problem)
    parts_s, fixed_s = contributions(base, problem, plan), fixed_times(base, problem, plan)
    of_tables_s = (parts_s * true_factors(free, monotone)).sum(axis=(1, 2))
    step_s = float((of_tables_s + fixed_s).max())
    return Example(case.workload, free, monotone, parts_s, fixed_s, step_s)


@pytest.fixture(scope="module")
def fit() -> Fit:
    return train([example(case) for case in random_cases(11, 50)], epochs=250)


@pytest.fixture
def model(fit: Fit) -> Learned:
    return learned(fit.networks, float(np.std(fit.log_errors)))


@pytest.fixture(scope="module")
def unseen() -> list[tuple[Case, float]]:
    return [(case, example(case).step_s) for case in random_cases(12, 25)]


def errors(model: CostModel, cases: list[tuple[Case, float]]) -> np.ndarray:
    found = [model.evaluate(case.problem(), case.plan()).step_time_s for case, _ in cases]
    return np.abs(np.array(found) / np.array([step_s for _, step_s in cases]) - 1)


def test_it_learns_unit_costs_that_depend_on_the_table(
    model: Learned, unseen: list[tuple[Case, float]]
) -> None:
    learned, base = errors(model, unseen), errors(Calibrated(CALIBRATION), unseen)
    assert learned.mean() < 0.1
    assert learned.mean() < base.mean() / 2


def test_held_out_errors_tell_errors_on_unseen_workloads(
    fit: Fit, model: Learned, unseen: list[tuple[Case, float]]
) -> None:
    said, true = np.abs(np.expm1(fit.log_errors)).mean(), errors(model, unseen).mean()
    assert true / 2 < said < true * 3
    before = errors(Calibrated(CALIBRATION), unseen).mean()
    assert np.abs(np.expm1(fit.base_log_errors)).mean() == pytest.approx(before, rel=0.5)


def test_training_starts_from_the_calibrated_costs() -> None:
    made = [example(case) for case in random_cases(13, 10)]
    networks = train(made, epochs=0).networks
    assert np.abs(networks.log_factors(made[0].free, made[0].monotone)).max() == 0


def test_training_keeps_plans_of_a_workload_together() -> None:
    """Else errors would be those of workloads that the member was fitted to."""
    made = [example(case) for case in random_cases(14, 10)]
    twice = [replace(one, step_s=one.step_s * by) for one in made for by in (1.0, 1.0)]
    found = train(twice, epochs=20)
    np.testing.assert_allclose(found.log_errors[0::2], found.log_errors[1::2])
    # No member is exact where it was not fitted, after a few epochs.
    assert np.abs(found.log_errors).min() > 1e-6


def test_training_says_what_it_lacks() -> None:
    made = [example(case) for case in random_cases(15, 10)]
    with pytest.raises(DataError, match="9 measured workloads are too few to learn from; measure"):
        train(made[:9])
    with pytest.raises(DataError, match=r"takes 0\.0 s; times must be positive"):
        train([*made, replace(made[0], step_s=0.0)])


# Uncertainty


def test_a_prediction_is_what_is_evaluated_give_or_take(
    model: Learned, unseen: list[tuple[Case, float]]
) -> None:
    beyond = []
    for case, step_s in unseen:
        problem, plan = case.problem(), case.plan()
        found = model.predict(problem, plan)
        assert found.mean_s == model.evaluate(problem, plan).step_time_s
        assert found.std_s > 0
        beyond.append(abs(found.mean_s - step_s) / found.std_s)
    assert np.median(beyond) < 1.5
    assert np.mean(np.array(beyond) < 3) > 0.85


def test_it_is_less_sure_of_tables_unlike_those_it_knows(
    model: Learned, unseen: list[tuple[Case, float]]
) -> None:
    """Of far wider tables, and of far larger batches."""

    def unsure(problem: Problem, case: Case) -> float:
        found = model.predict(problem, case.plan())
        return found.std_s / found.mean_s

    known = [unsure(case.problem(), case) for case, _ in unseen]
    case = unseen[0][0]
    larger = unsure(replace(case.problem(), batch_size=1 << 22), case)
    wide = problem_of(zipf_table("t0", 10_000, 8192, lookups=5), batch_size=256)
    instance = Instance(wide, model)
    plan = solve(wide, solver="greedy-cost", cost_model=model).plan
    assert plan is not None
    assert instance.tables == 1
    wider = model.predict(wide, plan)
    assert larger > 1.5 * max(known)
    assert wider.std_s / wider.mean_s > 1.5 * max(known)


# Solvers


@pytest.mark.parametrize(
    "solver", mostly_slow(["greedy-cost", "local-search", "auto"], "greedy-cost")
)
def test_solvers_use_it(model: Learned, solver: str) -> None:
    tables = [
        zipf_table(f"t{n}", 2_000 * (n + 1), 16 * (1 + n % 3), lookups=1 + n, exponent=0.9)
        for n in range(7)
    ]
    topology = next(random_cases(1, 1, gpus=3)).topology().with_memory(hbm=1 << 20)
    problem = problem_of(*tables, topology=topology, batch_size=128)
    result = solve(problem, solver=solver, cost_model=model, time_limit_s=2, seed=0)
    assert result.plan is not None
    assert violations(result.plan) == []
    assert result.step_time_s == model.evaluate(problem, result.plan).step_time_s
    assert result.bound_s is not None
    assert 0 < result.bound_s <= result.step_time_s * (1 + 1e-9)


# Files


def test_a_file_gives_the_same_model(tmp_path: Path, unseen: list[tuple[Case, float]]) -> None:
    path = tmp_path / "model.safetensors"
    before = LearnedFile(random_networks(3), CALIBRATION, 0.12, 0.08, {"plans": 7})
    before.save(path)
    after = cost_model(f"learned:{path}")
    assert isinstance(after, Learned)
    assert after.name == f"learned:{path}"
    assert after.relative_error == 0.08
    assert after.file.calibration == CALIBRATION
    assert after.file.facts == {"plans": 7}
    case = unseen[0][0]
    for ask in (Learned.predict, Learned.evaluate):
        assert ask(after, case.problem(), case.plan()) == ask(
            Learned(before, after.name), case.problem(), case.plan()
        )


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda about: about.pop(key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("format"), "is no learned cost model, or damaged"),
        (lambda about: about.update(version=99), "of version 99; this placer reads"),
        (lambda about: about.update(format="other"), "'other' of version 2"),
        (lambda about: about["features"].reverse(), "trained on other features"),
        (lambda about: about["parts"].pop(), "trained on other features"),
        (without("residual"), "is damaged: KeyError"),
        (lambda about: about.update(facts=3), "is damaged: TypeError"),
        (lambda about: about.update(calibration={}), "cannot read a calibration from"),
        (lambda about: about.update(residual=float("nan")), "its errors are no numbers"),
        (lambda about: about.update(residual=0.25), "was altered since it was written"),
    ],
)
def test_files_that_say_something_else_are_refused(
    at_random: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    content, path = at_random.read_bytes(), tmp_path / "changed.safetensors"
    size = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["placer"])
    change(about)
    path.write_bytes(save_arrays(load_arrays(content), metadata={"placer": json.dumps(about)}))
    with pytest.raises(PlacerError, match=words):
        Learned.load(path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("w1", None, "w1 is missing, not float32"),
        ("w2", np.zeros((1, 2), np.float32), r"w2 is float32 of shape \(1, 2\), not float32"),
        ("level", np.zeros((3, len(PARTS))), "level is float64"),
        ("w", np.float32(-1), "is damaged: w has values"),
        ("b1", np.float32(np.nan), "is damaged: b1 has values"),
        ("scale", np.float32(0), "scales of features must be positive"),
        ("b1", np.float32(0.5), "was altered since it was written"),
    ],
)
def test_files_with_other_numbers_are_refused(
    at_random: Path, tmp_path: Path, name: str, value: Any, words: str
) -> None:
    content, path = at_random.read_bytes(), tmp_path / "changed.safetensors"
    size = int.from_bytes(content[:8], "little")
    arrays = dict(load_arrays(content))
    if value is None:
        del arrays[name]
    elif np.ndim(value):
        arrays[name] = value
    else:
        arrays[name] = np.full_like(arrays[name], value)
    path.write_bytes(save_arrays(arrays, json.loads(content[8 : 8 + size])["__metadata__"]))
    with pytest.raises(PlacerError, match=words):
        Learned.load(path)


def test_files_that_are_none_are_refused(at_random: Path, tmp_path: Path) -> None:
    content, path = at_random.read_bytes(), tmp_path / "model.safetensors"
    with pytest.raises(PlacerError, match="cannot read the learned cost model"):
        Learned.load(path)
    for wrong in (b"", b"{}", content[:100], content[:-9], save_arrays({})):
        path.write_bytes(wrong)
        with pytest.raises(PlacerError, match="is no learned cost model, or damaged"):
            Learned.load(path)


def test_models_that_come_with_placer_are_found_by_name(
    at_random: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped_models, "FOLDER", tmp_path)
    with pytest.raises(PlacerError, match=r"no learned cost model for this machine .* none\. Make"):
        cost_model("learned")
    facts = {"machine": machine(), "setting": asdict(resolved(Setting()))}
    model = LearnedFile(random_networks(1), CALIBRATION, 0.1, 0.1, facts)
    other = replace(model, facts={**facts, "machine": {"cpu": "Abacus (TM) 1"}})
    assert shipped_name(other) == "abacus-tm-1-None-cores-numba"
    other.save(tmp_path / "abacus.safetensors")
    assert cost_model("learned:abacus").name == "learned:abacus"
    with pytest.raises(PlacerError, match="those that do: learned:abacus"):
        cost_model("learned")
    model.save(tmp_path / f"{shipped_name(model)}.safetensors")
    assert cost_model("learned").name == "learned"


# Data sets


def dataset_of(cases: Iterable[Case], **setting: Any) -> Dataset:
    """Cases, each measured twice, with the times of these tests' machine."""
    times = [(case, example(case).step_s) for case in cases]
    measured = [
        Measurement(case, Measured((by * step_s,) * 3, (step_s,) * 3), repeat)
        for case, step_s in times
        for repeat, by in enumerate((2.0, 3.0))
    ]
    return Dataset(Setting(**{"backend": "torch", **setting}), machine(), tuple(measured))


@pytest.mark.slow
def test_it_learns_from_files_of_measurements() -> None:
    one = dataset_of(random_cases(31, 7))
    two = dataset_of(random_cases(31, 3, first=7, gpus=2), ranks=2)
    wall, cpu = (examples_of([one, two], CALIBRATION, clock) for clock in ("wall", "cpu"))
    assert len(wall) == len(cpu) == 10
    for slow, fast in zip(wall, cpu, strict=True):
        assert slow.step_s == pytest.approx(2 * fast.step_s)  # The lesser of 2 and 3 times.
        np.testing.assert_array_equal(slow.parts_s, fast.parts_s)
    found = learn([one, two], CALIBRATION, clock="cpu")
    assert found.facts["plans"] == found.facts["workloads"] == 10
    assert found.relative_error == found.facts["held_out"]["mape"]
    assert found.relative_error < found.facts["calibrated"]["mape"]
    assert found.facts["setting"]["backend"] == "torch"


def test_it_learns_of_one_executor_alone() -> None:
    cases = list(random_cases(31, 2))
    with pytest.raises(DataError, match="backend 'torch', another data set with 'tiered'"):
        learn([dataset_of(cases), dataset_of(cases, backend="tiered")], CALIBRATION)
    tiered = replace(CALIBRATION, setting={"backend": "tiered"})
    with pytest.raises(DataError, match="'torch', the calibration with 'tiered'"):
        learn([dataset_of(cases)], tiered)
    with pytest.raises(DataError, match="no data set"):
        learn([], CALIBRATION)


@pytest.mark.slow
def test_the_command_trains_on_what_was_measured_before(tmp_path: Path) -> None:
    """All plans that it would measure are in its file already, so it measures none."""
    data = dataset_of(random_cases(5, 10, plans=2))
    setting = resolved(Setting("torch"))
    header = {"format": FORMAT, "version": VERSION, "setting": asdict(setting), "machine": {}}
    lines = [header] + [
        {
            "case": one.case.to_json(),
            "repeat": one.repeat,
            "seconds": 0.0,
            "wall_s": one.measured.wall_s,
            "cpu_s": one.measured.cpu_s,
        }
        for one in data.measurements
    ]
    measured, model = tmp_path / "model.measurements.jsonl", tmp_path / "model.safetensors"
    measured.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = measured.read_bytes()
    asked = ["calibrate", "--backend", "torch", "--clock", "cpu", "--format", "json"]
    run = CliRunner().invoke(
        main, [*asked, "--learn", "--seed", "5", "--workloads", "10", "-o", str(model)]
    )
    assert run.exit_code == 0, run.output
    assert measured.read_bytes() == before
    assert json.loads(run.stdout)["workloads"] == 10
    case = next(random_cases(6, 1))
    assert cost_model(f"learned:{model}").evaluate(case.problem(), case.plan()).step_time_s > 0
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(line) + "\n" for line in lines[:16]))
    refused = CliRunner().invoke(main, [*asked, "--learn-only", str(few), "-o", str(model)])
    assert refused.exit_code == 1
    assert "are too few to" in refused.stderr
