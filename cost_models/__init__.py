"""What a placement costs in time and memory. One model per file."""

from collections.abc import Callable
from functools import partial

from cost_models._base import (
    WHOLE,
    CostModel,
    CostReport,
    Cut,
    GpuCost,
    HostCost,
    Piece,
    PieceCurve,
    pieces_of,
)
from cost_models.roofline import Roofline
from cost_models.torchrec import TorchRec
from placer.errors import PlacerError

COST_MODELS: dict[str, Callable[[], CostModel]] = {
    "roofline": Roofline,
    "torchrec": TorchRec,
    "torchrec-prefetch": partial(TorchRec, prefetch_pipeline=True),
}

__all__ = [
    "COST_MODELS",
    "WHOLE",
    "CostModel",
    "CostReport",
    "Cut",
    "GpuCost",
    "HostCost",
    "Piece",
    "PieceCurve",
    "Roofline",
    "TorchRec",
    "cost_model",
    "pieces_of",
]


def cost_model(name: str) -> CostModel:
    """The cost model of that name.

    Raises
    ------
    PlacerError
        If there is none; the message lists the valid names.
    """
    try:
        return COST_MODELS[name]()
    except KeyError:
        raise PlacerError(
            f"no cost model is called {name!r}; choose from {', '.join(COST_MODELS)}"
        ) from None
