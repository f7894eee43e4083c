"""Cost models: the time and memory that a placement takes. One model per file."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.base import ANY_SHARE as ANY_SHARE
    from cost_models.base import IN_DRAM as IN_DRAM
    from cost_models.base import WHOLE_TABLE as WHOLE_TABLE
    from cost_models.base import Cold as Cold
    from cost_models.base import ColdHome as ColdHome
    from cost_models.base import CostCurve as CostCurve
    from cost_models.base import CostModel as CostModel
    from cost_models.base import ShardingOption as ShardingOption
    from cost_models.base import TableShard as TableShard
    from cost_models.base import shards_of as shards_of
    from cost_models.calibrated.model import Calibrated as Calibrated
    from cost_models.cost_report import CostReport as CostReport
    from cost_models.cost_report import GpuCost as GpuCost
    from cost_models.cost_report import HostCost as HostCost
    from cost_models.cost_report import PhaseCost as PhaseCost
    from cost_models.registry import COST_MODELS as COST_MODELS
    from cost_models.registry import FILE_MODELS as FILE_MODELS
    from cost_models.registry import cost_model as cost_model
    from cost_models.registry import is_model_name as is_model_name
    from cost_models.registry import model_names as model_names
    from cost_models.roofline import Roofline as Roofline
    from cost_models.schedule import ONE_PHASE as ONE_PHASE
    from cost_models.schedule import Schedule as Schedule
    from cost_models.simulation import Simulated as Simulated
    from cost_models.simulation import Stream as Stream
    from cost_models.simulation import drawn_stream as drawn_stream
    from cost_models.simulation import log_stream as log_stream
    from cost_models.simulation import simulate as simulate
    from cost_models.torchrec.model import TorchRec as TorchRec

__getattr__, __all__ = lazy_exports(__name__)
