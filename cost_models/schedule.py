"""The order of a step's phases: which phases wait for others, and which run at the same time."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]


class SharedLane(NamedTuple):
    """A GPU's resource that a phase of the first chain shares with a phase of another chain.

    While both use it, each runs at half speed. So the phase of the first chain grows by the smaller
    of two times: its own seconds on the lane, and the seconds that the other phase still has left.
    """

    phase: int  # The number of the phase of the first chain.
    part: int  # The row with this phase's seconds on the lane, at the end of the phase.
    beside: int  # The number of the phase of the other chain.
    before: tuple[int, ...] = ()  # Earlier phases of the first chain.
    # The start of the other phase in seconds; the first chain starts at 0.
    begin_s: float = 0.0

    def added_s(self, waited: Any, phase: Any, part: Any, beside: Any) -> Any:
        """Return the seconds by which the phase grows; it starts after `waited` seconds."""
        begins = waited + phase - part
        left = np.minimum(self.begin_s + beside - begins, beside)
        return np.fmax(np.minimum(part - np.fmax(self.begin_s - begins, 0.0), left), 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases of a step, and the chains that they form.

    A collective is a barrier: no GPU starts the next phase before all have finished this one. So a
    chain of phases takes the sum of the slowest GPU's time in each phase. Chains run at the same
    time, so a step takes as long as the longest chain::

        T = max over chains c of  fixed_s[c] + Σ over phases p of c of  max over GPUs g of t[p, g]

    where t are phase times including the delays of shared lanes (`prolonged`). Only the first chain
    is delayed: all work of a lane is a chain of its own, which is no shorter than the delayed work
    beside the first chain.

    `phases` are names, in the order of the rows of phase times. A lane, the work of one resource in
    all phases, counts as a phase. `chains` lists the phase numbers of each chain. `fixed_s` has the
    seconds of each chain that no plan changes. `shared` lanes are in the order of the phases that
    they delay.

    Examples
    --------
    >>> schedule = Schedule(("lookup", "exchange"), ((0, 1),))
    >>> schedule.step_time_s(np.array([[0.002, 0.001], [0.001, 0.003]]))
    0.005

    The first GPU reads in place for 1 ms at the end of its lookup. By then, 0.8 of 1.8 ms of copies
    are left:

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
        """A matrix with 1 if a chain contains a phase, else 0, shape (chains, phases)."""
        members = np.zeros((len(self.chains), len(self.phases)))
        for number, chain in enumerate(self.chains):
            members[number, list(chain)] = 1.0
        return members

    @property
    def fixed(self) -> Float:
        """The `fixed_s` as an array, shape (chains,); zeros if there are none."""
        return np.array(self.fixed_s or (0.0,) * len(self.chains))

    def prolonged(self, phase_s: Float, slowest_s: Float | None = None) -> Float:
        """Return phase times including the delays of shared lanes, shape (phases, ...).

        `phase_s`, shape (phases, GPUs, ...); any (phases, ...) with `slowest_s`: times of each
        phase alone; the array is not changed. `slowest_s`, shape (phases,): the slowest GPU's
        seconds in each phase, for which others wait. By default, they are taken from `phase_s`.
        """
        longer = phase_s
        for lane in self.shared:
            slowest = longer.max(axis=1, initial=0.0) if slowest_s is None else slowest_s
            waited = slowest[list(lane.before)].sum(axis=0)
            part, beside = longer[lane.part], longer[lane.beside]
            if not part.any() or (lane.begin_s + beside <= waited).all():
                continue  # The usual case.
            with np.errstate(invalid="ignore"):  # Infinite times stay infinite.
                added_s = lane.added_s(waited, longer[lane.phase], part, beside)
            longer = longer.copy()
            longer[lane.phase] += added_s
        return longer

    def chain_times_s(self, phase_s: Float) -> Float:
        """Return the seconds of each chain, shape (chains,), from phase times (phases, GPUs)."""
        slowest = self.prolonged(phase_s).max(axis=1, initial=0.0)
        times: Float = self.members @ slowest + self.fixed
        return times

    def step_time_s(self, phase_s: Float) -> float:
        """Return the seconds of the longest chain, from phase times of shape (phases, GPUs)."""
        return float(self.chain_times_s(phase_s).max())


ONE_PHASE = Schedule(("step",), ((0,),))
"""The schedule of one phase: a step takes as long as the GPU with the most work."""
