"""Training over 2 and 4 ranks gives what one process without a plan gives."""

import functools
from dataclasses import replace

import pytest
import torch
from executor_cases import (
    EPS,
    LR,
    assert_same_bits,
    contents,
    machine,
    plan_of,
    random_batch,
    shard,
    take_over,
)
from fast_and_full import is_fast, mostly_slow, some
from plan_cases import with_drives
from ranks_cases import (
    all_close,
    backward,
    backward_of_squares,
    batches_of,
    close,
    every_placement,
    held_cells,
    joined,
    passes_refused,
    saved_cells,
    sharded,
    table_with,
    train_step,
    trains_alike,
    weighted_bags,
)
from ranks_launcher import Job, Outcomes, run

from placer.errors import BackendError, DataError, PlanMismatchError
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead, make_embeddings
from placer.executor.distributed.collectives import Communicator, exchange_as
from placer.plan.plan import Plan
from placer.tables import OPTIMIZERS, Feature, Table

STEPS = 5  # Each rank then has had each number of samples.
TRAINED = some(OPTIMIZERS, "adam")
WITH_STATE = some(("rowwise_adagrad", "adam"), "rowwise_adagrad")


def repeats(rank: int, world: int, plan: Plan) -> None:
    """Two runs of a plan give the same bits, and start as one process."""
    results = []
    for _ in range(2):
        model = sharded(plan)
        start = model.state_dict()
        for batch in (batches_of(plan.tables, world, step)[rank] for step in range(4)):
            backward_of_squares(model(batch))
        results.append(contents(model))
        model.close()
    assert_same_bits(results[0], results[1])
    alone = PlacedEmbeddings(plan, seed=3).state_dict()
    assert start.keys() == alone.keys()
    assert_same_bits(alone, start)


def tiers(rank: int, world: int, plan: Plan) -> tuple[int, float]:
    """Tiers with memory of their own give what one memory gives, with staged rows ahead too."""
    flat, tiered = sharded(plan, backend="torch"), sharded(plan, backend="tiered")
    batches = [batches_of(plan.tables, world, step)[rank] for step in range(4)]
    for model in (flat, tiered):
        for batch in look_ahead(batches, model):
            backward_of_squares(model(batch))
    all_close(tiered.state_dict(), flat.state_dict())
    rates = tiered.hit_rates()
    assert flat.hit_rates() is None
    return rates.lookups, rates.hbm_hit_rate


def homes(rank: int, world: int, plan: Plan) -> None:
    """Rows on each rank's drive train like those in memory; narrow ones with copies or without."""
    table = table_with("rowwise_adagrad", name="cold copies")
    plan = with_drives(plan)
    copies = shard(table, on=("gpu:0", "gpu:3"), memory="dram", lookup="staged")
    plan = replace(plan, tables=(*plan.tables, table), shards=(*plan.shards, copies))
    batches = [batches_of(plan.tables, world, step)[rank] for step in range(4)]
    results = []
    for home, entries in (
        ({}, 9),
        ({"memory": "ssd"}, 9),
        ({"dtype": "int8"}, 9),
        ({"dtype": "int8"}, 1),
    ):
        shards = [
            replace(part, **home, staging_rows=entries if part.lookup == "staged" else 0)
            if part.lookup in ("staged", "cached")
            else part
            for part in plan.shards
        ]
        model = sharded(replace(plan, shards=tuple(shards)), backend="tiered")
        for batch in look_ahead(batches, model):
            backward_of_squares(model(batch))
        results.append(contents(model))
        model.close()
    memory, drive, narrow, again = results
    assert_same_bits(memory, drive)
    assert_same_bits(narrow, again)
    key = "cold copies.weight"
    assert not torch.equal(memory[key], narrow[key])
    close(narrow[key], memory[key], key, scale=3000)


def cold_on_one() -> Plan:
    """Columns on two ranks, of which only the first has a backend with tiers."""
    columns, cold = (table_with("rowwise_adagrad", name=name) for name in ("columns", "cold"))
    shards = [shard(columns, None, (0, 3)), shard(columns, None, (3, 8), on="gpu:3")]
    shards.append(shard(cold, memory="ssd", lookup="staged"))
    return with_drives(plan_of([columns, cold], shards))


def exchanged(rank: int, world: int, dtype: str) -> None:
    """Numbers of any size come as the type rounds them, also from ranks that send none."""
    comm = Communicator(None, torch.device("cpu"))
    values = torch.randn(3 * world, generator=torch.Generator().manual_seed(rank))
    for scale in (1e-30, 1e-6, 1.0, 1e6, 1e30):
        own = values * scale if rank else values[:0]
        sent, received = [own.numel() // world] * world, [0, *[3] * (world - 1)]
        came = exchange_as(dtype, comm, "outputs", own, sent, received)
        for other, numbers in enumerate(torch.split(came, received)[1:], 1):
            theirs = torch.randn(3 * world, generator=torch.Generator().manual_seed(other))
            expected = theirs[3 * rank : 3 * rank + 3] * scale
            torch.testing.assert_close(numbers, expected, rtol=ROUNDING[dtype], atol=0)
    zeros = exchange_as(dtype, comm, "outputs", torch.zeros(world), [1] * world, [1] * world)
    assert not zeros.any()
    comm.close()


ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}


def padding(rank: int, world: int, plan: Plan) -> None:
    """Padded lookups are left out, counted by no mean, and zero without pooling."""
    padded = {feature.name: 1 for table in plan.tables for feature in table.features}
    model = sharded(plan, padding_idx=padded)
    reference = PlacedEmbeddings(plan, lr=LR, eps=EPS, seed=3, padding_idx=padded, backend="torch")
    batches = batches_of(plan.tables, world, 2)
    outputs = model(batches[rank])
    alone = reference(batches[rank])
    for name, output in outputs.items():
        close(output.detach(), alone[name].detach(), name)
    backward(outputs)
    backward(reference(joined(batches, len(padded))), 1 / world)
    all_close(model.state_dict(), reference.state_dict())


def bad_batches(rank: int, world: int, plan: Plan) -> str:
    """All ranks are told of one's bad batch, and can go on."""
    model = sharded(plan)
    good = batches_of(plan.tables, world, 0)[rank]
    bad = random_batch(plan.tables, 4)
    if rank == 0:
        bad.ids[-1] = 61
    with pytest.raises(DataError) as error:
        model(bad)
    before = model.state_dict()
    with pytest.raises(DataError, match=r"not a dict|ranks \[0\] refused"):
        model({} if rank == 0 else good)
    with pytest.raises(DataError), torch.set_grad_enabled(rank == 0):
        model(good)
    with torch.no_grad():
        model(good)
    assert_same_bits(model.state_dict(), before)
    backward(model(good))
    return str(error.value)


def other_plans(rank: int, world: int, plans: list[Plan]) -> str:
    with pytest.raises(PlanMismatchError, match=r"growing tables, lr, eps, betas or rounding;"):
        sharded(plans[0], lr=0.1 + rank % 2)
    with pytest.raises(PlanMismatchError) as error:
        sharded(plans[rank % 2])
    return str(error.value)


def changed_plans(rank: int, world: int, optimizer: str) -> None:
    """Save by one plan on all ranks, load by another in one process, and the other way round."""
    one, other = every_placement(optimizer), _whole(every_placement(optimizer))
    first, uninterrupted = sharded(one), sharded(one)
    second = PlacedEmbeddings(other, lr=LR, eps=EPS, seed=9)
    third = sharded(one, seed=8)
    tables = one.tables

    def batch(step: int) -> list[BagBatch]:
        return batches_of(tables, world, step)

    for step in range(2):
        train_step(first, rank, batch(step), step)
    for step in range(6):
        train_step(uninterrupted, rank, batch(step), step)
    take_over(second, first)
    features = sum(len(table.features) for table in tables)
    for step in range(2, 4):
        whole = joined(batch(step), features)
        outputs = second(whole)
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(output.shape, generator=generator) for output in outputs.values()]
        torch.autograd.backward(list(outputs.values()), [g / world for g in gradients])
    take_over(third, second)
    for step in range(4, 6):
        train_step(third, rank, batch(step), step)
    all_close(contents(third), contents(uninterrupted))


def _whole(plan: Plan) -> Plan:
    return plan_of(plan.tables)


def odd_tables(rank: int, world: int) -> None:
    """Tables without rows or without features, and ranks without tables."""
    tables = [
        Table("none", 0, 4, features=(Feature("a"), Feature("b", pooling="none"))),
        Table("unread", 9, 4),
        table_with("adagrad"),
        Table("unread copies", 9, 3),
    ]
    unread = [shard(tables[1], on="gpu:1"), shard(tables[3], on=("gpu:0", "gpu:1"))]
    plan = plan_of(tables, [*unread, shard(tables[2])], topology=machine(2))
    model = sharded(plan)
    outputs = model(batches_of(tables, world, 3)[rank])
    assert outputs["a"].shape == (SIZES_AT_3[rank], 4)
    assert outputs["b"].shape == (0, 4)
    backward(outputs)
    assert model.state_dict()["unread.weight"].abs().sum() > 0
    assert model.state_dict()["unread copies.weight"].abs().sum() > 0
    assert model.state_dict()["none.weight"].shape == (0, 4)


SIZES_AT_3 = (3, 5, 0, 7)


def unread_rows(rank: int, world: int) -> None:
    """Rows that no rank reads in a step, beside others that are in memory with one column slice."""
    table = Table("t", 5, 6, optimizer="rowwise_adagrad", features=(Feature("f"),))
    even, odd = (0, 5, 2), (1, 5, 2)
    shards = [
        *(shard(table, even, (0, 3), on="gpu:0"), shard(table, odd, (0, 3), on="gpu:3")),
        shard(table, (0, 5, 1), (3, 4), on="gpu:0"),
        *(shard(table, even, (4, 6), on="gpu:3"), shard(table, odd, (4, 6), on="gpu:0")),
    ]
    model = sharded(plan_of([table], shards))
    reference = PlacedEmbeddings(model.plan, lr=LR, eps=EPS, seed=3)
    for row in (2, 3, 4):
        batch = BagBatch(torch.full((3,), row), torch.arange(4), 3)
        for one in (model, reference):
            one(batch)["f"].square().sum().backward()
    all_close(contents(model), contents(reference))


def subgroups(rank: int, world: int, plan: Plan) -> None:
    """Two models side by side, each on half of the ranks."""
    half = world // 2
    groups = [torch.distributed.new_group(list(range(i * half, (i + 1) * half))) for i in (0, 1)]
    which, local = divmod(rank, half)
    model = sharded(plan, process_group=groups[which])
    assert (model.rank, model.world) == (local, half)
    reference = PlacedEmbeddings(plan, lr=LR, eps=EPS, seed=3)
    batches = batches_of(plan.tables, half, which)
    backward(model(batches[local]))
    features = sum(len(table.features) for table in plan.tables)
    backward(reference(joined(batches, features)), 1 / half)
    all_close(model.state_dict(), reference.state_dict())


def beside_ddp(rank: int, world: int, plan: Plan) -> None:
    """Under DistributedDataParallel dense layers and tables train as in one process."""

    class Model(torch.nn.Module):
        def __init__(self, embeddings: torch.nn.Module) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embeddings = embeddings
            width = 8 * len(features)
            self.dense = torch.nn.Sequential(torch.nn.Linear(width, 6), torch.nn.Linear(6, 1))

        def forward(self, batch: BagBatch) -> torch.Tensor:
            return self.dense(torch.cat(list(self.embeddings(batch).values()), 1)).tanh()

    features = [feature for table in plan.tables for feature in table.features]
    here = Model(sharded(plan))
    whole = Model(PlacedEmbeddings(plan, lr=LR, eps=EPS, seed=3))
    parallel = torch.nn.parallel.DistributedDataParallel(here)
    trainers = [torch.optim.SGD(model.dense.parameters(), lr=0.1) for model in (here, whole)]
    for step in range(4):
        batches = [random_batch(plan.tables, 4, seed=100 * step + other) for other in range(world)]
        for model, batch in ((parallel, batches[rank]), (whole, joined(batches, len(features)))):
            model(batch).mean().backward()
        for trainer in trainers:
            trainer.step()
            trainer.zero_grad()
    all_close(here.state_dict(), whole.state_dict())


def in_type(dtype: str) -> Plan:
    """Every placement, with pooled rows in 16 bits. Maxima of rounded rows may be other rows'."""
    return replace(every_placement("sgd", ("sum", "mean", "none")), exchange_dtype=dtype)


def jobs(world: int) -> list[Job]:
    """All that is run on so many ranks."""
    found: list[Job] = [
        (f"every placement, {optimizer}", trains_alike, (every_placement(optimizer), STEPS))
        for optimizer in TRAINED
    ]
    mixed = every_placement("rowwise_adagrad")
    summed = every_placement("rowwise_adagrad", ("sum", "mean"))
    found += [
        ("weighted bags", weighted_bags, (every_placement("adagrad"),)),
        ("weighted bags of rows cut by columns", weighted_bags, (mixed,)),
        ("runs repeat", repeats, (mixed,)),
        ("tiers", tiers, (mixed,)),
        ("homes of cold rows", homes, (mixed,)),
        ("cold rows on one rank", trains_alike, (cold_on_one(), STEPS)),
        ("padding", padding, (every_placement("adagrad"),)),
        ("bad batches", bad_batches, (plan_of([table_with("sgd")]),)),
        ("other plans", other_plans, ([mixed, summed],)),
        *((f"checkpoints, {name}", changed_plans, (name,)) for name in WITH_STATE),
        *((f"held cells, {name}", held_cells, (name,)) for name in WITH_STATE),
        *((f"saved cells, {name}", saved_cells, (name,)) for name in WITH_STATE),
        ("odd tables", odd_tables, ()),
        ("passes refused", passes_refused, (summed,)),
        ("unread rows", unread_rows, ()),
        ("exchanged float16", exchanged, ("float16",)),
        ("exchanged bfloat16", exchanged, ("bfloat16",)),
        *(
            (f"trains in {dtype}", trains_alike, (in_type(dtype), STEPS, scale))
            for dtype, scale in (("float16", 20), ("bfloat16", 160))
            if dtype in some(ROUNDING)
        ),
        ("beside DDP", beside_ddp, (summed,)),
    ]
    if world == 4:
        found.append(("subgroups", subgroups, (mixed,)))
    left_out: set[str] = set()
    if is_fast():
        left_out |= {"homes of cold rows", "runs repeat", "weighted bags of rows cut by columns"}
    if world == 4:  # What does not depend on the number of ranks, or is so in another type, too.
        left_out |= {"every placement, sgd", "every placement, adagrad", "weighted bags"}
        left_out |= {"runs repeat", "homes of cold rows", "padding", "checkpoints, adam"}
        left_out |= {"trains in bfloat16"}
    return [job for job in found if job[0] not in left_out]


WORLDS = (2, 4)


@functools.cache
def done_by(world: int) -> Outcomes:
    return run(world, jobs(world))


@pytest.fixture(scope="module", params=mostly_slow(WORLDS, 2), ids=lambda world: f"{world} ranks")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return done_by(request.param)


@pytest.mark.parametrize("name", [name for name, _, _ in jobs(2)])
def test_on_two_ranks(name: str) -> None:
    done_by(2).of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in jobs(4)])
def test_on_four_ranks(name: str) -> None:
    done_by(4).of(name)


def test_every_rank_is_told_of_a_bad_id(outcomes: Outcomes) -> None:
    said = outcomes.of("bad batches")
    assert "'t.none': id 61 is not a row of table 't'" in said[0]
    assert all("ranks [0] refused" in text for text in said[1:])


def test_every_rank_is_told_of_another_plan(outcomes: Outcomes) -> None:
    said = outcomes.of("other plans")
    assert all("ranks [1" in text and "another plan than rank 0" in text for text in said)


def test_each_rank_counts_the_hits_of_its_rows(outcomes: Outcomes) -> None:
    rates = outcomes.of("tiers")
    assert all(lookups > 0 for lookups, _ in rates)
    assert 0 < rates[0][1] < 1
    assert rates[-1][1] == 1  # Its GPUs have all of their rows at home.


@pytest.mark.parametrize("optimizer", WITH_STATE)
def test_held_cells_cover_every_table(outcomes: Outcomes, optimizer: str) -> None:
    plan = every_placement(optimizer)
    replicated = {shard.table for shard in plan.shards if len(shard.devices) > 1}
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for held in outcomes.of(f"held cells, {optimizer}"):
        for table, tensor, ids, cols in held:
            cells = found.setdefault((table, tensor), [])
            cells += [(row, column) for row in ids for column in range(*cols)]
    for (table, tensor), cells in found.items():
        per_row = (tensor, optimizer) == ("sum", "rowwise_adagrad")
        # Column slices have copies of a state that is one number a row.
        once = cells if table not in replicated and not per_row else set(cells)
        width = 1 if per_row else 8
        assert sorted(once) == [(row, column) for row in range(61) for column in range(width)]


@pytest.mark.parametrize("optimizer", WITH_STATE)
def test_every_cell_is_saved_once(outcomes: Outcomes, optimizer: str) -> None:
    by_rank = outcomes.of(f"saved cells, {optimizer}")
    cells, _ = by_rank[0]
    assert sorted(cell for _, sent in by_rank for cell in sent) == list(range(cells))
    assert all(sent for _, sent in by_rank)


def test_backward_passes_that_cannot_be_exact_are_refused_in_one_process() -> None:
    passes_refused(0, 1, every_placement("adagrad", ("sum",)), is_alone=True)


def test_one_rank_is_one_process() -> None:
    plan = every_placement("rowwise_adagrad")
    model = make_embeddings(replace(plan, exchange_dtype="float16"), lr=LR, eps=EPS, seed=3)
    alone = PlacedEmbeddings(plan, lr=LR, eps=EPS, seed=3)
    assert isinstance(model, PlacedEmbeddings)
    with pytest.raises(BackendError, match="not initialized"):
        sharded(plan)
    assert model.feature_names == alone.feature_names
    for batch in look_ahead([random_batch(plan.tables, seed=seed) for seed in range(3)], model):
        backward(model(batch))
    for seed in range(3):
        backward(alone(random_batch(plan.tables, seed=seed)))
    one, other = torch.nn.Sequential(model).state_dict(), torch.nn.Sequential(alone).state_dict()
    assert one.keys() == other.keys()
    assert_same_bits(other, one)
    state = alone.optimizer_state_dict()
    assert_same_bits(model.optimizer_state_dict(), state)
    assert not model.comm_stats()
