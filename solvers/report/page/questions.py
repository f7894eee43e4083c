"""The optional questions of a page, from which the command line takes its options."""

from dataclasses import dataclass
from typing import Annotated

from placer.knobs import Knob, check_knobs

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
        str | None, Knob("Solvers to compare on the plan's problem, comma-separated.")
    ] = None
    hbm_steps: Annotated[
        str | None, Knob("Step time with each of these budgets of a GPU: 2GiB,4GiB.")
    ] = None
    whatif: Annotated[bool, Knob("Tell what more memory or a faster machine gains.")] = False
    solver: Annotated[str, Knob("Method that solves for --hbm-steps and --whatif.")] = "greedy-cost"
    data: Annotated[tuple[str, ...], Knob("Log files to replay through the plan; repeatable.")] = ()
    data_format: Annotated[str | None, Knob("Format of --data; by default what names say.")] = None
    batches: Annotated[int | None, Knob("Batches of the log; by default all.", least=1)] = None
    windows: Annotated[int, Knob("Parts of the log, to see a drift.", least=1)] = 4
    explained: Annotated[
        int | None,
        Knob("Slowest tables whose alternatives are costed; by default 3 of small plans.", least=0),
    ] = None

    def __post_init__(self) -> None:
        check_knobs(self)
