"""Refuse gradients of a loss that a `torch.amp.GradScaler` has scaled.

A scaler multiplies the loss by a factor, such as 65,536, and divides the gradients by it before the
optimizer's step. Rows of placed tables are updated earlier, in the backward pass, so their
gradients would be too large. Therefore scaled losses get a hook that marks their backward pass, and
the update refuses marked passes.
"""

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError

_marked: deque[int] = deque(maxlen=256)
"""Autograd's ids of backward passes that started at a scaled loss."""


def watch_scalers() -> None:
    """Patch all GradScaler classes, so that existing and new scalers mark scaled losses."""
    for kind in _with_subclasses(torch.amp.GradScaler):
        own = kind.__dict__.get("scale")
        if own is not None and not hasattr(own, "_is_watched"):
            kind.scale = _watched(own)


def refuse_scaled() -> None:
    """Raise PlacerError if the running backward pass started at a scaled loss."""
    if _marked and torch._C._current_graph_task_id() in _marked:
        raise PlacerError(
            "the loss was scaled by a GradScaler, and placed tables are updated within the "
            "backward pass, by gradients that it has not unscaled: train in bfloat16, which needs "
            "no scaler, or with GradScaler(enabled=False)"
        )


def _watched(scale: Any) -> Any:
    @functools.wraps(scale)
    def marking(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            _mark(scaled)
        return scaled

    marking._is_watched = True  # type: ignore[attr-defined]
    return marking


def _mark(scaled: Any) -> None:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            scaled.register_hook(_mark_pass)  # type: ignore[no-untyped-call]
    elif isinstance(scaled, list | tuple):
        for one in scaled:
            _mark(one)


def _mark_pass(_: Tensor) -> None:
    _marked.append(torch._C._current_graph_task_id())


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    below: list[type[Any]] = kind.__subclasses__()
    return [kind, *(one for child in below for one in _with_subclasses(child))]
