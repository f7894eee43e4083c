"""Analyses of a plan: why it is as it is, what changes would gain, and which plan should follow."""

from solvers.analysis.alternatives import Alternative
from solvers.analysis.explain import Binding, Explanation, ShardMargin, explain
from solvers.analysis.replan import HORIZON_STEPS, Candidate, Replanned, replan
from solvers.analysis.whatif import Effect, FrontPoint, WhatIf, front, whatif

__all__ = [
    "HORIZON_STEPS", "Alternative", "Binding", "Candidate", "Effect", "Explanation", "FrontPoint",
    "Replanned", "ShardMargin", "WhatIf", "explain", "front", "replan", "whatif",
]  # fmt: skip
