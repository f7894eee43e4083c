"""Backends: the kernels that read and update arenas, by name."""

import torch

from placer.errors import BackendError
from placer.executor.backends._base import Backend

BACKENDS: tuple[str, ...] = ("auto", "numba", "torch", "staged")


def make_backend(name: str, device_type: str) -> Backend:
    """The backend called `name`; ``auto`` takes the fastest that is installed.

    Raises
    ------
    BackendError
        If there is no such backend, its library is missing, or it cannot run on the device.
    """
    from placer.executor.backends.torch_backend import TorchBackend

    if name not in BACKENDS:
        raise BackendError(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    if device_type != "cpu":
        if name not in ("auto", "staged"):
            raise BackendError(f"backend {name!r} runs on cpu, not on {device_type}; use 'staged'")
        if device_type == "cuda" and not torch.cuda.is_available():
            raise BackendError("device 'cuda': torch finds no GPU here; use device='cpu'")
        return TorchBackend("staged")
    if name in ("torch", "staged"):
        return TorchBackend(name)
    try:
        import numba  # noqa: F401
    except ImportError as error:
        if name == "auto":
            return TorchBackend("torch")
        raise BackendError(
            "backend 'numba' needs numba: pip install 'embedding-placer[cpu]'"
        ) from error
    from placer.executor.backends.numba_backend import NumbaBackend

    return NumbaBackend()
