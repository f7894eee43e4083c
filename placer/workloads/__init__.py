"""Named workloads: profiles of published models, with a stated skew. See docs/workloads.md."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import count, islice
from typing import Any

from placer.errors import ProfileError, did_you_mean
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table
from placer.workloads.drawn import (
    RECSHARD_ROWS,
    meta_workload,
    neuroshard_workload,
    random_workload,
    recshard_workload,
)

__all__ = ["named_workload", "workload_names", "workload_titles"]

_FAMILIES = {"neuroshard": neuroshard_workload, "random": random_workload}
_MEMBER = re.compile(rf"(?P<family>{'|'.join(_FAMILIES)})-(?P<tables>\d+)(?:@(?P<seed>\d+))?")


def workload_titles() -> dict[str, str]:
    """Return the title of each named workload, in the order of the documentation.

    ``neuroshard-N[@seed]`` and ``random-N[@seed]`` stand for families. `named_workload` takes all
    other names as they are.
    """
    return {
        **{name: entry["title"] for name, entry in published().items()},
        **{f"recshard-{one}": f"RecShard {one.upper()}, tables drawn" for one in RECSHARD_ROWS},
        "meta-t856": "Meta's synthetic traces of 2021, lookups drawn",
        "neuroshard-N[@seed]": "N of Meta's tables as in NeuroShard's tasks",
        "random-N[@seed]": "N tables drawn with a seed (0 by default)",
    }


def workload_names() -> tuple[str, ...]:
    """Return the names of all published workloads."""
    return tuple(workload_titles())


def named_workload(name: str) -> Profile:
    """Return the profile of a named workload.

    Access CDFs follow Zipf's law with the exponent `TableProfile.zipf_exponent`. Ids are taken to
    be ranks. `Profile.source` says what is published and what is assumed.

    Raises ProfileError if there is no such workload. The message lists all names.

    >>> profile = named_workload("criteo-kaggle")
    >>> len(profile)
    26
    """
    if name in published():
        entry = published()[name]
        exponent = float(entry["zipf_exponent"])
        tables = tuple(TableProfile.zipf(table, exponent) for table in _tables(entry))
        return Profile(tables, source=f"workload {name}: {entry['title']}. {entry['source']}")
    if name == "meta-t856":
        return meta_workload()
    if name.removeprefix("recshard-") in RECSHARD_ROWS and name.startswith("recshard-"):
        return recshard_workload(name.removeprefix("recshard-"))
    if (match := _MEMBER.fullmatch(name)) is not None:
        return _FAMILIES[match["family"]](int(match["tables"]), int(match["seed"] or 0))
    known = workload_names()
    more = did_you_mean(name, known)
    raise ProfileError(f"no workload is called {name!r}; there are {', '.join(known)}{more}")


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return the content of ``published.json``, by workload: sizes, dims and lookups per feature.

    A workload has groups of equal tables, ``[tables, rows, dim, [lookups of each feature],
    coverage]`` with coverage 1 by default; or tables by name, ``[rows, dim, {feature: lookups}]``.
    """
    text = files("placer.workloads").joinpath("published.json").read_text(encoding="utf-8")
    workloads: dict[str, dict[str, Any]] = json.loads(text)
    return workloads


def _tables(entry: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables that are given by name, then those in groups, numbered from 1."""
    for table, (rows, dim, lookups) in entry.get("tables", {}).items():
        features = (
            Feature(name, float(own), pooling=entry["pooling"]) for name, own in lookups.items()
        )
        yield Table(table, rows, dim, features=tuple(features))
    numbers = count(1)
    for tables, rows, dim, lookups, *rest in entry.get("groups", ()):
        for number in islice(numbers, tables):
            table = entry["table_name"].format(number)
            names = [f"{table}_{n}" for n in range(1, 1 + len(lookups))] if lookups[1:] else [table]
            features = (
                Feature(name, float(of_bag), *rest)
                for name, of_bag in zip(names, lookups, strict=True)
            )
            yield Table(table, rows, dim, features=tuple(features))
