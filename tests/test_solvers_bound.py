"""Bounds held against the best plan there is, and the convex pieces that they are made of."""

import random
from dataclasses import replace

import numpy as np
import pytest
from enumeration import best_step_time_s
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import machine
from problem_cases import counted_table, problem_of, zipf_table

from cost_models import PieceCurve, Roofline
from placer import Problem
from solvers import solve
from solvers._bound import least, pooled_bound
from solvers._feasibility import impossible
from solvers._fill import fill, hull, ladder
from solvers._instance import Instance, Piece

ENUMERATED = 160
"""Tiny problems that are solved by enumeration."""

PROGRAMS = 30
"""The first few of them, that CP-SAT solves too."""


def tiny_problem(seed: int) -> Problem:
    """Two or three tables of up to 5 rows on two GPUs, some of them short of memory."""
    rng = random.Random(seed)
    tables = []
    for number in range(rng.choice([2, 2, 3])):
        name, rows = f"t{number}", rng.randint(1, 5 if number < 2 else 4)
        dim, lookups = rng.choice([16, 32]), rng.choice([0.1, 1.0, 4.0])
        if rng.random() < 0.5:
            counts = [rng.randint(0, 20) for _ in range(rows)]
            tables.append(counted_table(name, counts, dim, lookups=lookups))
        else:
            exponent, pooling = rng.uniform(0, 2), rng.choice(["sum", "none"])
            tables.append(
                zipf_table(name, rows, dim, lookups=lookups, exponent=exponent, pooling=pooling)
            )
    launch_s = rng.choice([0.0, 1e-9, 1e-6])
    topology = rng.choice([machine(2, launch_s=launch_s), machine(1, 2, launch_s=launch_s)])
    problem = problem_of(*tables, topology=topology, batch_size=rng.choice([1, 4, 16]))
    instance = Instance(problem, Roofline())
    curves = [instance.curve(Piece(table), 0) for table in range(instance.tables)]
    low, high = (sum(float(end(c.hbm_bytes)) for c in curves) for end in (np.min, np.max))
    hbm = (low + (high - low) * rng.uniform(-0.1, 1.0)) / 2 * rng.uniform(1, 1.5)
    slower = rng.choice([1.0, 0.3])
    first, second = topology.gpus
    gpus = (
        replace(first, memory_bytes=int(hbm)),
        replace(
            second,
            memory_bytes=int(hbm * rng.choice([1.0, 1.0, 0.7])),
            hbm_bytes_per_s=second.hbm_bytes_per_s * slower,
        ),
    )
    return replace(problem, topology=replace(topology, gpus=gpus))


@pytest.fixture(scope="module")
def enumerated() -> list[tuple[Problem, float]]:
    """Tiny problems and the step times of their best plans, infinite where nothing fits."""
    problems = [tiny_problem(seed) for seed in range(ENUMERATED)]
    return [(problem, best_step_time_s(problem, Roofline())) for problem in problems]


def test_the_problems_are_of_all_kinds(enumerated: list[tuple[Problem, float]]) -> None:
    solvable = sum(np.isfinite(best) for _, best in enumerated)
    assert ENUMERATED / 2 < solvable < ENUMERATED
    assert {len(problem.topology.hosts) for problem, _ in enumerated} == {1, 2}


def test_the_pooled_bound_is_below_the_best_plan(
    enumerated: list[tuple[Problem, float]],
) -> None:
    ratios = []
    for problem, best in enumerated:
        bound_s = pooled_bound(Instance(problem, Roofline())).step_time_s
        assert bound_s <= best * (1 + 1e-9)
        if np.isfinite(best):
            ratios.append(bound_s / best)
    # Two GPUs cannot share three tables evenly, so that the bound is loose here; not idle.
    assert np.median(ratios) > 0.7


def test_what_is_called_impossible_is(enumerated: list[tuple[Problem, float]]) -> None:
    proofs = [impossible(Instance(problem, Roofline())) is not None for problem, _ in enumerated]
    assert all(np.isinf(best) for (_, best), proof in zip(enumerated, proofs, strict=True) if proof)
    assert sum(proofs) >= 5


@pytest.mark.parametrize(
    ("name", "found", "optimal"),
    [("greedy-cost", 0.9, 0.7), ("greedy-size", 0.35, 0.02)],
)
def test_greedies_against_the_best_plan(
    enumerated: list[tuple[Problem, float]], name: str, found: float, optimal: float
) -> None:
    times = []
    for problem, best in enumerated:
        result = solve(problem, name)
        if result.step_time_s is None:
            times.append((np.inf, best))
            continue
        assert result.bound_s is not None
        assert result.bound_s <= best * (1 + 1e-9)
        assert result.step_time_s >= best * (1 - 1e-9)
        times.append((result.step_time_s, best))
    solvable = [(time, best) for time, best in times if np.isfinite(best)]
    assert np.mean([np.isfinite(time) for time, _ in solvable]) > found
    assert np.mean([time <= best * (1 + 1e-6) for time, best in solvable]) > optimal


def test_the_ilp_against_the_best_plan(enumerated: list[tuple[Problem, float]]) -> None:
    gap, exact = 1e-2, []
    for problem, best in enumerated[:PROGRAMS]:
        result = solve(problem, "ilp", time_limit_s=1.0, gap=gap, threads=1)
        if np.isinf(best):
            assert result.plan is None
            continue
        if result.bound_s is not None:
            assert result.bound_s <= best * (1 + 1e-9)
        if result.step_time_s is None:
            exact.append(False)
            continue
        assert result.step_time_s >= best * (1 - 1e-9)
        if result.termination.reason == "optimal":
            assert result.step_time_s <= best * (1 + gap)
        exact.append(result.step_time_s <= best * (1 + 1e-3))
    assert np.mean(exact) > 0.85


@st.composite
def curves(draw: st.DrawFn) -> PieceCurve:
    """A curve of a piece: times convex and falling, bytes that rise but for a few."""
    points = draw(st.integers(1, 8))
    steps = st.lists(st.integers(1, 50), min_size=points - 1, max_size=points - 1)
    hot = np.concatenate(([0], np.cumsum(draw(steps)))).astype(np.int64)
    slopes = np.array(sorted(draw(steps))) if points > 1 else np.zeros(0)
    gpu_s = np.concatenate(([0.0], np.cumsum(slopes[::-1] * np.diff(hot))))
    gpu_s = (gpu_s[-1] - gpu_s) + draw(st.integers(1, 50))
    change = st.lists(st.integers(-20, 80), min_size=points - 1, max_size=points - 1)
    hbm_bytes = 200.0 + np.concatenate(([0.0], np.cumsum(draw(change))))
    return PieceCurve(
        hot,
        gpu_s.astype(float),
        gpu_s / 2,
        hbm_bytes,
        10.0 * (hot[-1] - hot),
        float(draw(st.integers(0, 100))),
        float(draw(st.integers(0, 10))),
    )


def tried(curve: PieceCurve, hbm_bytes: float) -> list[tuple[int, float, float]]:
    """Hot rows, time and bytes of every way to fill one piece that fits."""
    found = []
    for hot in range(int(curve.hot_rows[-1]) + 1):
        split = 0 < hot < curve.hot_rows[-1]
        time_s = np.interp(hot, curve.hot_rows, curve.gpu_s) + split * curve.split_s
        size = np.interp(hot, curve.hot_rows, curve.hbm_bytes) + split * curve.split_hbm_bytes
        if size <= hbm_bytes:
            found.append((hot, float(time_s), float(size)))
    return found


@given(curves(), st.floats(0, 800), st.floats(0, 10))
@settings(max_examples=300, deadline=None)
def test_the_least_of_a_piece_is_below_everything_tried(
    curve: PieceCurve, hbm_bytes: float, price: float
) -> None:
    time_s, priced_s = least(curve, hbm_bytes, price)
    for _, tried_s, size in tried(curve, hbm_bytes):
        assert time_s <= tried_s + 1e-6
        assert priced_s <= tried_s + price * size + 1e-6


@given(curves())
@settings(max_examples=200, deadline=None)
def test_the_hull_is_convex_and_below_the_curve(curve: PieceCurve) -> None:
    corners = hull(curve, curve.gpu_s)
    assert (np.diff(corners.hbm_bytes) > 0).all()
    assert (np.diff(corners.time_s) < 0).all()
    slopes = np.diff(corners.time_s) / np.diff(corners.hbm_bytes)
    assert (np.diff(slopes) >= -1e-9).all()
    assert corners.hbm_bytes[0] == curve.hbm_bytes.min()
    assert corners.time_s[-1] == curve.gpu_s.min()
    below = np.interp(curve.hbm_bytes, corners.hbm_bytes, corners.time_s)
    assert (below <= curve.gpu_s + 1e-6).all()


@given(st.lists(curves(), min_size=1, max_size=3), st.floats(0, 2500))
@settings(max_examples=200, deadline=None)
def test_fillings_fit_and_cost_what_they_say(pieces: list[PieceCurve], hbm_bytes: float) -> None:
    prices = np.concatenate(([np.inf], np.geomspace(1e3, 1e-3, 60), [0.0]))
    filling = fill([ladder(curve, prices) for curve in pieces], hbm_bytes)
    least_bytes = sum(float(curve.hbm_bytes.min()) for curve in pieces)
    if filling is None:
        reserve = sum(curve.split_hbm_bytes for curve in pieces)
        assert least_bytes + reserve > hbm_bytes
        return
    assert filling.hbm_bytes <= hbm_bytes + 1
    assert len(filling.hot_rows) == len(pieces)
    time_s = 0.0
    for hot, curve in zip(filling.hot_rows, pieces, strict=True):
        assert 0 <= hot <= curve.hot_rows[-1]
        split = 0 < hot < curve.hot_rows[-1]
        time_s += float(np.interp(hot, curve.hot_rows, curve.gpu_s)) + split * curve.split_s
    # Hot rows are cut to whole ones, at a loss of at most one row's saving each.
    slack = sum(float(-np.diff(c.gpu_s).min(initial=0.0)) + c.split_s for c in pieces)
    assert time_s <= filling.gpu_s + slack + 1e-6


@given(curves(), st.floats(0, 4500))
@settings(max_examples=200, deadline=None)
def test_one_piece_is_filled_as_well_as_can_be(curve: PieceCurve, hbm_bytes: float) -> None:
    """Where bytes are in proportion to rows; prices lie closer together than the slopes."""
    curve = replace(curve, hbm_bytes=200.0 + 10.0 * curve.hot_rows, split_hbm_bytes=0.0)
    assume(hbm_bytes >= 200)
    prices = np.concatenate(([np.inf], np.geomspace(10, 0.05, 800), [0.0]))
    filling = fill([ladder(curve, prices)], hbm_bytes)
    assert filling is not None
    # A byte more is tolerated, for rounding.
    assert filling.gpu_s <= least(curve, hbm_bytes)[0] + 1e-6
    assert filling.gpu_s >= least(curve, hbm_bytes + 1)[0] - 1e-6
