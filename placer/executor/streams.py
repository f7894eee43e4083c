"""Work of a CUDA device that the host watches without waiting."""

import torch
from torch import Tensor


def recorded() -> torch.cuda.Event:
    """Return an event that completes once all work queued on the current stream so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def start_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory, complete once the current stream gets here."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, and wait for the copy.

    It goes through pinned memory: to other memory a GPU copies at a few percent of its link's rate.
    """
    if tensor.device.type != "cuda":
        return tensor
    copy = start_copy(tensor)
    recorded().synchronize()
    return copy


def indexed(device: torch.device) -> torch.device:
    """Return the device with its number: tensors on ``cuda`` say that they are on ``cuda:0``."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
