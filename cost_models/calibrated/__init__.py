"""The cost model whose constants were measured on a machine: `calibrate` finds them."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.calibrated.calibration import Calibration as Calibration
    from cost_models.calibrated.fit import calibrate as calibrate
    from cost_models.calibrated.model import Calibrated as Calibrated

__getattr__, __all__ = lazy_exports(__name__)
