"""Find the profile that a plan was made from, and open logs with that profile's id mapping.

A plan names its profile, and the profile has the id mapping of its log. Training with a plan, and
replaying a log through it, need both.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.data.options import TextOptions
from placer.errors import PlacerError, PlanMismatchError, ProfileError
from placer.plan.plan import Plan
from placer.profile.file import JSON_NAME as PROFILE_JSON
from placer.profile.growing_tables import with_growing
from placer.profile.profile import Profile
from placer.units import listed
from placer.workloads import named_workload

if TYPE_CHECKING:
    from placer.data.reader import EncodedLog


def profile_of(
    plan: Plan,
    file: Path,
    profile: Path | None = None,
    *,
    needed_for: str | None = None,
    other_data: bool = False,
) -> Profile | None:
    """Return the profile that a plan was made from, with the plan's tables.

    It is `profile`, or the profile that the plan names relative to its own `file`. Returns None if
    there is none, but raises PlanMismatchError if it is `needed_for` something, which the message
    names. A profile that is there but damaged is an error in any case. With `other_data`, the
    profile may map ids to rows in another way.
    """
    if profile is not None:
        return _of_plan(plan, Profile.load(profile), other_data)
    name = plan.provenance.profile
    folder = file.resolve().parent / name
    # Look at no other machine: others may have written the file.
    is_elsewhere = name.startswith(("//", "\\\\"))
    try:
        document = folder / PROFILE_JSON
        # `Path.exists` raises errors if a name is too long or invalid, as a file's may be.
        is_there = name and not is_elsewhere and os.path.exists(document)  # noqa: PTH110
        recorded = None if is_there else named_workload(name)
    except PlacerError as error:
        if needed_for is None:
            return None
        why = f"{name!r} is not there" if name else "the plan names none"
        raise PlanMismatchError(
            f"{needed_for} needs the profile that {file} was made from, and {why}; give --profile"
        ) from error
    return _of_plan(plan, recorded or Profile.load(folder), other_data)


def open_log_of(
    plan: Plan,
    file: Path,
    logs: Sequence[str | Path],
    format: str | None = None,
    profile: Path | None = None,
    *,
    other_data: bool = False,
    options: TextOptions | None = None,
    ids_alone: bool = False,
) -> "EncodedLog":
    """Open a log, with ids mapped to rows as in the profile that a plan was made from.

    `logs` are the log's files in order, in a `format` of `placer.data.FORMATS`. `options` describe
    their lines if these differ from the profile's log. With `ids_alone`, the log needs no label and
    no numeric columns. For other arguments, see `profile_of`. Raises PlanMismatchError if the
    profile is missing, or has no id mapping.
    """
    recorded = profile_of(plan, file, profile, other_data=other_data)
    if recorded is None or recorded.encoding is None:
        raise PlanMismatchError(
            f"reading {logs[0]} needs the id mapping that {file} was made with, and its profile "
            f"{plan.provenance.profile!r} has none or is not there; "
            "give --profile"
        )
    return open_as_profiled(recorded, logs, format, options, ids_alone=ids_alone)


def open_as_profiled(
    profile: Profile,
    logs: Sequence[str | Path],
    format: str | None = None,
    options: TextOptions | None = None,
    *,
    ids_alone: bool = False,
) -> "EncodedLog":
    """Open a log, with ids mapped to rows as in a profile; see `open_log_of`."""
    from placer.data.reader import open_log  # not above: it needs pyarrow, and plans do not

    if profile.encoding is None:
        raise ProfileError(
            f"the profile {profile.source!r} does not say how ids become rows, so that no log can "
            "be read with it; give one that `placer profile` counted in a log"
        )
    layout = None if options is None else options.layout(profile.encoding.layout)
    kind: Any = format
    encoding = profile.encoding.of_ids_alone if ids_alone else profile.encoding
    log = open_log(list(logs), kind, encoding=encoding, layout=layout)
    if profile.source == log.description and profile.sampling == 1:
        log.expected_samples = profile.samples
    return log


def check_ids(plan: Plan, ids_sha256: Mapping[str, str], whose: str) -> None:
    """Raise PlanMismatchError if ids map to other rows than when the plan was made.

    `ids_sha256` is `Encoding.ids_sha256`, and `whose` names its owner for the message. Tables of
    unknown mapping are not compared.
    """
    known = plan.provenance.ids_sha256
    different = [n for n, sha256 in ids_sha256.items() if known.get(n, sha256) != sha256]
    if different:
        raise PlanMismatchError(
            f"{whose} maps the ids of {listed(different, 3)} to other rows than the "
            "profile that the plan was made from, though their number is the same: give that "
            "profile, make a new plan, or say that other data is meant (--other-data)"
        )


def check_same_tables(plan: Plan, other: Plan, other_data: bool = False) -> None:
    """Raise PlanMismatchError if another plan lacks tables, or has other rows for the same ids.

    Tables that grow in both may have other capacities. With `other_data`, ids are not compared.
    """
    grow = plan.growing.keys() & other.growing.keys()
    rows = {
        table.name: plan.tables_by_name[table.name].rows if table.name in grow else table.rows
        for table in other.tables
    }
    if lost := _lost(plan, rows):
        raise PlanMismatchError(
            f"the other plan has other tables: {listed(lost, 5)}; give a plan that was made from "
            "the same profile, or from one of another log that was made --like it"
        )
    if not other_data:
        ids = other.provenance.ids_sha256
        check_ids(plan, {name: ids[name] for name in ids if name not in grow}, "the other plan")


def _lost(plan: Plan, rows: Mapping[str, int]) -> list[str]:
    """Return words for tables of a plan that `rows` lacks, or that have another number of rows."""
    return [
        f"{table.name!r} has {rows[table.name]} rows, not {table.rows}"
        if table.name in rows
        else f"{table.name!r} is missing"
        for table in plan.tables
        if rows.get(table.name) != table.rows
    ]


def with_tables_as_in(
    plan: Plan, profile: Profile, other_data: bool = False, *, has_all: bool = False
) -> Profile:
    """Return a profile whose tables have the plan's dims, types, optimizers and pooling.

    Tables that grow get the plan's rows. The profile must have exactly the plan's tables and rows.
    With `other_data`, it may differ, but with `has_all`, no table of the plan may be missing.
    """
    growing = {name: how for name, how in plan.growing.items() if name in profile.table_numbers}
    profile = with_growing(profile, growing)
    now = {one.name: one.table.rows for one in profile}
    lost = _lost(plan, now)
    added = [f"{name!r} is new" for name in now if name not in plan.tables_by_name]
    differences = [] if other_data else lost + added
    if has_all and lost:
        differences = lost
    if differences:
        meant = "" if has_all and lost else ", or say that other data is meant (--other-data)"
        raise PlanMismatchError(
            f"the profile has other tables than the plan: {listed(differences, 5)}; "
            "give the profile that the plan was made from, or one of another log that was made "
            f"--like it{meant}"
        )
    if not other_data:
        check_ids(plan, profile.ids_sha256, "the profile")
    tables = []
    for known in profile:
        was = plan.tables_by_name.get(known.name)
        tables.append(known if was is None else replace(known, table=known.table.like(was)))
    return replace(profile, tables=tuple(tables))


def _of_plan(plan: Plan, profile: Profile, other_data: bool) -> Profile:
    """Return the profile of only the plan's tables, in the plan's order."""
    known = with_tables_as_in(plan, profile, other_data, has_all=True)
    return replace(known, tables=tuple(known[table.name] for table in plan.tables))


def save_with_profile(plan: Plan, file: Path, profile: Path | str) -> Plan:
    """Save a plan that names its profile; return that plan.

    A workload is named by its name, and a folder relative to the plan's folder, so that both can
    move together.
    """
    name = profile
    if isinstance(profile, Path):
        name = os.path.relpath(profile.resolve(), file.resolve().parent)
    named = replace(plan, provenance=replace(plan.provenance, profile=str(name)))
    named.save(file)
    return named
