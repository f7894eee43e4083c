"""Colours, formats and panel styles that pictures and pages of reports share.

The colours are from Okabe and Ito, "Color Universal Design" (2008). People with any kind of colour
vision can tell them apart; https://jfly.uni-koeln.de/color/.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.errors import BackendError, PlacerError
from placer.files.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#8A94A0"

SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW, GREY)
"""Colours of series, in order of use. Grey stands for black."""

STEP, BOUND = BLUE, VERMILION

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Matplotlib's marker for each colour of `SERIES`."""

INK, MUTED, FAINT = "#1f2933", "#6b7785", "#d5dbe1"
"""Colours of text, of secondary text, and of lines, on white."""


@contextmanager
def picture(
    path: str | os.PathLike[str],
    inches: tuple[float, float],
    *,
    font_size: int = 10,
    dpi: int = 160,
) -> "Iterator[Figure]":
    """Yield an empty matplotlib figure, and write it to a file when the block ends.

    The file's ending chooses png, pdf or svg. It needs neither a display nor pyplot.

    Raises `BackendError` if matplotlib is missing, and `PlacerError` if the file has another ending
    or cannot be written.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in ("png", "pdf", "svg"):
        raise PlacerError(f"cannot draw {path}: end its name in one of .png, .pdf, .svg")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "--plot needs matplotlib; install it with: pip install 'embedding-placer[report]'"
        ) from error
    with matplotlib.rc_context({"font.size": font_size, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=inches, layout="constrained")
        yield figure
        with replacing(path) as temporary:
            figure.savefig(temporary, format=suffix, dpi=dpi)


def plain_grid(panel: "Axes", **style: Any) -> None:
    """Give a panel faint grid lines in the background, and remove its frame and ticks."""
    panel.tick_params(length=0, colors=MUTED, which="both")
    for side in panel.spines.values():
        side.set_visible(False)
    panel.grid(color=FAINT, **{"linewidth": 0.7, **style})
    panel.set_axisbelow(True)
