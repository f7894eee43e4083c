"""Many ranks in one process: the real routing and exchange over rows that take no memory.

Every rank runs the code that it runs under `torch.distributed`, but for two things: the ranks'
collectives are a shuffle of vectors in memory, and instead of weights there is a function of
table, id and column. Its values are small whole numbers, so that sums of them are exact in
float32 in any order, and what comes back can be held against the sums over the bags' ids.
"""

import copy
import gc
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from placer.executor import BagBatch
from placer.executor.distributed.channels import Survey, spans
from placer.executor.distributed.collectives import Kind
from placer.executor.distributed.division import Target
from placer.executor.distributed.input_exchange import InputExchange
from placer.executor.distributed.row_sums import RowTotals
from placer.executor.distributed.serving import Serve, Served
from placer.executor.distributed.table_routes import ShardedKeys
from placer.executor.lookups.batch_reads import FeatureRead, feature_reads
from placer.plan.plan import Plan, Ranks

T = TypeVar("T")
HOST = torch.device("cpu")
WAIT_S = 600.0


@dataclass(frozen=True)
class Call:
    """A collective that a rank has come to."""

    name: str
    kind: Kind
    values: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class SimulatedRank:
    """One rank's `Communicator`: hands a call over, and runs on when all have made theirs."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.sent_bytes: Counter[str] = Counter()
        self.turn, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.call: Call | None = None
        self.answer: Tensor | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def exchange(
        self, kind: Kind, values: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        away = sum(sent) - sent[self.rank]
        self.sent_bytes[kind] += away * values.element_size()
        return self._all_here(Call("exchange", kind, values.detach(), tuple(sent), tuple(received)))

    def gather(self, kind: Kind, values: Tensor) -> Tensor:
        self.sent_bytes[kind] += values.numel() * (self.world - 1) * values.element_size()
        return self._all_here(Call("gather", kind, values.detach()))

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        return self.gather("header", torch.tensor(values)).tolist()

    def _all_here(self, call: Call) -> Tensor:
        self.call = call
        self.waits.release()
        if not self.turn.acquire(timeout=WAIT_S) or self.answer is None:
            raise RuntimeError("another rank failed")
        return self.answer


def run(world: int, work: Callable[[SimulatedRank], T]) -> list[T]:
    """Run `work` for every rank, one at a time between two collectives.

    Raises what a rank raises, and AssertionError where ranks are not in step: where they come to
    different collectives, or what one sends is not what the other expects.
    """
    ranks = [SimulatedRank(rank, world) for rank in range(world)]
    running = list(ranks)
    threads = [threading.Thread(target=_run, args=(r, work), daemon=True) for r in ranks]
    for thread in threads:
        thread.start()
    collecting = gc.isenabled()
    gc.disable()  # Millions of live objects, which it would visit again and again.
    try:
        while running:
            for rank in running:
                rank.call = None
                rank.turn.release()
                assert rank.waits.acquire(timeout=WAIT_S), f"rank {rank.rank} does not come"
                if rank.error is not None:
                    raise rank.error
            calls = [rank.call for rank in running]
            if all(call is None for call in calls):
                break
            present = [call for call in calls if call is not None]
            assert len(present) == world, "some ranks have ended before the others"
            for rank, answer in zip(ranks, _answers(present), strict=True):
                rank.answer = answer
    finally:
        if collecting:
            gc.enable()
        for rank in ranks:  # Let go of those that wait still.
            rank.answer = None
            rank.turn.release()
        for thread in threads:
            thread.join(WAIT_S)
    return [rank.result for rank in ranks]


def _run(rank: SimulatedRank, work: Callable[[SimulatedRank], Any]) -> None:
    rank.turn.acquire()
    try:
        rank.result = work(rank)
    except BaseException as error:
        rank.error = error
    rank.call = None
    rank.waits.release()


def _answers(calls: Sequence[Call]) -> list[Tensor]:
    assert len({(call.name, call.kind, call.values.dtype) for call in calls}) == 1, (
        "ranks are not in step"
    )
    if calls[0].name == "gather":
        whole = torch.stack([call.values for call in calls])
        return [whole] * len(calls)
    sent = np.array([call.sent for call in calls])
    received = np.array([call.received for call in calls])
    assert (sent == received.T).all(), "ranks expect other sizes than are sent"
    assert [call.values.numel() for call in calls] == sent.sum(1).tolist()
    starts = (sent.cumsum() - sent.flatten()).reshape(sent.shape)
    index = spans(starts.T.flatten().tolist(), sent.T.flatten().tolist(), HOST)
    flat = torch.cat([call.values for call in calls])[index]
    return list(torch.split(flat, sent.sum(0).tolist()))


def row_values(table: int, ids: Tensor, cols: tuple[int, int]) -> Tensor:
    """The weights of rows: whole numbers from 0 to 7, float32, shape (ids, columns)."""
    columns = torch.arange(*cols)
    mixed = ids.long()[:, None] * 40_503 + table * 9_176 + columns * 257
    return ((mixed // 64) % 8).float()


def pooled_gradients(rank: int, feature: int, samples: int, dim: int) -> Tensor:
    """Gradients of a feature's outputs: whole numbers from −2 to 2, float32."""
    sample, column = torch.arange(samples)[:, None], torch.arange(dim)
    return ((rank * 7 + sample * 5 + feature * 3 + column) % 5 - 2).float()


@dataclass
class Arrivals:
    """What came to the holders: gradients of rows, by table and columns, and Σ g²."""

    gradients: dict[tuple[str, tuple[int, int]], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    replicated: dict[tuple[str, tuple[int, int]], list[tuple[int, Tensor, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    squares: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)


class Rows:
    """Stands for a unit's `PlacedEmbeddings`: has rows of known values, keeps what comes."""

    device = HOST

    def __init__(
        self,
        own: Plan,
        targets: Mapping[str, Target],
        totals: RowTotals | None,
        rank: int,
        world: "World",
    ) -> None:
        self.features, self.tables = feature_reads(own.tables, {}), own.tables
        self.targets, self.totals, self.rank, self.world = targets, totals, rank, world

    def by_row(self) -> "Rows":
        rows = copy.copy(self)
        rows.features = [
            FeatureRead(table.name, table.name, table.rows, "none", None) for table in self.tables
        ]
        return rows

    def __call__(self, batch: BagBatch) -> dict[str, Tensor]:
        anchor = torch.zeros((), requires_grad=True)
        outputs = _Lookup.apply(anchor, self, batch)
        return {
            feature.name: output for feature, output in zip(self.features, outputs, strict=True)
        }

    def reads(self, batch: BagBatch) -> list[tuple[Target, str, Tensor, Tensor]]:
        """Target, pooling, rows and bag of each lookup, by feature."""
        found, size = [], batch.batch_size
        lengths = batch.offsets.diff()
        bounds = batch.bounds or (0,) * (len(self.features) + 1)
        for index, feature in enumerate(self.features):
            rows = batch.ids[bounds[index] : bounds[index + 1]]
            own = lengths[index * size : (index + 1) * size]
            bags = torch.arange(size).repeat_interleave(own)
            found.append((self.targets[feature.table], feature.pooling, rows, bags))
        return found

    def took(self, batch: BagBatch, gradients: Sequence[Tensor]) -> None:
        """Keep the gradient of each lookup's row; add Σ g² up as row-wise Adagrad does."""
        arrivals, by_target = self.world.arrivals, defaultdict(list)
        reads = self.reads(batch)
        for (target, pooling, rows, bags), gradient in zip(reads, gradients, strict=True):
            own = gradient[bags] if pooling == "sum" else gradient
            kept = arrivals.replicated if target.replicated else arrivals.gradients
            key = target.table.name, target.cols
            kept[key].append((self.rank, self.world.ids_of(target, rows), own))
            by_target[target.name].append((rows, own))
        if self.totals is None:
            return
        squares, ids = {}, {}
        for name in self.totals.dims:
            rows, own = (torch.cat(parts) for parts in zip(*by_target[name], strict=True))
            if rows.numel():
                distinct, sums = summed(rows, own)
                squares[name] = sums.square().sum(1)
                ids[name] = self.world.ids_of(self.targets[name], distinct)
        for name, total in self.totals.total(squares).items():
            arrivals.squares.append((self.targets[name].table.name, ids[name], total))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Rows, batch: BagBatch) -> tuple[Tensor, ...]:
        ctx.rows, ctx.batch = rows, batch
        outputs = []
        for target, pooling, own, bags in rows.reads(batch):
            ids = rows.world.ids_of(target, own)
            values = row_values(rows.world.numbers[target.table.name], ids, target.cols)
            if pooling == "sum":
                empty = torch.zeros((batch.batch_size, target.width))
                values = empty.index_add_(0, bags, values)
            outputs.append(values)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.rows.took(ctx.batch, gradients)
        return None, None, None


def summed(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, ascending, and the sum of each one's values."""
    distinct, places = torch.unique(ids, return_inverse=True)
    empty = torch.zeros((distinct.numel(), values.shape[1]))
    return distinct, empty.index_add_(0, places, values)


@dataclass
class Step:
    """What a rank saw of a step."""

    outputs: dict[str, Tensor]
    sent_bytes: Counter[str]  # To others.
    routing_bytes: dict[str, int]


def ids_of(order: Ranks, target: Target, rows: Tensor) -> Tensor:
    """Ids of a target's rows, in the row order of its table."""
    if target.by_id:
        return rows
    part = torch.searchsorted(torch.tensor(target.bases), rows, right=True) - 1
    start = torch.tensor([p.start for p in target.parts])
    step = torch.tensor([p.step for p in target.parts])
    ranks = (start[part] + (rows - torch.tensor(target.bases)[part]) * step[part]).numpy()
    listed = ranks < order.listed.size
    ids = np.empty_like(ranks)
    ids[listed] = order.listed[ranks[listed]]
    ids[~listed] = order.unlisted_ids(ranks[~listed])
    return torch.from_numpy(ids)


class World:
    """A plan on as many ranks as it has GPUs, each with a batch of its own."""

    def __init__(self, plan: Plan, batches: Sequence[BagBatch]) -> None:
        self.plan, self.batches = plan, batches
        self.features = feature_reads(plan.tables, {})
        self.numbers = {table.name: number for number, table in enumerate(plan.tables)}
        self.survey = Survey.of(
            plan,
            self.features,
            {table.name: table.optimizer for table in plan.tables},
            len(batches),
            HOST,
        )
        self.targets = {target.name: target for target in self.survey.targets}
        self.arrivals = Arrivals()
        self._orders: dict[str, Ranks] = {}
        self._by_rank: dict[Any, dict[tuple[int, int], tuple[Tensor, Tensor]]] | None = None

    def order(self, table: str) -> Ranks:
        """The row order of a table."""
        if table not in self._orders:
            self._orders[table] = Ranks.in_plan(self.plan, table)
        return self._orders[table]

    def ids_of(self, target: Target, rows: Tensor) -> Tensor:
        """Ids of a target's rows."""
        return ids_of(self.order(target.table.name), target, rows)

    def came_to(
        self, table: str, rank: int, replicated: bool
    ) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Distinct ids of a table whose gradients came to a rank, and these, by columns."""
        if self._by_rank is None:
            arrivals, gathered = self.arrivals, defaultdict(list)
            for kept, flag in ((arrivals.gradients, False), (arrivals.replicated, True)):
                for (name, cols), parts in kept.items():
                    for holder, ids, values in parts:
                        gathered[name, holder, flag, cols].append((ids, values))
            self._by_rank = defaultdict(dict)
            for (name, holder, flag, cols), parts in gathered.items():
                ids, values = (torch.cat(of) for of in zip(*parts, strict=True))
                self._by_rank[name, holder, flag][cols] = summed(ids, values)
        return self._by_rank[table, rank, replicated]

    def step(self) -> list[Step]:
        """Forward and backward on every rank."""
        return run(len(self.batches), self._step)

    def _step(self, comm: SimulatedRank) -> Step:
        survey, batch = self.survey, self.batches[comm.rank]

        def build(own: Plan, totals: RowTotals | None) -> Rows:
            return Rows(own, self.targets, totals, comm.rank, self)

        keys = ShardedKeys({}, {}, None, comm)
        served = Served(survey, comm, HOST, 1.0, build, keys)
        inputs = InputExchange(survey, served.channels, comm, HOST, keys)
        asked = inputs(batch, True, None)
        anchor = torch.zeros((), requires_grad=True)
        flat = Serve.apply(anchor, None, asked, served, True)
        outputs = served.combine(flat, asked)
        torch.autograd.backward(
            list(outputs.values()),
            [
                pooled_gradients(comm.rank, number, batch.batch_size, output.shape[1])
                for number, output in enumerate(outputs.values())
            ],
        )
        return Step(
            {name: output.detach() for name, output in outputs.items()},
            comm.sent_bytes,
            {name: table.nbytes for name, table in survey.routes.items()},
        )


def check_outputs(world: World, steps: Sequence[Step]) -> None:
    """Each bag of each rank is the sum of its ids' rows."""
    for batch, step in zip(world.batches, steps, strict=True):
        size, bounds = batch.batch_size, batch.bounds
        assert bounds is not None
        for number, feature in enumerate(world.features):
            ids = batch.ids[bounds[number] : bounds[number + 1]]
            lengths = batch.offsets.diff()[number * size : (number + 1) * size]
            found = step.outputs[feature.name]
            values = row_values(world.numbers[feature.table], ids, (0, found.shape[1]))
            bags = torch.arange(size).repeat_interleave(lengths)
            assert torch.equal(found, torch.zeros_like(found).index_add_(0, bags, values))


def check_gradients(world: World) -> None:
    """Each row's gradient has come to who holds it, whole; replicas have all got the total."""
    expected: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    dims = {table.name: table.dim for table in world.plan.tables}
    for rank, batch in enumerate(world.batches):
        size, bounds = batch.batch_size, batch.bounds
        assert bounds is not None
        for number, feature in enumerate(world.features):
            ids = batch.ids[bounds[number] : bounds[number + 1]]
            lengths = batch.offsets.diff()[number * size : (number + 1) * size]
            bags = torch.arange(size).repeat_interleave(lengths)
            gradients = pooled_gradients(rank, number, size, dims[feature.table])
            expected[feature.table].append((ids, gradients[bags]))
    for table in world.plan.tables:
        ids, values = (torch.cat(parts) for parts in zip(*expected[table.name], strict=True))
        distinct, sums = summed(ids, values)
        ranks = world.order(table.name).ranks(distinct.numpy())
        columns = np.zeros((distinct.numel(), table.dim), dtype=bool)
        for shard in world.plan.shards_by_table[table.name]:
            holders = {world.survey.ranks[device] for device in shard.devices}
            start, stop, step = shard.rows
            inside = (ranks >= start) & (ranks < stop) & ((ranks - start) % step == 0)
            asked = distinct[inside]
            for holder in holders if asked.numel() else ():
                found = world.came_to(table.name, holder, len(holders) > 1)
                width = 0
                for cols, (its, theirs) in found.items():
                    first, last = max(cols[0], shard.cols[0]), min(cols[1], shard.cols[1])
                    if first >= last:
                        continue
                    places = torch.searchsorted(its, asked).clamp(max=its.numel() - 1)
                    assert torch.equal(its[places], asked), "a row's gradient went elsewhere"
                    mine = theirs[places][:, first - cols[0] : last - cols[0]]
                    assert torch.equal(mine, sums[inside][:, first:last])
                    columns[inside, first:last] = True
                    width += last - first
                assert width == shard.width, f"rank {holder} misses gradients of {table.name!r}"
        assert columns.all(), f"gradients of {table.name!r} are missing"
        squares = sums.square().sum(1)
        for name, its, totals in world.arrivals.squares:
            if name == table.name:
                assert torch.equal(totals, squares[torch.searchsorted(distinct, its)])
