"""How a step's phases follow one another: what waits for what, and what runs beside it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases of a step, and the chains that they form.

    A collective is a barrier: no GPU begins what follows before all have finished what comes
    before. A chain of phases therefore takes the sum, over its phases, of the slowest GPU in each.
    Chains run beside one another, so that a step takes as long as the longest of them::

        T = max over chains c of  fixed_s[c] + Σ over phases p of c of  max over GPUs g of t[p, g]

    TorchRec's linear-programming planner minimises such a sum; the slowest sum of any one GPU, as
    most planners take it, is shorter than a step whose collectives wait for all.

    Attributes
    ----------
    phases : tuple of str
        Names, in the order of rows of phase times. A lane, the work of one resource in
        all phases together, is a phase as well.
    chains : tuple of tuple of int
        Numbers of phases.
    fixed_s : tuple of float
        Seconds of each chain that no plan changes; none by default.

    Examples
    --------
    >>> schedule = Schedule(("lookup", "exchange"), ((0, 1),))
    >>> schedule.step_time_s(np.array([[0.002, 0.001], [0.001, 0.003]]))
    0.005
    """

    phases: tuple[str, ...]
    chains: tuple[tuple[int, ...], ...]
    fixed_s: tuple[float, ...] = ()

    @property
    def members(self) -> Float:
        """1 where a phase is part of a chain, shape (chains, phases)."""
        members = np.zeros((len(self.chains), len(self.phases)))
        for number, chain in enumerate(self.chains):
            members[number, list(chain)] = 1.0
        return members

    @property
    def fixed(self) -> Float:
        """`fixed_s` as an array, shape (chains,)."""
        return np.array(self.fixed_s or (0.0,) * len(self.chains))

    def chain_times_s(self, phase_s: Float) -> Float:
        """Time of each chain, shape (chains,), of phase times of shape (phases, GPUs)."""
        slowest = phase_s.max(axis=1, initial=0.0)
        times: Float = self.members @ slowest + self.fixed
        return times

    def step_time_s(self, phase_s: Float) -> float:
        """Time of the longest chain, of phase times of shape (phases, GPUs)."""
        return float(self.chain_times_s(phase_s).max())


ONE_PHASE = Schedule(("step",), ((0,),))
"""A step takes as long as its slowest GPU with all its work."""
