# mypy: disable-error-code="no-untyped-call, type-arg"
"""Starts Triton kernels: compiled for a GPU, or interpreted on the CPU for tests.

No call waits for the device, and every launch has a size that the host knows: where the amount
of work is known on the device alone, a fixed number of programs share it. A step can thus be
captured in a CUDA graph.
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
"""Warps per multiprocessor where a fixed number of programs shares the work."""

BLOCK, BLOCK_WARPS = 1024, 4
"""Ids that a program translates, or rows among which it finds staged and cached ones; its warps."""


class TritonLauncher(Backend):
    """Starts kernels; see `TritonBackend`."""

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
        """Launch over `size` elements, which the host knows: one program for each block."""
        grid = (-(-size // BLOCK),)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def walk(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over at most `size` elements, which a fixed number of programs shares."""
        grid = self.shared(-(-size // BLOCK), BLOCK_WARPS)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def shared(self, tiles: int, warps: int) -> tuple[int]:
        """Programs that share so many tiles: as many as are resident, or one for each tile.

        The interpreter runs one after the other: two are enough to show that they share.
        """
        most = self._multiprocessors * max(1, RESIDENT_WARPS // warps)
        return (min(tiles, most or 2),)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch, unless there is nothing to do."""
        if math.prod(grid):
            with self._current_device():
                # Whether a product and a sum are fused is not left to each kernel's compilation.
                kernel[grid](*arguments, enable_fp_fusion=False, **options)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Let Triton launch on the tensors' device: it takes torch's current one."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            return torch.cuda.device(self._device)
        return nullcontext()
