"""All cost models by name; each is imported when it is asked for."""

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
"""Models whose constants are in a file: named ``calibrated:machine.json``."""


def cost_model(name: str) -> "CostModel":
    """Return the cost model with a name of `COST_MODELS`, or with one of `FILE_MODELS` and a file.

    Raises
    ------
    PlacerError
        If there is none, and the message lists the valid names; or if its file is damaged.

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
    """Return the names of all cost models, for help and messages."""
    return ", ".join([*COST_MODELS, *(f"{kind}:FILE" for kind in FILE_MODELS)])


def is_model_name(name: str) -> bool:
    """Return whether `cost_model` knows the name, without reading a file."""
    kind, _, path = name.partition(":")
    return name in COST_MODELS or (bool(path) and kind in FILE_MODELS)
