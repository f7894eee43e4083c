"""Plans whose tables grow: the file, what is checked, and the executor that reads them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_cases import machine

from placer import Feature, Plan, Shard, Table
from placer.adapters import document_for
from placer.errors import CapacityError, PlanError, PlanMismatchError
from placer.executor import BagBatch, make_embeddings
from placer.growing import Growing
from placer.plan.memory import device_memory
from placer.plan.verify import verify, violations

HOW = Growing(capacity=9, admission=2, eviction="lru", ttl=5)


def growing_plan(how: Growing = HOW, rows: int | None = None) -> Plan:
    """One table that grows, half in HBM and half in DRAM, beside a fixed one."""
    rows = how.rows if rows is None else rows
    item = Table("item", rows, 4, features=(Feature("item"),))
    city = Table("city", 5, 4, features=(Feature("city"),))
    shards = (
        Shard("item", (0, 4, 1), (0, 4), ("gpu:0",), "hbm", "device"),
        Shard("item", (4, rows, 1), (0, 4), ("gpu:1",), "dram", "uva"),
        Shard("city", (0, 5, 1), (0, 4), ("gpu:0",), "hbm", "device"),
    )
    return Plan((item, city), machine(), shards, growing={"item": how})


def test_the_file_has_what_the_plan_has(tmp_path: Path) -> None:
    plan, path = growing_plan(), tmp_path / "plan.json"
    plan.save(path)
    said = json.loads(path.read_text())["growing"]
    assert said == {"item": {"capacity": 9, "admission": 2, "eviction": "lru", "ttl": 5}}
    assert Plan.load(path) == plan
    assert plan.of_tables(["city"]).growing == {}
    assert plan.of_tables(["item"]).growing == {"item": HOW}


def test_a_plan_without_it_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace(growing_plan(), growing={}).save(path)
    assert "growing" not in json.loads(path.read_text())
    assert Plan.load(path).growing == {}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"capacity": 0}, "greater than or equal to 1"),
        ({"capacity": 9, "admission": 256}, "less than or equal to 255"),
        ({"capacity": 9, "eviction": "fifo"}, "'lfu' or 'lru'"),
        ({"capacity": 9, "size": 3}, "item.size: Extra inputs"),
        ({"capacity": 2**40}, f"capacity {2**40} is not within"),
    ],
)
def test_bad_values_are_named(said: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    growing_plan().save(path)
    document = json.loads(path.read_text())
    del document["sha256"]
    document["growing"]["item"] = said
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=message):
        Plan.load(path)


def test_rows_and_names_are_verified() -> None:
    assert not violations(growing_plan())
    (fault,) = violations(growing_plan(rows=9))
    assert (fault.rule, fault.where) == ("growing", "item")
    assert "has 9 rows; a capacity of 9 keys takes 10" in fault.message
    (fault,) = violations(replace(growing_plan(), growing={"user": HOW}))
    assert "table 'user' grows but is not listed" in fault.message


def test_key_maps_are_charged_to_hosts_by_their_gpus() -> None:
    plan = growing_plan()
    fixed = device_memory(replace(plan, growing={}))
    one = device_memory(replace(plan, topology=machine(gpus=1), shards=plan.shards[:1]))
    assert one["host:0"].row_map_bytes == HOW.nbytes
    assert one["gpu:0"].row_map_bytes == fixed["gpu:0"].row_map_bytes + HOW.copy_nbytes
    # Of 9 keys each of two GPUs has 5, and the numbers of 6 rows.
    part = replace(HOW, capacity=5).nbytes + 4 * 6
    grown = device_memory(plan)
    assert grown["host:0"].row_map_bytes == 2 * part
    assert grown["host:0"].total_bytes == fixed["host:0"].total_bytes + 2 * part
    assert grown["gpu:0"] == fixed["gpu:0"]
    two = replace(plan, topology=machine(gpus=1, hosts=2))
    assert [device_memory(two)[f"host:{n}"].row_map_bytes for n in (0, 1)] == [part] * 2
    full = replace(plan, topology=machine(dram_bytes=fixed["host:0"].total_bytes))
    with pytest.raises(CapacityError, match=f"host:0 .* {2 * part} bytes too many"):
        verify(full)


_MEMORY = """
import ctypes, gc
import numpy as np, torch
from placer import Feature, Plan, Shard, Table, Topology
from placer.executor import BagBatch, make_embeddings
from placer.growing import Growing
from placer.plan.memory import device_memory
def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Freed memory is none of the tables'.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
def trained(how):
    table = Table("t", how.rows, 8, features=(Feature("t"),), optimizer="rowwise_adagrad")
    shard = Shard("t", (0, how.rows, 1), (0, 8), ("gpu:0",), "dram", "uva")
    plan = Plan((table,), Topology.parse("1xh100"), (shard,), growing={"t": how})
    embeddings = make_embeddings(plan, backend="numba")
    for first in range(0, 5_000_000, 65_536):
        keys = torch.from_numpy(np.arange(first, first + 65_536) * 1_000_003**2)
        batch = BagBatch.from_features({"t": (keys, None, None)}, ["t"])
        embeddings(batch)["t"].sum().backward()
    return embeddings, device_memory(plan)["host:0"].total_bytes
trained(Growing(9))  # What compiling takes is none of it.
before = held()
embeddings, planned = trained(Growing(5_000_000))
print((held() - before) / planned)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what a process has")
def test_a_process_takes_the_host_memory_of_its_plan() -> None:
    command = [sys.executable, "-c", _MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(1, abs=0.05)


def test_the_executor_gives_rows_as_the_plan_says() -> None:
    keys = torch.tensor([2**60, -3, 2**60, 7])
    for how in (None, {"item": Growing(9)}):
        options = {} if how is None else {"growing": how}
        embeddings = make_embeddings(growing_plan(), **options)
        features = {"item": (keys, None, None), "city": (torch.tensor([0, 1, 2, 3]), None, None)}
        batch = BagBatch.from_features(features, embeddings.feature_names)
        sum(one.sum() for one in embeddings(batch).values()).backward()
        # Admission at the second reading leaves keys that are read once without a row.
        live = {2**60} if how is None else {2**60, -3, 7}
        assert set(embeddings.live_keys("item")[0].tolist()) == live


def test_who_has_no_key_map_refuses() -> None:
    with pytest.raises(PlanMismatchError, match=r"'item' grows: .* which HugeCTR does not have"):
        document_for("hugectr", growing_plan())
