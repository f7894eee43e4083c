"""How a step's phases follow one another: what waits for what, and what runs beside it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]


class SharedLane(NamedTuple):
    """A resource of a GPU that a phase of the first chain and one beside it use at once.

    While both do, each goes half as fast. So the phase is longer by what they do at the same time:
    by its own seconds on the lane, or by what the other one then still has to do, whichever
    is less.
    """

    phase: int  # Of the first chain.
    part: int  # The row of that phase's seconds on the lane, which are its last ones.
    beside: int  # The phase beside it.
    before: tuple[int, ...] = ()  # The phases of the first chain before it.
    # Seconds after which the phase beside begins; the first chain begins at once.
    begin_s: float = 0.0

    def added_s(self, waited: Any, phase: Any, part: Any, beside: Any) -> Any:
        """Return by how much the phase is longer; `waited` are the seconds before it."""
        begins = waited + phase - part
        left = np.minimum(self.begin_s + beside - begins, beside)
        return np.fmax(np.minimum(part - np.fmax(self.begin_s - begins, 0.0), left), 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases of a step, and the chains that they form.

    A collective is a barrier: no GPU begins what follows before all have finished what comes
    before. A chain of phases therefore takes the sum, over its phases, of the slowest GPU in each.
    Chains run beside one another, so that a step takes as long as the longest of them::

        T = max over chains c of  fixed_s[c] + Σ over phases p of c of  max over GPUs g of t[p, g]

    where t are phase times with what shared lanes add (`prolonged`). They add to the first chain
    alone: a lane's own work, all phases together, is a chain of its own, and no shorter than
    what is delayed beside the first one.

    TorchRec's linear-programming planner minimises such a sum; the slowest sum of any one GPU, as
    most planners take it, is shorter than a step whose collectives wait for all.

    `phases` are names, in the order of rows of phase times; a lane, the work of one resource in all
    phases together, is a phase as well. `chains` are numbers of phases, and no plan changes the
    `fixed_s` of each. Lanes that are `shared` are in the order of the phases that they delay.

    Examples
    --------
    >>> schedule = Schedule(("lookup", "exchange"), ((0, 1),))
    >>> schedule.step_time_s(np.array([[0.002, 0.001], [0.001, 0.003]]))
    0.005

    The first GPU reads in place for 1 ms at the end of its lookup, while 0.8 ms of 1.8 ms of
    copies are left:

    >>> names, link = ("lookup", "copies", "reads in place"), SharedLane(0, part=2, beside=1)
    >>> schedule = Schedule(names, ((0,), (1,)), shared=(link,))
    >>> schedule.step_time_s(np.array([[0.002, 0.002], [0.0018, 0.0], [0.001, 0.001]]))
    0.0028
    """

    phases: tuple[str, ...]
    chains: tuple[tuple[int, ...], ...]
    fixed_s: tuple[float, ...] = ()
    shared: tuple[SharedLane, ...] = ()

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

    def prolonged(self, phase_s: Float, slowest_s: Float | None = None) -> Float:
        """Return phase times with what shared lanes add, shape (phases, ...).

        Parameters
        ----------
        phase_s : float64, shape (phases, GPUs, ...); any (phases, ...) with `slowest_s`
            As if each phase were alone. Not changed.
        slowest_s : float64, shape (phases,), optional
            The slowest GPU's seconds in each phase, for which others wait; by default of
            `phase_s`.
        """
        longer = phase_s
        for lane in self.shared:
            slowest = longer.max(axis=1, initial=0.0) if slowest_s is None else slowest_s
            waited = slowest[list(lane.before)].sum(axis=0)
            part, beside = longer[lane.part], longer[lane.beside]
            if not part.any() or (lane.begin_s + beside <= waited).all():
                continue  # Mostly.
            with np.errstate(invalid="ignore"):  # What is infinite stays so.
                added_s = lane.added_s(waited, longer[lane.phase], part, beside)
            longer = longer.copy()
            longer[lane.phase] += added_s
        return longer

    def chain_times_s(self, phase_s: Float) -> Float:
        """Return time of each chain, shape (chains,), of phase times of shape (phases, GPUs)."""
        slowest = self.prolonged(phase_s).max(axis=1, initial=0.0)
        times: Float = self.members @ slowest + self.fixed
        return times

    def step_time_s(self, phase_s: Float) -> float:
        """Return the time of the longest chain, of phase times of shape (phases, GPUs)."""
        return float(self.chain_times_s(phase_s).max())


ONE_PHASE = Schedule(("step",), ((0,),))
"""A step takes as long as its slowest GPU with all its work."""
