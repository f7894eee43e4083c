"""Choose a backend, the kernels that read and update arenas, by name."""

import importlib.util

import torch

from placer.errors import BackendError, PlacerError
from placer.executor import BACKENDS, Policy
from placer.executor.backends.backend import Backend

__all__ = ["BACKENDS", "make_backend", "usable_device"]


def make_backend(
    name: str, device: torch.device, policy: Policy = "lfu", *, needs_tiers: bool = False
) -> Backend:
    """Return the backend called `name`; ``auto`` takes the fastest that is installed.

    ``numba`` and ``torch`` keep all rows in host memory and read them in place. ``triton`` and
    ``tiered`` keep the tiers in separate memories. ``triton`` has Triton kernels. ``tiered`` is
    plain PyTorch, slower, and runs on every device. If a plan `needs_tiers`, because some of its
    rows cannot be read in place, ``tiered`` replaces ``numba`` and ``torch``.
    """
    if name not in BACKENDS:
        raise BackendError(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    if device.type != "cpu" and name in ("numba", "torch"):
        raise BackendError(f"backend {name!r} runs on cpu, not on {device.type}; use 'triton'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError("device 'cuda': torch finds no GPU here; use device='cpu'")
    best_host = "numba" if _installed("numba") else "torch"
    if name == "auto":
        best = "triton" if device.type == "cuda" and _installed("triton") else "tiered"
        name = best_host if device.type == "cpu" else best
    if name in ("numba", "torch") and not needs_tiers:
        return _host_backend(name)
    if name != "triton":
        return Backend(device, policy, _host_backend(best_host))
    if not _installed("triton"):
        raise BackendError("backend 'triton' needs triton: pip install 'embedding-placer[gpu]'")
    from placer.executor.backends.triton.triton_backend import TritonBackend

    return TritonBackend(device, policy, _host_backend(best_host))


def usable_device(name: str) -> torch.device:
    """Return a device by name; raise PlacerError if this machine or PyTorch cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # PyTorch built without CUDA raises AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise PlacerError(f"device {name!r} cannot be used here: {reason}; use cpu") from error
    return device


def _host_backend(name: str) -> Backend:
    if name == "torch":
        return Backend(torch.device("cpu"))
    if not _installed("numba"):
        raise BackendError("backend 'numba' needs numba: pip install 'embedding-placer[cpu]'")
    from placer.executor.backends.numba_backend import NumbaBackend

    return NumbaBackend()


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # After `sys.modules[package] = None`.
        return False
