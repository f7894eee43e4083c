"""How placed tables are trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from placer.executor.names import Policy
from placer.executor.optimizers.rounding import Rounding
from placer.executor.optimizers.rule import DEFAULTS
from placer.files import StrPath
from placer.tables import OptimizerName

_EARLIER_EPS = 1e-8
"""What every optimizer had by default in versions whose checkpoints do not say it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a table's module is made with; see `PlacedEmbeddings`.

    Attributes
    ----------
    unsaid_eps : float
        With which a checkpoint was trained that does not say it.
    """

    lr: float
    eps: float
    betas: tuple[float, float]
    backend: str = "auto"
    cache_policy: Policy = "lfu"
    rounding: Rounding = "nearest"
    drive: StrPath | None = None
    unsaid_eps: float = _EARLIER_EPS

    def arguments(self) -> dict[str, Any]:
        """The same as keyword arguments of `make_embeddings`."""
        return {name: value for name, value in asdict(self).items() if name != "unsaid_eps"}


def options_of(optimizer: OptimizerName, said: Mapping[str, Any]) -> Options:
    """Fill in what a user has not said of all tables: constants are each optimizer's own.

    >>> options_of("adagrad", {"lr": 0.1}).eps, options_of("adam", {}).lr
    (1e-10, 0.001)
    """
    constants = {**asdict(DEFAULTS[optimizer]), **said}
    return Options(**constants, unsaid_eps=said.get("eps", _EARLIER_EPS))
