"""Curves of shards, their cheapest points at prices, and what fills a GPU."""

from dataclasses import replace

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CostCurve
from solvers.bounds.option_costs import cold_costs, least
from solvers.model.knapsack import BYTES, GPU_S, costs_of, phases_at, priced_costs, solve_knapsack


@st.composite
def curves(draw: st.DrawFn, most_step: int = 50) -> CostCurve:
    """A curve of a piece: times convex and falling, bytes that rise but for a few.

    Some have jumps beside their ends, as those of caches: more time and bytes in between.
    """
    points = draw(st.integers(1, 8))
    steps = st.lists(st.integers(1, most_step), min_size=points - 1, max_size=points - 1)
    column_widths = draw(steps)
    jump = draw(st.integers(0, 50)) if points >= 4 else 0
    if jump:
        column_widths[0] = column_widths[-1] = 1
    hot = np.concatenate(([0], np.cumsum(column_widths))).astype(np.int64)
    slopes = np.array(sorted(draw(steps))) if points > 1 else np.zeros(0)
    gpu_s = np.concatenate(([0.0], np.cumsum(slopes[::-1] * np.diff(hot))))
    gpu_s = (gpu_s[-1] - gpu_s) + draw(st.integers(1, 50))
    change = st.lists(st.integers(-20, 80), min_size=points - 1, max_size=points - 1)
    hbm_bytes = 200.0 + np.concatenate(([0.0], np.cumsum(draw(change))))
    gpu_s[1:-1] += jump
    hbm_bytes[1:-1] += 21 * (jump > 0)
    return CostCurve(
        hot,
        gpu_s.astype(float),
        gpu_s / 2,
        hbm_bytes,
        10.0 * (hot[-1] - hot),
        float(draw(st.integers(0, 100))),
        float(draw(st.integers(0, 10))),
    )


def costs_at(curve: CostCurve, hot: int) -> tuple[float, float]:
    """Time and bytes of a piece."""
    split = 0 < hot < curve.hot_rows[-1]
    time_s = np.interp(hot, curve.hot_rows, curve.gpu_s) + split * curve.split_s
    size = np.interp(hot, curve.hot_rows, curve.hbm_bytes) + split * curve.split_hbm_bytes
    return float(time_s), float(size)


def tried(shards: list[CostCurve], hbm_bytes: float) -> float:
    """The least time of all ways to fill some pieces that fit; infinite if none does."""
    time_s, size = np.zeros(1), np.zeros(1)
    for curve in shards:
        every = np.array([costs_at(curve, hot) for hot in range(int(curve.hot_rows[-1]) + 1)])
        time_s = np.add.outer(time_s, every[:, 0]).ravel()
        size = np.add.outer(size, every[:, 1]).ravel()
    return float(time_s[size <= hbm_bytes].min(initial=np.inf))


def all_prices(shards: list[CostCurve]) -> np.ndarray:
    """Prices at which priced have all corners of the convex hulls of these curves."""
    found = {1.0}
    for curve in shards:
        points = costs_of(curve)
        less = np.subtract.outer(points[GPU_S], points[GPU_S])
        more = np.subtract.outer(points[BYTES], points[BYTES])
        slopes = -less[more > 0] / more[more > 0]
        found |= set(slopes[slopes > 0].tolist())
    slopes = np.array(sorted(found, reverse=True))
    between = np.concatenate(([slopes[0] * 2], (slopes[:-1] + slopes[1:]) / 2, [slopes[-1] / 2]))
    return np.concatenate(([np.inf], between, [0.0]))


@given(curves(), st.floats(0, 800), st.floats(0, 10))
@examples(100)
def test_the_least_of_a_shard_is_below_everything_tried(
    curve: CostCurve, hbm_bytes: float, price: float
) -> None:
    time_s, (priced_s,) = least(curve, hbm_bytes, np.array([price]), np.zeros(1))
    fits = False
    for hot in range(int(curve.hot_rows[-1]) + 1):
        tried_s, size = costs_at(curve, hot)
        if size <= hbm_bytes:
            fits = True
            assert time_s <= tried_s + 1e-6
            assert priced_s <= tried_s + price * size + 1e-6
    if not fits:  # But with a row map and a part of a row less.
        assert np.isinf(time_s) == np.isinf(priced_s)
        assert np.isinf(time_s) == (curve.hbm_bytes.min() > hbm_bytes)


@given(curves())
@examples(70)
def test_rungs_are_the_cheapest_points_at_their_prices(curve: CostCurve) -> None:
    prices, points = all_prices([curve]), costs_of(curve)
    values = priced_costs(curve, prices)
    assert values.shape == (6, prices.size)
    assert {tuple(price_index) for price_index in values.T} <= {tuple(point) for point in points.T}
    assert (np.diff(values[BYTES]) >= 0).all()
    assert (np.diff(values[GPU_S]) <= 0).all()
    assert values[BYTES, 0] == points[BYTES].min()
    assert values[GPU_S, -1] == points[GPU_S].min()
    for price, price_index in zip(prices[1:-1], values.T[1:-1], strict=True):
        least_s = (points[GPU_S] + price * points[BYTES]).min()
        assert price_index[GPU_S] + price * price_index[BYTES] == pytest.approx(least_s)


@given(st.lists(curves(), max_size=3), st.floats(0, 2500))
@examples(100)
def test_fillings_fit_and_cost_what_they_say(shards: list[CostCurve], hbm_bytes: float) -> None:
    prices = np.concatenate(([np.inf], np.geomspace(1e3, 1e-3, 60), [0.0]))
    knapsack = solve_knapsack(
        [priced_costs(curve, prices) for curve in shards], hbm_bytes, shards.__getitem__
    )
    if knapsack is None:
        assert sum(float(costs_of(curve)[BYTES].min()) for curve in shards) > hbm_bytes
        return
    assert knapsack.hbm_bytes <= hbm_bytes + 1e-6
    assert len(knapsack.hot_rows) == len(shards)
    sums = np.zeros(4)
    for hot, curve in zip(knapsack.hot_rows, shards, strict=True):
        assert isinstance(hot, int)
        assert 0 <= hot <= curve.hot_rows[-1]
        parts = (curve.dram_s, curve.dram_bytes)
        dram = [float(np.interp(hot, curve.hot_rows, of)) for of in parts]
        sums += [*costs_at(curve, hot), *dram]
    assert sums == pytest.approx(
        [knapsack.gpu_s, knapsack.hbm_bytes, knapsack.dram_s, knapsack.dram_bytes]
    )


@given(st.lists(curves(3), min_size=1, max_size=3), st.floats(0, 1))
@examples(100)
def test_fillings_lie_between_their_limit_and_everything_tried(
    shards: list[CostCurve], share: float
) -> None:
    """Prices are all that matter here, so that the limit is one of any knapsack."""
    prices = all_prices(shards)
    priced = [priced_costs(curve, prices) for curve in shards]
    sums = np.sum(priced, axis=0)
    hbm_bytes = float(sums[BYTES, 0] * 0.95 + share * (sums[BYTES, -1] - sums[BYTES, 0] * 0.9))
    best_s, limit_s = tried(shards, hbm_bytes), float(phases_at(sums[:3], hbm_bytes)[0])
    assert limit_s <= best_s + 1e-6
    knapsack = solve_knapsack(priced, hbm_bytes, shards.__getitem__)
    if knapsack is None:
        assert np.isinf(best_s)
        return
    assert knapsack.gpu_s >= best_s - 1e-6
    # As good as the price_index that all pieces reach together, at least.
    reached = sums[GPU_S, sums[BYTES] <= hbm_bytes]
    assert knapsack.gpu_s <= reached.min() + 1e-6


@given(st.lists(curves(3), min_size=1, max_size=3), st.floats(0, 1))
@examples(100)
def test_convex_shards_are_filled_to_less_than_a_row(shards: list[CostCurve], share: float) -> None:
    """Where bytes are in proportion to rows, and splits are free."""
    shards = [
        replace(
            curve,
            gpu_s=np.sort(curve.gpu_s)[::-1],
            hbm_bytes=200.0 + 10.0 * curve.hot_rows,
            split_s=0.0,
            split_hbm_bytes=0.0,
        )
        for curve in shards
    ]
    shards = [convex(curve) for curve in shards]
    prices = all_prices(shards)
    most = sum(float(curve.hbm_bytes[-1]) for curve in shards)
    hbm_bytes = 200.0 * len(shards) + share * (most - 200.0 * len(shards))
    knapsack = solve_knapsack(
        [priced_costs(curve, prices) for curve in shards], hbm_bytes, shards.__getitem__
    )
    rows = [-np.diff(c.gpu_s) / np.diff(c.hot_rows) for c in shards if c.hot_rows.size > 1]
    steepest_s = max((float(saved.max()) for saved in rows), default=0.0)
    best_s = tried(shards, hbm_bytes)
    assert best_s - 1e-6 <= knapsack.gpu_s <= best_s + steepest_s + 1e-6
    if len(shards) == 1:
        assert knapsack.gpu_s == pytest.approx(best_s)


def convex(curve: CostCurve) -> CostCurve:
    """The same points with their steepest savings first."""
    if curve.hot_rows.size < 2:
        return curve
    saved = -np.diff(curve.gpu_s) / np.diff(curve.hot_rows)
    steps = np.sort(saved)[::-1] * np.diff(curve.hot_rows)
    gpu_s = curve.gpu_s[-1] + np.concatenate((np.cumsum(steps[::-1])[::-1], [0.0]))
    return replace(curve, gpu_s=gpu_s)


def line(rows: int, *, split_hbm_bytes: float = 0.0, **more: object) -> CostCurve:
    """A curve of rows of 10 bytes, each of which saves a second in HBM."""
    hot = np.array([0, rows])
    seconds, none = rows - hot.astype(np.float64), np.zeros(2)
    return CostCurve(
        hot, seconds, none, 10.0 * hot, 10.0 * seconds, 0.5, split_hbm_bytes,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_split_takes_its_bytes_and_its_time() -> None:
    curve = line(100, split_hbm_bytes=35.0)
    knapsack = solve_knapsack(
        [priced_costs(curve, np.array([np.inf, 0.0]))], 500.0, lambda _: curve
    )
    assert knapsack.hot_rows == (46,)
    assert (knapsack.hbm_bytes, knapsack.gpu_s) == (495.0, 54.5)
    assert knapsack.dram_bytes == 540.0


def test_cold_rows_are_on_the_drive_where_that_is_cheapest() -> None:
    """From any point on, not only from those at which the shard's hot rows end."""
    hot = np.arange(6)
    curve = replace(
        line(5), hot_rows=hot, dram_bytes=np.array([50.0, 40, 30, 20, 10, 0]),
        drive_s=np.array([9.0, 2, 8, 1, 6, 0]),
    )  # fmt: skip
    prices = np.array([0.0, 0.1, 0.3])
    expected = [
        [
            price * curve.dram_bytes[point]
            + min(curve.drive_s[on] - price * curve.dram_bytes[on] for on in range(point, 6))
            for point in range(6)
        ]
        for price in prices
    ]
    assert cold_costs(curve, prices) == pytest.approx(np.array(expected))


def test_an_empty_gpu_is_filled_with_nothing() -> None:
    knapsack = solve_knapsack([], 10.0, lambda number: pytest.fail(f"there is no piece {number}"))
    assert (knapsack.hot_rows, knapsack.gpu_s, knapsack.hbm_bytes) == ((), 0.0, 0.0)
    assert (
        solve_knapsack([], -1.0, lambda number: pytest.fail(f"there is no piece {number}")) is None
    )


@given(st.lists(st.lists(curves(3), min_size=2, max_size=2), min_size=1, max_size=3))
@examples(50)
def test_limits_of_many_gpus_at_once_are_those_of_each(gpus: list[list[CostCurve]]) -> None:
    prices = all_prices([curve for shards in gpus for curve in shards])
    sums = np.array(
        [np.sum([priced_costs(curve, prices) for curve in shards], axis=0) for shards in gpus]
    )
    rooms = np.linspace(300, 900, len(gpus))
    each = [phases_at(one, room).tolist() for one, room in zip(sums, rooms, strict=True)]
    assert phases_at(sums, rooms).tolist() == each
