"""Copy tensors between host and device, and track CUDA work without blocking the host."""

import torch
from torch import Tensor


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
