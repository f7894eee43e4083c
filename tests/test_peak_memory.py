"""Memory by phase of a step; benchmarks/step_memory.py holds it to what PyTorch allocates."""

from dataclasses import replace
from unittest import mock

import pytest
from problem_cases import counted_table, machine

from placer import Feature, Plan, Profile, Shard, Table
from placer.dense import DenseLayers
from placer.errors import ProblemError
from placer.plan.fields import Pipeline
from placer.plan.memory import device_memory, index_buffer_bytes, output_vectors
from placer.plan.peak_memory import (
    _ENTRY_BYTES_PASSING,
    _SORT_BYTES,
    _STAGING_BYTES,
    COMMUNICATOR_BYTES,
    COMMUNICATORS,
    CONTEXT_BYTES,
    FRAGMENTATION_SHARE,
    SUM_BYTES_PER_LOOKUP_AND_COLUMN,
    DeviceKind,
    DevicePeak,
    PhaseMemory,
    _Arena,
    _loads,
    _own_output_bytes,
    largest_batch,
    peak_memory,
)
from placer.tables import DType
from solvers.report.explain import memory_report

ROWS, DIM, LOOKUPS, BATCH = 1000, 16, 5.0, 64


def profile() -> Profile:
    """One table of evenly read rows."""
    table = counted_table("t", [1] * ROWS, dim=DIM, lookups=LOOKUPS)
    return Profile((table,), samples=1)


def plan(*devices: str, dense: DenseLayers | None = None) -> Plan:
    """The table, divided by rows where there are several devices."""
    count = len(devices)
    shards = tuple(
        Shard("t", (place, ROWS, count), (0, DIM), (device,), "hbm", "device")
        for place, device in enumerate(devices)
    )
    topology = machine(count, hbm_bytes=1 << 30)
    tables = (profile()["t"].table,)
    return Plan(tables, topology, shards, {}, {}, BATCH, dense=dense)


def by_name(peak: DevicePeak) -> dict[str, PhaseMemory]:
    return {phase.name: phase for phase in peak.phases}


def test_vectors_are_of_pooled_bags_and_of_single_lookups() -> None:
    features = (
        Feature("sum", 4.0, coverage=0.5),
        Feature("never", 4.0, coverage=0.0),
        Feature("none", 1.0, pooling="none"),
    )
    table = Table("t", 100, 8, features=features)
    # Of 10 samples one bag each, whether or not it is empty, and a third of 6 lookups.
    assert output_vectors(table, 10, 6.0) == 10 + 2
    assert output_vectors(replace(table, features=features[1:2]), 10, 6.0) == 0


def test_loads_by_hand() -> None:
    """A table with hot rows and a cache on one of two GPUs, and a table on both."""
    tables = [counted_table(name, [1] * 10, dim=8, lookups=2.0) for name in ("t", "r")]
    hot = Shard("t", (0, 2, 1), (0, 8), ("gpu:0",), "hbm", "device")
    cold = replace(hot, rows=(2, 10, 1), memory="dram", lookup="cached")
    cold = replace(cold, cache_rows=3, staging_rows=2)
    both = Shard("r", (0, 10, 1), (0, 8), ("gpu:0", "gpu:1"), "hbm", "device")
    specs = tuple(one.table for one in tables)
    placed = Plan(specs, machine(2), (hot, cold, both), {}, {}, 4)
    loads = _loads(placed, Profile(tuple(tables), samples=1))
    first, second = loads["gpu:0"], loads["gpu:1"]
    of_t, of_r = first.arenas.values()  # Replicas have arenas of their own.
    assert (of_t.lookups, of_r.lookups) == pytest.approx((2 * 4 * 2, 4 * 2))
    assert (of_t.cold_rows, of_t.entries) == (8, 5)
    assert first.row_cache_bytes == 5 * specs[0].bytes_per_row()
    # Bags of all samples for hot and cold rows together, and of its own for the replica.
    assert (first.vectors, second.vectors) == (2 * 4 + 4, 4)
    assert first.output_bytes == (2 * 4 + 4) * 8 * 4
    assert (second.lookups, second.entries, second.row_cache_bytes) == (pytest.approx(8), 0, 0)
    # Its own samples' bags of each table come from one place.
    assert _own_output_bytes(placed) == 2 * 4 * 8 * 4
    assert _own_output_bytes(replace(placed, shards=(hot, cold))) == 4 * 8 * 4


def test_what_an_arena_holds_for_a_while_by_hand() -> None:
    staged, read = _Arena(8, 100.0, 30, 5), _Arena(8, 100.0, 30, 0)
    for kind in ("cuda", "cpu"):
        more = staged.prepare_bytes(kind) - read.prepare_bytes(kind)
        assert more == pytest.approx(_STAGING_BYTES * 30 + 5 * _ENTRY_BYTES_PASSING[kind])
        assert read.prepare_bytes(kind) == pytest.approx(100 * _SORT_BYTES[kind])
    wide = replace(read, width=128)
    assert read.update_bytes() == 100 * (4 + 4)  # A number for each lookup at least.
    assert wide.update_bytes() == 100 * (4 + 128 * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
    assert 128 * SUM_BYTES_PER_LOOKUP_AND_COLUMN > 4


def test_one_rank_by_hand() -> None:
    (peak,) = peak_memory(plan("gpu:0"), profile(), device_kind="cpu")
    phases = by_name(peak)
    assert list(phases) == ["prepare", "lookup", "forward", "backward", "update"]
    lookups, output = BATCH * LOOKUPS, BATCH * DIM * 4
    rows = ROWS * profile()["t"].table.bytes_per_row()
    in_flight = 2 * (16 * lookups + 8 * BATCH)
    assert phases["prepare"].total_bytes == rows + in_flight + 13 * lookups
    assert phases["lookup"].total_bytes == rows + in_flight + output
    # The gradients, as they came and as the kernels read them.
    assert phases["update"].total_bytes == rows + in_flight + 2 * output + (4 + 4) * lookups
    assert peak.peak_bytes == max(phase.total_bytes for phase in phases.values())
    assert peak.free_bytes == (1 << 30) - peak.peak_bytes


def test_a_gpu_has_a_context_and_prepares_beside_the_step() -> None:
    (peak,) = peak_memory(plan("gpu:0"), profile())
    parts = by_name(peak)["update"].parts
    lookups = BATCH * LOOKUPS
    assert parts["context"] == CONTEXT_BYTES
    assert "communication" not in parts
    assert parts["indices"] == 2 * (16 * lookups + 8 * BATCH) + (20 + 8) * lookups
    passing = sum(parts.values()) - parts["fragmentation"] - CONTEXT_BYTES
    passing -= parts["weights"] + parts["optimizer state"]
    assert parts["fragmentation"] == pytest.approx(FRAGMENTATION_SHARE * passing, abs=1)
    # Plans charge neither the ids, which are copies of the loader's, nor what the next step's sort
    # takes on its stream, but 4 bytes for what the allocator rounds up.
    charged = index_buffer_bytes(profile()["t"].table, lookups, DIM)
    assert parts["indices"] + parts["sums of rows"] == pytest.approx(
        charged + (8 + 20 - 4) * lookups + 16 * BATCH
    )


def test_serial_steps_hold_one_batch() -> None:
    ahead = plan("gpu:0")
    (one,) = peak_memory(replace(ahead, pipeline="serial"), profile())
    (two,) = peak_memory(ahead, profile())
    lookups = BATCH * LOOKUPS
    serial, overlapped = (by_name(peak)["lookup"].parts["indices"] for peak in (one, two))
    assert serial == 16 * lookups + 8 * BATCH
    assert overlapped == 2 * serial + (20 + 8) * lookups


def test_ranks_exchange_outputs_and_gradients() -> None:
    peaks = peak_memory(plan("gpu:0", "gpu:1"), profile())
    assert [peak.device for peak in peaks] == ["gpu:0", "gpu:1"]
    phases = by_name(peaks[0])
    assert len(phases) == 8
    # Half of the rows give a sum for each of all samples, and own samples get one from each rank.
    output = 2 * BATCH * DIM * 4
    assert phases["lookup"].parts["outputs"] == output
    assert phases["exchange of outputs"].parts["exchange"] == 2 * output
    assert phases["lookup"].parts["communication"] == COMMUNICATORS * COMMUNICATOR_BYTES


@pytest.mark.parametrize("pipeline", ["look-ahead", "serial"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("exchange", ["float32", "bfloat16"])
def test_two_ranks_by_hand(pipeline: Pipeline, kind: DeviceKind, exchange: DType) -> None:
    """Two tables on the first of two GPUs: it sends all outputs, and the other sends none."""
    tables = [counted_table("t", [1] * 10, dim=16, lookups=5.0)]
    tables.append(counted_table("u", [1] * 10, dim=8, lookups=1.0))
    shards = tuple(
        Shard(one.table.name, (0, 10, 1), (0, one.table.dim), ("gpu:0",), "hbm", "device")
        for one in tables
    )
    given = Plan(tuple(one.table for one in tables), machine(2), shards, {}, {}, BATCH)
    given = replace(given, pipeline=pipeline, exchange_dtype=exchange)
    first, second = peak_memory(given, Profile(tuple(tables), samples=1), device_kind=kind)
    most, lookups, vectors = 2 * BATCH * 5, 2 * BATCH * (5 + 1), 2 * 2 * BATCH
    outputs, own = 2 * BATCH * (16 + 8) * 4, BATCH * (16 + 8) * 4
    is_cuda, is_ahead = kind == "cuda", pipeline == "look-ahead"
    step, ids = 16 * lookups + 8 * vectors, 8 * lookups
    sort = (20 if is_cuda else 13) * most  # One arena after the other.
    held = 2 * step + ids if is_ahead else step  # Ids of the next step have come.
    shared = held + (sort + ids if is_cuda and is_ahead else 0)
    narrow = (outputs + own) // 2 if exchange == "bfloat16" else 0
    expected = {
        "exchange of ids": {
            "indices": step + ids if is_ahead else step,
            "exchange": ids * 7 // 2 if is_cuda else ids * 5 // 2,
        },
        "prepare": {"indices": held + sort + ids},
        "lookup": {"indices": shared, "outputs": outputs},
        "exchange of outputs": {
            "indices": shared,
            "outputs": outputs,
            "exchange": outputs + own + narrow,
        },
        "forward": {"indices": shared, "outputs": outputs, "exchange": own},
        "backward": {"indices": shared, "outputs": outputs},
        "exchange of gradients": {
            "indices": shared,
            "outputs": outputs,
            "exchange": 2 * own + outputs + narrow,
        },
        "update": {
            "indices": shared,
            "outputs": outputs,
            "gradients of outputs": 2 * outputs + own,
            "sums of rows": (4 + 4) * most,
        },
    }
    always = {"weights", "optimizer state", "context", "communication", "fragmentation"}
    found = {
        phase.name: {part: size for part, size in phase.parts.items() if part not in always}
        for phase in first.phases
    }
    assert found == expected
    assert list(found) == list(expected)
    for phase in second.phases:
        assert "outputs" not in phase.parts
        assert "weights" not in phase.parts
    assert by_name(second)["forward"].parts["exchange"] == own


def test_dense_layers_have_their_phase() -> None:
    layers = DenseLayers((64, 1), (32, DIM), 13, optimizer="adam", reserved_bytes=1000)
    without, with_layers = (
        peak_memory(plan("gpu:0", dense=dense), profile())[0] for dense in (None, layers)
    )
    more = with_layers.peak_bytes - without.peak_bytes
    parts = by_name(with_layers)["backward"].parts
    assert parts["dense state"] == 2 * parts["dense parameters"]
    assert more > parts["dense parameters"] + parts["dense state"]
    # What the problem took off the GPU for them is there.
    assert with_layers.capacity_bytes == without.capacity_bytes + 1000


def test_the_largest_batch_fits_and_one_more_sample_does_not() -> None:
    given = plan("gpu:0", "gpu:1")
    room = {"gpu:0": 2 << 30, "gpu:1": (1 << 30) + (300 << 20)}
    most = largest_batch(given, profile(), capacity_bytes=room)
    for batch, fits in ((most, True), (most + 1, False)):
        peaks = peak_memory(replace(given, batch_size=batch), profile(), capacity_bytes=room)
        assert all(peak.free_bytes >= 0 for peak in peaks) == fits
    assert largest_batch(given, profile(), capacity_bytes={"gpu:0": 0}) == 0


def test_what_a_step_has_at_all_times_is_what_plans_charge() -> None:
    given = plan("gpu:0")
    charged = device_memory(given)["gpu:0"]
    (peak,) = peak_memory(given, profile())
    for phase in peak.phases:
        assert phase.parts["weights"] == charged.weight_bytes
        assert phase.parts["optimizer state"] == charged.state_bytes


def test_a_profile_of_other_tables_is_refused() -> None:
    other = Profile((counted_table("u", [1, 1]),), samples=1)
    with pytest.raises(ProblemError, match=r"the profile lacks tables \['t'\] of the plan"):
        peak_memory(plan("gpu:0"), other)


def test_report_says_whether_it_fits() -> None:
    report = memory_report(plan("gpu:0"), profile())
    assert report.headline[0].startswith("fits, with ")
    assert report.facts["fits"]
    assert report.facts["largest_batch_size"] >= BATCH
    *purposes, total = report.to_json()["phases"]
    assert total.pop("purpose") == "total"
    assert total == {phase: sum(row[phase] for row in purposes) for phase in total}
    tight = plan("gpu:0")
    gpus = tuple(replace(gpu, memory_bytes=1 << 20) for gpu in tight.topology.gpus)
    tight = replace(tight, topology=replace(tight.topology, gpus=gpus))
    report = memory_report(tight, profile())
    assert "are short in phase" in report.headline[0]
    # No batch is small enough, and with a smaller budget there is less to compare with.
    assert "gpu:0; name the chip of gpu:0 in the machine's file: " in report.headline[0]
    assert report.facts["free_bytes"] < 0
    assert report.facts["largest_batch_size"] == 0
    cards = tuple(replace(gpu, chip="t4") for gpu in gpus)
    large = replace(tight, topology=replace(tight.topology, gpus=cards), batch_size=1 << 28)
    advice = "; make the batch smaller, or plan with less --hbm"
    assert memory_report(large, profile()).headline[0].endswith(advice)


def test_the_vectors_of_replicas_are_counted_once() -> None:
    topology = machine(32, hbm_bytes=1 << 30)
    everywhere = replace(plan("gpu:0").shards[0], devices=tuple(gpu.id for gpu in topology.gpus))
    many = replace(plan("gpu:0"), topology=topology, shards=(everywhere,))
    with mock.patch("placer.plan.peak_memory.output_vectors", wraps=output_vectors) as counted:
        peaks = peak_memory(many, profile())
    assert len({peak.peak_bytes for peak in peaks}) == 1
    assert counted.call_count < 10
