"""`Profile`: what a training log says of all tables."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import zip_longest
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from placer.data.files.stores import COPY_THERE, here
from placer.errors import ProfileError
from placer.profile.locality import added
from placer.profile.table_profile import TableProfile
from placer.tables import DType, OptimizerName, Pooling
from placer.units import Summarized, format_bytes

if TYPE_CHECKING:
    from placer.data.encoding import Encoding


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Summarized):
    """Profiles of all tables of a model, from a log or a published workload.

    Attributes
    ----------
    tables : tuple of TableProfile
        In the model's order; names are unique.
    samples : int
        Number of samples that were read.
    sampling : float
        Share of the log that was read: 1.0 unless the log was sampled.
    source : str
        Where the profile comes from, as text for people.
    encoding : Encoding or None
        How the log's columns became rows, so that a trainer can map ids the same way:
        ``open_log(paths, encoding=profile.encoding)``. None if rows were counted directly.
    folder : Path or None
        Folder that the profile was loaded from. Plans name it; it is not saved.

    Examples
    --------
    >>> from placer.workloads import named_workload
    >>> profile = named_workload("random-3@7")
    >>> profile.table_names
    ['t1', 't2', 't3']
    >>> profile.with_tables(dim=8, names=["t2"])["t2"].table.dim
    8
    """

    tables: tuple[TableProfile, ...]
    samples: int = 0
    sampling: float = 1.0
    source: str = ""
    encoding: "Encoding | None" = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)[:9]
        if repeated:
            raise ProfileError(f"tables named more than once in a profile: {repeated}")

    def summary(self) -> dict[str, str]:
        """Return the numbers to show of the profile; see `Summarized`."""
        return {
            "tables": str(len(self)),
            "rows": f"{sum(one.table.rows for one in self):,}",
            "bytes": format_bytes(self.total_bytes),
            "samples": f"{self.samples:,}",
        }

    def __iter__(self) -> Iterator[TableProfile]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, name: str) -> TableProfile:
        number = self.table_numbers.get(name)
        if number is None:
            raise ProfileError(f"no table {name!r} in the profile; it has {self.table_names}")
        return self.tables[number]

    @property
    def table_names(self) -> list[str]:
        """Names of the tables, in order."""
        return list(self.table_numbers)

    @cached_property
    def table_numbers(self) -> dict[str, int]:
        """Position of each table in `tables`, by name."""
        return {table.name: number for number, table in enumerate(self.tables)}

    @property
    def total_bytes(self) -> int:
        """Weights and optimizer state of all tables, in bytes."""
        return sum(profile.table.total_bytes for profile in self.tables)

    @property
    def ids_sha256(self) -> dict[str, str]:
        """By table, the hash of its id mapping; empty if rows were counted directly."""
        known = {} if self.encoding is None else self.encoding.ids_sha256
        return {name: known[name] for name in self.table_names if name in known}

    def with_tables(
        self,
        *,
        dim: int | None = None,
        dtype: DType | None = None,
        optimizer: OptimizerName | None = None,
        pooling: Mapping[str, Pooling] | None = None,
        names: Sequence[str] | None = None,
    ) -> "Profile":
        """Return the profile with another dim, dtype, optimizer or pooling, or with fewer tables.

        `pooling` is by feature; ``*`` stands for all others. Other features keep their pooling.

        Raises ProfileError if there is no such table or feature.
        """
        pooling = pooling or {}
        features = {feature.name for one in self.tables for feature in one.table.features}
        unknown = [name for name in pooling if name != "*" and name not in features]
        if unknown:
            raise ProfileError(f"pooling is given for feature {unknown[0]!r}, which no table has")
        kept = self.tables if names is None else tuple(self[name] for name in names)
        changed = tuple(
            replace(
                profile,
                table=replace(
                    profile.table,
                    dim=profile.table.dim if dim is None else dim,
                    dtype=dtype or profile.table.dtype,
                    optimizer=optimizer or profile.table.optimizer,
                    features=tuple(
                        replace(one, pooling=pooling.get(one.name, pooling.get("*", one.pooling)))
                        for one in profile.table.features
                    ),
                ),
            )
            for profile in kept
        )
        return replace(self, tables=changed)

    @classmethod
    def merge(cls, profiles: Iterable["Profile"]) -> "Profile":
        """Merge the profiles of a log's parts, in any grouping, into a profile of the log.

        Integer counts are added, and other values are computed from them. So the result equals the
        profile of the whole log bit by bit, except for `source` and for the windows in which
        distinct rows were counted. It has no hit rates of growing tables, as those of parts say
        nothing of the whole. Sampled parts weigh by the samples that they stand for.

        Raises ProfileError if there is no profile, one has no counts, or they differ in a table, a
        feature or the way raw ids became rows.
        """
        profiles = list(profiles)
        if not profiles:
            raise ProfileError("there is no profile to merge; give at least one")
        first = profiles[0]
        for other in profiles[1:]:
            _check_alike(first, other)
        samples = sum(profile.samples for profile in profiles)
        if all(profile.sampling == 1 for profile in profiles):
            sampling = 1.0
        else:
            sampling = samples / sum(profile.samples / profile.sampling for profile in profiles)
        return cls(
            tables=tuple(
                _merged(parts, samples)
                for parts in zip(*(profile.tables for profile in profiles), strict=True)
            ),
            samples=samples,
            sampling=sampling,
            source=" + ".join(profile.source for profile in profiles if profile.source),
            encoding=first.encoding,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Load a saved profile.

        Raises ProfileError if a file is missing, cut short, altered or of a newer version.
        """
        from placer.profile import file  # Imported late: pyarrow loads slowly.

        place = Path(here(path)).resolve()  # The profile's folder, or its JSON.
        folder = place if place.is_dir() else place.parent
        return replace(cls(**file.read(here(path))), folder=folder)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``profile.json`` and a binary file of counts into the folder `path`, atomically."""
        from placer.profile import file

        file.write(self, here(path, COPY_THERE))

    @property
    def reference(self) -> str:
        """The text by which plans name this profile: its folder, or else its source."""
        return self.source if self.folder is None else str(self.folder)

    def sampling_error(self, table: str, share: float = 0.5) -> float:
        """Return the standard error of `share`, the share of lookups in a set of rows.

        For a sampled log: binomial over the lookups that were read, with the finite population
        correction √(1 − sampling). It is the noise for a *given* set of rows. The hottest rows of
        a sample are partly hot by chance, which biases their share upwards; the bias shrinks as the
        counts of the coldest of these rows grow.
        """
        lookups = self[table].lookups
        if lookups == 0:
            return float("nan")
        return float(np.sqrt(max(0.0, 1 - self.sampling) * share * (1 - share) / lookups))


def _merged(tables: Sequence[TableProfile], samples: int) -> TableProfile:
    parts = []
    for part in tables:
        if part.counts is None:
            raise ProfileError(
                f"table {part.name!r} has no counts, only a CDF; profiles of logs can be merged"
            )
        parts.append(part.counts)
    counts = reduce(add, parts)
    features = {
        name: reduce(add, (part.features[name] for part in tables)) for name in tables[0].features
    }
    table = replace(
        tables[0].table,
        features=tuple(
            features[feature.name].measured(feature, samples)
            if feature.name in features
            else feature
            for feature in tables[0].table.features
        ),
    )
    unknown = [part.unknown for part in tables if part.unknown is not None]
    return replace(
        TableProfile.counted(table, counts, features),
        locality=added([part.locality for part in tables]),
        unknown=reduce(add, unknown) if unknown else None,
    )


def _check_alike(first: Profile, other: Profile) -> None:
    """Raise ProfileError if profiles differ in tables, features or mappings of ids."""
    pairs = zip_longest(first.tables, other.tables)
    different = [
        f"{_shown(one)} and {_shown(two)}" for one, two in pairs if _shown(one) != _shown(two)
    ]
    if different:
        raise ProfileError(
            f"profiles of different tables cannot be merged: {'; '.join(different[:9])}; "
            "profile every part of a log with the same rows= or encoding= (--rows, --like)"
        )
    if first.encoding != other.encoding:
        raise ProfileError(
            "profiles whose ids became rows in different ways cannot be merged; profile every "
            "part of a log with the same encoding= (the same vocabulary; --like)"
        )


def _shown(profile: TableProfile | None) -> str:
    if profile is None:
        return "none"
    table, features = profile.table, {one.name: one.pooling for one in profile.table.features}
    return (
        f"{table.name} ({table.rows} rows × {table.dim} {table.dtype}, {table.optimizer}, "
        f"features {features})"
    )
