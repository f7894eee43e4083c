"""Training of the bundled DLRM with a plan."""

from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.dlrm import Dlrm
from placer.training.loop import TrainResult, train
from placer.training.parity import ParityResult, compare_training
from placer.training.run import Progress
from placer.training.trace import PhaseTime, TraceRequest, TraceSummary

__all__ = [
    "CheckpointPolicy",
    "Dlrm",
    "ParityResult",
    "PhaseTime",
    "Progress",
    "TraceRequest",
    "TraceSummary",
    "TrainConfig",
    "TrainResult",
    "compare_training",
    "train",
]
