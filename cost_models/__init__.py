"""What a placement costs in time and memory. One model per file."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from cost_models.base import (
        ANY_SHARE,
        WHOLE_TABLE,
        Cold,
        CostCurve,
        CostModel,
        ShardingOption,
        TableShard,
        shards_of,
    )
    from cost_models.calibrated.model import Calibrated
    from cost_models.cost_report import CostReport, GpuCost, HostCost, PhaseCost
    from cost_models.registry import (
        COST_MODELS,
        FILE_MODELS,
        cost_model,
        is_model_name,
        model_names,
    )
    from cost_models.roofline import Roofline
    from cost_models.schedule import ONE_PHASE, Schedule
    from cost_models.simulation import Simulated, Stream, drawn_stream, log_stream, simulate
    from cost_models.torchrec.model import TorchRec

__all__ = [
    "ANY_SHARE",
    "COST_MODELS",
    "FILE_MODELS",
    "ONE_PHASE",
    "WHOLE_TABLE",
    "Calibrated",
    "Cold",
    "CostCurve",
    "CostModel",
    "CostReport",
    "GpuCost",
    "HostCost",
    "PhaseCost",
    "Roofline",
    "Schedule",
    "ShardingOption",
    "Simulated",
    "Stream",
    "TableShard",
    "TorchRec",
    "cost_model",
    "drawn_stream",
    "is_model_name",
    "log_stream",
    "model_names",
    "shards_of",
    "simulate",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "cost_models.base": "ANY_SHARE WHOLE_TABLE Cold CostCurve CostModel ShardingOption "
        "TableShard shards_of",
        "cost_models.cost_report": "CostReport GpuCost HostCost PhaseCost",
        "cost_models.calibrated.model": "Calibrated",
        "cost_models.registry": "COST_MODELS FILE_MODELS cost_model is_model_name model_names",
        "cost_models.roofline": "Roofline",
        "cost_models.schedule": "ONE_PHASE Schedule",
        "cost_models.simulation": "Simulated Stream drawn_stream log_stream simulate",
        "cost_models.torchrec.model": "TorchRec",
    },
)
