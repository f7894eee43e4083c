"""Whether shards cover a table once, against a count of every cell; and in how much time."""

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer import Feature, Plan, Shard, Table, Topology
from placer.plan.coverage import coverage_fault
from placer.plan.verify import violations

ROWS, DIM = 12, 4


def shard(rows: tuple[int, int, int], cols: tuple[int, int] = (0, DIM), table: str = "t") -> Shard:
    return Shard(table, rows, cols, ("gpu:0",), "hbm", "device")


def counted(shards: list[Shard], rows: int = ROWS) -> np.ndarray:
    cells = np.zeros((rows, DIM), dtype=int)
    for one in shards:
        cells[slice(*one.rows), slice(*one.cols)] += 1
    return cells


def agrees(shards: list[Shard]) -> None:
    cells = counted(shards)
    fault = coverage_fault(Table("t", ROWS, DIM), shards)
    assert (fault is None) == bool((cells == 1).all()), fault
    if fault is None:
        return
    words = fault.split("columns ")[1]
    left, right = map(int, words.split(":")[0].split(".."))
    rank, times = int(words.split("rank ")[1].split()[0]), int(words.split(" times")[0].split()[-1])
    assert (cells[rank, left:right] == times).all()
    assert times != 1


def slices() -> st.SearchStrategy[tuple[int, int, int]]:
    ends = st.integers(0, ROWS)
    return st.tuples(ends, ends, st.integers(1, 5)).map(lambda s: (min(s[:2]), max(s[:2]), s[2]))


def columns() -> st.SearchStrategy[tuple[int, int]]:
    return st.sampled_from([(a, b) for a, b in product(range(DIM), range(1, DIM + 1)) if a < b])


@given(st.lists(st.builds(shard, slices(), columns()), max_size=6))
def test_any_shards_are_judged_as_by_counting_cells(shards: list[Shard]) -> None:
    agrees(shards)


@st.composite
def divisions(draw: st.DrawFn) -> list[Shard]:
    """Shards that cover the table once: cut again and again, by rows, columns or strides."""
    shards = [shard((0, ROWS, 1))]
    for _ in range(draw(st.integers(0, 5))):
        one = shards.pop(draw(st.integers(0, len(shards) - 1)))
        (start, stop, step), (left, right) = one.rows, one.cols
        match draw(st.sampled_from(["rows", "columns", "strides"])):
            case "rows":
                middle = draw(st.integers(start, stop))
                # A later part begins at a member of the class.
                later = start + -(-(middle - start) // step) * step
                parts = [replace(one, rows=(start, middle, step))]
                parts.append(replace(one, rows=(min(later, stop), stop, step)))
            case "columns" if right - left > 1:
                middle = draw(st.integers(left + 1, right - 1))
                parts = [replace(one, cols=(left, middle)), replace(one, cols=(middle, right))]
            case _:
                ways = draw(st.integers(2, 3))
                parts = [
                    replace(one, rows=(min(start + i * step, stop), stop, step * ways))
                    for i in range(ways)
                ]
        shards += parts
    return shards


@given(divisions(), st.data())
def test_divided_tables_are_sound_and_not_without_a_shard(
    shards: list[Shard], data: st.DataObject
) -> None:
    assert coverage_fault(Table("t", ROWS, DIM), shards) is None
    left_out = data.draw(st.integers(0, len(shards) - 1))
    agrees([one for number, one in enumerate(shards) if number != left_out])
    agrees([*shards, shards[left_out]])


def test_a_pattern_that_no_line_divides() -> None:
    pinwheel = [
        shard((0, 4, 1), (0, 3)),
        shard((0, 8, 1), (3, 4)),
        shard((8, 12, 1), (1, 4)),
        shard((4, 12, 1), (0, 1)),
        shard((4, 8, 1), (1, 3)),
    ]
    agrees(pinwheel)
    agrees(pinwheel[:-1])


def test_strides_without_a_common_period_are_refused() -> None:
    rows = 1 << 40
    primes = [99_991, 99_989, 99_971]
    fault = coverage_fault(Table("t", rows, DIM), [shard((0, rows, step)) for step in primes])
    assert fault is not None
    assert "too long a common period" in fault


def roomy() -> Topology:
    machine = Topology.parse("1xh100")
    gpus = tuple(replace(gpu, memory_bytes=1 << 50) for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


MANY = 2_000


@pytest.mark.parametrize("kind", ["rows", "strides", "columns", "both", "tables"])
def test_time_grows_with_the_number_of_shards_or_tables(kind: str) -> None:
    """A fiftieth of the 100,000 that take 5 s at most; see docs/reliability.md."""
    n, table = MANY, Table("t", MANY * 10, 8)
    match kind:
        case "rows":
            shards = [shard((i * 10, i * 10 + 10, 1), (0, 8)) for i in range(n)]
        case "strides":
            shards = [shard((i, n * 10, n), (0, 8)) for i in range(n)]
        case "columns":
            table = Table("t", 10, n)
            shards = [shard((0, 10, 1), (i, i + 1)) for i in range(n)]
        case _:
            shards = [shard((i * 10, i * 10 + 10, 1), (0, 8)) for i in range(n // 2)]
            shards += [shard((n * 5, n * 10, 1), (i, i + 1)) for i in range(8)]
    tables = (table,)
    if kind == "tables":
        tables = tuple(Table(f"t{i}", 10, 8, features=(Feature(f"f{i}"),)) for i in range(n))
        shards = [shard((0, 10, 1), (0, 8), f"t{i}") for i in range(n)]
    plan = Plan(tables, roomy(), tuple(shards))
    started = time.process_time()
    assert violations(plan) == []
    assert time.process_time() - started < 1
