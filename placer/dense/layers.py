"""Describe a model's dense part by its layers' sizes or its measured time; read its files.

docs/dense.md describes the fields of these YAML, TOML and JSON files.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from placer.config_file import StrictModel, read_file
from placer.errors import ProblemError
from placer.files.atomic import StrPath

Interaction = Literal["dot", "cross", "concat"]
"""How the pooled embeddings and the bottom MLP's output are combined:

``dot``: products of all pairs of vectors (DLRM, Naumov et al. 2019, arXiv:1906.00091);
``cross``: x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l over all columns side by side. W_l is a matrix or
a product of two narrow matrices (DCN-V2, Wang et al. 2021, doi:10.1145/3442381.3450078);
``concat``: side by side."""

DenseMath = Literal["float32", "tf32", "float16", "bfloat16"]
"""Type of matrix multiplications. Parameters are always float32."""

DenseOptimizer = Literal["sgd", "adagrad", "adam"]

DENSE_MATH: tuple[DenseMath, ...] = get_args(DenseMath)


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """A bottom MLP, an interaction and a top MLP, replicated on every GPU.

    Raises ProblemError if a size is too small, or a field does not go with the interaction.

    >>> DenseLayers(top=(256, 1), bottom=(512, 64), dense_features=13).interaction
    'dot'
    """

    top: tuple[int, ...]  # Outputs of each layer of the top MLP; the last layer gives the logits.
    # Outputs of each layer of the bottom MLP. If empty, the dense features themselves are combined
    # with the embeddings.
    bottom: tuple[int, ...] = ()
    dense_features: int = 0  # Numeric columns of a sample.
    interaction: Interaction = "dot"
    # For ``cross``: the number of layers, and the columns between a layer's two matrices. With
    # `cross_rank` 0, each layer has one square matrix.
    cross_layers: int = 0
    cross_rank: int = 0
    # For ``concat``: number of neighbouring embedding columns whose mean is one input.
    concat_stride: int = 1
    math: DenseMath = "float32"
    optimizer: DenseOptimizer = "sgd"  # Optimizer of the dense parameters.
    # Floating-point operations a second that a GPU reaches in these layers. None: use the known
    # rate of its chip.
    flops_per_s: float | None = None
    # Bytes already subtracted from each GPU for this part; `placer.Problem` sets it.
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("interaction", self.interaction, get_args(Interaction)),
            ("math", self.math, DENSE_MATH),
            ("optimizer", self.optimizer, get_args(DenseOptimizer)),
        ):
            if value not in known:
                raise ProblemError(f"dense layers: {name} {value!r} is none of {', '.join(known)}")
        if not self.top:
            raise ProblemError("dense layers: top lists no layer; the last one gives the logits")
        sizes = {
            "top": (min(self.top), 1),
            "bottom": (min(self.bottom, default=1), 1),
            "concat_stride": (self.concat_stride, 1),
            "dense_features": (self.dense_features, 0),
            "cross_layers": (self.cross_layers, 0),
            "cross_rank": (self.cross_rank, 0),
            "reserved_bytes": (self.reserved_bytes, 0),
        }
        for name, (size, least) in sizes.items():
            if size < least:
                raise ProblemError(f"dense layers: {name} must be at least {least}, not {size}")
        if self.flops_per_s is not None and not self.flops_per_s > 0:
            raise ProblemError(
                f"dense layers: flops_per_s must be more than 0, not {self.flops_per_s:g}"
            )
        if (self.interaction == "cross") != (self.cross_layers > 0):
            raise ProblemError(
                f"dense layers: interaction {self.interaction!r} with cross_layers "
                f"{self.cross_layers}; cross needs one layer at least, others have none"
            )
        if self.cross_rank and self.interaction != "cross":
            raise ProblemError(f"dense layers: cross_rank {self.cross_rank} goes with cross alone")
        if self.concat_stride != 1 and self.interaction != "concat":
            raise ProblemError("dense layers: concat_stride goes with interaction concat alone")
        if self.bottom and not self.dense_features:
            raise ProblemError("dense layers: a bottom MLP needs dense_features, which are 0")


@dataclass(frozen=True, slots=True)
class MeasuredDense:
    """A dense part of which only the measured time is known.

    Raises ProblemError if the time is negative or not finite.

    >>> MeasuredDense(0.012).step_s
    0.012
    """

    # Seconds on each GPU in a step of the problem's batch: forward, backward, update, and the part
    # of its gradients' exchange that nothing overlaps.
    step_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.step_s < float("inf"):
            raise ProblemError(f"dense: a measured time must be 0 s or more, not {self.step_s:g} s")


Dense = DenseLayers | MeasuredDense

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
        layers = {"top": tuple(self.top), "bottom": tuple(self.bottom)}
        return DenseLayers(**{**self.model_dump(), **layers})


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
