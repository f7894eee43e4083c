"""The ranks that share a plan's tables: those that train, and servers, which do as these say.

A server is a host without a GPU. It takes part in every exchange, without samples of its own, but
cannot know when one comes. So each server follows one trainer, which tells it just before. As all
trainers do the same in the same order, servers do too, whomever they follow.
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
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.division import servers_of
from placer.growing import Growing
from placer.plan.plan import Plan
from placer.tables import OptimizerName


class Command(IntEnum):
    """What a trainer is about to do, and with it the servers that follow it."""

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
"""A command and its numbers: float64, for one may be a learning rate."""


class NumberedBatch:
    """The number by which servers know a batch, for as long as a trainer may come back to it."""

    def __init__(self, number: int) -> None:
        self.number = number


class TableRanks:
    """The ranks of a group and what they are: trainers first, one for each GPU, then servers.

    `serves` says whether this rank is meant to be a server.

    Attributes
    ----------
    comm, trainers : Communicator
        All ranks; and those that train, which is the same one where there are no servers.
    acting : Communicator
        The ranks that do what nobody is told of: all of them until `begin`, then the trainers.
    followers : tuple of int
        The servers that do as this rank says; none before `begin`.

    Raises
    ------
    BackendError
        If `torch.distributed` is not initialized.
    PlanMismatchError
        If there are more or fewer ranks than the plan's servers ask for, this one has the other
        part, or servers have a model already.
    """

    _serve_one: ClassVar[bool] = False  # Whether servers wait for what this process does.

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
        # Which tables the followers take commands to be about.
        self._told_of: list[tuple[int, ...]] = [()]

    def of_part(self, tables: Sequence[int]) -> "TableRanks":
        """Return the same for some of the tables, by their numbers in the plan."""
        part = copy.copy(self)
        part._tables = tuple(tables)
        return part

    def connect(self) -> Communicator:
        """Make a process group of all ranks; all of them must do so."""
        # What has no GPU has no NCCL.
        return Communicator(
            self._parent, self._device, backend="gloo" if self._has_servers else None
        )

    def leader_of(self, rank: int) -> int:
        """Return the trainer that a server follows; a trainer is its own."""
        return rank % self.trainers.world

    def share(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first trainer's settings, on all ranks: servers have no other ones."""
        if not self._has_servers:
            return dict(settings)
        text = json.dumps(dict(settings), default=lambda number: number.item())
        shared: dict[str, Any] = json.loads(self.comm.text_from_first(text))
        return shared

    def begin(self) -> None:
        """From here on servers wait for what they are told."""
        servers = range(self.trainers.world, self.comm.world)
        self.followers = tuple(s for s in servers if self.leader_of(s) == self.comm.rank)
        self.acting, TableRanks._serve_one = self.trainers, self._has_servers

    def tell(self, command: Command, *numbers: float, then: Sequence[Tensor] = ()) -> None:
        """Tell the servers that follow this rank what it does next, and send them tensors."""
        if not self.followers:
            return
        while self._dropped:
            self._tell(self.followers, Command.DROP, self._dropped.popleft())
        self._tell_tables()
        self._tell(self.followers, command, *numbers, then=then)

    def tell_of_batch(self, command: Command, *numbers: float) -> NumberedBatch | None:
        """The same of a new batch; servers drop it when nobody here has its number any more."""
        if not self.followers:
            return None
        batch = NumberedBatch(next(self._batches))
        weakref.finalize(batch, self._dropped.append, batch.number).atexit = False
        self.tell(command, batch.number, *numbers)
        return batch

    def write(self, rank: int, *numbers: int, then: Sequence[Tensor]) -> None:
        """Send a server rows to write."""
        self._tell_tables()
        self._tell((rank,), Command.WRITE, *numbers, then=then)

    def hear(self) -> tuple[Command, list[float]]:
        """Return what a server is told next."""
        message = self.receive(torch.empty(_MESSAGE, dtype=torch.float64)).tolist()
        return Command(int(message[0])), message[1:]

    def receive(self, out: Tensor) -> Tensor:
        """Return a tensor that was sent after a command."""
        return self.comm.hear(self.leader_of(self.comm.rank), out)

    def close(self) -> None:
        """Close the connections."""
        self.followers, TableRanks._serve_one = (), False
        self.trainers.close()
        self.comm.close()

    def _tell_tables(self) -> None:
        """Say which tables what comes next is about, where it is about others than before."""
        if self._told_of[0] != self._tables:
            self._told_of[0] = self._tables
            then = [torch.tensor(self._tables)] if self._tables else []
            self._tell(self.followers, Command.PART, len(self._tables), then=then)

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
    """Check that each GPU and each host without one has its rank, where there are such hosts."""
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
    """Check that this rank does what it is for."""
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


def check_same(
    plan: Plan,
    optimizers: Mapping[str, OptimizerName],
    growing: Mapping[str, Growing],
    comm: Communicator,
) -> None:
    """Check that all ranks have the same plan. With different plans they would wait for ever."""
    options = sorted(optimizers.items()), sorted(growing.items(), key=lambda item: item[0])
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
            f"ranks {other} have another plan than rank 0, or other growing tables; load the same "
            "file on all of them"
        )


def check_all_built(failure: PlacerError | None, comm: Communicator) -> None:
    """Raise on all ranks if one of them lacks the memory for its part, or what else it needs."""
    said = comm.numbers([int(failure is not None)])
    bad = [rank for rank, (failed,) in enumerate(said) if failed]
    if failure is not None:
        raise failure
    if bad:
        raise PlanMismatchError(
            f"ranks {bad} cannot hold their part of the plan; see what they say"
        )
