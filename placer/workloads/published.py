"""Workloads whose tables are published: sizes, dims and lookups per feature.

The figures are in ``published.json``: for each workload groups of equal tables, ``[tables, rows,
dim, [lookups of each feature that reads the table], coverage]`` with a coverage of 1 by default, or
tables by their names, ``[rows, dim, {feature: lookups}]``.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.profile.zipf import zipf_cdf
from placer.tables import Feature, Table


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the content of ``published.json``, by workload."""
    text = files("placer.workloads").joinpath("published.json").read_text(encoding="utf-8")
    workloads: dict[str, dict[str, Any]] = json.loads(text)
    return workloads


def published_workload(name: str) -> Profile:
    """Return the profile of one of `published`'s workloads; bags have a fixed size."""
    entry = published()[name]
    exponent = float(entry["zipf_exponent"])
    tables = [
        TableProfile(
            Table(table, rows, dim, features=features),
            zipf_cdf(rows, exponent),
            zipf_exponent=exponent,
        )
        for table, rows, dim, features in (*_named(entry), *_grouped(entry))
    ]
    return Profile(tuple(tables), source=f"workload {name}: {entry['title']}. {entry['source']}")


def _named(entry: Mapping[str, Any]) -> Iterator[tuple[str, int, int, tuple[Feature, ...]]]:
    """Yield tables that have names: name, rows, dim and features."""
    for table, (rows, dim, lookups) in entry.get("tables", {}).items():
        features = (
            Feature(name, float(count), pooling=entry["pooling"]) for name, count in lookups.items()
        )
        yield table, rows, dim, tuple(features)


def _grouped(entry: Mapping[str, Any]) -> Iterator[tuple[str, int, int, tuple[Feature, ...]]]:
    """Yield tables of groups, numbered from 1 on."""
    number = 0
    for count, rows, dim, lookups, *rest in entry.get("groups", ()):
        for _ in range(count):
            number += 1
            table = entry["table_name"].format(number)
            yield table, rows, dim, _features(table, lookups, *rest)


def _features(table: str, lookups: list[float], coverage: float = 1.0) -> tuple[Feature, ...]:
    if len(lookups) == 1:
        return (Feature(table, float(lookups[0]), coverage),)
    return tuple(
        Feature(f"{table}_{number}", float(count), coverage)
        for number, count in enumerate(lookups, 1)
    )
