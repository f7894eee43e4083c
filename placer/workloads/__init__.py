"""Named workloads: published models, as profiles with a stated skew. See docs/workloads.md."""

import re
from dataclasses import dataclass

from placer.errors import ProfileError, did_you_mean
from placer.profile.profile import Profile
from placer.workloads.drawn import (
    RECSHARD_ROWS,
    meta_workload,
    neuroshard_workload,
    random_workload,
    recshard_workload,
)
from placer.workloads.published import published, published_workload

__all__ = ["WorkloadInfo", "named_workload", "workload_infos", "workload_names"]

_FAMILIES = {"neuroshard": neuroshard_workload, "random": random_workload}
_MEMBER = re.compile(rf"(?P<family>{'|'.join(_FAMILIES)})-(?P<tables>\d+)(?:@(?P<seed>\d+))?")


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """A workload's name and what it is."""

    name: str
    title: str


def workload_infos() -> tuple[WorkloadInfo, ...]:
    """Return all named workloads, in the order in which they are documented.

    ``neuroshard-N[@seed]`` and ``random-N[@seed]`` stand for families; every other name can
    be given to `named_workload` as it is.
    """
    return (
        *(WorkloadInfo(name, entry["title"]) for name, entry in published().items()),
        *(
            WorkloadInfo(f"recshard-{model}", f"RecShard {model.upper()}, tables drawn")
            for model in RECSHARD_ROWS
        ),
        WorkloadInfo("meta-t856", "Meta's synthetic traces of 2021, lookups drawn"),
        WorkloadInfo("neuroshard-N[@seed]", "N of Meta's tables as in NeuroShard's tasks"),
        WorkloadInfo("random-N[@seed]", "N tables drawn with a seed (0 by default)"),
    )


def workload_names() -> tuple[str, ...]:
    """Return names of `workload_infos`."""
    return tuple(info.name for info in workload_infos())


def named_workload(name: str) -> Profile:
    """Return the profile of a named workload.

    Its access CDFs follow Zipf's law with the exponent in `TableProfile.zipf_exponent`;
    ids are taken to be ranks. `Profile.source` tells what is published and what assumed.

    Raises
    ------
    ProfileError
        If there is no such workload; the message lists the names.

    Examples
    --------
    >>> profile = named_workload("criteo-kaggle")
    >>> len(profile)
    26
    """
    if name in published():
        return published_workload(name)
    if name == "meta-t856":
        return meta_workload()
    if name.removeprefix("recshard-") in RECSHARD_ROWS and name.startswith("recshard-"):
        return recshard_workload(name.removeprefix("recshard-"))
    if (match := _MEMBER.fullmatch(name)) is not None:
        return _FAMILIES[match["family"]](int(match["tables"]), int(match["seed"] or 0))
    known = workload_names()
    more = did_you_mean(name, known)
    raise ProfileError(f"no workload is called {name!r}; there are {', '.join(known)}{more}")
