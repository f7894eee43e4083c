"""What pictures of reports have in common: formats, colours, and how a panel looks."""

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from placer.errors import BackendError, PlacerError
from placer.report.palette import FAINT, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("png", "pdf", "svg")


def image_format(path: str | os.PathLike[str]) -> str:
    """The format that a file's ending asks for.

    Raises
    ------
    PlacerError
        If it is none that can be drawn.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in _FORMATS:
        raise PlacerError(f"cannot draw {path}: end its name in one of .{', .'.join(_FORMATS)}")
    return suffix


def drawing() -> "tuple[ModuleType, type[Figure]]":
    """Matplotlib, and figures of their own canvas: neither a display nor pyplot is touched.

    Raises
    ------
    BackendError
        If matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "--plot needs matplotlib; install it with: pip install 'embedding-placer[report]'"
        ) from error
    return matplotlib, Figure


def plain_panel(panel: "Axes", colour: str = MUTED) -> None:
    """Take the frame and the ticks of a panel away; labels get the colour."""
    panel.tick_params(length=0, colors=colour, which="both")
    for side in panel.spines.values():
        side.set_visible(False)


def grid_behind(panel: "Axes", **style: Any) -> None:
    """Faint lines at the ticks, behind what is drawn."""
    panel.grid(color=FAINT, **{"linewidth": 0.7, **style})
    panel.set_axisbelow(True)
