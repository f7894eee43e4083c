"""Differences of plans: against brute force over cells, and in cases known by hand."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, placed, plan_of, tables

from placer import Plan, Table, Topology
from placer.errors import PlanError
from placer.plan.diff import Home, PlanDiff, diff, shared_bytes
from placer.plan.fields import RowOrder, SolverRecord
from placer.plan.memory import home_of
from placer.plan.migration import migration
from placer.report.moves import diff_report

TABLE = Table("t", 100, 8, optimizer="sgd")


@st.composite
def successive_plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Two sound placements of one table on one machine, each with a row order of its own."""
    table = draw(tables())
    topology = machine(draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    return draw(placed((table,), topology)), draw(placed((table,), topology))


def homes_by_cell(plan: Plan) -> dict[tuple[int, int], frozenset[Home]]:
    (table,) = plan.tables
    listed = plan.hot_ids["t"].tolist() if plan.order_of("t").kind == "profile" else []
    ids = [*listed, *(row for row in range(table.rows) if row not in set(listed))]
    return {
        (ids[rank], column): frozenset(Home(device, shard.memory) for device in shard.devices)
        for shard in plan.shards
        for rank in range(*shard.rows)
        for column in range(*shard.cols)
    }


@given(successive_plans())
def test_cells_are_those_of_brute_force(plans: tuple[Plan, Plan]) -> None:
    old, new = plans
    hosts = {gpu.id: gpu.host for gpu in new.topology.gpus}
    before, after = homes_by_cell(old), homes_by_cell(new)

    def place(home: Home) -> str:
        return home.device if home.memory == "hbm" else hosts.get(home.device, home.device)

    arrivals: Counter[Home | None] = Counter()
    weight_cells = 0
    for cell, homes in after.items():
        come, held = homes - before[cell], {place(was) for was in before[cell]}
        arrivals.update(come)
        if not come:
            arrivals[None] += len(before[cell] - homes)
        weight_cells += sum(place(home) not in held for home in come)
    found = diff(old, new)
    assert found.changed_cells == sum(after[cell] != before[cell] for cell in after)
    assert found.compared_cells == len(after)
    assert Counter(home for move in found.moves for home in [move.target] * move.cells) == arrivals
    (table,) = new.tables
    if table.optimizer != "rowwise_adagrad":  # Its scalar moves with each part of a row.
        state = {"sgd": 0, "adagrad": 4, "adam": 8}[table.optimizer]
        bytes_per_cell = table.weight_bytes_per_row(1) + state
        assert found.moved_bytes == weight_cells * bytes_per_cell
    assert {move.source for move in found.moves} <= {h for homes in before.values() for h in homes}


@given(successive_plans())
def test_a_plan_does_not_differ_from_itself(plans: tuple[Plan, Plan]) -> None:
    for plan in plans:
        same = diff(plan, plan)
        assert (same.changed_cells, same.moved_bytes, same.moves) == (0, 0, ())
        assert [table.status for table in same.tables] == ["same"]


def changed(table: Table, old: list[object], new: list[object]) -> PlanDiff:
    return diff(plan_of(table, *old), plan_of(table, *new))  # type: ignore[arg-type]


def test_kinds_and_bytes_of_moves() -> None:
    old = plan_of(TABLE, in_hbm("t", (0, 40, 1), (0, 8)), in_dram("t", (40, 100, 1), (0, 8)))
    new = plan_of(
        TABLE,
        in_hbm("t", (0, 10, 1), (0, 8)),
        in_hbm("t", (10, 30, 1), (0, 8), "gpu:1"),
        in_dram("t", (30, 50, 1), (0, 8)),
        in_dram("t", (50, 100, 1), (0, 8), "gpu:1"),
    )
    found = diff(old, new)
    moves = {(m.kind, str(m.source), str(m.target), m.cells, m.moved_bytes) for m in found.moves}
    assert moves == {
        ("HBM to HBM", "gpu:0 hbm", "gpu:1 hbm", 160, 640),
        ("HBM to DRAM", "gpu:0 hbm", "gpu:0 dram", 80, 320),
        ("served elsewhere", "gpu:0 dram", "gpu:1 dram", 400, 0),
    }
    assert found.changed_cells == 640
    assert found.moved_bytes == 960


def test_a_moved_part_of_a_row_brings_its_state() -> None:
    halves = in_hbm("t", (0, 100, 1), (0, 4)), in_hbm("t", (0, 100, 1), (4, 8), "gpu:1")
    sizes = {"sgd": 16, "adagrad": 32, "rowwise_adagrad": 20, "adam": 48}
    for optimizer, row_bytes in sizes.items():
        table = replace(TABLE, optimizer=optimizer)
        old = plan_of(table, in_hbm("t", (0, 100, 1), (0, 8)))
        assert diff(old, plan_of(table, *halves)).moved_bytes == 100 * row_bytes


def test_narrow_rows_move_and_stay_in_their_type() -> None:
    table = replace(TABLE, optimizer="rowwise_adagrad")
    cold = replace(in_dram("t", (40, 100, 1), (0, 8)), dtype="int8")
    old = plan_of(table, in_hbm("t", (0, 40, 1), (0, 8)), cold)
    less = replace(cold, rows=(10, 100, 1))
    away = replace(less, devices=("gpu:1",))
    row, narrow = 8 * 4 + 4, 8 + 8 + 4  # A scale and an offset, and Adagrad's number.
    for new in (less, away):
        found = diff(old, plan_of(table, in_hbm("t", (0, 10, 1), (0, 8)), new))
        assert found.moved_bytes == 30 * narrow
        assert found.kept_bytes == 10 * row + 60 * narrow
        assert diff(found.new, old).moved_bytes == 30 * narrow
    wide = plan_of(table, in_hbm("t", (0, 40, 1), (0, 8)), replace(cold, dtype=None))
    narrowed, widened = diff(wide, old), diff(old, wide)
    assert (narrowed.kept_bytes, widened.kept_bytes) == (40 * row + 60 * narrow, 100 * row)
    details = [one.tables[0].detail for one in (narrowed, widened, diff(old, old))]
    assert details == ["cold rows become int8", "cold rows become float32", ""]
    assert "cold rows become int8" in diff_report(narrowed).to_csv()


def test_replicas_come_and_go() -> None:
    one = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))
    both = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8), "gpu:0", "gpu:1"))
    copied, dropped = diff(one, both), diff(both, one)
    assert [move.kind for move in copied.moves] == ["HBM to HBM"]
    assert copied.moved_bytes == 3200
    assert [(move.kind, move.target) for move in dropped.moves] == [("dropped", None)]
    assert (dropped.changed_cells, dropped.moved_bytes) == (800, 0)


def test_tables_that_cannot_be_compared_are_named() -> None:
    kept, gone, come = TABLE, replace(TABLE, name="gone"), replace(TABLE, name="come")
    wide = replace(TABLE, name="wide")
    wider = replace(wide, dim=16, optimizer="adagrad")

    def whole(*tables: Table) -> Plan:
        shards = tuple(in_hbm(t.name, (0, t.rows, 1), (0, t.dim)) for t in tables)
        return Plan(tables, machine(), shards)

    found = diff(whole(kept, gone, wide), whole(kept, wider, come))
    statuses = {table.table: (table.status, table.detail) for table in found.tables}
    assert statuses == {
        "t": ("same", ""),
        "gone": ("removed", ""),
        "wide": ("reshaped", "dim 8 → 16, optimizer sgd → adagrad"),
        "come": ("added", ""),
    }
    assert found.compared_cells == 800


def test_forty_million_rows_are_not_listed() -> None:
    rows = 40_000_000
    table = Table("t", rows, 4, optimizer="sgd")
    old = plan_of(table, *(in_hbm("t", (n, rows, 6), (0, 4), "gpu:0") for n in range(6)))
    new = plan_of(table, *(in_hbm("t", (n, rows, 4), (0, 4), f"gpu:{n % 2}") for n in range(4)))
    listed = np.arange(rows - 1, 0, -997)
    new = replace(new, row_order={"t": RowOrder("profile")}, hot_ids={"t": listed})
    # Half of all ranks, whatever their order, go to the second GPU.
    assert diff(old, new).changed_cells == rows // 2 * 4


def test_a_plan_with_a_hole_is_refused() -> None:
    whole = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))
    holed = plan_of(TABLE, in_hbm("t", (0, 99, 1), (0, 8)))
    with pytest.raises(PlanError, match="'t' exactly once: 792 of 800 cells"):
        diff(whole, holed)


def test_report() -> None:
    old = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))
    old = replace(old, solver=SolverRecord(step_time_s=2e-3))
    new = plan_of(TABLE, in_dram("t", (0, 100, 1), (0, 8)))
    new = replace(new, solver=SolverRecord(step_time_s=1e-3))
    report = diff_report(diff(old, new))
    assert any(line.endswith("links, waiting for gpu:0 pcie out") for line in report.headline)
    shown = report.to_json()
    assert (shown["moved_bytes"], shown["kept_bytes"]) == (3200, 0)
    assert shown["migration_s"] == migration(diff(old, new)).seconds > 0
    assert shown["waits_for"] == migration(diff(old, new)).waits_for
    assert (shown["old_step_time_s"], shown["new_step_time_s"]) == (2e-3, 1e-3)
    assert [row["moved_bytes"] for row in shown["tables"]] == [3200]
    assert shown["moves"][0]["from"] == "gpu:0 hbm"
    assert shown["moves"][0]["to"] == "gpu:0 dram"
    assert shown["kinds"] == [
        {"kind": "HBM to DRAM", "cells": 800, "cells_share": 1.0, "moved_bytes": 3200}
    ]


def test_rows_of_a_host_without_a_link_take_no_known_time() -> None:
    old = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8), "gpu:1"), topology=machine(1, 2))
    new = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)), topology=machine(1, 1))
    report = diff_report(diff(old, new))
    assert (report.facts["moved_bytes"], report.facts["migration_s"]) == (3200, None)
    assert "no network link joins the hosts" in report.headline[1]


def test_work_of_replicas_grows_with_the_gpus_and_not_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = Counter[int]()
    equal = Home.__eq__

    def counted(one: Home, other: object) -> bool:
        compared[gpus] += 1
        return equal(one, other)

    monkeypatch.setattr(Home, "__eq__", counted)
    for gpus in (16, 32):
        topology = Topology.parse(f"{gpus // 8}x8xt4")
        everywhere = in_hbm("t", (0, 100, 1), (0, 8), *(gpu.id for gpu in topology.gpus))
        plan = plan_of(TABLE, everywhere, topology=topology)
        assert diff(plan, plan).changed_cells == 0
    assert 0 < compared[32] <= 2.5 * compared[16]


def test_rows_that_all_gpus_have_do_not_tell_gpus_apart() -> None:
    topology = Topology.parse("3xt4")
    ids = [gpu.id for gpu in topology.gpus]
    hot, cold = (0, 10, 1), (10, 100, 1)
    everywhere, some = in_hbm("t", hot, (0, 8), *ids), in_hbm("t", hot, (0, 8), *ids[:2])
    one, other = (in_hbm("t", cold, (0, 8), gpu) for gpu in ids[:2])
    cold_pair = {(Home(ids[0], "hbm"), Home(ids[1], "hbm")): 90 * 8 * 4}
    plans = [plan_of(TABLE, *shards, topology=topology) for shards in (
        (everywhere, one), (everywhere, other), (some, one), (some, other)
    )]  # fmt: skip
    assert shared_bytes(plans[0], plans[1], "t") == cold_pair
    assert shared_bytes(plans[2], plans[1], "t") == cold_pair
    assert shared_bytes(plans[0], plans[3], "t") == cold_pair
    pairs = shared_bytes(plans[2], plans[3], "t")
    assert len(pairs) == 4
    assert pairs[Home(ids[0], "hbm"), Home(ids[1], "hbm")] == 100 * 8 * 4


def test_replicas_are_compared_in_time_that_grows_with_their_number() -> None:
    topology = machine(64, 2)
    ids = [gpu.id for gpu in topology.gpus]
    old, new = (
        plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8), *ids[:count]), topology=topology)
        for count in (64, 128)
    )
    with mock.patch("placer.plan.diff.home_of", wraps=home_of) as asked:
        found = diff(old, new)
    assert Counter(move.kind for move in found.moves) == {"HBM to HBM": 64}
    assert asked.call_count < 4 * len(ids)
