"""Train the bundled DLRM with a plan."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.training.config import CheckpointPolicy as CheckpointPolicy
    from placer.training.config import TraceRequest as TraceRequest
    from placer.training.config import TrainConfig as TrainConfig
    from placer.training.loop import TrainResult as TrainResult
    from placer.training.loop import train as train
    from placer.training.metrics import MetricLog as MetricLog
    from placer.training.metrics import metric_logs as metric_logs
    from placer.training.pilot import ParityResult as ParityResult
    from placer.training.pilot import compare_training as compare_training
    from placer.training.run import Progress as Progress
    from placer.training.trace import PhaseTime as PhaseTime
    from placer.training.trace import TraceSummary as TraceSummary
    from placer.training.trainer import Dlrm as Dlrm

__getattr__, __all__ = lazy_exports(__name__)
