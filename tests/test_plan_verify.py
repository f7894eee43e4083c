"""`verify`: sound plans have no violation, and each single fault is found."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import calls_of, in_dram, in_hbm, machine, plan_of, plans, sized

from placer import Feature, Plan, Shard, Table
from placer.errors import CapacityError, PlanError
from placer.plan.fields import RowOrder
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, ROW_MAP_BYTES_PER_ROW, device_memory
from placer.plan.verify import coverage_fault, verify, violations

TABLE = Table("t", 10, 4, optimizer="rowwise_adagrad")


def cells(table: Table, shards: Sequence[Shard]) -> np.ndarray:
    """How often each row × column is covered: by enumeration."""
    times = np.zeros((table.rows, table.dim), dtype=int)
    for one in shards:
        times[slice(*one.rows), slice(*one.cols)] += 1
    return times


@given(plans())
@examples(60)
def test_sound_plans_break_no_rule(plan: Plan) -> None:
    assert violations(plan) == []
    verify(plan)
    for table in plan.tables:
        assert (cells(table, plan.shards_by_table[table.name]) == 1).all()


WHOLE = in_hbm("t", (0, 10, 1), (0, 4))


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (replace(WHOLE, table="u"), "not listed among the plan's tables"),
        (replace(WHOLE, rows=(0, 11, 1)), "0 <= start <= stop <= 10"),
        (replace(WHOLE, rows=(-1, 10, 1)), "0 <= start <= stop <= 10"),
        (replace(WHOLE, rows=(5, 4, 1)), "0 <= start <= stop <= 10"),
        (replace(WHOLE, rows=(0, 10, 0)), "step >= 1"),
        (replace(WHOLE, cols=(0, 5)), "within [0, 4]"),
        (replace(WHOLE, cols=(2, 2)), "not be empty"),
        (replace(WHOLE, devices=()), "at least one device"),
        (replace(WHOLE, devices=("gpu:0", "gpu:0")), "each once"),
        (replace(WHOLE, devices=("gpu:7",)), "'gpu:7' is not in the topology"),
        (replace(WHOLE, devices=("host:0",)), "host:0 has GPUs, which serve its rows: name one"),
        (replace(WHOLE, memory="ram"), "'ram' is none of hbm, dram, ssd"),
        (replace(WHOLE, memory="dram", lookup="uvm"), "'uvm' is none of device, uva, staged"),
        (replace(WHOLE, dtype="int4"), "'int4' is none of float32, float16, bfloat16, int8"),
        (replace(WHOLE, memory="dram"), "'device' does not go with memory 'dram'"),
        (replace(WHOLE, lookup="staged"), "'staged' does not go with memory 'hbm'"),
        (replace(WHOLE, memory="dram", lookup="cached"), "with cache_rows 0"),
        (replace(WHOLE, memory="dram", lookup="cached", cache_rows=11), "within 0..10"),
        (replace(WHOLE, cache_rows=3), "with cache_rows 3"),
        (replace(WHOLE, staging_rows=3), "'device' with staging_rows 3"),
        (replace(WHOLE, memory="dram", lookup="uva", staging_rows=1), "'uva' with staging_rows 1"),
        (replace(WHOLE, memory="dram", lookup="staged", staging_rows=11), "must lie within 0..10"),
        (replace(WHOLE, memory="dram", lookup="staged", staging_rows=-1), "must lie within 0..10"),
        (replace(WHOLE, buffer_bytes=-1), "be at least 0"),
        (replace(WHOLE, memory="dram", lookup="uva", dtype="int8"), "rows of int8 are staged or"),
    ],
)
def test_malformed_shards(shard: Shard, words: str) -> None:
    found = violations(plan_of(TABLE, shard))
    assert {violation.rule for violation in found} == {"shard"}
    assert any(words in violation.message for violation in found)
    with pytest.raises(PlanError):
        verify(plan_of(TABLE, shard))


def test_only_rows_of_float32_are_narrowed() -> None:
    narrow = replace(WHOLE, memory="dram", lookup="staged", dtype="float16")
    assert violations(plan_of(TABLE, narrow)) == []
    for dtype, words in (("float16", []), ("bfloat16", ["rows of float16 are of tables of flo"])):
        found = violations(plan_of(replace(TABLE, dtype=dtype), narrow))
        assert [fault.message.partition(": ")[2][:36] for fault in found] == words


def test_a_table_listed_twice() -> None:
    plan = replace(plan_of(TABLE, WHOLE), tables=(TABLE, TABLE))
    assert "listed more than once" in violations(plan)[0].message


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3, 3], "lists an id more than once"),
        ([0, 10], "id 10 is outside 0..9"),
        ([-1], "id -1 is outside 0..9"),
        (None, "lists no ids"),
    ],
)
def test_row_orders(ids: list[int] | None, words: str) -> None:
    plan = replace(
        plan_of(TABLE, WHOLE),
        row_order={"t": RowOrder("profile")},
        hot_ids={} if ids is None else {"t": np.array(ids, dtype=np.int64)},
    )
    (violation,) = violations(plan)
    assert violation.rule == "row_order"
    assert words in violation.message
    verify(replace(plan, hot_ids={"t": np.array([9, 0])}))


def test_a_row_order_of_no_table() -> None:
    plan = replace(plan_of(TABLE, WHOLE), row_order={"u": RowOrder("profile")})
    assert "'u' has a row order but is not listed" in violations(plan)[0].message


@given(plans(), st.data())
@examples(60)
def test_one_byte_too_many_is_found(plan: Plan, data: st.DataObject) -> None:
    uses = [use for use in device_memory(plan).values() if use.total_bytes]
    assume(uses)
    use = data.draw(st.sampled_from(uses))

    def with_memory(memory_bytes: int) -> Plan:
        return replace(plan, topology=sized(plan.topology, {use.device: memory_bytes}))

    verify(with_memory(use.total_bytes))
    with pytest.raises(CapacityError, match=rf"{use.device} would hold .*: 1 bytes too many"):
        verify(with_memory(use.total_bytes - 1))


def test_memory_by_hand() -> None:
    """10 rows of 4 float32 (16 bytes) with 4 bytes of state each, in four places at once."""
    hot = replace(in_hbm("t", (0, 3, 1), (0, 4), "gpu:0", "gpu:1"), buffer_bytes=100)
    cached = Shard(
        "t", (3, 6, 1), (0, 4), ("gpu:1",), "dram", "cached", cache_rows=2, buffer_bytes=7
    )
    left = in_dram("t", (6, 10, 1), (0, 2), "gpu:0")
    right = Shard("t", (6, 10, 1), (2, 4), ("host:1",), "dram", "host", buffer_bytes=9)
    plan = replace(
        plan_of(TABLE, hot, cached, left, right, topology=machine(servers=1)),
        row_order={"t": RowOrder("profile")},
        hot_ids={"t": np.arange(6)},
    )
    assert violations(plan) == []
    gpu0, gpu1, host, server = device_memory(plan).values()
    assert (gpu0.weight_bytes, gpu0.state_bytes, gpu0.buffer_bytes) == (3 * 16, 3 * 4, 100)
    assert (gpu1.weight_bytes, gpu1.state_bytes, gpu1.buffer_bytes) == (3 * 16, 3 * 4, 107)
    assert (gpu0.cache_bytes, gpu1.cache_bytes) == (0, 2 * (20 + ROW_CACHE_ENTRY_BYTES))
    # Strips of columns have their own copy of row-wise state.
    assert (host.weight_bytes, host.state_bytes) == (3 * 16 + 4 * 8, 3 * 4 + 4 * 4)
    assert (server.weight_bytes, server.state_bytes) == (4 * 8, 4 * 4)
    assert (host.buffer_bytes, server.buffer_bytes) == (0, 9)
    assert host.row_map_bytes == 0
    assert {use.row_map_bytes for use in (gpu0, gpu1, server)} == {10 * ROW_MAP_BYTES_PER_ROW}


def test_hosts_without_gpus_pool_rows_of_their_memory() -> None:
    pooled = replace(WHOLE, devices=("host:1",), memory="dram", lookup="host")
    with_server = plan_of(TABLE, pooled, topology=machine(servers=1))
    assert violations(with_server) == []
    for wrong in (
        replace(pooled, memory="hbm", lookup="device"),
        replace(pooled, lookup="staged"),
        replace(pooled, lookup="uva"),
        replace(pooled, lookup="cached", cache_rows=1),
    ):
        (found,) = violations(replace(with_server, shards=(wrong,)))
        assert "host:1 is a host without GPUs: it serves memory dram by lookup host" in (
            found.message
        )
    small = replace(with_server.topology.servers[0], memory_bytes=TABLE.total_bytes - 1)
    topology = replace(with_server.topology, hosts=(with_server.topology.hosts[0], small))
    with pytest.raises(CapacityError, match=r"host:1 would hold .* 1 bytes too many"):
        verify(replace(with_server, topology=topology))


def test_a_replica_in_dram_is_one_copy_per_gpu() -> None:
    plan = plan_of(TABLE, in_dram("t", (0, 10, 1), (0, 4), "gpu:0", "gpu:1"))
    assert device_memory(plan)["host:0"].total_bytes == 2 * TABLE.total_bytes


def test_the_message_lists_the_first_faults() -> None:
    shards = [replace(WHOLE, rows=(0, n, 1), devices=("gpu:9",)) for n in range(8)]
    with pytest.raises(PlanError, match=r"; and 3 more$"):
        verify(plan_of(TABLE, *shards))


# Coverage, against a count of every cell; and in how much time

ROWS, DIM = 12, 4
DIVIDED = Table("t", ROWS, DIM)


def shard(rows: tuple[int, int, int], cols: tuple[int, int] = (0, DIM), table: str = "t") -> Shard:
    return Shard(table, rows, cols, ("gpu:0",), "hbm", "device")


def agrees(shards: list[Shard]) -> None:
    counted = cells(DIVIDED, shards)
    fault = coverage_fault(DIVIDED, shards)
    assert (fault is None) == bool((counted == 1).all()), fault
    if fault is None:
        return
    words = fault.split("columns ")[1]
    left, right = map(int, words.split(":")[0].split(".."))
    rank, times = int(words.split("rank ")[1].split()[0]), int(words.split(" times")[0].split()[-1])
    assert (counted[rank, left:right] == times).all()
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
    assert coverage_fault(DIVIDED, shards) is None
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
    assert "too long a common period" in fault


def _calls_of_verify(kind: str, n: int) -> int:
    """Calls of functions that a plan of so many shards takes to verify."""
    table = Table("t", n * 10, 8)
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
    plan, found = Plan(tables, machine(), tuple(shards)), []
    calls = calls_of(lambda: found.extend(violations(plan)))
    assert found == []
    return calls


@pytest.mark.parametrize("kind", ["rows", "strides", "columns", "both", "tables"])
def test_work_grows_with_the_number_of_shards_or_tables(kind: str) -> None:
    """Not with its square; see docs/reliability.md."""
    assert _calls_of_verify(kind, 2_000) < 2.5 * _calls_of_verify(kind, 1_000)
