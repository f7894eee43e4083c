"""Tables that grow: what is planned for them, and what their keys did."""

from collections.abc import Iterator, Mapping

from placer.growing.key_map import Growing, KeyCounts
from placer.profile.growing_tables import hit_rate_for
from placer.profile.profile import Profile
from placer.report import section as form
from placer.report.section import Column, Row, Section
from placer.units import counted


def growing_words(profile: Profile, growing: Mapping[str, Growing]) -> Iterator[str]:
    """Say how many keys each table that grows has rows for, and the hit rate that is predicted."""
    for name, how in growing.items():
        predicted = ""
        if profile[name].hit_rates:
            share = form.share(hit_rate_for(profile[name], how.capacity))
            predicted = f", for a predicted hit rate of {share}"
        yield f"{name} grows: a row for each of {counted(how.capacity, 'key')}{predicted}"


def keys_section(counts: Mapping[str, KeyCounts]) -> Section:
    """List what the keys of each table that grows did."""
    rows: list[Row] = [
        {"table": name, "hit_rate": one.hit_rate, **one._asdict(), "live": one.live}
        for name, one in counts.items()
    ]
    names = ("hits", "misses", "waiting", "refused", "admitted", "evicted", "expired", "live")
    return Section(
        "keys",
        "Keys of tables that grow",
        (
            Column("table", "table"),
            Column("hit_rate", "hit rate", form.share),
            *(Column(name, name, form.count) for name in names),
        ),
        tuple(rows),
    )
