"""Every placement of every setting on every platform."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cost_models import CostModel
from cost_models.sweep.placements import PLACEMENTS
from cost_models.sweep.platforms import Platform
from cost_models.sweep.settings import Setting, cases
from cost_models.sweep.steps import Embeddings, Point, Steps
from placer.errors import ProblemError

PARAMETER_SERVERS = 8
"""CPU servers that hold the tables of placement ``remote``; an assumption."""


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
        steps = Steps(machine, setting, changed, embeddings, parameter_servers)
        points += [steps.point(PLACEMENTS[name]) for name in placements]
        if on_point is not None:
            on_point(done + 1, len(todo), machine.name)
    varied = {axis: tuple(values) for axis, values in axes.items()}
    what = tuple(platforms), tuple(placements), cost_model.name
    return Sweep(base, varied, grid, *what, tuple(points))
