"""Workloads whose tables are published: sizes, dims and lookups per feature.

The figures are in ``published.json``: for each workload groups of equal tables,
``[tables, rows, dim, [lookups of each feature that reads the table]]``.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.profile.zipf import zipf_cdf
from placer.tables import Feature, Table


@cache
def published() -> dict[str, dict[str, Any]]:
    """The content of ``published.json``, by workload."""
    text = files("placer.workloads").joinpath("published.json").read_text(encoding="utf-8")
    workloads: dict[str, dict[str, Any]] = json.loads(text)
    return workloads


def published_workload(name: str) -> Profile:
    """The profile of one of `published`'s workloads; bags have a fixed size."""
    entry = published()[name]
    exponent = float(entry["zipf_exponent"])
    tables: list[TableProfile] = []
    for count, rows, dim, lookups in entry["groups"]:
        for _ in range(count):
            table = entry["table_name"].format(len(tables) + 1)
            tables.append(
                TableProfile(
                    Table(table, rows, dim, features=_features(table, lookups)),
                    zipf_cdf(rows, exponent),
                    zipf_exponent=exponent,
                )
            )
    return Profile(tuple(tables), source=f"workload {name}: {entry['title']}. {entry['source']}")


def _features(table: str, lookups: list[int]) -> tuple[Feature, ...]:
    if len(lookups) == 1:
        return (Feature(table, float(lookups[0])),)
    return tuple(
        Feature(f"{table}_{number}", float(count)) for number, count in enumerate(lookups, 1)
    )
