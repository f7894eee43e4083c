"""Training of the bundled DLRM with a plan."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.training.config import CheckpointPolicy, TraceRequest, TrainConfig
    from placer.training.dlrm import Dlrm
    from placer.training.loop import TrainResult, train
    from placer.training.metric_logs import MetricLog, metric_logs
    from placer.training.parity import ParityResult, compare_training
    from placer.training.run import Progress
    from placer.training.trace import PhaseTime, TraceSummary

__all__ = [
    "CheckpointPolicy",
    "Dlrm",
    "MetricLog",
    "ParityResult",
    "PhaseTime",
    "Progress",
    "TraceRequest",
    "TraceSummary",
    "TrainConfig",
    "TrainResult",
    "compare_training",
    "metric_logs",
    "train",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "placer.training.config": "CheckpointPolicy TraceRequest TrainConfig",
        "placer.training.dlrm": "Dlrm",
        "placer.training.loop": "TrainResult train",
        "placer.training.metric_logs": "MetricLog metric_logs",
        "placer.training.parity": "ParityResult compare_training",
        "placer.training.run": "Progress",
        "placer.training.trace": "PhaseTime TraceSummary",
    },
)
