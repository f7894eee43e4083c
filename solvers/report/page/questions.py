"""The optional questions of a page, from which the command line takes its options."""

from dataclasses import dataclass
from typing import Annotated

from placer.data.layout import Format
from placer.knobs import Knob, check_knobs
from placer.units import parse_sizes
from solvers.registry import check_names

RENAMED_FLAGS = {
    "compared": "compared --compare",
    "data_format": "log_format --log-format",
    "explained": "explained --explain",
}
"""Names and flags of questions whose flags differ from their names."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that a page answers besides the plan itself.

    >>> Questions(hbm_steps="2GiB,4GiB").windows
    4
    """

    compared: Annotated[
        str | None,
        Knob("Also solve the plan's problem with these solvers: ilp,auto.", kind=check_names),
    ] = None
    hbm_steps: Annotated[
        str | None,
        Knob(
            "Also show the step time with each of these GPU budgets: 2GiB,4GiB.", kind=parse_sizes
        ),
    ] = None
    whatif: Annotated[bool, Knob("Also show what more memory or a faster machine would gain.")] = (
        False
    )
    solver: Annotated[str, Knob("Solver for --hbm-steps and --whatif.", kind=check_names)] = (
        "greedy-cost"
    )
    data: Annotated[tuple[str, ...], Knob("Log file to replay through the plan; repeatable.")] = ()
    data_format: Annotated[
        Format | None, Knob("Format of --data; by default it is found from the file names.")
    ] = None
    batches: Annotated[int | None, Knob("Replay only this many batches of the log.", least=1)] = (
        None
    )
    windows: Annotated[
        int, Knob("Divide the log into this many parts, to see how its accesses change.", least=1)
    ] = 4
    explained: Annotated[
        int | None,
        Knob(
            "Show other placements of this many tables, the slowest ones; by default 3 if the plan "
            "is small.",
            least=0,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_knobs(self)
