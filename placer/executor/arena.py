"""Arenas: the memory that holds weights and optimizer state, one row a slot."""

import contextlib
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from placer.executor.layout import ArenaSpec, SlotRange

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

HUGE_PAGE_BYTES = 2 << 20
"""Smaller arenas fit the cache with ordinary pages."""


class Rows(Protocol):
    """A matrix (or vector) over slots, wherever its parts are."""

    def read(self, slots: Tensor) -> Tensor:
        """A copy of the rows at `slots`, in that order."""
        ...

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Overwrite the rows at `slots`, which are distinct."""
        ...

    def range_bytes(self, part: SlotRange) -> int:
        """Bytes held by a range of slots."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """All slots in one tensor."""

    data: Tensor

    def read(self, slots: Tensor) -> Tensor:
        return self.data.index_select(0, slots)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.data.index_copy_(0, slots, rows.to(self.data.dtype))

    def range_bytes(self, part: SlotRange) -> int:
        return self.data[part.start : part.stop].nbytes


@dataclass(frozen=True, slots=True, eq=False)
class TieredRows:
    """Each range of slots in a tensor of its own, on the device that holds it.

    Rows are collected on `device` and sent back from there.
    """

    parts: tuple[tuple[SlotRange, Tensor], ...]
    device: torch.device

    def read(self, slots: Tensor) -> Tensor:
        example = self.parts[0][1]
        rows = torch.empty(
            (slots.numel(), *example.shape[1:]), dtype=example.dtype, device=self.device
        )
        for part, data in self.parts:
            here, local = _within(slots, part)
            rows[here] = data.index_select(0, local.to(data.device)).to(self.device)
        return rows

    def write(self, slots: Tensor, rows: Tensor) -> None:
        for part, data in self.parts:
            here, local = _within(slots, part)
            data.index_copy_(0, local.to(data.device), rows[here].to(data.device, data.dtype))

    def range_bytes(self, part: SlotRange) -> int:
        return sum(data.nbytes for held, data in self.parts if held == part)


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Weights ``[rows, width]`` and optimizer state of one arena.

    State is float32 whatever the weights are: ``[rows]`` for row-wise Adagrad, ``[rows,
    width]`` for Adagrad, None for SGD.
    """

    spec: ArenaSpec
    weights: Rows
    state: Rows | None

    def range_bytes(self, part: SlotRange) -> int:
        """Bytes of weights and state in a range of slots."""
        state = 0 if self.state is None else self.state.range_bytes(part)
        return self.weights.range_bytes(part) + state


def allocate(
    spec: ArenaSpec, home: Callable[[SlotRange], torch.device] | None, device: torch.device
) -> Arena:
    """Zeroed memory for an arena.

    Parameters
    ----------
    spec : ArenaSpec
    home : callable or None
        The device of each range, where every tier has memory of its own; None keeps the
        whole arena in one tensor of the host.
    device : torch.device
        Where rows are collected for a step.
    """

    def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
        if home is None:
            return FlatRows(_host_zeros((spec.rows, *shape), dtype))
        if not spec.ranges:
            return FlatRows(torch.zeros((0, *shape), dtype=dtype, device=device))
        parts = []
        for part in spec.ranges:
            place = home(part)
            size = (part.stop - part.start, *shape)
            # Rows in host memory are copied to a GPU faster when they are pinned.
            pinned = device.type == "cuda" and place.type == "cpu"
            parts.append((part, torch.zeros(size, dtype=dtype, device=place, pin_memory=pinned)))
        return TieredRows(tuple(parts), device)

    key = spec.key
    weights = rows((key.width,), TORCH_DTYPES[key.dtype])
    if key.optimizer == "sgd":
        return Arena(spec, weights, None)
    state_shape = () if key.optimizer == "rowwise_adagrad" else (key.width,)
    return Arena(spec, weights, rows(state_shape, torch.float32))


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed host memory, in huge pages where the system has them.

    Rows are read at random: with small pages nearly each of them misses the TLB too.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without huge pages; the memory is as good.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _within(slots: Tensor, part: SlotRange) -> tuple[Tensor, Tensor]:
    """Positions of the slots that lie in a range, and their places in it."""
    here = torch.nonzero((slots >= part.start) & (slots < part.stop)).squeeze(1)
    return here, slots[here] - part.start
