"""Read files of dense layers: YAML, TOML or JSON. docs/dense.md describes the fields."""

from typing import Annotated

from pydantic import Field

from placer.config_file import StrictModel, read_file
from placer.dense.layers import DenseLayers, DenseMath, DenseOptimizer, Interaction
from placer.errors import ProblemError
from placer.files import StrPath

Width = Annotated[int, Field(ge=1)]


class DenseEntry(StrictModel):
    """Dense layers, in a file of their own or in a plan."""

    top: list[Width] = Field(strict=False, min_length=1)
    bottom: list[Width] = Field([], strict=False)
    dense_features: int = Field(0, ge=0)
    interaction: Interaction = "dot"
    cross_layers: int = Field(0, ge=0)
    cross_rank: int = Field(0, ge=0)
    concat_stride: int = Field(1, ge=1)
    math: DenseMath = "float32"
    optimizer: DenseOptimizer = "sgd"
    flops_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)

    def layers(self) -> DenseLayers:
        """Return the layers that the fields describe."""
        return DenseLayers(
            **self.model_dump(exclude={"top", "bottom"}),
            top=tuple(self.top),
            bottom=tuple(self.bottom),
        )


def read(path: StrPath) -> DenseLayers:
    """Read dense layers from a file.

    Raises ProblemError if the file cannot be read (see `placer.config_file.read_file`) or the
    layers are impossible.
    """
    entry = read_file(path, DenseEntry, "dense", ProblemError)
    try:
        return entry.layers()
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error
