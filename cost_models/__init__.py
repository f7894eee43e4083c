"""What a placement costs in time and memory. One model per file."""

from cost_models._base import CostModel, CostReport, GpuCost, HostCost, PieceCurve
from cost_models.roofline import Roofline
from placer.errors import PlacerError

COST_MODELS: dict[str, type[CostModel]] = {
    "roofline": Roofline,
}

__all__ = [
    "COST_MODELS",
    "CostModel",
    "CostReport",
    "GpuCost",
    "HostCost",
    "PieceCurve",
    "Roofline",
    "cost_model",
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
