"""What a planner answers of an instance."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Shards of a plan, as JSON; None with a ``reason`` among the facts.

    `facts` are written beside the plan: options, seed, processor seconds, status, bound.
    `step_time_s` is what the planner says of its plan under the library's equation, if it does.
    """

    shards: list[dict[str, Any]] | None
    facts: dict[str, Any]
    step_time_s: float | None = None
