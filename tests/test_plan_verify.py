"""`verify`: sound plans have no violation, and each single fault is found."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, plan_of, plans, sized

from placer import Plan, Shard, Table
from placer.errors import CapacityError, PlanError
from placer.plan.fields import RowOrder
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, ROW_MAP_BYTES_PER_ROW, device_memory
from placer.plan.verify import verify, violations

TABLE = Table("t", 10, 4, optimizer="rowwise_adagrad")


def cells(plan: Plan, table: Table) -> np.ndarray:
    """How often each row × column is covered: by enumeration."""
    times = np.zeros((table.rows, table.dim), dtype=int)
    for shard in plan.shards_by_table[table.name]:
        times[slice(*shard.rows), slice(*shard.cols)] += 1
    return times


def rules(plan: Plan) -> set[str]:
    return {violation.rule for violation in violations(plan)}


@given(plans())
@examples(60)
def test_sound_plans_break_no_rule(plan: Plan) -> None:
    assert violations(plan) == []
    verify(plan)
    for table in plan.tables:
        assert (cells(plan, table) == 1).all()


@st.composite
def any_shards(draw: st.DrawFn) -> Plan:
    """A small table and a few well-formed shards of it, which rarely cover it."""
    table = Table("t", draw(st.integers(0, 6)), draw(st.integers(1, 3)))
    shards = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, table.rows))
        stop = draw(st.integers(start, table.rows))
        first = draw(st.integers(0, table.dim - 1))
        cols = (first, draw(st.integers(first + 1, table.dim)))
        shards.append(in_hbm("t", (start, stop, draw(st.integers(1, 4))), cols))
    return plan_of(table, *shards)


@given(any_shards())
@examples(200)
def test_the_message_names_a_row_that_is_wrong(plan: Plan) -> None:
    times = cells(plan, plan.tables[0])
    assume((times != 1).any())
    (violation,) = violations(plan)
    words = violation.message.replace(",", "").replace("..", " ").split()
    left, right = int(words[3]), int(words[4].rstrip(":"))
    rank, count = int(words[words.index("rank") + 1]), int(words[words.index("covered") + 1])
    assert (times[rank, left:right] == count).all()
    assert count != 1


def test_long_strides_need_no_enumeration() -> None:
    table = Table("t", 40_000_000, 64)
    ways = 1024
    shards = [in_hbm("t", (n, table.rows, ways), (0, 64)) for n in range(ways)]
    assert "coverage" not in rules(plan_of(table, *shards))
    assert "coverage" in rules(plan_of(table, *shards[1:]))


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
    ],
)
def test_malformed_shards(shard: Shard, words: str) -> None:
    found = violations(plan_of(TABLE, shard))
    assert {violation.rule for violation in found} == {"shard"}
    assert any(words in violation.message for violation in found)
    with pytest.raises(PlanError):
        verify(plan_of(TABLE, shard))


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


def test_nothing_above_is_imported() -> None:
    code = (
        "import sys, placer.plan.verify; print([m for m in sys.modules if "
        "m.split('.')[0] in ('solvers', 'cost_models', 'ortools', 'click', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
