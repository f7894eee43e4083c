"""The ranks that share a plan's tables: trainers, and servers that follow their commands.

A server is a host without a GPU. It takes part in every exchange, without samples of its own. Each
server follows one trainer, which sends it a command before each exchange. All trainers do the same
in the same order, so all servers do too.
"""

import copy
import hashlib
import itertools
import json
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import BackendError, PlacerError, PlanMismatchError
from placer.executor.distributed.channels import NumberedBatch
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.division import servers_of
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import OptimizerName


class Command(IntEnum):
    """The next action of a trainer and of the servers that follow it."""

    SEND = 0
    PREFETCH = 1
    FORWARD = 2
    BACKWARD = 3
    DROP = 4
    SET_LR = 5
    SET_EPS = 6
    FETCH = 7
    WRITE = 8
    COUNT_UPDATES = 9
    SET_UPDATES = 10
    CLOSE = 11
    PART = 12
    FIND_ROWS = 13


_MESSAGE = 4
"""Length of a message: a command and up to three numbers, all float64."""


class TableRanks:
    """The ranks of a group and their roles: trainers first, one for each GPU, then servers.

    `serves` says whether this rank is to be a server.

    Raises BackendError if `torch.distributed` is not initialized. Raises PlanMismatchError if the
    number of ranks does not fit the plan's servers, this rank has the other role, or servers have a
    model already.

    - `comm`, `trainers`: all ranks, and the ranks that train. Without servers these are the same
      object.
    - `acting`: the ranks that act without commands: all ranks until `begin`, then the trainers.
    - `followers`: the servers that follow this rank; none before `begin`.
    """

    _serve_one: ClassVar[bool] = False  # Whether this process has tables with servers.

    def __init__(
        self,
        plan: Plan,
        process_group: "dist.ProcessGroup | None",
        device: torch.device,
        *,
        serves: bool = False,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise BackendError(
                "tables are shared over torch.distributed, which is not initialized; call "
                "torch.distributed.init_process_group before, or take make_embeddings"
            )
        servers = len(servers_of(plan))
        if servers and process_group not in (None, dist.group.WORLD):
            raise PlanMismatchError(
                f"{', '.join(servers_of(plan))}, without a GPU, serve tables to all ranks; leave "
                "process_group out"
            )
        check_world(plan, dist.get_world_size(process_group))
        _check_role(plan, dist.get_rank(process_group), serves)
        if servers and TableRanks._serve_one:
            raise PlanMismatchError(
                f"{', '.join(servers_of(plan))}, without a GPU, serve the tables of one model, on "
                "one device, at a time; close those of the one before, also before a copy is made"
            )
        self._parent, self._device, self._has_servers = process_group, device, servers > 0
        self.comm = self.trainers = self.acting = self.connect()
        count = self.comm.world - servers
        if servers:
            cpu = torch.device("cpu")
            self.trainers = Communicator(process_group, cpu, first=count, backend="gloo")
        self.followers: tuple[int, ...] = ()
        self._batches = itertools.count(1)
        self._dropped: deque[int] = deque()
        self._tables: tuple[int, ...] = ()
        # The tables that commands concern, as the followers know it. Parts share this list.
        self._told_of: list[tuple[int, ...]] = [()]

    def of_part(self, tables: Sequence[int]) -> "TableRanks":
        """Return these ranks for commands on some of the tables, by their numbers in the plan."""
        part = copy.copy(self)
        part._tables = tuple(tables)
        return part

    def connect(self) -> Communicator:
        """Make a process group of all ranks. All ranks must call this."""
        # NCCL needs a GPU, which servers lack.
        return Communicator(
            self._parent, self._device, backend="gloo" if self._has_servers else None
        )

    def leader_of(self, rank: int) -> int:
        """Return the trainer that a server follows; a trainer is its own leader."""
        return rank % self.trainers.world

    def share(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first trainer's settings on all ranks, as servers have no others."""
        if not self._has_servers:
            return dict(settings)
        shared: dict[str, Any] = json.loads(self.comm.text_from_first(_as_json(settings)))
        return shared

    def begin(self) -> None:
        """Make servers wait for commands from now on."""
        servers = range(self.trainers.world, self.comm.world)
        self.followers = tuple(s for s in servers if self.leader_of(s) == self.comm.rank)
        self.acting, TableRanks._serve_one = self.trainers, self._has_servers

    def tell(
        self,
        command: Command,
        *numbers: float,
        then: Sequence[Tensor] = (),
        to: Sequence[int] | None = None,
    ) -> None:
        """Send this rank's next command, and the tensors that follow it, to its servers.

        `to` names some of them; by default all.
        """
        if not self.followers:
            return
        while self._dropped:
            self._tell(self.followers, Command.DROP, self._dropped.popleft())
        if self._told_of[0] != self._tables:  # The followers know other tables.
            self._told_of[0] = self._tables
            tables = [torch.tensor(self._tables)] if self._tables else []
            self._tell(self.followers, Command.PART, len(self._tables), then=tables)
        self._tell(self.followers if to is None else to, command, *numbers, then=then)

    def tell_of_batch(self, command: Command, *numbers: float) -> NumberedBatch | None:
        """Send a command for a new batch. Servers keep the batch as long as the result exists."""
        if not self.followers:
            return None
        batch = NumberedBatch(next(self._batches))
        weakref.finalize(batch, self._dropped.append, batch.number).atexit = False
        self.tell(command, batch.number, *numbers)
        return batch

    def hear(self) -> tuple[Command, list[float]]:
        """Wait for the next command; return it and its numbers. Servers call this."""
        message = self.receive(torch.empty(_MESSAGE, dtype=torch.float64)).tolist()
        return Command(int(message[0])), message[1:]

    def receive(self, out: Tensor) -> Tensor:
        """Receive a tensor that follows a command."""
        return self.comm.hear(self.leader_of(self.comm.rank), out)

    def close(self) -> None:
        """Close the connections."""
        self.followers, TableRanks._serve_one = (), False
        self.trainers.close()
        self.comm.close()

    def _tell(
        self,
        servers: Sequence[int],
        command: Command,
        *numbers: float,
        then: Sequence[Tensor] = (),
    ) -> None:
        message = torch.zeros(_MESSAGE, dtype=torch.float64)
        message[: 1 + len(numbers)] = torch.tensor([command, *numbers], dtype=torch.float64)
        for server in servers:
            for tensor in (message, *then):
                self.comm.tell(server, tensor)


def check_world(plan: Plan, world: int) -> None:
    """Check that there is one rank for each GPU and server, if the plan has servers."""
    servers, gpus = servers_of(plan), len(plan.topology.gpus)
    if servers and world != gpus + len(servers):
        hosts = [host.id for host in plan.topology.hosts if plan.topology.gpus_of(host.id)]
        sizes = [len(plan.topology.gpus_of(host)) for host in hosts] + [1] * len(servers)
        nodes = [f"{n} on {host}" for n, host in zip(sizes, [*hosts, *servers], strict=True)]
        raise PlanMismatchError(
            f"the plan needs {gpus + len(servers)} processes, one for each GPU and one for each of "
            f"{', '.join(servers)}, and there are {world}; start them with `torchrun --nnodes "
            f"{len(nodes)} --node-rank I --nproc-per-node N`, in this order: {', '.join(nodes)}"
        )


def _check_role(plan: Plan, rank: int, serves: bool) -> None:
    servers, gpus = servers_of(plan), len(plan.topology.gpus)
    is_server = bool(servers) and rank >= gpus
    if is_server and not serves:
        raise PlanMismatchError(
            f"rank {rank} is {servers[rank - gpus]}, which has no GPU and serves tables: call "
            "placer.executor.serve_tables on it"
        )
    if serves and not is_server:
        raise PlanMismatchError(
            f"rank {rank} does not serve tables as a host without a GPU"
            f"{f'; ranks from {gpus} on do' if servers else ', which the plan lacks'}: call "
            "placer.executor.make_embeddings on it"
        )


def _as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), default=lambda one: getattr(one, "item", one.__repr__)())


def check_same(
    plan: Plan,
    optimizers: Mapping[str, OptimizerName],
    growing: Mapping[str, Growing],
    updates: Mapping[str, Any],
    comm: Communicator,
) -> None:
    """Check that all ranks have the same plan and options of updates.

    With different plans they would hang; with other options, rows would learn at different rates.
    """
    options = [sorted(optimizers.items()), sorted(growing.items(), key=lambda item: item[0])]
    options.append(_as_json(updates))
    digest = hashlib.sha256(
        repr((plan.tables, plan.shards, plan.exchange_dtype, *options)).encode()
    )
    for name in sorted(plan.hot_ids):
        digest.update(name.encode() + plan.hot_ids[name].tobytes())
    number = int.from_bytes(digest.digest()[:7], "little")
    said = comm.numbers([number])
    other = [rank for rank, theirs in enumerate(said) if theirs != said[0]]
    if other:
        raise PlanMismatchError(
            f"ranks {other} have another plan than rank 0, or other growing tables, lr, eps, betas "
            "or rounding; load the same file and pass the same options on all of them"
        )


def check_all_built(failure: PlacerError | None, comm: Communicator) -> None:
    """Raise on all ranks if one of them could not build its part, such as for lack of memory."""
    said = comm.numbers([int(failure is not None)])
    bad = [rank for rank, (failed,) in enumerate(said) if failed]
    if failure is not None:
        raise failure
    if bad:
        raise PlanMismatchError(
            f"ranks {bad} cannot hold their part of the plan; see what they say"
        )
