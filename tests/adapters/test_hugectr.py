"""Plans as HugeCTR's shard matrix: what it would execute is what the plan says."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine

from placer import Feature, Plan, Shard, Table
from placer.adapters.hugectr import as_arguments, to_hugectr
from placer.errors import PlanMismatchError
from placer.plan.fields import RowOrder


def executed(arguments: dict[str, Any], tables: dict[str, Table]) -> set[tuple[Any, ...]]:
    """What HugeCTR holds where: (table, columns, ids, GPU), by the rules of its source."""
    matrix = arguments["shard_matrix"]
    held = set()
    for strategy, listed in arguments["shard_strategy"]:
        for entry in listed:
            name, strips = entry if isinstance(entry, tuple) else (entry, 1)
            table = tables[name]
            gpus = [gpu for gpu, own in enumerate(matrix) if name in own]
            ids = tuple(range(table.rows))
            if strategy == "dp":
                held |= {(name, (0, table.dim), ids, gpu) for gpu in gpus}
                continue
            ways, width = len(gpus) // strips, table.dim // strips
            for number, gpu in enumerate(gpus):
                strip, way = number // ways, number % ways
                cols = (strip * width, (strip + 1) * width)
                held.add((name, cols, tuple(i for i in ids if i % ways == way), gpu))
    return held


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of tables that HugeCTR can have, on four GPUs, each of which holds something."""
    tables, shards = [], []
    for number in range(draw(st.integers(1, 4))):
        name, rows, dim = f"t{number}", draw(st.integers(4, 20)), 8
        tables.append(Table(name, rows, dim))
        gpus = [f"gpu:{n}" for n in sorted(draw(st.permutations(range(4)))[:4])]
        if draw(st.booleans()):
            shards.append(in_hbm(name, (0, rows, 1), (0, dim), *gpus))
            continue
        strips, ways = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)]))
        gpus = sorted(draw(st.permutations(gpus))[: strips * ways])
        for place, gpu in enumerate(gpus):
            strip, way = divmod(place, ways)
            cols = (strip * dim // strips, (strip + 1) * dim // strips)
            shards.append(in_hbm(name, (way, rows, ways), cols, gpu))
    tables.append(Table("everywhere", 4, 8))
    shards.append(in_hbm("everywhere", (0, 4, 1), (0, 8), *(f"gpu:{n}" for n in range(4))))
    return Plan(tuple(tables), machine(4), tuple(draw(st.permutations(shards))))


@given(plans())
def test_it_executes_the_plan(plan: Plan) -> None:
    arguments = as_arguments(json.loads(json.dumps(to_hugectr(plan))))
    assert len(arguments["shard_matrix"]) == 4
    expected = {
        (shard.table, shard.cols, tuple(range(*shard.rows)), int(gpu.removeprefix("gpu:")))
        for shard in plan.shards
        for gpu in shard.devices
    }
    assert executed(arguments, plan.tables_by_name) == expected
    listed = defaultdict(int)
    for _, names in arguments["shard_strategy"]:
        for entry in names:
            listed[entry[0] if isinstance(entry, tuple) else entry] += 1
    assert listed == dict.fromkeys(plan.tables_by_name, 1)


T = Table("t", 10, 8)
ALL = in_hbm("u", (0, 4, 1), (0, 8), "gpu:0", "gpu:1")
REFUSED: dict[str, tuple[list[Shard], str]] = {
    "rows in DRAM": ([in_dram("t", (0, 10, 1), (0, 8))], "are in DRAM"),
    "blocks": (
        [
            in_hbm("t", (0, 5, 1), (0, 8), "gpu:0"),
            in_hbm("t", (5, 10, 1), (0, 8), "gpu:1"),
        ],
        r"gpu:0 holds rows \[0, 5, 1\]",
    ),
    "slices on other GPUs": (
        [in_hbm("t", (1 - n, 10, 2), (0, 8), f"gpu:{n}") for n in range(2)],
        r"it would hold rows \[0, 10, 2\]",
    ),
    "two shards on a GPU": (
        [in_hbm("t", (0, 10, 1), (4 * n, 4 * n + 4)) for n in range(2)],
        "a GPU holds several",
    ),
    "replicas of hot rows": (
        [in_hbm("t", (0, 2, 1), (0, 8), "gpu:0", "gpu:1"), in_hbm("t", (2, 10, 1), (0, 8))],
        "replicates whole tables",
    ),
    "uneven strips": (
        [in_hbm("t", (0, 10, 1), (0, 2)), in_hbm("t", (0, 10, 1), (2, 8), "gpu:1")],
        "even column slices",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_run(what: str) -> None:
    shards, words = REFUSED[what]
    plan = Plan((T, Table("u", 4, 8)), machine(2), (*shards, ALL))
    with pytest.raises(PlanMismatchError, match=f"HugeCTR cannot place table 't' so: .*{words}"):
        to_hugectr(plan)


def test_plans_that_are_refused_as_a_whole() -> None:
    shards = tuple(in_hbm("t", (n, 10, 2), (0, 8), f"gpu:{n}") for n in range(2))
    order = {"t": RowOrder("profile")}, {"t": np.array([3])}
    of_max = replace(T, features=(Feature("f"), Feature("g", pooling="max")))
    for plan, message in (
        (Plan((T,), machine(2), shards, *order), "in the order of a profile"),
        (Plan((T,), machine(2), (in_hbm("t", (0, 10, 1), (0, 8)),)), "gpu:1 holds no table"),
        (
            Plan((Table("t", 0, 8),), machine(1), (in_hbm("t", (0, 0, 1), (0, 8)),)),
            "it has no rows",
        ),
        (
            Plan((of_max,), machine(1), (in_hbm("t", (0, 10, 1), (0, 8)),)),
            "features with pooling max",
        ),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            to_hugectr(plan)
