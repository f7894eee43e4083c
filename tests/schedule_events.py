"""A step as events: threads of all GPUs, barriers between them, and lanes that they share.

Written apart from the cost model's schedule, to hold it: it knows no chains and no maxima, only
what each thread does next and what it waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_models.step_equation.phases import (
    COPIES,
    GRADIENTS,
    IDS,
    LINK_LOOKUP,
    LINK_UPDATE,
    LOOKUP,
    OUTPUTS,
    UPDATE,
)

_DONE = 1e-18

Todo = tuple[str | None, object]
"""(lane, seconds), or (None, name) to wait."""


@dataclass
class Thread:
    """What a thread of a GPU still has to do.

    A wait has a name; it ends when all threads that have it in their list have reached it.
    """

    gpu: int
    todo: list[Todo]
    at: int = 0
    left_s: float = 0.0
    marks: dict[object, float] = field(default_factory=dict)


def threads_of(
    phase_s: np.ndarray, steps: int, *, look_ahead: bool, between_s: float, ids_s: float
) -> list[Thread]:
    """Threads of a training of `steps` steps; `phase_s` has shape (8, GPUs).

    `between_s` is what every step spends between lookups and gradients, `ids_s` what ids take
    before they are on the network.
    """
    threads = []
    for gpu, times in enumerate(phase_s.T.tolist()):
        ids = [("latency", ids_s), ("wait", "ids"), ("network", times[IDS]), ("wait", "sent")]
        copied = [("link", times[COPIES]), ("wait", "copied")]
        main = [
            ("compute", times[LOOKUP]),
            ("link", times[LINK_LOOKUP]),
            ("wait", "looked up"),
            ("network", times[OUTPUTS]),
            ("wait", "outputs"),
            ("compute", between_s),
            ("wait", "dense"),
            ("network", times[GRADIENTS]),
            ("wait", "gradients"),
            ("compute", times[UPDATE]),
            ("link", times[LINK_UPDATE]),
            ("wait", "updated"),
        ]
        own: list[Todo] = []
        exchanges: list[Todo] = []
        copies: list[Todo] = []
        for step in range(steps):
            named = [
                [(None, (name, step)) if lane == "wait" else (lane, name) for lane, name in part]
                for part in (ids, copied, main)
            ]
            if not look_ahead:
                own += [*named[0], *named[1], *named[2]]
                continue
            # Beside a step go the copies of the next one, and the ids of the one after it.
            exchanges += [(None, ("begin", step - 2)), *named[0]]
            copies += [(None, ("sent", step)), (None, ("begin", step - 1)), *named[1]]
            own += [(None, ("copied", step)), (None, ("begin", step)), *named[2]]
        for todo in (own, exchanges, copies) if look_ahead else (own,):
            before_all = ((None, ("begin", -2)), (None, ("begin", -1)))
            threads.append(Thread(gpu, [each for each in todo if each not in before_all]))
    return threads


def finished_at(threads: Sequence[Thread], mark: str, steps: int) -> np.ndarray:
    """When each step's wait of a name ended, shape (steps,)."""
    waiting: dict[object, int] = {}
    for thread in threads:
        for lane, what in thread.todo:
            if lane is None:
                waiting[what] = waiting.get(what, 0) + 1
    now, ended = 0.0, {}
    reached: dict[object, list[Thread]] = {}
    active: list[Thread] = []

    def go_on(thread: Thread) -> None:
        """Up to the next work or wait of a thread."""
        while thread.at < len(thread.todo):
            lane, what = thread.todo[thread.at]
            if lane is None:
                reached.setdefault(what, []).append(thread)
                if len(reached[what]) < waiting[what]:
                    return
                ended[what] = now
                for one in reached[what]:
                    one.at += 1
                for one in reached[what]:
                    if one is not thread:
                        go_on(one)
                continue
            thread.left_s = float(what)  # type: ignore[arg-type]
            if thread.left_s > _DONE:
                active.append(thread)
                return
            thread.at += 1

    for thread in threads:
        go_on(thread)
    while active:
        users: dict[tuple[int, object], int] = {}
        for thread in active:
            place = thread.gpu, thread.todo[thread.at][0]
            users[place] = users.get(place, 0) + 1
        shares = [1 / users[one.gpu, one.todo[one.at][0]] for one in active]
        passed = min(one.left_s / share for one, share in zip(active, shares, strict=True))
        now += passed
        running, active = active, []
        over = []
        for thread, share in zip(running, shares, strict=True):
            thread.left_s -= passed * share
            (over if thread.left_s <= max(_DONE, 1e-12 * passed) else active).append(thread)
        for thread in over:
            thread.at += 1
            go_on(thread)
    return np.array([ended[mark, step] for step in range(steps)])
