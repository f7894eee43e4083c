"""The simulator counts what the executor counts, and what a plain reference counts."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import simulator_reference
from fast_and_full import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, plan_of, plans
from simulator_cases import (
    chunks,
    executor_rates,
    one_id_chunk,
    replay,
    simulated_rates,
    simulated_shares,
)

from placer import Feature, Plan, Table
from placer.data.log import Bags, Chunk
from placer.errors import PlanMismatchError
from placer.simulator.parts import Part, arrange
from placer.simulator.replay import ReplayOptions
from placer.simulator.table_reads import TableReader
from placer.tables import OPTIMIZERS


@given(st.data())
@examples(60)
def test_counts_equal_the_executors_own(data: st.DataObject) -> None:
    plan = data.draw(plans())
    batches = data.draw(chunks(plan))
    policy = data.draw(st.sampled_from(["lfu", "rank"]))
    ahead = data.draw(st.booleans())
    optimizer = data.draw(st.sampled_from([None, *OPTIMIZERS]))
    tables = tuple(replace(t, optimizer=optimizer or t.optimizer) for t in plan.tables)
    options = ReplayOptions(1, policy, ahead)
    found, totals = replay(replace(plan, tables=tables), batches, options)
    expected = executor_rates(plan, batches, policy=policy, ahead=ahead, optimizer=optimizer)
    assert simulated_rates(found, totals) == expected
    assert simulated_shares(found, totals) == pytest.approx(expected.tables)


@given(st.data())
@examples(60)
def test_counts_equal_a_plain_reference(data: st.DataObject) -> None:
    plan = data.draw(plans())
    batches = data.draw(chunks(plan))
    policy, ahead = data.draw(st.sampled_from(["lfu", "rank"])), data.draw(st.booleans())
    found, totals = replay(plan, batches, ReplayOptions(1, policy, ahead))
    expected = simulator_reference.count(plan, batches, policy, ahead)
    counted = set()
    for at, part in enumerate(found.parts):
        key = plan.tables[part.table].name, part.shard, part.cols
        counted.add(key)
        words = ["lookups", "rows"]
        if part.uses_row_cache:
            words += ["hit_lookups", "hit_rows", "staged_rows", "written_back_rows"]
            words += ["in_place_lookups", "in_place_rows"]
        for word in words:
            assert getattr(totals.parts, word)[at] == expected[key][word], (key, word)
    assert not any(sum(counts.values()) for key, counts in expected.items() if key not in counted)


@given(st.data())
@examples(40)
def test_every_gpu_serves_what_a_plain_reference_says(data: st.DataObject) -> None:
    plan = data.draw(plans())
    (chunk,) = data.draw(chunks(plan, most=1))
    try:
        found, totals = replay(plan, [chunk])
    except PlanMismatchError:
        # Some columns of a row are replicated and some are not: no one can train it.
        optimizers = {table.optimizer for table in plan.tables}
        assume("rowwise_adagrad" not in optimizers)
        raise
    expected = simulator_reference.lookups_by_device(plan, chunk)
    columns: dict[tuple[int, str], int] = defaultdict(int)
    weighted: dict[tuple[int, str], int] = defaultdict(int)
    for at, part in enumerate(found.parts):
        width = part.cols[1] - part.cols[0]
        columns[part.shard, part.device] += width * int(totals.parts.lookups[at])
        weighted[part.shard, part.device] += width * int(totals.parts.rows[at])
    for number, shard in enumerate(plan.shards):
        for device in shard.devices:
            reads = expected[number, shard.cols, device]
            assert columns[number, device] == shard.width * sum(reads.values())
            assert weighted[number, device] == shard.width * len(reads)


def test_ranks_with_columns_of_a_row_sum_its_squares() -> None:
    thirds = [
        in_hbm("t", (0, 10, 1), cols, f"gpu:{n}") for n, cols in enumerate([(0, 2), (2, 4), (4, 8)])
    ]
    replicas = [in_hbm("t", (0, 10, 1), (0, 8), "gpu:0", "gpu:1", "gpu:2")]
    for shards, each in ((thirds, 4 * 3), (replicas, 0)):  # A float32 of each distinct row.
        found = []
        for optimizer in ("rowwise_adagrad", "adagrad"):
            table = Table("t", 10, 8, optimizer=optimizer, features=(Feature("f"),))
            plan = Plan((table,), machine(3), tuple(shards))
            found.append(replay(plan, [one_id_chunk(np.array([1, 1, 2, 3]))])[1])
        summed, plain = found
        assert summed.sent["rows"].tolist() == [[0, each, each], [each, 0, each], [each, each, 0]]
        assert not plain.sent["rows"].any()
        returned = summed.served.returned_bytes - plain.served.returned_bytes
        assert returned.tolist() == [[2 * each] * 3]


def test_a_host_returns_a_vector_for_each_bag_and_each_lookup_that_is_not_pooled() -> None:
    features = Feature("f"), Feature("g", pooling="none")
    host = replace(in_dram("t", (0, 10, 1), (0, 8)), lookup="host")
    plan = plan_of(Table("t", 10, 8, features=features), host, topology=machine(1))
    bags = Bags(np.array([1, 2, 3])), Bags(np.array([1, 1, 2, 3, 4]), np.array([0, 4, 5, 5]))
    chunk = Chunk(3, dict(zip("fg", bags, strict=True)), np.zeros((3, 0), np.float32))
    assert replay(plan, [chunk])[1].parts.vectors.tolist() == [3 + 5]


def test_the_reader_of_a_table_does_not_look_at_the_parts_of_all_tables() -> None:
    searched = []

    class Parts(tuple[Part, ...]):
        def __iter__(self) -> Iterator[Part]:
            searched.append(self)
            return super().__iter__()

    tables = tuple(Table(name, 10, 8) for name in "abc")
    shards = tuple(in_hbm(t.name, (n, 10, 2), (0, 8), f"gpu:{n}") for t in tables for n in (0, 1))
    arranged = arrange(Plan(tables, machine(2), shards))
    counted = replace(arranged, parts=Parts(arranged.parts))
    assert [len(TableReader(counted, number)._parts) for number in range(3)] == [2, 2, 2]
    assert not searched
