"""Hosts without a GPU serve tables to ranks that train, with the results of one process."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from executor_cases import (
    EPS,
    LR,
    assert_equal_states,
    assert_same_bits,
    contents,
    machine,
    plan_of,
    random_batch,
    shard,
    take_over,
)
from fast_and_full import some
from ranks_cases import (
    all_close,
    backward_of_squares,
    batches_of,
    every_placement,
    joined,
    sharded,
    table_with,
    train_step,
    trains_alike,
    weighted_bags,
)
from ranks_launcher import Job, Outcomes, run

from placer.errors import DataError, PlanMismatchError
from placer.executor import PlacedEmbeddings, look_ahead, make_embeddings
from placer.executor.distributed import serve_tables
from placer.growing import Growing
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.storage.checkpoint import load_model, save_model
from placer.tables import OPTIMIZERS

STEPS = 4
TRAINED = some(OPTIMIZERS, "adam")
RESUMED = some(("rowwise_adagrad", "adam"))
OTHERS = some(
    ("ahead", "weights", "settings", "growing", "growing alike"), "settings", "growing alike"
)
TWO_TRAINERS, TWO_SERVERS = (2, 1), (1, 2)
ENOUGH_WITH_TWO_TRAINERS = {"sgd", "adagrad", "weights", "settings", "adam resumes"}
BATCHES = 4


def on_servers(plan: Plan, trainers: int, servers: int) -> Plan:
    """The same placements on fewer GPUs: what was on the last of four is on servers."""
    devices = {f"gpu:{i}": f"gpu:{i}" for i in range(trainers)}
    devices |= {f"gpu:{i}": f"host:{1 + i % servers}" for i in range(trainers, 4)}

    def moved(part: Shard) -> Shard:
        homes = dict.fromkeys(devices.get(device, device) for device in part.devices)
        if part.table == "dram":  # A whole table, on a server alone.
            homes = {f"host:{servers}": None}
        gpus = tuple(home for home in homes if home.startswith("gpu"))
        if gpus:
            return replace(part, devices=gpus)
        return Shard(part.table, part.rows, part.cols, tuple(homes), "dram", "host")

    shards = tuple(map(moved, plan.shards))
    return replace(plan, topology=machine(trainers, servers=servers), shards=shards)


# What runs on each rank --------------------------------------------------------------------------


def beside(
    rank: int,
    world: int,
    trainers: int,
    models: int,
    job: Callable[..., Any],
    plan: Plan,
    *more: Any,
) -> Any:
    """A job on the ranks that train, while the others serve so many models, one after the other."""
    if rank < trainers:
        return job(rank, trainers, plan, *more)
    for _ in range(models):
        serve_tables(plan)
    return None


def alike(rank: int, world: int, trainers: int, plan: Plan) -> None:
    """All placements, poolings and optimizers, against float64."""
    group = dist.new_group(list(range(trainers)))
    beside(rank, world, trainers, 1, trains_alike, plan, STEPS, 1, group)


def ahead_or_not(rank: int, world: int, plan: Plan) -> None:
    """The same bits with and without look-ahead, batches that nobody wants, and two at a time."""
    found = []
    for ahead in (False, True):
        model = sharded(plan)
        start = model.state_dict()
        batches = [batches_of(plan.tables, world, step)[rank] for step in range(BATCHES)]
        stream = look_ahead(iter(batches), model) if ahead else iter(batches)
        backward_of_squares(model(next(stream)))
        with torch.no_grad():
            model(batches[0])
        model(batches[1])  # With a gradient that nobody asks for.
        first = model.prefetch(batches[1]) if ahead else batches[1]
        outputs = [model(first), model(batches[2])]
        backward_of_squares(
            {f"{i}{name}": v for i, by in enumerate(outputs) for name, v in by.items()}
        )
        model.set_lr(0.03)
        for batch in look_ahead(batches[2:], model) if ahead else batches[2:]:
            backward_of_squares(model(batch))
        found.append(contents(model))
        model.close()
    assert_same_bits(found[0], found[1])
    assert_same_bits(PlacedEmbeddings(plan, seed=3).state_dict(), start)


def other_settings(rank: int, world: int, plan: Plan) -> None:
    """Servers take the trainers' settings: rates, the optimizer, how gradients add up, rounding."""
    settings = {"lr": 0.02, "eps": 1e-3, "seed": 11, "optimizer": "adam", "betas": (0.7, 0.99)}
    model = make_embeddings(plan, average_gradients=False, **settings)
    alone = PlacedEmbeddings(plan, **settings)
    for step in range(3):
        batches = batches_of(plan.tables, world, step)
        if step == 2:
            for one in (model, alone):
                one.set_lr(0.5)
                one.set_eps(1e-4)
        backward_of_squares(model(batches[rank]))
        backward_of_squares(alone(joined(batches, len(alone.features))))
    all_close(contents(model), contents(alone))
    model.close()


def trained(model: Any, rank: int, world: int, steps: range) -> Any:
    for step in steps:
        train_step(model, rank, batches_of(model.plan.tables, world, step), step)
    return model


def trained_alone(model: PlacedEmbeddings, world: int, steps: range) -> PlacedEmbeddings:
    """The same in one process, with the samples of all ranks."""
    for step in steps:
        outputs = model(joined(batches_of(model.plan.tables, world, step), len(model.features)))
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(output.shape, generator=generator) for output in outputs.values()]
        torch.autograd.backward(list(outputs.values()), [one / world for one in gradients])
    return model


def resumes(rank: int, world: int, trainers: int, plan: Plan, folder: Path) -> None:
    """Save with servers and load without, and the other way round: the rows keep their bits."""
    group = dist.new_group(list(range(trainers)))
    served = on_servers(plan, trainers, world - trainers)
    if rank >= trainers:
        for _ in range(4):
            serve_tables(served)
        return
    first = trained(sharded(served), rank, trainers, range(2))
    kept = contents(first)
    save_model(folder / "served", first, {"at": torch.tensor(2)})
    first.close()
    alone = PlacedEmbeddings(plan, lr=LR, eps=EPS, seed=9)
    assert load_model(folder / "served", alone) == {"at": torch.tensor(2)}
    assert_equal_states(contents(alone), kept)
    trained_alone(alone, trainers, range(2, 4))
    kept = contents(alone)
    if rank == 0:
        save_model(folder / "alone", alone)
    dist.barrier(group)
    for by_folder in (True, False):
        model = sharded(served, seed=8)
        if by_folder:
            load_model(folder / "alone", model)
        else:
            take_over(model, alone)
        assert_equal_states(contents(model), kept)
        found = contents(trained(model, rank, trainers, range(4, 6)))
        model.close()
    whole = trained(sharded(served), rank, trainers, range(6))
    all_close(found, contents(whole))
    whole.close()


def growing(rank: int, world: int, plan: Plan) -> None:
    """Keys are mapped by trainers; rows that change keys begin again on servers, too."""
    (table,) = plan.tables
    how = {table.name: Growing(table.rows - 1)}
    found = []
    for ahead in (False, True):
        model = make_embeddings(plan, growing=how, seed=3, lr=LR, backend="torch")
        batches = batches_of(plan.tables, world, 0) + batches_of(plan.tables, world, 1)
        steps = [
            replace(batch, ids=batch.ids * 7919 + 10**12 * step)
            for step in range(4)
            for batch in batches[rank::world]
        ]
        for batch in look_ahead(steps, model) if ahead else steps:
            backward_of_squares(model(batch))
        counts = model.key_counts()[table.name]
        assert counts.evicted > 0
        found.append(contents(model))
        model.close()
    assert_same_bits(found[0], found[1])
    rows = found[0][f"{table.name}.weight"]
    assert rows.isfinite().all()


def growing_alike(rank: int, world: int, trainers: int, served: Plan, plain: Plan) -> None:
    """Tables of a plan that grow, trained with servers and without: the same bits, keys included.

    Gradients do not depend on outputs, of which servers only add up other partial sums.
    """
    verify(served)
    group = dist.new_group(list(range(trainers)))
    if rank >= trainers:
        return serve_tables(served, backend="torch")
    found = []
    for plan, process_group in ((served, None), (plain, group)):
        # Also a single rank shares tables here, so that its keys are mapped alike.
        model = sharded(plan, process_group=process_group, backend="torch")
        for step in range(STEPS):
            batches = [
                replace(batch, ids=batch.ids * 7919 + 10**12 * (step // 2))
                for batch in batches_of(plan.tables, trainers, step)
            ]
            train_step(model, rank, batches, step)
        counts = model.key_counts()
        assert all(count.evicted > 0 for count in counts.values())
        found.append((counts, {**contents(model), **model.state_dict()}))
        model.close()
    (served_counts, with_servers), (plain_counts, without) = found
    assert served_counts == plain_counts
    assert_equal_states(with_servers, without)
    assert any(name.endswith(".keys.rows") for name in with_servers)


def bad_batch(rank: int, world: int, plan: Plan) -> str:
    """An error of one trainer is one of all, and they go on; servers say nothing."""
    model = sharded(plan)
    good, bad = batches_of(plan.tables, world, 0)[rank], random_batch(plan.tables, 4)
    if rank == 0:
        bad.ids[-1] = 61
    said = ""
    try:
        for batch in look_ahead([good, bad, good], model):
            backward_of_squares(model(batch))
    except DataError as error:
        said = str(error)
    backward_of_squares(model(good))
    updates = contents(model)["updates"]
    model.close()
    return f"after {updates} updates: {said}"


def refused(rank: int, world: int, plan: Plan, trainers: int) -> str:
    with pytest.raises(PlanMismatchError) as error:
        make_embeddings(plan) if rank >= trainers else serve_tables(plan)
    return str(error.value)


def lacks(rank: int, world: int, trainers: int, plan: Plan) -> list[str]:
    """What servers do not do, told before anyone waits."""
    group = dist.new_group(list(range(world)))
    with pytest.raises(PlanMismatchError) as error:
        make_embeddings(plan, process_group=group)
    if rank >= trainers:
        serve_tables(plan)
        return [str(error.value)]
    first = sharded(plan)
    with pytest.raises(PlanMismatchError) as second:
        sharded(plan)
    first.close()
    return [str(error.value), str(second.value)]


def jobs_of(trainers: int, servers: int, folder: Path) -> list[Job]:
    def plan(optimizer: str) -> Plan:
        return on_servers(every_placement(optimizer), trainers, servers)

    def job(name: str, models: int, work: Callable[..., Any], *more: Any) -> Job:
        return name, beside, (trainers, models, work, *more)

    few = table_with("sgd", ("sum",))
    last = shard(few, on=f"host:{servers + 1}", memory="dram", lookup="host")
    too_many = plan_of(
        [few],
        [
            last,
            *(replace(last, rows=(0, 0, 1), devices=(f"host:{i + 1}",)) for i in range(servers)),
        ],
        topology=machine(trainers, servers=servers + 1),
    )
    table = table_with("rowwise_adagrad", ("sum", "max"), rows=12)
    devices = [*(f"gpu:{i}" for i in range(trainers)), *(f"host:{i + 1}" for i in range(servers))]
    strided = plan_of(
        [table],
        [
            shard(table, (i, 12, 3), on=on, memory="dram", lookup="host" if on[0] == "h" else "uva")
            for i, on in enumerate(devices)
        ],
        topology=machine(trainers, servers=servers),
    )
    growing_plans = []
    first, last = "gpu:0", f"gpu:{trainers - 1}"
    for homes in ([*devices[trainers:]] * 2, (last, first)):
        cold, other = homes[:2]
        on_host = {"memory": "dram", "lookup": "host"}
        names = "rowwise_adagrad", "adam"
        tables = [table_with(name, ("sum", "none"), name=name, rows=12) for name in names]
        made = plan_of(
            tables,
            [
                shard(tables[0], (0, 12, 2)),
                shard(tables[0], (1, 12, 2), on=cold, **on_host),
                shard(tables[1], on=other, **on_host),
            ],
            topology=machine(trainers, servers=servers),
        )
        growing_plans.append(replace(made, growing=dict.fromkeys(names, Growing(11))))
    jobs = [
        *((name, alike, (trainers, plan(name))) for name in TRAINED),
        job("ahead", 2, ahead_or_not, plan("rowwise_adagrad")),
        job("weights", 1, weighted_bags, plan("adagrad")),
        job("settings", 1, other_settings, plan("sgd")),
        job("bad batch", 1, bad_batch, plan("adam")),
        job("growing", 2, growing, strided),
        ("growing alike", growing_alike, (trainers, *growing_plans)),
        *(
            (f"{name} resumes", resumes, (trainers, every_placement(name), folder / name))
            for name in RESUMED
        ),
        ("refused", refused, (plan("sgd"), trainers)),
        ("lacks", lacks, (trainers, plan("sgd"))),
        ("too few", refused, (too_many, trainers)),
    ]
    left_out = {"ahead", "weights", "growing"} - {*OTHERS}
    if (trainers, servers) == TWO_SERVERS:
        left_out |= ENOUGH_WITH_TWO_TRAINERS
    return [one for one in jobs if one[0] not in left_out]


@functools.cache
def done_by(trainers: int, servers: int) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        return run(trainers + servers, jobs_of(trainers, servers, Path(folder)))


@pytest.fixture(
    params=[TWO_TRAINERS, pytest.param(TWO_SERVERS, marks=pytest.mark.slow)],
    ids=["2 trainers and a server", "a trainer and 2 servers"],
)
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    trainers, servers = request.param
    return trainers, servers


@pytest.fixture
def outcomes(shape: tuple[int, int]) -> Outcomes:
    return done_by(*shape)


@pytest.mark.parametrize("what", [*TRAINED, *OTHERS])
def test_tables_on_servers_train_as_in_one_process(what: str) -> None:
    done_by(*TWO_TRAINERS).of(what)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [name for name in (*TRAINED, *OTHERS) if name not in ENOUGH_WITH_TWO_TRAINERS]
)
def test_tables_on_two_servers_train_as_in_one_process(what: str) -> None:
    done_by(*TWO_SERVERS).of(what)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "optimizer"),
    [(TWO_TRAINERS, "rowwise_adagrad"), (TWO_TRAINERS, "adam"), (TWO_SERVERS, "rowwise_adagrad")],
)
def test_plans_with_servers_and_without_load_each_others_checkpoints(
    shape: tuple[int, int], optimizer: str
) -> None:
    done_by(*shape).of(f"{optimizer} resumes")


def test_a_bad_batch_of_one_is_an_error_of_all_who_train(
    shape: tuple[int, int], outcomes: Outcomes
) -> None:
    said = outcomes.of("bad batch")[: shape[0]]
    assert "id 61 is not a row of table" in said[0]
    assert all(each.startswith("after 2 updates: ") for each in said)


def test_ranks_that_do_what_others_are_for_are_refused(
    shape: tuple[int, int], outcomes: Outcomes
) -> None:
    trainers, _ = shape
    said = outcomes.of("refused")
    for rank, words in enumerate(said):
        if rank < trainers:
            assert words == (
                f"rank {rank} does not serve tables as a host without a GPU; ranks from "
                f"{trainers} on do: call placer.executor.make_embeddings on it"
            )
        else:
            assert words.startswith(f"rank {rank} is host:{rank - trainers + 1}, which has no GPU")


def test_what_servers_lack_is_refused(shape: tuple[int, int], outcomes: Outcomes) -> None:
    for rank, (group, *second) in enumerate(outcomes.of("lacks")):
        assert group.endswith("without a GPU, serve tables to all ranks; leave process_group out")
        assert len(second) == (rank < shape[0])
        assert all("serve the tables of one model, on one device" in words for words in second)


def test_too_few_processes_are_told_how_to_start(
    shape: tuple[int, int], outcomes: Outcomes
) -> None:
    trainers, servers = shape
    for words in outcomes.of("too few"):
        assert f"the plan needs {trainers + servers + 1} processes" in words
        assert f"and there are {trainers + servers}; start them with `torchrun --nnodes " in words
        assert f"in this order: {trainers} on host:0, 1 on host:1" in words
