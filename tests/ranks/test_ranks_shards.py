"""Shards into the tables of several ranks: each reads what it holds."""

from unittest import mock

import pytest
import torch
from executor_cases import machine, placements
from ranks_cases import sharded, table_with
from ranks_launcher import Job, Outcomes, run
from shard_cases import checkpoint_of

from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.storage.shards import load_shards, write_shards

CASES = ("host", "split 50%", "grid", "crossing cuts", "replicas")


def mixed() -> Plan:
    """Ways to cut a table, under an optimizer with one number a row and one with two tensors."""
    plans = [
        placements(table_with(optimizer, ("sum",), name=f"{optimizer} {case}"))[case]
        for optimizer in ("rowwise_adagrad", "adam")
        for case in CASES
    ]
    return Plan(
        tuple(table for plan in plans for table in plan.tables),
        machine(),
        tuple(shard for plan in plans for shard in plan.shards),
        {name: order for plan in plans for name, order in plan.row_order.items()},
        {name: ids for plan in plans for name, ids in plan.hot_ids.items()},
    )


def elsewhere() -> Plan:
    """The same tables, each whole on one GPU."""
    tables = mixed().tables
    shards = (
        Shard(table.name, (0, table.rows, 1), (0, table.dim), ("gpu:3",), "hbm", "device")
        for table in tables
    )
    return Plan(tables, machine(), tuple(shards))


def loaded(rank: int, world: int, folder: str) -> tuple[object, ...]:
    """Weights, state and updates on this rank, and the folders that it read from."""
    module = sharded(mixed())
    found = load_shards(module, folder)
    read = {name.partition("/")[0] for name in found._checked}
    return module.state_dict(), module.optimizer_state_dict(), module.update_count(), read


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("shards")
    jobs: list[Job] = []
    for name, written in (("own", mixed()), ("other", elsewhere())):
        with mock.patch("os.fsync"):  # Waiting for the disk takes long, and shows nothing here.
            write_shards(written, checkpoint_of(written), folder / name)
        jobs.append((name, loaded, (str(folder / name),)))
    return run(2, jobs)


@pytest.mark.parametrize("name", ["own", "other"])
def test_every_rank_gets_its_rows(outcomes: Outcomes, name: str) -> None:
    expected = checkpoint_of(mixed()).tensors
    for weights, states, updates, _ in outcomes.of(name):
        assert weights.keys() == expected["embeddings"].keys()
        assert all(torch.equal(weights[key], expected["embeddings"][key]) for key in weights)
        assert states.keys() == expected["embedding_optimizer"].keys()
        assert all(torch.equal(states[k], expected["embedding_optimizer"][k]) for k in states)
        assert updates == 7


def test_files_of_other_ranks_are_not_read(outcomes: Outcomes) -> None:
    first, second = (read for *_, read in outcomes.of("own"))
    assert first == {"gpu%3A0.hbm", "gpu%3A1.hbm", "gpu%3A0.dram", "gpu%3A1.dram"}
    assert second == {"gpu%3A2.hbm", "gpu%3A3.hbm"}
