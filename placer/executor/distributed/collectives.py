"""Collectives between ranks that count bytes and name the cause of errors."""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import BackendError
from placer.tables import DType

T = TypeVar("T")
Kind = Literal[
    "header",
    "commands",
    "keys",
    "lengths",
    "ids",
    "weights",
    "outputs",
    "gradients",
    "replica counts",
    "replicas",
    "rows",
    "state",
]
"""The content of a message, in this order: batch sizes; commands to servers; keys of growing tables
and their rows; lengths of bags; row ids; weights of lookups, or gradients of weights; pooled rows;
gradients of pooled rows; numbers of replicated rows touched; sums of their gradients; Σ g² of
column-sliced rows; rows of checkpoints."""


_WORDS: dict[Kind, str] = {
    "header": "sizes and agreements",
    "commands": "what servers shall do",
    "keys": "keys of growing tables",
    "outputs": "pooled rows",
    "state": "rows of a checkpoint",
}
"""Names of kinds in error messages, if the kind's own name is not clear."""

_MOST_TOLD = 16
"""Most messages from this rank to servers that are under way at once."""
_NO_LIMIT = timedelta(days=365)
_WAIT_S = 5.0
"""Seconds to wait for other ranks' reports of a broken exchange. After a hang, ranks time out at
different times, because they began the exchange at different times."""
_POLL_S = 0.05
_KEY = "placer found a rank lost: "


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that this rank has sent since the start or the last reset."""

    to_others_bytes: int = 0
    to_self_bytes: int = 0  # Stays on this rank: uses no link.

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.to_others_bytes + other.to_others_bytes, self.to_self_bytes + other.to_self_bytes
        )


class Communicator:
    """Collectives in a separate process group, so that others cannot interleave with them.

    Raises BackendError: from every method, if a collective fails because a rank died or made
    another call.

    - `parent`: every rank of the parent must make the communicator and call its methods in the same
      order.
    - `device`: device of arguments and results.
    - `first`: include only this many ranks of the parent, from the first one on.
    - `backend`, {"nccl", "gloo"}: default: the parent's backend.

    Attributes:
    - `rank`, `world`: this process's rank, or -1 outside of the group, and the number of ranks.
    - `group`: the group, for direct calls of `torch.distributed`.
    - `volumes`: bytes sent, by kind.
    """

    def __init__(
        self,
        parent: "dist.ProcessGroup | None",
        device: torch.device,
        *,
        first: int | None = None,
        backend: str | None = None,
    ) -> None:
        group = parent if parent is not None else dist.group.WORLD
        assert group is not None, "checked by the caller"
        members = dist.get_process_group_ranks(group)[:first]
        backend = backend or dist.get_backend(group)
        # NCCL works on the GPU's memory, gloo on the host's.
        self._wire = device if backend == "nccl" else torch.device("cpu")
        self._device = device
        # New groups do not inherit their parent's timeout.
        self.timeout: timedelta = group._get_backend(self._wire).options._timeout
        self.group: dist.ProcessGroup = dist.new_group(
            members,
            timeout=self.timeout,
            backend=backend,
            # Ranks outside of the parent do not make this group.
            use_local_synchronization=group is not dist.group.WORLD,
        )
        own = dist.get_rank()
        self.rank = members.index(own) if own in members else -1
        self._closed = self.rank < 0
        self._members = members
        self._told: deque[tuple[dist.Work, Tensor]] = deque()
        self.world = len(members)
        self.volumes: dict[Kind, Volume] = defaultdict(Volume)

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        while self._told and not self._closed:
            self._run("commands", self._told.popleft()[0].wait)
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(self.group)

    def exchange(
        self, kind: Kind, values: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Send each rank its part of a vector; return the parts received, in the order of ranks.

        `sent` and `received` are the numbers of elements for and from each rank.
        """
        self._count(kind, values, sent[self.rank], sum(sent))
        values = values.detach().to(self._wire).contiguous()
        out = values.new_empty(sum(received))
        self._run(
            kind,
            lambda: dist.all_to_all_single(out, values, list(received), list(sent), self.group),
        )
        return out.to(self._device)

    def gather(self, kind: Kind, values: Tensor) -> Tensor:
        """Return the vectors of all ranks, shape (world, length). All must have one length."""
        size = values.numel()
        self._count(kind, values, size, size * self.world)
        values = values.detach().to(self._wire).contiguous()
        out = [torch.empty_like(values) for _ in range(self.world)]
        self._run(kind, lambda: dist.all_gather(out, values, self.group))
        return torch.stack(out).to(self._device)

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, in the order of ranks. All must pass equally many."""
        said: list[list[int]] = self.gather("header", torch.tensor(values)).tolist()
        return said

    def objects(self, value: T) -> list[T]:
        """Return the value of each rank, by rank. Values are pickled; bytes are not counted."""
        said = [value] * self.world
        self._run("header", lambda: dist.all_gather_object(said, value, group=self.group))
        return said

    def total(self, kind: Kind, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks."""
        self._count(kind, values, 0, values.numel() * max(self.world - 1, 0))
        values = values.detach().to(self._wire).clone()
        self._run(kind, lambda: dist.all_reduce(values, group=self.group))
        return values.to(self._device)

    def from_first(self, kind: Kind, values: Tensor) -> Tensor:
        """Return the first rank's values. On other ranks, `values` only gives shape and dtype."""
        self._count(kind, values, 0, values.numel() * (self.world - 1) * (self.rank == 0))
        own = values.detach().to(self._wire).clone(memory_format=torch.contiguous_format)
        # As bytes, because not every backend supports every dtype.
        self._run(
            kind,
            lambda: dist.broadcast(own.view(-1).view(torch.uint8), self._members[0], self.group),
        )
        return own.to(self._device)

    def text_from_first(self, text: str) -> str:
        """Return the first rank's text; the text of other ranks is ignored."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = int(self.from_first("header", torch.tensor(own.numel())))
        said = self.from_first("header", own if self.rank == 0 else own.new_empty(size))
        return bytes(said.tolist()).decode()

    def tell(self, rank: int, values: Tensor) -> None:
        """Send a tensor to one rank's `hear`, without waiting for it to arrive."""
        self._count("commands", values, 0, values.numel())
        own = values.detach().cpu().clone(memory_format=torch.contiguous_format)

        def send() -> None:
            work = dist.isend(own, self._members[rank], self.group)
            assert work is not None, "this process is in the group"
            self._told.append((work, own))
            if len(self._told) > _MOST_TOLD:
                self._told.popleft()[0].wait()

        self._run("commands", send)

    def hear(self, rank: int, out: Tensor) -> Tensor:
        """Receive a tensor that a rank sends with `tell` into `out`; wait without a timeout."""

        def receive() -> None:
            work = dist.irecv(out, self._members[rank], self.group)
            assert work is not None, "this process is in the group"
            work.wait(_NO_LIMIT)

        self._run("commands", receive)
        return out

    def _count(self, kind: Kind, values: Tensor, kept: int, sent: int) -> None:
        size = values.element_size()
        self.volumes[kind] += Volume((sent - kept) * size, kept * size)

    def _run(self, kind: Kind, collective: Callable[[], object]) -> None:
        if self._closed:
            raise BackendError(
                "the tables' connections to other ranks are closed, by close or remove_plan: read "
                "and save tables before that"
            )
        try:
            collective()
        except RuntimeError as error:
            doing = f"exchanging {_WORDS.get(kind, kind)}"
            within = f"within {self.timeout.total_seconds():g} s"
            raise rank_lost(self.rank, self._members, doing, error, within) from error


_LARGEST_EXPONENT = 15
"""Scale numbers to below 2¹⁵ before sending, as float16 ends just below 2¹⁶."""


def exchange_as(
    dtype: DType,
    comm: Communicator,
    kind: Kind,
    values: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
) -> Tensor:
    """Exchange float32 numbers in another dtype. Numbers that stay on this rank are rounded too.

    Gradients of large batches can be too small for float16. So each rank scales its numbers by the
    power of two that brings the largest one near the limit, and appends the exponent to each
    message.
    """
    if dtype != "float16":
        return comm.exchange(kind, values.to(getattr(torch, dtype)), sent, received).float()
    device, one = values.device, torch.ones(1, dtype=torch.float32, device=values.device)
    wire = torch.empty(values.numel() + comm.world, dtype=torch.float16, device=device)
    if values.numel():
        least, most = values.aminmax()
        exponent = torch.frexp(torch.maximum(-least, most)).exponent.clamp(min=-100).reshape(1)
    else:
        exponent = torch.zeros(1, dtype=torch.int32, device=device)
    scale = torch.ldexp(one, _LARGEST_EXPONENT - exponent)
    parts = torch.split(values, list(sent))
    for part, (numbers, said) in zip(parts, _messages(wire, sent), strict=True):
        torch.mul(part, scale, out=numbers)
        said.copy_(exponent)
    came = comm.exchange(kind, wire, [n + 1 for n in sent], [n + 1 for n in received])
    result = torch.empty(sum(received), dtype=torch.float32, device=device)
    parts = torch.split(result, list(received))
    for part, (numbers, said) in zip(parts, _messages(came, received), strict=True):
        torch.mul(numbers, torch.ldexp(one, said.float() - _LARGEST_EXPONENT), out=part)
    return result


def _messages(wire: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each rank's message: its numbers, and the exponent after them."""
    each = torch.split(wire, [size for n in sizes for size in (n, 1)])
    return zip(each[::2], each[1::2], strict=True)


def lost_ranks(rank: int, members: Sequence[int]) -> list[int]:
    """Return the ranks of a group that are lost, as far as known; empty if unknown.

    Every rank with a broken exchange calls this. It writes an entry to the store of the default
    group, and waits until only one other rank has no entry. After `_WAIT_S`, it returns all ranks
    without an entry; some of them may still wait in another exchange. With only two ranks, the
    other rank is lost. In a group of two among more ranks, the other rank may have left because
    a rank outside of the group is lost.

    `members` are the group's ranks in the default group, and `rank` is this rank's index there.
    Returns indices into `members`, or the number of one lost rank outside of the group.

    >>> lost_ranks(0, [0, 1])
    [1]
    """
    others = [place for place in range(len(members)) if place != rank]
    is_sure = len(others) < 2
    # Ranks outside of the group may look for this rank's entry.
    if is_sure and not (dist.is_initialized() and dist.get_world_size() > len(members)):
        return others
    found: list[int] = []
    # The lost process may have held the store: a request to it might never return.
    asking = threading.Thread(target=_ask, args=(rank, members, found), daemon=True)
    asking.start()
    asking.join(_WAIT_S + 1)
    return list(found) or (others if is_sure else [])


def rank_lost(
    rank: int, members: Sequence[int], doing: str, error: Exception, within: str = "in time"
) -> BackendError:
    """Return the error for ranks that no longer answer. It names the failure and the lost ranks.

    `doing` names the failed action as the subject of a sentence, and `within` says how long this
    rank waited for the others; see `lost_ranks`. The source location and the advice in the message
    of `error` are left out.

    >>> failed = RuntimeError("[/src/pair.cc:53] Connection closed. This is typically caused by")
    >>> print(rank_lost(0, [0, 1], "exchanging ids", failed))  # doctest: +ELLIPSIS
    rank 0 of 2: exchanging ids failed: Connection closed. Rank 1 died, or did not come in time, ...
    """
    lost = lost_ranks(rank, members)
    said = str(error).partition("\n")[0].partition(". This is typically")[0]
    reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", said) or type(error).__name__
    who = f"Rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "Another rank"
    return BackendError(
        f"rank {rank} of {len(members)}: {doing} failed: {reason}. {who} died, or did "
        f"not come {within}, or ended earlier: are the loaders equally long? Do all ranks evaluate "
        "and save? See the output of all ranks, and start again from the last checkpoint"
    )


def _ask(rank: int, members: Sequence[int], found: list[int]) -> None:
    """Write this rank's entry, and put the indices of ranks without one into `found`."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_KEY + str(members[rank]), "1")
        silent = [place for place in range(len(members)) if place != rank]
        outside = [one for one in range(dist.get_world_size()) if one not in members]
        lost_anyway = 1 if len(members) > 2 else 0
        until = time.monotonic() + _WAIT_S
        while len(silent) > lost_anyway and time.monotonic() < until:
            silent = [p for p in silent if not store.check([_KEY + str(members[p])])]
            time.sleep(_POLL_S)
        while not silent and len(outside) > 1 and time.monotonic() < until:
            outside = [one for one in outside if not store.check([_KEY + str(one)])]
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):  # The store is gone, or there never was one.
        return
    found[:] = silent or (outside if len(outside) == 1 else [])
