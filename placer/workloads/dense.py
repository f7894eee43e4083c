"""Parse the dense part of a problem from the text of a command's option.

The dense layers of published workloads are in ``published.json``, with their sources.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from placer.config_file import SUFFIXES
from placer.dense import DENSE_MATH, Dense, DenseLayers, MeasuredDense
from placer.errors import PlacerError, ProblemError
from placer.units import parse_seconds
from placer.workloads import published

_MEASURED = "measured:"


def published_dense(workload: str, dim: int | None = None) -> DenseLayers:
    """Return the dense layers that a named workload was published with.

    `dim` is the number of columns of its tables, if it differs from the published one. The last
    bottom layer gets this width if the interaction multiplies vectors pair by pair.

    >>> layers = published_dense("mlperf-dcnv2")
    >>> layers.interaction, layers.cross_layers, layers.cross_rank
    ('cross', 3, 512)
    """
    known = {name: entry["dense"] for name, entry in published().items() if "dense" in entry}
    if workload not in known:
        raise ProblemError(
            f"no dense layers were published for {workload!r}; there are some of "
            f"{', '.join(known)}; else give a file of layer sizes (docs/dense.md)"
        )
    entry: dict[str, Any] = dict(known[workload])
    del entry["source"]
    layers = DenseLayers(tuple(entry.pop("top")), tuple(entry.pop("bottom", ())), **entry)
    if dim is None or layers.interaction != "dot" or not layers.bottom:
        return layers
    return replace(layers, bottom=(*layers.bottom[:-1], dim))


def dense_part(text: str, workload: str | None = None, dim: int | None = None) -> Dense | None:
    """Return the dense part that a text names.

    The text is ``none``; ``workload`` for the workload's published layers, or
    ``workload:bfloat16`` for the same with this type of matrix products; ``measured:12ms`` for a
    measured time; or a file.

    Raises ProblemError if it is none of these, or the workload has no published layers.

    >>> dense_part("measured:12ms")
    MeasuredDense(step_s=0.012)
    >>> dense_part("workload:tf32", "criteo-kaggle").bottom
    (512, 256, 64, 16)
    """
    if text == "none":
        return None
    if text.startswith(_MEASURED):
        try:
            return MeasuredDense(parse_seconds(text.removeprefix(_MEASURED)))
        except PlacerError as error:
            raise ProblemError(f"--dense {text}: {error}") from error
    name, _, math = text.partition(":")
    if name == "workload":
        if workload is None:
            raise ProblemError(
                "--dense workload is of a named workload: give --workload, or a file of layer sizes"
            )
        layers = published_dense(workload, dim)
        known: Any = math or layers.math
        return replace(layers, math=known)
    if Path(text).suffix.lower() in SUFFIXES:
        from placer.dense.layers import read  # Imported late: pydantic loads slowly.

        return read(text)
    raise ProblemError(
        f"--dense {text!r} is none of none, workload (or workload:MATH with MATH one of "
        f"{', '.join(DENSE_MATH)}), measured:12ms, or a file that ends in {', '.join(SUFFIXES)}"
    )
