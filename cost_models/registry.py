"""All cost models by name. A model is imported at its first use."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import cost_models
from placer.errors import PlacerError

if TYPE_CHECKING:
    from cost_models.base import CostModel


COST_MODELS: dict[str, "Callable[[], CostModel]"] = {
    "roofline": lambda: cost_models.Roofline(),
    "torchrec": lambda: cost_models.TorchRec(),
    "torchrec-prefetch": lambda: cost_models.TorchRec(prefetch_pipeline=True),
}
FILE_MODELS: dict[str, "Callable[[str], CostModel]"] = {
    "calibrated": lambda path: cost_models.Calibrated.load(path),
}
"""Models that read their constants from a file, with names such as ``calibrated:machine.json``."""


def cost_model(name: str) -> "CostModel":
    """Return a cost model: by a name of `COST_MODELS`, or as ``KIND:FILE`` by one of `FILE_MODELS`.

    Raises PlacerError if no model has this name (the message lists valid names), or its file is
    damaged.

    Examples
    --------
    >>> cost_model("roofline").name
    'roofline'
    """
    if name in COST_MODELS:
        return COST_MODELS[name]()
    kind, _, path = name.partition(":")
    if is_model_name(name):
        return FILE_MODELS[kind](path)
    raise PlacerError(f"no cost model is called {name!r}; choose from {model_names()}")


def model_names() -> str:
    """Return the names of all cost models, for help texts and error messages."""
    return ", ".join([*COST_MODELS, *(f"{kind}:FILE" for kind in FILE_MODELS)])


def is_model_name(name: str) -> bool:
    """Return whether `cost_model` accepts the name. Reads no file."""
    kind, _, path = name.partition(":")
    return name in COST_MODELS or (bool(path) and kind in FILE_MODELS)
