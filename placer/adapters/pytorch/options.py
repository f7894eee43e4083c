"""How placed tables are trained."""

from dataclasses import asdict, dataclass
from typing import Any

from placer.executor.names import Policy
from placer.executor.optimizers.rounding import Rounding
from placer.executor.optimizers.rule import DEFAULTS
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
    unsaid_eps: float = _EARLIER_EPS

    def arguments(self) -> dict[str, Any]:
        """The same as keyword arguments of `make_embeddings`."""
        return {name: value for name, value in asdict(self).items() if name != "unsaid_eps"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user has said of all tables; constants that are None are each optimizer's own."""

    lr: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    backend: str = "auto"
    cache_policy: Policy = "lfu"
    rounding: Rounding = "nearest"

    def options(self, optimizer: OptimizerName) -> Options:
        """Those of a table.

        >>> Wanted(lr=0.1).options("adagrad").eps, Wanted().options("adam").lr
        (1e-10, 0.001)
        """
        said = {name: value for name, value in asdict(self).items() if value is not None}
        unsaid_eps = _EARLIER_EPS if self.eps is None else self.eps
        return Options(**(asdict(DEFAULTS[optimizer]) | said), unsaid_eps=unsaid_eps)
