"""Inputs are exchanged beside the training, with the same results and the same errors."""

import functools
import itertools
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from executor_cases import assert_same_bits, contents, plan_of, random_batch, shard
from ranks_cases import backward, batches_of, every_placement, sharded, table_with
from ranks_launcher import Job, Outcomes, run

from placer.errors import BackendError, DataError
from placer.executor import BagBatch, look_ahead
from placer.executor.distributed.collectives import Communicator
from placer.plan.plan import Plan

STEPS = 5
WAIT_S = 20.0


def row_wise(optimizer: str = "adagrad") -> Plan:
    table = table_with(optimizer, ("sum",))
    return plan_of([table], [shard(table, (i, 61, 4), on=f"gpu:{i}") for i in range(4)])


def overlaps(rank: int, world: int, plan: Plan) -> list[str]:
    """Batch t + 2 is exchanged between the forward and the end of the backward pass of batch t.

    The exchange waits for the forward pass, and the backward pass for the exchange: were they
    one after the other in one thread, one of them would wait in vain.
    """
    model = sharded(plan)
    forward = [threading.Event() for _ in range(STEPS)]
    exchanged = [threading.Event() for _ in range(STEPS)]
    order: list[str] = []
    number = itertools.count()
    make = model._inputs.group

    def group() -> Communicator:
        ahead = make()
        send = ahead.exchange
        ahead.exchange = functools.partial(exchange, send)  # type: ignore[method-assign]
        return ahead

    def exchange(send, kind, values, sent, received):  # type: ignore[no-untyped-def]
        if kind != "lengths":
            return send(kind, values, sent, received)
        batch = next(number)
        if batch >= 2:
            assert forward[batch - 2].wait(WAIT_S), f"batch {batch} is exchanged too early"
        order.append(f"exchange {batch}")
        result = send(kind, values, sent, received)
        exchanged[batch].set()
        return result

    model._inputs.group = group
    batches = [batches_of(plan.tables, world, step)[rank] for step in range(STEPS)]
    for step, batch in enumerate(look_ahead(batches, model)):
        outputs = model(batch)
        forward[step].set()
        if step + 2 < STEPS:
            assert exchanged[step + 2].wait(WAIT_S), f"batch {step + 2} is exchanged too late"
        backward(outputs)
        order.append(f"backward {step}")
    model.close()
    return order


def same_results(rank: int, world: int, plan: Plan) -> None:
    """Equal to the bit, with and without, and where a loop ends early and another follows."""
    found = []
    for ahead in (False, True):
        model = sharded(plan)
        batches = [batches_of(plan.tables, world, step)[rank] for step in range(STEPS)]
        stream = look_ahead(iter(batches), model) if ahead else iter(batches)
        for batch in itertools.islice(stream, 2):
            backward(model(batch))
        with torch.no_grad():
            model(batches[0])  # After those that were sent and are not wanted any more.
        for batch in look_ahead(batches[2:], model) if ahead else batches[2:]:
            backward(model(batch))
        found.append(contents(model))
        if ahead:
            assert model._inputs._thread is not None, "nothing was sent ahead"
        model.close()
    assert_same_bits(found[0], found[1])


def bad_batch_ahead(rank: int, world: int, plan: Plan) -> tuple[int, str]:
    """A bad batch of one rank is an error of all at its turn, and they can go on."""
    model = sharded(plan)
    batches = [random_batch(plan.tables, 4, seed=step) for step in range(STEPS)]
    if rank == 0:
        batches[3].ids[-1] = 61
    steps, said = 0, ""
    stream = look_ahead(batches, model)
    try:
        for batch in stream:
            backward(model(batch))
            steps += 1
    except DataError as error:
        said = str(error)
    for batch in look_ahead(batches[:2], model):
        backward(model(batch))
    model.close()
    return steps, said


def ends_early(rank: int, world: int, plan: Plan) -> tuple[int, str]:
    """One rank has fewer batches: the others are told within the timeout."""
    model = sharded(plan)
    batches = [random_batch(plan.tables, 4, seed=step) for step in range(STEPS)]
    steps, said = 0, ""
    try:
        for batch in look_ahead(batches[: 3 if rank == 0 else STEPS], model):
            backward(model(batch))
            steps += 1
    except BackendError as error:
        said = str(error)
    return steps, said


JOBS: list[Job] = [
    ("overlap", overlaps, (row_wise(),)),
    ("same results", same_results, (every_placement("rowwise_adagrad"),)),
    ("bad batch", bad_batch_ahead, (row_wise(),)),
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run(2, JOBS)


def test_the_exchange_runs_beside_the_training(outcomes: Outcomes) -> None:
    for order in outcomes.of("overlap"):
        for step in range(STEPS - 2):
            assert order.index(f"exchange {step + 2}") < order.index(f"backward {step}")
            assert step == 0 or order.index(f"exchange {step + 2}") > order.index(
                f"backward {step - 1}"
            )


def test_results_are_those_without_it(outcomes: Outcomes) -> None:
    outcomes.of("same results")


def test_a_bad_batch_is_an_error_at_its_turn_on_every_rank(outcomes: Outcomes) -> None:
    said = outcomes.of("bad batch")
    assert [steps for steps, _ in said] == [3, 3]
    assert "id 61 is not a row of table 't'" in said[0][1]
    assert "ranks [0] refused" in said[1][1]


@pytest.mark.slow
def test_a_loop_that_ends_early_does_not_hang_the_others() -> None:
    short, long = run(2, [("early", ends_early, (row_wise(),))], timeout_s=8).of("early")
    # The longer loop waits for batch 3 before it trains on batch 2, and so does the other then.
    assert short[0] >= 2
    assert long[0] >= 2
    # What it is doing when it finds out is a matter of time.
    kinds = "sizes and agreements|pooled rows|gradients"
    assert re.search(rf"rank 1 of 2: exchanging ({kinds}) failed", long[1])


class Sends:
    """What `look_ahead` asks of embeddings, written down."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def send_ahead(self, batch: BagBatch) -> str:
        self.said.append(f"send {batch.batch_size}")
        return f"sent {batch.batch_size}"

    def prefetch(self, sent: str) -> str:
        number = sent.removeprefix("sent ")
        assert number != sent
        self.said.append(f"prefetch {number}")
        return number


def test_a_batch_is_sent_two_steps_and_prepared_one_step_before_it_trains() -> None:
    embeddings = Sends()
    sizes = [1, 2, 3, 4]

    def read() -> Iterator[BagBatch]:
        for size in sizes:
            yield BagBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(size + 1).long(), size)

    for size in look_ahead(read(), embeddings):
        embeddings.said.append(f"train {size}")
    expected = "send 1, send 2, prefetch 1, send 3, prefetch 2, train 1, send 4, prefetch 3, "
    expected += "train 2, prefetch 4, train 3, train 4"
    assert ", ".join(embeddings.said) == expected
