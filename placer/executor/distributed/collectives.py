"""Collectives between the ranks, with counts of bytes and errors that name the cause."""

import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import BackendError
from placer.tables import DType

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
"""What is sent: batch sizes; what servers shall do; keys of growing tables, and their rows; lengths
of bags; ids of rows; their weights (and the gradients of these); pooled rows; their gradients; how
many replicated rows were touched, and their summed gradients; Σ g² of column-sliced rows;
checkpoints."""


_WORDS: dict[Kind, str] = {
    "header": "sizes and agreements",
    "commands": "what servers shall do",
    "keys": "keys of growing tables",
    "outputs": "pooled rows",
    "state": "rows of a checkpoint",
}
"""Phases as a message names them, where the kind alone would not say enough."""

_MOST_TOLD = 16
"""Messages to one rank that may be on their way."""
_NO_LIMIT = timedelta(days=365)
_WAIT_S = 5.0
"""How long the words of other ranks are waited for, in seconds: with a hang, their timeouts end
as far apart as the ranks had come to the exchange."""
_POLL_S = 0.05
_KEY = "placer found a rank lost: "


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that this rank sent, since it was made or counts were last reset."""

    to_others_bytes: int = 0
    to_self_bytes: int = 0  # What stayed here: no link carries it.

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(
            self.to_others_bytes + other.to_others_bytes, self.to_self_bytes + other.to_self_bytes
        )


class Communicator:
    """A process group of its own, so that other collectives cannot interleave with these.

    Parameters
    ----------
    parent : process group, or None for the default one
        Every rank of it must make the communicator, and call its methods in the same order.
    device : torch.device
        Where tensors are handed over and returned.
    first : int, optional
        Only so many ranks of the parent, the first, are in it; the others close it at once.
    backend : {"nccl", "gloo"}, optional
        The parent's by default.

    Attributes
    ----------
    rank, world : int
        The rank is -1 where this process is not in it.
    group : torch.distributed.ProcessGroup
        For what `torch.distributed` itself does with these ranks.
    volumes : dict of Kind to Volume
        What was sent so far.

    Raises
    ------
    BackendError
        From every method, if a collective fails: a rank has died, or is not in step.
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
        self.timeout: timedelta = _timeout(group, self._wire)
        self.group: dist.ProcessGroup = dist.new_group(
            members,
            timeout=self.timeout,
            backend=backend,
            # Ranks outside of the parent do not know of this.
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
        """Close its connections; a second call does nothing."""
        while self._told and not self._closed:
            self._run("commands", self._told.popleft()[0].wait)
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(self.group)

    def exchange(
        self, kind: Kind, values: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Send each rank its part of a vector; what the ranks sent here, in their order.

        `sent` and `received` are elements for and from each rank.
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
        """Return the vectors of all ranks, which are of one length: shape (world, length)."""
        size = values.numel()
        self._count(kind, values, size, size * self.world)
        values = values.detach().to(self._wire).contiguous()
        out = [torch.empty_like(values) for _ in range(self.world)]
        self._run(kind, lambda: dist.all_gather(out, values, self.group))
        return torch.stack(out).to(self._device)

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, in their order; all pass equally many."""
        said: list[list[int]] = self.gather("header", torch.tensor(values)).tolist()
        return said

    def total(self, kind: Kind, values: Tensor) -> Tensor:
        """Sum over the ranks, elementwise."""
        self._count(kind, values, 0, values.numel() * max(self.world - 1, 0))
        values = values.detach().to(self._wire).clone()
        self._run(kind, lambda: dist.all_reduce(values, group=self.group))
        return values.to(self._device)

    def from_first(self, kind: Kind, values: Tensor) -> Tensor:
        """Return the values of the first rank; the others' say their shape and dtype."""
        self._count(kind, values, 0, values.numel() * (self.world - 1) * (self.rank == 0))
        own = values.detach().to(self._wire).clone(memory_format=torch.contiguous_format)
        # As bytes: not every backend knows every dtype.
        self._run(
            kind,
            lambda: dist.broadcast(own.view(-1).view(torch.uint8), self._members[0], self.group),
        )
        return own.to(self._device)

    def text_from_first(self, text: str) -> str:
        """Return the text of the first rank; the others' is not read."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = int(self.from_first("header", torch.tensor(own.numel())))
        said = self.from_first("header", own if self.rank == 0 else own.new_empty(size))
        return bytes(said.tolist()).decode()

    def tell(self, rank: int, values: Tensor) -> None:
        """Send one rank what its `hear` gets, and do not wait until it does."""
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
        """Wait, however long it takes, for what a rank tells; its shape and dtype are `out`'s."""

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
        try:
            collective()
        except RuntimeError as error:
            doing = f"exchanging {_WORDS.get(kind, kind)}"
            within = f"within {self.timeout.total_seconds():g} s"
            raise rank_lost(self.rank, self._members, doing, error, within) from error


def _timeout(group: "dist.ProcessGroup", device: torch.device) -> timedelta:
    """Return the timeout of a group, which a new one does not inherit."""
    options = group._get_backend(device).options
    timeout: timedelta = options._timeout
    return timeout


_LARGEST_EXPONENT = 15
"""Numbers of float16 reach just below 2¹⁶: what is sent is scaled to below 2¹⁵."""


def exchange_as(
    dtype: DType,
    comm: Communicator,
    kind: Kind,
    values: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
) -> Tensor:
    """Exchange float32 numbers in another type; what stays on the rank is rounded like the rest.

    float16 has few exponents, and gradients of large batches are small: each rank multiplies its
    numbers by the power of two that makes the largest of them fit, and says which at the end of
    each message.
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
    """Return the numbers for or from each rank, and the exponent behind them."""
    each = torch.split(wire, [size for n in sizes for size in (n, 1)])
    return zip(each[::2], each[1::2], strict=True)


def lost_ranks(rank: int, members: Sequence[int], wait_s: float = _WAIT_S) -> list[int]:
    """Return ranks of a group that are lost, as far as can be known; empty where nobody knows.

    Every rank that finds an exchange broken calls this. It leaves a word in the store by which the
    processes met, and waits until one other rank alone has left none. Of more than one, all are
    given whose words are missing after `wait_s`; some of them may yet wait for an exchange
    of their own. Where two ranks are all there are, the other one is lost. Where a group has two
    and there are more, the other one may have left because of a rank that is not in the group.

    `members` are the group's ranks, as the default group numbers them, and `rank` is this one's
    place there. Returns places there, or the number of one rank that is not among them.

    Examples
    --------
    >>> lost_ranks(0, [0, 1])
    [1]
    """
    others = [place for place in range(len(members)) if place != rank]
    is_sure = len(others) < 2
    # Ranks outside of the group may look for this one's word.
    if is_sure and not (dist.is_initialized() and dist.get_world_size() > len(members)):
        return others
    found: list[int] = []
    # The store may have been in the lost process: what asks it might never come back.
    asking = threading.Thread(target=_ask, args=(rank, members, wait_s, found), daemon=True)
    asking.start()
    asking.join(wait_s + 1)
    return list(found) or (others if is_sure else [])


def rank_lost(
    rank: int, members: Sequence[int], doing: str, error: Exception, within: str = "in time"
) -> BackendError:
    """Return the error to raise where ranks no longer answer: what failed, and which they are.

    `doing` is what failed, as the subject of a sentence, and `within` how long the others were
    waited for; see `lost_ranks`.

    Examples
    --------
    >>> failed = RuntimeError("[/src/pair.cc:53] Connection closed")
    >>> print(rank_lost(0, [0, 1], "exchanging ids", failed))  # doctest: +ELLIPSIS
    rank 0 of 2: exchanging ids failed: Connection closed. Rank 1 died, or did not come in time, ...
    """
    lost = lost_ranks(rank, members)
    who = f"Rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "Another rank"
    return BackendError(
        f"rank {rank} of {len(members)}: {doing} failed: {reason_of(error)}. {who} died, or did "
        f"not come {within}, or ended earlier: are the loaders equally long? See the output of all "
        "ranks, and start again from the last checkpoint"
    )


def reason_of(error: Exception) -> str:
    """Return what a failed collective says, less the place in its source and its advice.

    >>> reason_of(RuntimeError("[/src/pair.cc:53] Connection closed. This is typically caused by"))
    'Connection closed'
    """
    first = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", first) or type(error).__name__


def _ask(rank: int, members: Sequence[int], wait_s: float, found: list[int]) -> None:
    """Leave a word, and put the places of those without one into `found`."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_KEY + str(members[rank]), "1")
        silent = [place for place in range(len(members)) if place != rank]
        outside = [one for one in range(dist.get_world_size()) if one not in members]
        lost_anyway = 1 if len(members) > 2 else 0
        until = time.monotonic() + wait_s
        while len(silent) > lost_anyway and time.monotonic() < until:
            silent = [p for p in silent if not store.check([_KEY + str(members[p])])]
            time.sleep(_POLL_S)
        while not silent and len(outside) > 1 and time.monotonic() < until:
            outside = [one for one in outside if not store.check([_KEY + str(one)])]
            time.sleep(_POLL_S)
    except (RuntimeError, ValueError):  # The store is gone, or there never was one.
        return
    found[:] = silent or (outside if len(outside) == 1 else [])
