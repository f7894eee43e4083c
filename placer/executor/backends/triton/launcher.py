# mypy: disable-error-code="no-untyped-call, type-arg"
"""Launch Triton kernels, compiled for a GPU or interpreted on the CPU for tests.

No call waits for the device. If only the device knows the amount of work, a fixed number of
programs share it. So the host knows the size of every launch, and CUDA graphs can capture a step.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from placer.errors import BackendError
from placer.executor.backends.backend import Backend
from placer.executor.backends.triton import lookup_kernels
from placer.executor.names import Policy

RESIDENT_WARPS = 32
"""Warps per multiprocessor, if a fixed number of programs shares the work."""

BLOCK, BLOCK_WARPS = 1024, 4
"""Elements of a program, such as ids to translate, and its number of warps."""


class TritonLauncher(Backend):
    """A backend that can launch Triton kernels; see `TritonBackend`."""

    def __init__(
        self, device: torch.device, policy: Policy = "lfu", host: Backend | None = None
    ) -> None:
        super().__init__(device, policy, host)
        self.name = "triton"
        compiled = isinstance(lookup_kernels.pool, triton.JITFunction)
        if device.type == "cpu" and compiled:
            raise BackendError(
                "backend 'triton' on device 'cpu' needs Triton's interpreter: "
                "set TRITON_INTERPRET=1 before Python starts"
            )
        self._multiprocessors = 0
        self.can_be_captured = device.type == "cuda"
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._multiprocessors = properties.multi_processor_count

    def each(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch one program for each block of `size` elements, a number that the host knows."""
        grid = (-(-size // BLOCK),)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def walk(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch a fixed number of programs that share at most `size` elements."""
        grid = self.shared(-(-size // BLOCK), BLOCK_WARPS)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def shared(self, tiles: int, warps: int) -> tuple[int]:
        """Return the number of programs that share tiles: the resident ones, or one for each tile.

        The interpreter uses two programs, which is enough to test sharing.
        """
        most = self._multiprocessors * max(1, RESIDENT_WARPS // warps)
        return (min(tiles, most or 2),)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch a kernel, unless its grid is empty."""
        if math.prod(grid):
            with self._current_device():
                # Without fused multiply-add, all kernels round alike, however they are compiled.
                kernel[grid](*arguments, enable_fp_fusion=False, **options)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Make the tensors' device current, as Triton launches on torch's current device."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            return torch.cuda.device(self._device)
        return nullcontext()
