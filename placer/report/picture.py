"""What pictures of reports have in common."""

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from placer.errors import BackendError, PlacerError

if TYPE_CHECKING:
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
