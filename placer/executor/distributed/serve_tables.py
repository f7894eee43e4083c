"""What runs on a host without a GPU: it serves tables until the trainers close theirs."""

from functools import lru_cache

import torch
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.distributed.input_exchange import SentBatch
from placer.executor.distributed.sharded_batch import ShardedBatch
from placer.executor.distributed.sharded_embeddings import ShardedEmbeddings
from placer.executor.distributed.table_ranks import Command, TableRanks
from placer.executor.id_order import IdRange
from placer.executor.local.lookahead import on_every_rank
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import read_by_one
from placer.growing import Growing
from placer.plan.plan import Plan

_MOST_PARTS = 4096
"""Sets of tables that are remembered. One that comes again after so many others is made anew."""


def serve_tables(plan: Plan, *, backend: str = "auto") -> None:
    """Serve a host's shards of a plan to the ranks that train, until these close their tables.

    Call it on the ranks behind those of the GPUs, one for each host without a GPU that serves
    shards, where the others call `make_embeddings` or `apply_plan`. All else, such as learning
    rates and what a checkpoint has, comes from them.

    Parameters
    ----------
    plan : Plan
        The same as theirs.
    backend : {"auto", "numba", "torch", "tiered"}
        How this host pools rows; see `PlacedEmbeddings`.

    Raises
    ------
    PlanMismatchError
        If the plan does not fit the ranks, or this one is to train.
    CapacityError
        If the plan places more bytes on a host than it has.
    BackendError
        If a rank is lost, or ends before it has closed its tables.

    Examples
    --------
    >>> import tempfile
    >>> import torch.distributed as dist
    >>> from placer import Plan, Topology
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group(
    ...         "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
    ...     )
    ...     try:
    ...         serve_tables(Plan((), Topology.parse("1xh100"), ()))
    ...     except PlacerError as error:
    ...         print(error)
    ...     dist.destroy_process_group()
    rank 0 does not serve tables as a host without a GPU, which the plan lacks: call ...
    """
    ranks = TableRanks(plan, None, torch.device("cpu"), serves=True)
    settings = ranks.share({})
    if settings["by_rows"]:
        plan = plan.of_tables(table.name for table in plan.tables)  # Whose shards come in order.
        plan = read_by_one(plan, settings["optimizer"])
    growing = {name: Growing(**how) for name, how in settings.pop("growing").items()}
    tables = ShardedEmbeddings(plan, ranks=ranks, growing=growing, backend=backend, **settings)
    server = _Server(tables, ranks)
    command, numbers = ranks.hear()
    while command != Command.CLOSE:
        try:
            server.do(command, *numbers)
        except PlacerError as error:
            if not on_every_rank(error):
                raise  # Else the trainers have it, too, and know whether they go on.
        command, numbers = ranks.hear()
    tables.close()


class _Server:
    """Does what a trainer does with its tables, with batches that have no samples."""

    def __init__(self, tables: ShardedEmbeddings, ranks: TableRanks) -> None:
        self._tables = self._whole = tables
        self._ranks = ranks
        self._part = lru_cache(_MOST_PARTS)(tables.part)
        nothing = torch.zeros(0, dtype=torch.int64)
        self._nothing = BagBatch(nothing, torch.zeros(1, dtype=torch.int64), 0)
        self._sent: dict[float, SentBatch] = {}
        self._steps: dict[float, ShardedBatch] = {}
        self._outputs: dict[float, list[Tensor]] = {}

    def do(self, command: Command, one: float, two: float, three: float) -> None:
        """Do what a trainer says that it does now."""
        tables, batch = self._tables, one
        match command:
            case Command.SEND:
                self._sent[batch] = tables.send_ahead(self._nothing)
            case Command.PREFETCH:
                self._steps[batch] = tables.prefetch(self._sent.pop(batch, self._nothing))
            case Command.FORWARD:
                with torch.set_grad_enabled(two > 0):
                    outputs = tables(self._steps.get(batch, self._nothing))
                    self._outputs[batch] = [output.sum() for output in outputs.values()]
            case Command.BACKWARD:
                torch.autograd.backward(self._outputs.pop(batch))
            case Command.DROP:
                for held in (self._sent, self._steps, self._outputs):
                    held.pop(batch, None)
            case Command.PART:
                self._tables = self._part_of(int(one))
            case Command.FIND_ROWS:
                tables.rows_of(self._nothing, one > 0, int(two))
            case Command.SET_LR:
                tables.set_lr(one)
            case Command.SET_EPS:
                tables.set_eps(one)
            case _:
                self._keep(command, int(one), int(two), int(three))

    def _part_of(self, count: int) -> ShardedEmbeddings:
        """Return so many tables, which a trainer names; none stands for all."""
        if not count:
            return self._whole
        numbers = self._ranks.receive(torch.empty(count, dtype=torch.int64)).tolist()
        return self._part(tuple(self._whole.plan.tables[number].name for number in numbers))

    def _keep(self, command: Command, one: int, two: int, three: int) -> None:
        """Take part in what concerns checkpoints."""
        order = self._tables.id_order()
        order.synchronize()
        match command:
            case Command.FETCH:
                said = self._ranks.receive(torch.empty((order.world, 3), dtype=torch.int64))
                order.fetch(
                    [
                        IdRange(order.numbered[tensor], start, stop) if tensor >= 0 else None
                        for tensor, start, stop in said.tolist()
                    ]
                )
            case Command.WRITE:
                order.receive(one, two, three)
            case Command.COUNT_UPDATES:
                order.update_count()
            case Command.SET_UPDATES:
                order.set_update_count(one)
