"""How placed tables are trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from placer.executor.names import Policy
from placer.executor.optimizers.rounding import Rounding
from placer.executor.optimizers.rule import DEFAULTS
from placer.files import StrPath
from placer.tables import OptimizerName


@dataclass(frozen=True, slots=True)
class Options:
    """What a table's module is made with; see `PlacedEmbeddings`."""

    lr: float
    eps: float
    betas: tuple[float, float]
    backend: str = "auto"
    cache_policy: Policy = "lfu"
    rounding: Rounding = "nearest"
    drive: StrPath | None = None


def options_of(optimizer: OptimizerName, said: Mapping[str, Any]) -> Options:
    """Fill in what a user has not said of all tables: constants are each optimizer's own.

    >>> options_of("adagrad", {"lr": 0.1}).eps, options_of("adam", {}).lr
    (1e-10, 0.001)
    """
    return Options(**{**asdict(DEFAULTS[optimizer]), **said})
