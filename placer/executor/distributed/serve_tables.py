"""Serve tables on a host without a GPU, until the trainers close their tables."""

from functools import lru_cache

import torch
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.distributed.channels import ShardedBatch
from placer.executor.distributed.input_exchange import SentBatch
from placer.executor.distributed.sharded_embeddings import ShardedEmbeddings
from placer.executor.distributed.table_ranks import Command, TableRanks
from placer.executor.id_order import IdRange
from placer.executor.local.lookahead import on_every_rank
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import read_by_one
from placer.growing import Growing
from placer.plan.plan import Plan

_MOST_PARTS = 4096
"""Number of sets of tables whose modules are cached."""


def serve_tables(plan: Plan, *, backend: str = "auto") -> None:
    """Serve a host's shards of a plan to the ranks that train, until they close their tables.

    Start one rank for each GPU, then one for each host without a GPU that serves shards. The ranks
    of these hosts call this function, while the other ranks call `make_embeddings` or `apply_plan`.
    Learning rates, checkpoints and all other settings come from the other ranks.

    Raises PlanMismatchError if the plan does not fit the ranks, or this rank is to train. Raises
    CapacityError if the plan places more bytes on a host than it has. Raises BackendError if a rank
    is lost, or ends before it closes its tables.

    Parameters
    ----------
    plan : Plan
        The same plan as on the other ranks.
    backend : {"auto", "numba", "torch", "tiered"}
        The kernels that pool rows on this host; see `PlacedEmbeddings`.

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
        plan = plan.of_tables(table.name for table in plan.tables)  # Sorts the shards by table.
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
                raise  # Trainers meet other errors too, and decide what to do.
        command, numbers = ranks.hear()
    tables.close()


class _Server:
    """Repeats a trainer's calls on its tables, with batches without samples."""

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
        """Run one command."""
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
        """Receive the numbers of `count` tables; return their module. 0 means all tables."""
        if not count:
            return self._whole
        numbers = self._ranks.receive(torch.empty(count, dtype=torch.int64)).tolist()
        return self._part(tuple(self._whole.plan.tables[number].name for number in numbers))

    def _keep(self, command: Command, one: int, two: int, three: int) -> None:
        """Run a command that concerns checkpoints."""
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
