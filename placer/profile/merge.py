"""Merging profiles of the parts of a log."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from placer.errors import ProfileError
from placer.profile.locality import added
from placer.profile.table_profile import ProfileFields, TableProfile


def merge(profiles: Sequence[ProfileFields]) -> ProfileFields:
    """The profile of a log from the profiles of its parts, in any grouping.

    Counts are integers and are added, and all else follows from them, so that the result
    equals the profile of the whole log bit by bit; only `source`, and the windows in which
    distinct rows were counted, tell them apart. Sampled parts weigh by the samples that they stand
    for.

    Raises
    ------
    ProfileError
        If there is no profile, one has no counts, or they differ in a table, a feature or
        the way raw ids became rows.
    """
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
    return ProfileFields(
        tables=tuple(
            _merged(parts, samples)
            for parts in zip(*(profile.tables for profile in profiles), strict=True)
        ),
        samples=samples,
        sampling=sampling,
        source=" + ".join(profile.source for profile in profiles if profile.source),
        encoding=first.encoding,
    )


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


def _check_alike(first: ProfileFields, other: ProfileFields) -> None:
    names, others = ([table.name for table in one.tables] for one in (first, other))
    if names != others:
        different = sorted(set(names) ^ set(others))
        raise ProfileError(
            "profiles of different tables cannot be merged: "
            + (f"only one has {', '.join(different)}" if different else "their order differs")
        )
    different = [
        f"{one.name} ({_shape(one)} and {_shape(two)})"
        for one, two in zip(first.tables, other.tables, strict=True)
        if _shape(one) != _shape(two)
    ]
    if different:
        raise ProfileError(
            f"profiles of different tables cannot be merged: {'; '.join(different)}; "
            "profile every part of a log with the same rows= or encoding="
        )
    for one, two in zip(first.tables, other.tables, strict=True):
        if _features(one) != _features(two):
            raise ProfileError(
                f"table {one.name!r} is read by other features in one profile than in another: "
                f"{_features(one)} and {_features(two)}"
            )
    if first.encoding != other.encoding:
        raise ProfileError(
            "profiles whose ids became rows in different ways cannot be merged; profile every "
            "part of a log with the same encoding= (the same vocabulary)"
        )


def _shape(profile: TableProfile) -> str:
    table = profile.table
    return f"{table.rows} rows × {table.dim} {table.dtype}, {table.optimizer}"


def _features(profile: TableProfile) -> list[tuple[str, str]]:
    return [(feature.name, feature.pooling) for feature in profile.table.features]
