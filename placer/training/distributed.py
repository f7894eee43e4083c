"""Connect the processes that train together under torchrun, and keep them in agreement."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from placer import errors
from placer.errors import BackendError, DataError, PlacerError
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.division import servers_of
from placer.executor.distributed.table_ranks import check_world
from placer.executor.local.lookahead import on_every_rank
from placer.plan.plan import Plan
from placer.training.config import TrainConfig

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_POLL_S = 0.01


class Ranks:
    """The processes of a run that train, as seen from this one.

    They communicate over gloo, without waiting for GPUs. All ranks must call the same methods in
    the same order. Without `comm`, this process trains alone. `everyone` has these ranks and the
    servers: hosts without a GPU, which do not train and have rank -1 here. DDP adds up gradients of
    dense layers in `dense_group`.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        everyone: "Ranks | None" = None,
        dense_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._comm, self.everyone, self.dense_group = comm, everyone or self, dense_group
        self.rank = 0 if comm is None else comm.rank
        self.world = 1 if comm is None else comm.world
        self.stopping = False

    def part_of(self, samples: int) -> tuple[int, int]:
        """Return this rank's part of a batch's samples: (start, stop)."""
        return samples * self.rank // self.world, samples * (self.rank + 1) // self.world

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, by rank. All ranks must pass equally many."""
        return [list(values)] if self._comm is None else self._comm.numbers(values)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(said for (said,) in self.numbers([int(flag)]))

    def total(self, values: Tensor) -> Tensor:
        """Return elementwise sums over the ranks, on the host."""
        return values.cpu() if self._comm is None else self._comm.total("header", values.cpu())

    def objects(self, value: T) -> list[T]:
        """Return the value of each rank, by rank; they are pickled."""
        return [value] if self._comm is None else self._comm.objects(value)

    def agree(self, fault: Exception | None = None) -> None:
        """Raise on every rank if any rank has a fault.

        A rank without a fault raises the first rank's: the same kind of PlacerError and message.
        """
        if isinstance(fault, BackendError):
            raise fault  # A rank may be lost and would not answer.
        if self.any(fault is not None):
            said = self.objects("" if fault is None else f"{type(fault).__name__}: {fault}")
            if fault is not None:
                raise fault
            kind, _, words = next(text for text in said if text).partition(": ")
            known = vars(errors).get(kind)
            raise known(words) if known is not None else PlacerError(f"{kind}: {words}")

    def together(self, work: Callable[[], T]) -> T:
        """Do work on every rank, then raise on all ranks if any rank failed."""
        try:
            result = work()
        except Exception as error:
            self.agree(error)
            raise
        self.agree()
        return result

    def in_step(
        self,
        stream: Generator[T],
        samples_of: Callable[[T], int],
        stops: Callable[[], bool] = lambda: False,
    ) -> Generator[T]:
        """Yield the items on all ranks in step. An error of reading on one rank is raised on all.

        `stopping` becomes true on all ranks at the same item, after `stops` returns true on one.

        Raises DataError if ranks read different logs.
        """
        with closing(stream):
            while True:
                fault: Exception | None = None
                item: T | None = None
                try:
                    item = next(stream, None)
                except Exception as error:
                    fault = error
                samples = -1 if item is None else samples_of(item)
                said = self.numbers([fault is not None, stops(), samples])
                if any(failed for failed, _, _ in said):
                    self.agree(fault)
                _check_same([size for _, _, size in said])
                self.stopping |= any(stop for _, stop, _ in said)
                if item is None:
                    return
                yield item

    def close(self) -> None:
        """Close the connections."""
        if self._comm is not None:
            self._comm.close()
        if self.everyone is not self:
            self.everyone.close()


ALONE = Ranks()


def world_of_launcher() -> int:
    """Return the number of processes that torchrun or a similar launcher started; 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_launcher() -> int:
    """Return the launcher's rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def batch_size_per_process(plan: Plan) -> int:
    """Return this process's samples a step, so that all processes have the plan's batch."""
    trainers = max(world_of_launcher() - len(servers_of(plan)), 1)
    return max(plan.batch_size * len(plan.topology.gpus) // trainers, 1)


@contextlib.contextmanager
def joined_ranks(config: TrainConfig, plan: Plan | None = None) -> Iterator[Ranks]:
    """Yield the ranks that train: torchrun's, those of an existing process group, or one alone.

    If the plan has hosts without a GPU that serve tables, the last ranks are these servers.
    """
    ours = not (dist.is_available() and dist.is_initialized())
    world = world_of_launcher() if ours else dist.get_world_size()
    if world == 1:
        yield Ranks()
        return
    servers = () if plan is None else servers_of(plan)
    if plan is not None:
        check_world(plan, world)
    trainers = world - len(servers)
    trains = (rank_of_launcher() if ours else dist.get_rank()) < trainers
    timeout = None if config.timeout_s is None else timedelta(seconds=config.timeout_s)
    # Without a GPU, the trainer raises the error.
    on_gpu = trains and config.device.startswith("cuda") and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(torch.device(device_of_rank(config.device)))
    if ours:
        kind = "nccl" if on_gpu and not servers else "gloo"
        try:
            dist.init_process_group(kind, timeout=timeout, **_own_store(timeout))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise BackendError(
                f"rank {rank_of_launcher()} of {world_of_launcher()} cannot join the others: "
                f"{reason}; start all of them with torchrun"
            ) from error
    # Use a gloo group, because these messages must not wait for GPU kernels.
    parent = None
    if dist.get_backend() != "gloo":
        parent = dist.new_group(backend="gloo", timeout=timeout)
    cpu = torch.device("cpu")
    ranks = Ranks(Communicator(parent, cpu))
    if servers:
        only = Communicator(parent, cpu, first=trainers)
        backend = "nccl" if on_gpu else "gloo"
        dense_group = dist.new_group(list(range(trainers)), timeout, backend)
        ranks = Ranks(only, ranks, dense_group)
    together = True
    try:
        yield ranks
    except BaseException as error:
        # Destroying a group waits for its pending work, such as a gradient that DDP sends. It would
        # wait forever if a rank is gone, or if only this rank has an error. When this process ends,
        # its connections close, and the others notice.
        together = on_every_rank(error)
        raise
    finally:
        if together:
            if ours:
                dist.destroy_process_group()
            else:
                ranks.close()


def _own_store(timeout: timedelta | None) -> dict[str, Any]:
    """Return arguments of `init_process_group` with a store that earlier starts do not share.

    torchrun keeps one store over its restarts, with addresses of lost processes. New processes
    would connect to these addresses, or wait. torchrun's count of restarts cannot tell starts
    apart, because each node counts its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed.rendezvous import rendezvous  # It is not available everywhere.

    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, world = next(rendezvous("env://", **options))
    start = name_of_start(store, rank, world, store.timeout.total_seconds())
    own = dist.distributed_c10d.PrefixStore(start, store)
    return {"store": own, "rank": rank, "world_size": world}


def name_of_start(store: "Store", rank: int, world: int, wait_s: float) -> str:
    """Return a name that all ranks of this start share, unlike earlier starts in the same store.

    Each rank stores a random word. Rank 0 stores the name under that word, and the rank confirms
    it. Rank 0 may also answer the old word of a lost rank, which no one confirms. It returns once
    all ranks have confirmed.

    >>> store = dist.HashStore()
    >>> name_of_start(store, 0, 1, 1.0) != name_of_start(store, 0, 1, 1.0)
    True
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"placer rank {rank}", own)
        store.wait([f"placer start {own}"], timedelta(seconds=wait_s))
        start: str = store.get(f"placer start {own}").decode()
        store.set(f"placer {start} {rank}", "1")
        return start
    silent, until = list(range(1, world)), time.monotonic() + wait_s
    while silent:
        for other in [other for other in silent if store.check([f"placer rank {other}"])]:
            store.set(f"placer start {store.get(f'placer rank {other}').decode()}", own)
        silent = [other for other in silent if not store.check([f"placer {own} {other}"])]
        if silent and time.monotonic() > until:
            raise RuntimeError(f"rank {silent[0]} did not come within {wait_s:g} s")
        if silent:
            time.sleep(_POLL_S)
    return own


def device_of_rank(device: str) -> str:
    """Return the name of this rank's device: for ``cuda``, the GPU of its LOCAL_RANK."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def _check_same(samples: Sequence[int]) -> None:
    if len(set(samples)) > 1:
        words = ["the end of the log" if size < 0 else f"{size} samples" for size in samples]
        read = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(words))
        raise DataError(f"ranks read different logs: {read}; give all of them the same files")
