"""The module that trains embedding tables over many processes."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.distributed.channels import ShardedBatch, Survey, UnitStep
from placer.executor.distributed.collectives import Communicator, Kind, Volume
from placer.executor.distributed.distributed_id_order import DistributedIdOrder
from placer.executor.distributed.input_exchange import InputExchange, InputsAhead, SentBatch
from placer.executor.distributed.row_sums import RowTotals
from placer.executor.distributed.serving import Serve, Served
from placer.executor.distributed.table_ranks import Command, TableRanks, check_all_built, check_same
from placer.executor.distributed.table_routes import ShardedKeys
from placer.executor.embeddings import Embeddings, uncompiled
from placer.executor.local.hit_rates import HitRates
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import gradient_norm, rows_added
from placer.executor.memory.layout import check_is_plan
from placer.executor.memory.row_cache import RowCacheStats
from placer.executor.optimizers import rounding_of
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import OptimizerName

_UPDATES = ("lr", "eps", "betas", "rounding")
"""Options that are the same on all ranks; servers take them from the first trainer."""


class ShardedEmbeddings(Embeddings):
    """`PlacedEmbeddings` over the ranks of `torch.distributed`: each holds its GPUs' shards.

    Call it with this rank's samples to get their pooled rows. It sends ids to the ranks that hold
    their rows, and these ranks send pooled rows back. Backward sends gradients in the same way, and
    updates each row once a step from the samples of all ranks. Training equals training in one
    process whose batch joins the batches of all ranks, in their order.

    All ranks must run forward and backward equally often. Their batches may differ in size, or be
    empty. docs/distributed.md says which rank holds which shards; ranks of hosts without a GPU call
    `serve_tables` instead.

    Raises PlanMismatchError if the plan is unsound or differs between ranks, the number of ranks
    does not fit its servers, or `weights` do not fit. Raises CapacityError if the plan places more
    bytes on a device than it has. Raises BackendError if `torch.distributed` is not initialized,
    the backend is missing, or a rank is lost.

    Parameters
    ----------
    plan : Plan
        The plan, the same on all ranks.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that share the plan; all ranks by default. Exchanges have its timeout.
    average_gradients : bool
        Whether to average gradients over ranks, for a loss that is a mean over each rank's samples,
        as `DistributedDataParallel` does; otherwise gradients are added.
    ranks : TableRanks, optional
        Roles of the ranks; made from `process_group` by default.
    by_rows : bool
        Whether each table is read by one sum-pooled feature of its name, with keys already replaced
        by rows, as modules of a model read it. Servers get this setting.
    optimizer, device, seed, weights, padding_idx, growing
        See `PlacedEmbeddings`. The first rank's `weights` are sent to all ranks, as
        `DistributedDataParallel` sends parameters; other ranks need not pass any.
    **options
        lr, eps, betas, backend, cache_policy, rounding, drive; see `PlacedEmbeddings`.
    """

    keys: ShardedKeys
    _is_shared = True

    @torch.inference_mode(False)
    def __init__(
        self,
        plan: Plan,
        *,
        process_group: "dist.ProcessGroup | None" = None,
        average_gradients: bool = True,
        ranks: TableRanks | None = None,
        by_rows: bool = False,
        optimizer: OptimizerName | None = None,
        device: str | torch.device = "cpu",
        seed: int | None = 0,
        weights: Mapping[str, Tensor] | None = None,
        padding_idx: Mapping[str, int] | None = None,
        growing: Mapping[str, Growing] | None = None,
        **options: Any,
    ) -> None:
        stochastic = options.get("rounding") == "stochastic"
        super().__init__(
            plan, torch.device(device), optimizer, weights, padding_idx, stochastic=stochastic
        )
        initial = dict(weights or {})
        grows = plan.growing if growing is None else growing
        updates = {name: options[name] for name in _UPDATES if name in options}
        if ranks is None:
            ranks = TableRanks(plan, process_group, self.device)
            ranks.share(
                {
                    **updates,
                    "average_gradients": average_gradients,
                    "by_rows": by_rows,
                    "optimizer": optimizer,
                    "seed": seed,
                    "growing": {name: asdict(how) for name, how in grows.items()},
                }
            )
        self._ranks, self._comm = ranks, (comm := ranks.comm)
        self.rank, self.world = comm.rank, ranks.trainers.world
        scale = 1 / self.world if average_gradients else 1.0
        check_same(plan, self.optimizers, grows, updates, comm)
        survey = Survey.of(plan, self.features, self.optimizers, comm.world, self.device)

        def build(own: Plan, totals: RowTotals | None) -> PlacedEmbeddings:
            # Zeros at first; weights are written below.
            return PlacedEmbeddings(
                own, device=self.device, seed=None, whole_rows=totals, growing={}, **options
            )

        failure: PlacerError | None = None
        try:
            self.keys = ShardedKeys(grows, plan.tables_by_name, seed, ranks.trainers)
            if by_rows:
                self.keys.read_by_rows()
            self._connect(survey, scale, self.counts_updates, build)
        except PlacerError as error:
            failure = error
        check_all_built(failure, comm)
        by_lookup = any(module.backend in ("tiered", "triton") for module in self._served.modules)
        if any(said for (said,) in comm.numbers([by_lookup])):
            for module in self._served.modules:
                module.sum_by_lookup()
        order = self._order
        drawn = [weight for weight in order.weights() if weight.table.rows]
        given = torch.tensor([weight.table.name in initial for weight in drawn])
        for weight, is_given in zip(drawn, comm.from_first("header", given).tolist(), strict=True):
            if is_given:
                order.overwrite_from_first(weight, initial.get(weight.table.name))
            elif seed is not None:
                order.draw(weight, seed)
        ranks.begin()

    def part(self, names: Sequence[str]) -> "ShardedEmbeddings":
        """Return a module of some of the tables, with the same memory and process group.

        It has its own learning rate and number of updates. Every rank must make the same parts;
        this needs no communication. Servers make a part when a command names it.
        """
        part = copy.copy(self)
        numbers = {table.name: number for number, table in enumerate(self.plan.tables)}
        part._ranks = self._ranks.of_part([numbers[name] for name in names])
        part.plan = self.plan.of_tables(names)
        part.optimizers = {name: self.optimizers[name] for name in names}
        part.features = tuple(read for read in self.features if read.table in part.optimizers)
        survey = Survey.of(part.plan, part.features, part.optimizers, self._comm.world, self.device)
        held = self._served.held
        part.keys = self.keys.of_tables(names)

        def build(own: Plan, totals: RowTotals | None) -> PlacedEmbeddings:
            return held[own.tables[0].name].part(own, totals)

        part._connect(survey, self._served.gradient_scale, self._order.counts_updates, build)
        return part

    def _connect(
        self,
        survey: Survey,
        gradient_scale: float,
        counts_updates: bool,
        build: Callable[[Plan, RowTotals | None], PlacedEmbeddings],
    ) -> None:
        """Make this rank's modules, its exchange of lookups, and its access to tables by id."""
        comm, device = self._comm, self.device
        self._served = Served(survey, comm, device, gradient_scale, build, self.keys, self._ranks)
        inputs = InputExchange(survey, self._served.channels, comm, device, self.keys)
        self._inputs = InputsAhead(inputs, self._ranks.connect)
        self.keys.wait = self._inputs.wait
        orders = {module: module.id_order() for module in self._served.modules}
        held = {name: orders[module] for name, module in self._served.held.items()}
        self._order = DistributedIdOrder(survey, counts_updates, held, self._ranks, device)

    def said(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank that trains; all must pass equally many."""
        return self._ranks.trainers.numbers(values)

    def gradient_norm(self, rows: Tensor, gradients: Tensor, norm_type: float) -> Tensor:
        """Return the norm of a table's gradients, added up by row over all ranks: shape ().

        `rows` and `gradients` are of this rank's lookups. Row r is added up on rank r mod world.
        """
        rows, gradients = rows_added(rows, gradients)
        comm, (_, dim) = self._ranks.trainers, gradients.shape
        places = rows % comm.world
        order, sent = places.argsort(), torch.bincount(places, minlength=comm.world).tolist()
        received = [theirs[comm.rank] for theirs in comm.numbers(sent)]
        there = comm.exchange("ids", rows[order], sent, received)
        cells = [[count * dim for count in counts] for counts in (sent, received)]
        values = comm.exchange("gradients", gradients[order].view(-1), *cells).view(-1, dim)
        norm = gradient_norm(there, values * self._served.gradient_scale, norm_type)
        norms = comm.gather("gradients", norm.view(1)).view(-1)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total.to(self.device)

    def rows_of(self, batch: BagBatch, training: bool, open_steps: int) -> BagBatch:
        """Return the batch with each key replaced by its row, for callers that read by rows.

        All ranks must call this with the same number of open steps before this one.
        """
        features, routes = self.features, self._served.survey.routes
        self._ranks.tell(Command.FIND_ROWS, training, open_steps)
        open_before = open_steps if training else None
        batch = self.keys.exchange(batch, features, open_before, routes, self._comm)
        self.keys.begin_rows(self._order)
        return batch

    @property
    def backend(self) -> str:
        return self._served.modules[0].backend if self._served.modules else ""

    def set_lr(self, lr: float) -> None:
        self._ranks.tell(Command.SET_LR, lr)
        for module in self._served.modules:
            module.set_lr(lr)

    def set_eps(self, eps: float) -> None:
        self._ranks.tell(Command.SET_EPS, eps)
        for module in self._served.modules:
            module.set_eps(eps)

    @uncompiled
    def send_ahead(self, batch: BagBatch) -> SentBatch:
        """Begin to exchange a batch's lookups; pass the result to `prefetch`.

        The exchange runs in a thread while earlier batches train. All ranks must send batches in
        the same order. `prefetch` raises the errors of the exchange.
        """
        return self._inputs.send(batch, self._ranks.tell_of_batch(Command.SEND))

    @uncompiled
    def prefetch(self, batch: BagBatch | SentBatch) -> ShardedBatch:
        """Exchange a batch's lookups and find its rows, before its forward pass.

        All ranks must call this at the same point of their loop; see `PlacedEmbeddings.prefetch`
        and `placer.executor.look_ahead`. Results are equal to the bit with and without it.

        Raises DataError on every rank, if one of them has a bad batch. Raises BackendError if a
        rank is lost.
        """
        if not isinstance(batch, Future):
            number = self._ranks.tell_of_batch(Command.PREFETCH)
            step = self._inputs.now(batch, number, training=True)
        else:
            step = self._inputs.arrived(batch)
            if step.number is not None:
                self._ranks.tell(Command.PREFETCH, step.number.number)
        self.keys.begin_rows(self._order)
        units: list[UnitStep] = []
        served = self._served
        held = zip(served.channels.units, served.modules, step.units, strict=True)
        for placed, module, unit in held:
            assert unit.batch is not None, "it has just come"
            prepared = module.prefetch(unit.batch)
            # Updates of replicas read the ids again.
            kept = unit.batch if placed.replicated else None
            units.append(replace(unit, batch=kept, prepared=prepared))
        return replace(step, units=tuple(units))

    @uncompiled
    def forward(self, batch: BagBatch | ShardedBatch) -> dict[str, Tensor]:
        """Return pooled rows of this rank's samples by feature; see `PlacedEmbeddings.forward`.

        Raises the errors of `prefetch`.
        """
        training = torch.is_grad_enabled()
        if not isinstance(batch, ShardedBatch):
            number = self._ranks.tell_of_batch(Command.FORWARD, training)
            step = self._inputs.now(batch, number, training)
        elif (step := batch).number is not None:
            self._ranks.tell(Command.FORWARD, step.number.number, training)
        self.keys.begin(step.key_step)
        if not training:
            self.keys.end_step(step.key_step)
        self.keys.begin_rows(self._order)
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        flat = Serve.apply(  # type: ignore[no-untyped-call]
            anchor, step.bags.weights, step, self._served, training
        )
        return self._served.combine(flat, step)

    def hit_rates(self) -> HitRates | None:
        """See `Embeddings.hit_rates`. Updates of replicated rows count as lookups, too."""
        held = [
            rates for module in self._served.modules if (rates := module.hit_rates()) is not None
        ]
        if not held:
            return None
        return HitRates(
            sum(rates.lookups for rates in held),
            sum(rates.home_lookups for rates in held),
            sum((rates.row_cache for rates in held), RowCacheStats()),
        )

    def reset_hit_rates(self) -> None:
        for module in self._served.modules:
            module.reset_hit_rates()

    def comm_stats(self) -> dict[Kind, Volume]:
        total: dict[Kind, Volume] = {}
        for comm in self._comms:
            for kind, volume in comm.volumes.items():
                total[kind] = total.get(kind, Volume()) + volume
        return total

    def reset_comm_stats(self) -> None:
        for comm in self._comms:
            comm.volumes.clear()

    def routing_bytes(self) -> dict[str, int]:
        return {name: routes.nbytes for name, routes in self._served.survey.routes.items()}

    def close(self) -> None:
        """Close the connections to other ranks. No lookup works afterwards.

        This waits for batches that were sent ahead and not trained on, at most for the timeout.
        """
        self._ranks.tell(Command.CLOSE)
        self._inputs.close()
        self._ranks.close()

    def memory_use(self) -> dict[tuple[str, str], int]:
        total: dict[tuple[str, str], int] = defaultdict(int)
        for module in self._served.modules:
            for key, size in module.memory_use().items():
                total[key] += size
        return dict(total)

    def id_order(self) -> DistributedIdOrder:
        if self.keys.maps:  # Batches sent ahead may have reused rows.
            self.keys.wait()
            self.keys.begin_rows(self._order)
        return self._order

    def update_count(self) -> int:
        return max((module.update_count() for module in self._served.modules), default=0)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows in parentheses."""
        tables, shards = len(self.plan.tables), len(self.plan.shards)
        return f"tables={tables}, shards={shards}, rank={self.rank} of {self.world}"

    @property
    def _comms(self) -> tuple[Communicator, ...]:
        held = self._ranks.comm, self._ranks.trainers, self._inputs.comm
        return tuple(dict.fromkeys(comm for comm in held if comm is not None))


def make_embeddings(
    plan: Plan,
    *,
    process_group: "dist.ProcessGroup | None" = None,
    average_gradients: bool = True,
    **options: Any,
) -> Embeddings:
    """Make a plan's embeddings, shared by all `torch.distributed` processes if there are several.

    Parameters
    ----------
    plan, process_group, average_gradients
        See `ShardedEmbeddings`.
    **options
        See `PlacedEmbeddings`. By default, 16-bit tables are rounded stochastically.

    Returns
    -------
    PlacedEmbeddings or ShardedEmbeddings

    Examples
    --------
    >>> from placer import Feature, Plan, Shard, Table, Topology
    >>> table = Table("words", rows=1000, dim=16, features=(Feature("words"),))
    >>> whole = Shard("words", (0, 1000, 1), (0, 16), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,))
    >>> make_embeddings(plan, backend="torch")
    PlacedEmbeddings(tables=1, features=1, shards=1, backend='torch', device=cpu)
    """
    check_is_plan(plan)
    options.setdefault("rounding", rounding_of(plan.tables))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        return ShardedEmbeddings(
            plan, process_group=process_group, average_gradients=average_gradients, **options
        )
    return PlacedEmbeddings(plan, **options)
