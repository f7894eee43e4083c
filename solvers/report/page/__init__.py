"""`placer report`: an HTML page of a plan and its analyses that needs no network.

The optional questions are here, as the command line takes its options from them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from placer.data.layout import Format
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

    >>> Questions(hbm_steps="2GiB,4GiB").windows
    4
    """

    HEADING: ClassVar[str] = "Parts of the page"

    compared: str | None = knob(
        None,
        "Also solve the plan's problem with these solvers: ilp,auto.",
        "compared --compare",
        kind=check_names,
    )
    hbm_steps: str | None = knob(
        None,
        "Also show the step time with each of these GPU budgets: 2GiB,4GiB.",
        kind=parse_sizes,
    )
    whatif: bool = knob(False, "Also show what more memory or a faster machine would gain.")
    solver: str = knob("greedy-cost", "Solver for --hbm-steps and --whatif.", kind=check_names)
    data: tuple[str, ...] = knob((), "Log file to replay through the plan; repeatable.")
    data_format: Format | None = knob(
        None,
        "Format of --data; by default it is found from the file names.",
        "log_format --log-format",
    )
    batches: int | None = knob(None, "Replay only this many batches of the log.", least=1)
    windows: int = knob(
        4, "Divide the log into this many parts, to see how its accesses change.", least=1
    )
    explained: int | None = knob(
        None,
        "Show other placements of this many tables, the slowest ones; by default 3 if the plan is "
        "small.",
        "explained --explain",
        least=0,
    )

    def __post_init__(self) -> None:
        check_knobs(self)
