"""A checkpoint of `placer train` into the tables of several ranks: each reads what it holds."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_cases import checkpoint_of
from executor_cases import machine, placements
from ranks_cases import plan_of_plans, sharded, table_with
from ranks_launcher import Job, Outcomes, run
from torch import Tensor

from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.storage.checkpoint import dcp_reader
from placer.training.checkpoint import load_embeddings, save

CASES = ("host", "split 50%", "grid", "crossing cuts", "replicas")


def mixed() -> Plan:
    """Ways to cut a table, under an optimizer with one number a row and one with two tensors."""
    plans = [
        placements(table_with(optimizer, ("sum",), name=f"{optimizer} {case}"))[case]
        for optimizer in ("rowwise_adagrad", "adam")
        for case in CASES
    ]
    return plan_of_plans(plans)


def elsewhere() -> Plan:
    """The same tables, each whole on one GPU of the second rank."""
    tables = mixed().tables
    shards = (
        Shard(table.name, (0, table.rows, 1), (0, table.dim), ("gpu:3",), "hbm", "device")
        for table in tables
    )
    return Plan(tables, machine(), tuple(shards))


def loaded(rank: int, world: int, folder: str, plan: Callable[[], Plan]) -> tuple[object, ...]:
    """Weights and state, and how often this rank read rows of tables."""
    module, reads = sharded(plan()), []
    call = dcp_reader._Rows.__call__

    def counted(self: dcp_reader._Rows, start: int, stop: int) -> Tensor:
        if stop - start > 1:  # No number of updates.
            reads.append(start)
        return call(self, start, stop)

    with mock.patch.object(dcp_reader._Rows, "__call__", counted):
        load_embeddings(folder, module)
    return module.state_dict(), module.optimizer_state_dict(), len(reads)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    save(folder, checkpoint_of(mixed()))
    jobs: list[Job] = [(one.__name__, loaded, (str(folder), one)) for one in (mixed, elsewhere)]
    return run(2, jobs)


@pytest.mark.parametrize("name", ["mixed", "elsewhere"])
def test_every_rank_gets_its_rows(outcomes: Outcomes, name: str) -> None:
    expected = checkpoint_of(mixed()).tensors
    for weights, states, _ in outcomes.of(name):
        assert weights.keys() == expected["embeddings"].keys()
        assert all(torch.equal(weights[key], expected["embeddings"][key]) for key in weights)
        assert states.keys() == expected["embedding_optimizer"].keys()
        assert all(torch.equal(states[k], expected["embedding_optimizer"][k]) for k in states)


def test_a_rank_that_holds_no_row_reads_none(outcomes: Outcomes) -> None:
    first, second = (reads for *_, reads in outcomes.of("elsewhere"))
    assert first == 0
    assert second == len(CASES) * (2 + 3)  # Tensors of both optimizers, each a block.
