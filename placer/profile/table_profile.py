"""What a log says of one table, below `placer.Profile`, which is of all tables."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from placer.errors import ProfileError
from placer.profile.cdf import AccessCdf
from placer.profile.counts import RowCounts
from placer.tables import Feature, Table

if TYPE_CHECKING:
    from placer.data.encoding import Encoding


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """What was counted of one feature, as integers, so that merging is exact.

    Attributes
    ----------
    lookups : int
        Ids read by the feature.
    bags : int
        Samples whose bag was not empty.
    """

    lookups: int = 0
    bags: int = 0

    def __add__(self, other: "FeatureCounts") -> "FeatureCounts":
        return FeatureCounts(self.lookups + other.lookups, self.bags + other.bags)

    def measured(self, feature: Feature, samples: int) -> Feature:
        """The feature with the pooling factor and coverage that were counted over `samples`."""
        return replace(
            feature,
            pooling_factor=self.lookups / self.bags if self.bags else 0.0,
            coverage=self.bags / samples if samples else 0.0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TableProfile:
    """A table, how often its rows are read, and where that knowledge comes from.

    Attributes
    ----------
    table : Table
        With features whose pooling factor and coverage are those of the log.
    cdf : AccessCdf
        Share of lookups over ranks.
    counts : RowCounts or None
        Exact access counts by id: they give the row order and can be merged. None for
        published workloads, whose ids are taken to be ranks already.
    features : mapping of feature name to FeatureCounts
        Empty for published workloads.
    zipf_exponent : float or None
        For published workloads, the exponent that was assumed.

    Examples
    --------
    >>> from placer import Feature
    >>> counts = RowCounts.from_dense([0, 5, 0, 5])
    >>> table = Table("C3", rows=4, dim=16, features=(Feature("C3"),))
    >>> profile = TableProfile.counted(table, counts, {"C3": FeatureCounts(10, 10)})
    >>> profile.lookups, round(profile.expected_unique(samples=100), 3)
    (10, 2.0)
    """

    table: Table
    cdf: AccessCdf
    counts: RowCounts | None = None
    features: dict[str, FeatureCounts] = field(default_factory=dict)
    zipf_exponent: float | None = None

    def __post_init__(self) -> None:
        if self.cdf.rows != self.table.rows:
            raise ProfileError(
                f"table {self.table.name!r} has {self.table.rows} rows "
                f"but an access CDF of {self.cdf.rows}"
            )

    @classmethod
    def counted(
        cls, table: Table, counts: RowCounts, features: dict[str, FeatureCounts]
    ) -> "TableProfile":
        """A table's profile from exact counts, which give its CDF."""
        return cls(table, AccessCdf.from_counts(counts.counts, counts.rows), counts, features)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.name

    @property
    def lookups(self) -> int:
        """Lookups that were counted."""
        return self.counts.total if self.counts is not None else 0

    def expected_unique(self, samples: int) -> float:
        """Expected distinct rows that a step of `samples` samples touches."""
        return self.cdf.unique(samples * self.table.lookups_per_sample)


@dataclass(frozen=True, eq=False)
class ProfileFields:
    """What a profile's folder holds; see `placer.Profile`."""

    tables: tuple[TableProfile, ...]
    samples: int = 0
    sampling: float = 1.0
    source: str = ""
    encoding: "Encoding | None" = None
    folder: Path | None = None
