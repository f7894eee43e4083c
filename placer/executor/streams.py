"""Copy tensors between host and device, track CUDA work, and name the parts of a step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

Phase = Literal["map", "sort", "stage", "forward", "backward", "update", "write-back"]
"""The parts of a step: ``map`` turns ids into slots, ``sort`` orders the lookups by row, ``stage``
copies cold rows to HBM, ``write-back`` copies them back, ``forward`` pools rows, ``backward``
collects the gradients of pooled rows, and ``update`` applies the optimizer."""

PHASE_PREFIX = "placer: "


def phase(name: Phase) -> AbstractContextManager[object]:
    """Return a context that a running `torch.profiler.profile` records under this name.

    Without a profiler the context does nothing, as a record takes longer than a kernel launch.
    """
    if _profiler_enabled():
        return record_function(PHASE_PREFIX + name)
    return nullcontext()


def recorded() -> torch.cuda.Event:
    """Return an event that completes once all work queued on the current stream so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def start_copy(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory; it is complete once the current stream reaches it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, and wait for the copy.

    The copy is in pinned memory: to other memory a GPU copies at a few percent of its link's rate.
    """
    if tensor.device.type != "cuda":
        return tensor
    copy = start_copy(tensor)
    recorded().synchronize()
    return copy


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors report it: ``cuda`` becomes ``cuda:0``."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
