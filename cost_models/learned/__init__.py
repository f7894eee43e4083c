"""The cost model that networks learned from measured steps: `learn` trains it."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.learned.fit import learn
    from cost_models.learned.model import Learned

__all__ = ["Learned", "learn"]

__getattr__ = lazy_exports(
    __name__, {"cost_models.learned.fit": "learn", "cost_models.learned.model": "Learned"}
)
