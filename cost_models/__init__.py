"""What a placement costs in time and memory. One model per file."""

from collections.abc import Callable
from functools import partial

from cost_models.base import (
    ANY_SHARE,
    WHOLE_TABLE,
    Cold,
    CostCurve,
    CostModel,
    CostReport,
    GpuCost,
    HostCost,
    ShardingOption,
    TableShard,
    shards_of,
)
from cost_models.calibrated.model import Calibrated
from cost_models.roofline import Roofline
from cost_models.torchrec.model import TorchRec
from placer.errors import PlacerError

COST_MODELS: dict[str, Callable[[], CostModel]] = {
    "roofline": Roofline,
    "torchrec": TorchRec,
    "torchrec-prefetch": partial(TorchRec, prefetch_pipeline=True),
}


def _learned(path: str) -> CostModel:
    from cost_models.learned.model import Learned

    return Learned.load(path) if path else Learned.of_this_machine()


FILE_MODELS: dict[str, Callable[[str], CostModel]] = {
    "calibrated": Calibrated.load,
    "learned": _learned,
}
"""Models whose constants are in a file: named ``calibrated:machine.json``. Of ``learned`` some
come with placer, so that it may stand alone."""

__all__ = [
    "ANY_SHARE",
    "COST_MODELS",
    "FILE_MODELS",
    "WHOLE_TABLE",
    "Calibrated",
    "Cold",
    "CostCurve",
    "CostModel",
    "CostReport",
    "GpuCost",
    "HostCost",
    "Roofline",
    "ShardingOption",
    "TableShard",
    "TorchRec",
    "cost_model",
    "is_model_name",
    "model_names",
    "shards_of",
]


def cost_model(name: str) -> CostModel:
    """The cost model of that name: of `COST_MODELS`, or of `FILE_MODELS` with a file behind it.

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
    """The names of all cost models, for help and messages."""
    return ", ".join([*COST_MODELS, *(f"{kind}:FILE" for kind in FILE_MODELS), "learned"])


def is_model_name(name: str) -> bool:
    """Whether `cost_model` knows the name; of a file nothing is read."""
    kind, _, path = name.partition(":")
    return name in COST_MODELS or name == "learned" or (bool(path) and kind in FILE_MODELS)
