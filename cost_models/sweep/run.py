"""Every placement of every setting on every platform."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models import CostModel
from cost_models.sweep.placements import PLACEMENTS, Placement
from cost_models.sweep.platforms import Platform
from cost_models.sweep.settings import Setting, cases
from cost_models.sweep.steps import Embeddings, ImpossibleError, Steps
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.memory import Shortage

PARAMETER_SERVERS = 8
"""CPU servers that hold the tables of placement ``remote``; an assumption."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one placement of one setting does on one platform.

    The setting has the values in `varied` on axes where it is not the sweep's base. Times and
    samples per second are None where the placement is not possible: `shortage` tells the memory
    that is too small, if that is why, and `detail` the reason, or else what is special. With CPU
    servers, a step is the time in which every trainer does one batch. It takes as long as the
    longest of its parts, which it `waits_for`. `hbm_lookup_share` of lookups are served from HBM;
    `extra_servers` are further machines that the placement needs.
    """

    platform: str
    placement: str
    setting: Setting
    varied: Mapping[str, float]
    step_time_s: float | None = None
    samples_per_s: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    waits_for: str = ""
    hbm_lookup_share: float | None = None
    shortage: Shortage | None = None
    detail: str = ""
    extra_servers: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points, platform by platform, case by case, in the order of `placements`.

    As a `grid`, axes were varied together, not one at a time.
    """

    base: Setting
    axes: Mapping[str, tuple[float, ...]]
    grid: bool
    platforms: tuple[Platform, ...]
    placements: tuple[str, ...]
    cost_model: str
    points: tuple[Point, ...]

    def ranked(self, platform: str, varied: Mapping[str, float]) -> tuple[Point, ...]:
        """Return the possible placements of a case on a platform, the fastest first.

        Placements that need further machines come last. Equals keep the order of `placements`.
        """
        possible = [
            point
            for point in self.points
            if point.platform == platform and point.varied == varied and point.samples_per_s
        ]
        possible.sort(key=lambda point: (point.extra_servers > 0, -(point.samples_per_s or 0.0)))
        return tuple(possible)


def sweep(
    platforms: Sequence[Platform],
    axes: Mapping[str, Sequence[float]],
    cost_model: CostModel,
    *,
    base: Setting | None = None,
    placements: Sequence[str] = tuple(PLACEMENTS),
    grid: bool = False,
    parameter_servers: int = PARAMETER_SERVERS,
    on_point: Callable[[float, float | None, str], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Sweep:
    """Try every placement of every case on every platform.

    Raises ProblemError if a placement is unknown, there is no platform or axis, or a platform is
    named twice.

    Parameters
    ----------
    axes : mapping of axis to values
        What is varied: one axis at a time, the others as in `base`, or with `grid` together.
    parameter_servers : int
        CPU servers of placement ``remote``.
    on_point : callable, optional
        Called after each case with how many cases are done, how many there are, and the platform.
    stop : callable, optional
        Called before each case; if it returns true, the sweep ends with the points so far.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from cost_models.sweep import platform
    >>> machines = [platform("big-basin"), platform("zion")]
    >>> swept = sweep(machines, {"batch": [200]}, Roofline(), placements=["gpu", "host-pooled"])
    >>> [swept.ranked(name, {"batch": 200})[0].placement for name in ("big-basin", "zion")]
    ['gpu', 'gpu']
    """
    for name in placements:
        if name not in PLACEMENTS:
            known = ", ".join(PLACEMENTS)
            raise ProblemError(f"no placement is called {name!r}; choose from {known}")
    if not platforms or not axes or not placements:
        raise ProblemError("a sweep needs a platform, a placement and an axis to vary")
    names = [platform.name for platform in platforms]
    if len(set(names)) < len(names):
        raise ProblemError(f"platforms are named more than once: {', '.join(names)}")
    base = base or Setting()
    todo = [(one, *case) for one in platforms for case in cases(base, axes, grid=grid)]
    embeddings = Embeddings(cost_model)
    points: list[Point] = []
    for done, (machine, changed, setting) in enumerate(todo):
        if stop is not None and stop():
            break
        steps = Steps(machine, setting, embeddings, parameter_servers)
        points += [_point(steps, PLACEMENTS[name], changed) for name in placements]
        if on_point is not None:
            on_point(done + 1, len(todo), machine.name)
    varied = {axis: tuple(values) for axis, values in axes.items()}
    what = tuple(platforms), tuple(placements), cost_model.name
    return Sweep(base, varied, grid, *what, tuple(points))


def _point(steps: Steps, placement: Placement, varied: Mapping[str, float]) -> Point:
    place = (steps.platform.name, placement.name, steps.setting, dict(varied))
    try:
        step = steps.of(placement)
    except ImpossibleError as error:
        return Point(*place, shortage=error.shortage, detail=str(error))
    except PlanMismatchError as error:  # A cost model that does not know the placement.
        return Point(*place, detail=str(error))
    speed = step.parts_s[step.waits_for], step.samples_per_s, step.parts_s, step.waits_for
    more: Any = {"detail": step.detail, "extra_servers": step.extra_servers}
    return Point(*place, *speed, step.hbm_lookup_share, **more)
