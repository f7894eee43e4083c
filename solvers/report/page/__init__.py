"""`placer report`: an HTML page of a plan and its analyses that needs no network.

The optional questions are here, as the command line takes its options from them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from placer.knobs import check_knobs, knob
from placer.lazy import lazy_exports
from placer.units import parse_sizes
from solvers.registry import check_names

if TYPE_CHECKING:
    from solvers.report.page.answers import Answers as Answers
    from solvers.report.page.answers import ask as ask
    from solvers.report.page.render import write_page as write_page

__getattr__, __all__ = lazy_exports(__name__)
__all__ += ["Questions"]


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that a page answers besides the plan itself.

    >>> Questions(hbm_steps="2GiB,4GiB").solver
    'greedy-cost'
    """

    HEADING: ClassVar[str] = "Parts of the page"

    hbm_steps: str | None = knob(
        None,
        "Also show the step time with each of these GPU budgets: 2GiB,4GiB.",
        kind=parse_sizes,
    )
    whatif: bool = knob(False, "Also show what more memory or a faster machine would gain.")
    solver: str = knob("greedy-cost", "Solver for --hbm-steps and --whatif.", kind=check_names)
    explained: int | None = knob(
        None,
        "Show other placements of this many tables, the slowest ones; by default 3 if the plan is "
        "small.",
        "explained --explain",
        least=0,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
