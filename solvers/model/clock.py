"""Decide when a search has to stop."""

import math
import time
from dataclasses import dataclass, field, replace

from solvers.result import Limit, Limits


@dataclass
class Clock:
    """Counts the time and steps that a search has left; its parts share one clock.

    - `deadline`, `began`: on `time.monotonic`.
    - `steps_left`: steps of local search that are left; None if only time limits them.
    - `whole`: the clock that this is a part of; its steps are spent too.
    """

    limits: Limits
    deadline: float
    steps_left: int | None
    whole: "Clock | None" = None
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, limits: Limits) -> "Clock":
        """Return a clock that starts now."""
        left_s = max(0.0, limits.time_limit_s - limits.spent_s)
        return cls(limits, time.monotonic() + left_s, limits.max_steps)

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.deadline - time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self.began

    def reserve(self, seconds: float) -> None:
        """Keep some of the time left for what follows the search."""
        self.deadline -= min(seconds, max(0.0, self.left_s))

    @property
    def stopped(self) -> bool:
        """Whether the caller wants the best plan so far, as with Ctrl-C."""
        return self.limits.stop is not None and self.limits.stop()

    @property
    def spent(self) -> bool:
        """Whether the search has to stop now."""
        return self.limit_hit is not None

    @property
    def limit_hit(self) -> Limit | None:
        """The limit that ended the search, or None."""
        if self.stopped:
            return "stop"
        if time.monotonic() > self.deadline:
            return "time"
        return "steps" if self.steps_left is not None and self.steps_left <= 0 else None

    def step(self, steps: int = 1) -> None:
        """Count steps of local search."""
        if self.steps_left is not None:
            self.steps_left -= steps
        if self.whole is not None:
            self.whole.step(steps)

    @property
    def repeats(self) -> bool:
        """Whether the search is limited by steps, so that its result must not depend on time."""
        return self.limits.max_steps is not None

    def part(self, share: float) -> "Clock":
        """Return a clock that stops after a share of the time that is left, or of the steps."""
        steps = None if self.steps_left is None else math.ceil(self.steps_left * share)
        left_s = max(0.0, self.left_s) * (1.0 if self.repeats else share)
        deadline = time.monotonic() + left_s
        return replace(self, deadline=deadline, steps_left=steps, whole=self)
