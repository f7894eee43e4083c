"""Plans of whole tables as a device_map."""

from dataclasses import replace

import pytest
from plan_cases import in_dram, in_hbm, machine

from placer import Plan, Shard, Table
from placer.adapters.device_map import to_device_map
from placer.errors import PlanMismatchError

TABLES = (Table("a", 10, 8), Table("b", 6, 8), Table("c", 4, 8))
SHARDS = (
    in_hbm("a", (0, 10, 1), (0, 8), "gpu:1"),
    in_hbm("b", (0, 6, 1), (0, 8), "gpu:0"),
    replace(in_dram("c", (0, 4, 1), (0, 8), "host:0"), lookup="host"),
)


def plan_with(*shards: Shard, hosts: int = 1) -> Plan:
    return Plan(TABLES, machine(2, hosts), shards)


def test_whole_tables_are_on_a_gpu_or_on_the_cpu() -> None:
    assert to_device_map(plan_with(*SHARDS)) == {"a": 1, "b": 0, "c": "cpu"}
    paths = {"a": "embeddings.a", "b": "embeddings.b", "c": "wide.c"}
    found = to_device_map(plan_with(*SHARDS), paths)
    assert found == {"embeddings.a": 1, "embeddings.b": 0, "wide.c": "cpu"}


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([in_hbm("c", (0, 4, 1), (0, 8), "gpu:0", "gpu:1")], "'c' has 1 shards on 2 devices"),
        (
            [in_hbm("c", (n, 4, 2), (0, 8), f"gpu:{n}") for n in range(2)],
            "'c' has 2 shards on 2 devices",
        ),
        ([in_dram("c", (0, 4, 1), (0, 8))], "'c' is in DRAM and a GPU reads its rows"),
    ],
)
def test_what_a_device_map_cannot_say(shards: list[Shard], words: str) -> None:
    with pytest.raises(PlanMismatchError, match=words):
        to_device_map(plan_with(*SHARDS[:2], *shards))


def test_several_hosts_and_modules_that_are_not_named() -> None:
    with pytest.raises(PlanMismatchError, match="the plan is for 2 hosts"):
        to_device_map(plan_with(*SHARDS, hosts=2))
    with pytest.raises(PlanMismatchError, match="where the model has 'b'"):
        to_device_map(plan_with(*SHARDS), {"a": "x"})
