"""Embedding tables and the features that read them."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Interval

from placer.errors import ProblemError

Pooling = Literal["sum", "mean", "max", "none"]
OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
DType = Literal["float32", "float16", "bfloat16"]
ColdDType = Literal["float32", "float16", "bfloat16", "int8"]
"""Types of cold rows. Each ``int8`` row has a float32 scale and offset."""
Count = Annotated[int, Interval(ge=0, lt=1 << 63)]
"""A number of bytes or rows in a file."""

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
COLD_DTYPES: tuple[ColdDType, ...] = get_args(ColdDType)
INT8_SCALE_BYTES = 8
"""Bytes of an int8 row's scale and offset, as in FBGEMM's row-wise tables."""
MOST_ROWS = 1 << 48
MOST_DIM = 1 << 20
"""Limits of tables, so that bytes and places of rows fit into 64 bits and float64."""
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
OPTIMIZER_STATE: dict[OptimizerName, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""Names of each optimizer's state, as in torch's optimizers.

If there are two, they are side by side in a row of state, each as wide as the weights.
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """One categorical feature of a sample: a bag of ids read from one table.

    `pooling_factor` is the mean number of lookups of a non-empty bag and `coverage` the
    share of samples whose bag is not empty. With pooling ``none`` every lookup is
    returned by itself (`nn.Embedding`).

    Examples
    --------
    >>> Feature("clicked items", pooling_factor=20.0, coverage=0.5).lookups_per_sample
    10.0
    """

    name: str
    pooling_factor: Annotated[float, Ge(0)] = 1.0
    coverage: Annotated[float, Interval(ge=0, le=1)] = 1.0
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise ProblemError(
                f"feature {self.name!r}: pooling {self.pooling!r} is none of {get_args(Pooling)}"
            )
        if self.pooling_factor < 0 or not 0 <= self.coverage <= 1:
            raise ProblemError(
                f"feature {self.name!r}: pooling_factor {self.pooling_factor} must be at least 0 "
                f"and coverage {self.coverage} within 0..1"
            )

    @property
    def lookups_per_sample(self) -> float:
        """Mean number of lookups per sample, including empty bags."""
        return self.pooling_factor * self.coverage


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table: `rows` × `dim` weights and the optimizer state beside them.

    Examples
    --------
    >>> table = Table("C3", rows=1000, dim=16, features=(Feature("C3"),))
    >>> table.bytes_per_row()  # 16 float32 and one float32 of row-wise Adagrad
    68
    >>> table.total_bytes
    68000
    """

    name: str
    rows: Count
    dim: Annotated[int, Ge(1)]
    dtype: DType = "float32"
    optimizer: OptimizerName = "rowwise_adagrad"
    features: tuple[Feature, ...] = field(default=())

    def __post_init__(self) -> None:
        if not 0 <= self.rows <= MOST_ROWS or not 1 <= self.dim <= MOST_DIM:
            raise ProblemError(
                f"table {self.name!r} has {self.rows} rows and dim {self.dim}; "
                f"rows must be 0 to {MOST_ROWS} and dim 1 to {MOST_DIM}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ProblemError(
                f"table {self.name!r}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ProblemError(
                f"table {self.name!r}: optimizer {self.optimizer!r} is none of {OPTIMIZERS}"
            )

    @property
    def lookups_per_sample(self) -> float:
        """Mean number of lookups per sample, over all features that read the table."""
        return sum(feature.lookups_per_sample for feature in self.features)

    def weight_bytes_per_row(self, width: int | None = None, dtype: ColdDType | None = None) -> int:
        """Return the bytes of weights of one row of a shard with `width` columns, by default all.

        `dtype` is the type of the shard's rows, by default the table's.
        """
        columns = self.dim if width is None else width
        if dtype == "int8":
            return columns + INT8_SCALE_BYTES
        return columns * DTYPE_BYTES[dtype or self.dtype]

    def state_bytes_per_row(self, width: int | None = None) -> int:
        """Return the bytes of optimizer state of one row of a shard with `width` columns.

        State is always float32. Row-wise Adagrad has one number per row, and each column slice has
        its own copy of it. Adam has two numbers per weight.
        """
        columns = self.dim if width is None else width
        sizes = {"sgd": 0, "adagrad": 4 * columns, "rowwise_adagrad": 4, "adam": 8 * columns}
        return sizes[self.optimizer]

    def bytes_per_row(self, width: int | None = None, dtype: ColdDType | None = None) -> int:
        """Return the bytes of weights and optimizer state of one row."""
        return self.weight_bytes_per_row(width, dtype) + self.state_bytes_per_row(width)

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and optimizer state of the whole table."""
        return self.rows * self.bytes_per_row()

    def like(self, other: "Table") -> "Table":
        """Return the table with the dim, type, optimizer and poolings of another."""
        pooling = {feature.name: feature.pooling for feature in other.features}
        features = tuple(
            replace(feature, pooling=pooling.get(feature.name, feature.pooling))
            for feature in self.features
        )
        own = replace(self, dim=other.dim, dtype=other.dtype, optimizer=other.optimizer)
        return replace(own, features=features)
