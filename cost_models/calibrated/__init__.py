"""The cost model whose constants were measured on a machine: `calibrate` finds them."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.calibrated.calibration import Calibration
    from cost_models.calibrated.fit import calibrate
    from cost_models.calibrated.model import Calibrated

__all__ = ["Calibrated", "Calibration", "calibrate"]

__getattr__ = lazy_exports(
    __name__,
    {
        "cost_models.calibrated.calibration": "Calibration",
        "cost_models.calibrated.fit": "calibrate",
        "cost_models.calibrated.model": "Calibrated",
    },
)
