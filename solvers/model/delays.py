"""A chain of phases that counts what shared lanes add, as a sum over shards.

Some phases share their lane with a phase of the next batch: the exchange of pooled rows shares the
network with the exchange of ids. Such a phase takes longer by ``a = min(o, c + i − W)`` if that is
positive. Here o are a GPU's seconds of the phase, i those of the phase beside it, which begins c
seconds into the step, and W ≥ c is what all GPUs wait for before
(`cost_models.schedule.SharedLane`). This depends on all shards of a GPU together. But ``x − y ≤ Σ
(x − y)⁺`` over shards, so

    W + o + a  ≥  o + min(o + W, c + i)  ≥  c + Σ over a GPU's shards of (o + min(o, i))

and a step is no shorter than a chain in which c seconds and one phase, of ``o + min(o, i)`` seconds
for each shard, replace the phase and all phases before it.
"""

from dataclasses import dataclass, replace

import numpy as np

from cost_models import CostCurve
from cost_models.schedule import Schedule, SharedLane
from solvers.model.knapsack import Float

NAME = "delayed"
"""Name of the added phase. It is no work: it says how long other phases are together."""


@dataclass(frozen=True, slots=True)
class Delay:
    """What a shared lane adds to the first chain of a schedule.

    Attributes
    ----------
    lane : SharedLane
        A lane that its phase uses from beginning to end.
    """

    lane: SharedLane

    @classmethod
    def of(cls, schedule: Schedule) -> "Delay | None":
        """Return the delay of the first chain that this module can count; None if there is none.

        Examples
        --------
        >>> lane = SharedLane(phase=1, part=1, beside=3, before=(0,), begin_s=0.5)
        >>> names = ("lookup", "outputs", "update", "ids")
        >>> delay = Delay.of(Schedule(names, ((0, 1, 2), (3,)), shared=(lane,)))
        >>> delay.schedule(Schedule(names, ((0, 1, 2), (3,)), (1.0, 0.0))).chains
        ((0, 1, 2), (3,), (2, 4))
        """
        for lane in schedule.shared:
            if lane.part == lane.phase and {lane.phase, *lane.before} <= set(schedule.chains[0]):
                return cls(lane)
        return None

    def schedule(self, schedule: Schedule) -> Schedule:
        """Return a schedule with the added phase and its chain, both last."""
        lane, first = self.lane, schedule.chains[0]
        replaced = {lane.phase, *lane.before}
        chain = (*(phase for phase in first if phase not in replaced), len(schedule.phases))
        fixed_s = tuple(schedule.fixed.tolist())
        return replace(
            schedule,
            phases=(*schedule.phases, NAME),
            chains=(*schedule.chains, chain),
            fixed_s=(*fixed_s, fixed_s[0] + lane.begin_s),
        )

    def with_row(self, phase_s: Float) -> Float:
        """Return a shard's or a launch's seconds of phases, with the added phase's.

        Parameters
        ----------
        phase_s : float64, shape (phases, ...)
        """
        own, beside = phase_s[self.lane.phase], phase_s[self.lane.beside]
        return np.concatenate((phase_s, (own + np.minimum(own, beside))[None]))

    def with_phase(self, curve: CostCurve) -> CostCurve:
        """Return a curve with the added phase."""
        return replace(
            curve,
            gpu_s_of_phases=self.with_row(curve.phase_s),
            split_s_of_phases=self.with_row(curve.split_phase_s),
        )

    def is_likely(self, phase_s: Float) -> bool:
        """Return whether the mean GPU is delayed, given seconds of shape (GPUs, phases)."""
        lane = self.lane
        own, beside = phase_s[:, lane.phase], phase_s[:, lane.beside]
        waited_s = phase_s[:, list(lane.before)].sum(axis=1)
        return bool((lane.begin_s + np.minimum(own, beside)).mean() > waited_s.mean())
