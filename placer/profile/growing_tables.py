"""Let tables of a profile grow, and choose their capacities from measured hit rates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from placer.data.encoding import RawKeys
from placer.errors import PlanMismatchError, ProblemError
from placer.growing.options import Eviction, Growing
from placer.growing.working_set import WorkingSet
from placer.profile.cdf import Float
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile


def with_growing(profile: Profile, growing: Mapping[str, Growing]) -> Profile:
    """Return the profile with some tables turned into growing tables.

    A growing table assigns its rows to keys as they are read. It has `capacity` rows and row 0. Its
    rows have no fixed ids, so nobody knows which rows are hot. The keys are the log's raw ids.
    Tables that grow already stay as they are.

    >>> from placer.workloads import named_workload
    >>> with_growing(named_workload("random-3@7"), {"t2": Growing(99)})["t2"].cdf.rows
    100
    """
    tables = {name: _grown(profile[name], how.rows) for name, how in growing.items()}
    if all(one is profile[name] for name, one in tables.items()):
        return profile
    encoding = profile.encoding
    if encoding is not None:
        keys = {name: RawKeys(how.rows) for name, how in growing.items()}
        encoding = replace(encoding, mappings={**encoding.mappings, **keys})
    changed = tuple(tables.get(one.name, one) for one in profile)
    return replace(profile, tables=changed, encoding=encoding)


def _grown(profile: TableProfile, rows: int) -> TableProfile:
    if profile.table.rows == rows and profile.counts is None:
        return profile
    table = replace(profile.table, rows=rows)
    return replace(profile, table=table, cdf=profile.cdf.over(rows), counts=None, unknown=None)


def with_hit_rates(profile: Profile, found: Mapping[str, WorkingSet]) -> Profile:
    """Return the profile with the hit rates of `placer.growing.working_sets`."""
    tables = (replace(one, hit_rates=found[one.name].hit_rates) for one in profile)
    return replace(profile, tables=tuple(tables))


def hit_rate_for(profile: TableProfile, capacity: int) -> float:
    """Predict the hit rate in the next window, with eviction ``lfu``.

    The hit rate is the share of lookups with a key that has a row. Between measured capacities it
    is interpolated over the logarithm of the capacity. Below the smallest measured capacity it is
    taken proportional to the capacity, which is too low.

    Raises ProblemError if the profile has no hit rates.
    """
    return _on_curve(capacity, *_curve(profile))


def hit_rates_of_windows(profile: TableProfile, capacity: int) -> tuple[float, float] | None:
    """Return the lowest and highest `hit_rate_for` over single windows; None if unknown."""
    if any(one.of_windows is None for one in profile.hit_rates if one.eviction == "lfu"):
        return None
    low, high = (_on_curve(capacity, *_curve(profile, bound)) for bound in (0, 1))
    return low, high


def _on_curve(capacity: int, capacities: Float, rates: Float) -> float:
    known = float(np.interp(np.log(capacity), np.log(capacities), rates))
    return known * min(1.0, capacity / float(capacities[0]))


def capacity_for(profile: TableProfile, hit_rate: float) -> int:
    """Return the smallest capacity with a predicted hit rate; see `hit_rate_for`.

    It is never smaller than the smallest measured capacity.

    Raises ProblemError if no capacity reaches it, because too many lookups read an id for the first
    time; or if the profile has no hit rates.

    Parameters
    ----------
    profile : TableProfile
        Profile with hit rates, as ``placer profile --window`` measures them.
    hit_rate : float
        Hit rate, above 0 and at most 1.

    Examples
    --------
    >>> from placer import AccessCdf, Table
    >>> from placer.growing import HitRate
    >>> rates = HitRate(10, "lfu", 0.5), HitRate(1000, "lfu", 0.9)
    >>> table = TableProfile(Table("item", 4000, 16), AccessCdf.zipf(4000, 1.0), hit_rates=rates)
    >>> capacity_for(table, 0.7)
    100
    """
    if not 0 < hit_rate <= 1:
        raise ProblemError(f"a hit rate of {_percent(hit_rate)} is not above 0% and at most 100%")
    capacities, rates = _curve(profile)
    if hit_rate > rates[-1]:
        raise ProblemError(
            f"no number of rows gives table {profile.name!r} a hit rate of {_percent(hit_rate)}: "
            f"with one for each id it has {_percent(rates[-1])}, as the other lookups read an id "
            "for the first time; lower the rate"
        )
    right = int(np.searchsorted(rates, hit_rate))
    if right == 0:
        return int(capacities[0])
    share = (hit_rate - rates[right - 1]) / (rates[right] - rates[right - 1])
    exact = capacities[right - 1] ** (1 - share) * capacities[right] ** share
    return int(np.ceil(exact - 1e-6))


def _curve(profile: TableProfile, bound: int | None = None) -> tuple[Float, Float]:
    """Return capacities and hit rates, ascending: overall, or of the lowest (0) or highest (1)."""
    measured = {
        one.capacity: one.hit_rate if bound is None or not one.of_windows else one.of_windows[bound]
        for one in profile.hit_rates
        if one.eviction == "lfu"
    }
    if not measured:
        raise ProblemError(
            f"the hit rate of table {profile.name!r} with fewer rows is not known: profile the log "
            "with --window and the samples of a day, or give a number of keys"
        )
    capacities = np.array(sorted(measured), dtype=np.float64)
    return capacities, np.maximum.accumulate([measured[int(one)] for one in capacities])


def most_capacity(profile: TableProfile) -> int:
    """Return the largest measured capacity, which has a row for each id of the log."""
    return int(_curve(profile)[0][-1])


def growing_of(profile: Profile, texts: Sequence[str]) -> tuple[dict[str, Growing], list[str]]:
    """Parse the command line's texts that say which tables grow, and how.

    A text is ``TABLE=SIZE:OPTION:…``, or several of these between commas. The size is a number of
    keys; or a percentage, for the smallest capacity with this hit rate in the next window (see
    `capacity_for`); or ``auto``, the default, for a row for each id of the log. Options are ``lfu``
    or ``lru``, ``admit=N``, ``ttl=STEPS``. Return the tables, and the names of the ``auto`` ones.

    >>> from placer.workloads import named_workload
    >>> growing, auto = growing_of(named_workload("random-3@7"), ["t1=5000,t3=20000:lru:admit=2"])
    >>> growing["t3"]
    Growing(capacity=20000, admission=2, eviction='lru', ttl=0)
    """
    growing: dict[str, Growing] = {}
    chosen = []
    for text in (part.strip() for one in texts for part in one.split(",")):
        # Names may contain the separators.
        named = [name for name in profile.table_names if text.startswith(name)]
        named = [name for name in named if text[len(name) :][:1] in ("", "=", ":")]
        if not named:
            known = ", ".join(profile.table_names[:5])
            raise ProblemError(
                f"--growing {text!r} begins with no table of the profile ({known}, …)"
            )
        name = max(named, key=len)
        if name in growing:
            raise ProblemError(f"--growing names table {name!r} twice")
        rest = text[len(name) :]
        size, *words = (rest[1:] if rest.startswith("=") else f"auto{rest}").split(":")
        try:
            options = dict(map(_option, words))
            if len(options) < len(words):
                raise ValueError(text)
            if size == "auto":
                capacity = most_capacity(profile[name])
                chosen.append(name)
            elif size.endswith("%"):
                capacity = capacity_for(profile[name], float(size[:-1]) / 100)
            else:
                capacity = int(size)
            growing[name] = Growing(capacity, **options)
        except (ValueError, PlanMismatchError) as error:
            said = error if isinstance(error, PlanMismatchError) else "it is of another form"
            raise ProblemError(
                f"--growing {text!r}: {said}. Write TABLE=KEYS, TABLE=PERCENT% or TABLE=auto, and "
                "behind it :lfu or :lru, :admit=READS, :ttl=STEPS, as item=2000000:lru:admit=2"
            ) from None
    return growing, chosen


def _option(word: str) -> tuple[str, Any]:
    """Parse an option into a field of `Growing` and its value."""
    if word in get_args(Eviction):
        return "eviction", word
    name, _, value = word.partition("=")
    fields = {"admit": "admission", "ttl": "ttl"}
    if name not in fields:
        raise ValueError(word)
    return fields[name], int(value)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
