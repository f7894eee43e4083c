"""Describe constraints on a placement: rules for tables, and memory to keep free.

docs/constraints.md describes the file, and `placer.constraints.file` reads and writes it.
`placer.constraints.unmet` says which constraints a plan breaks.
"""

import glob
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeVar

from placer.constraints.file import TableRule
from placer.errors import ProblemError
from placer.topology.devices import Gpu, Host
from placer.topology.topology import Topology
from placer.units import format_bytes, parse_bytes

_Device = TypeVar("_Device", Gpu, Host)


@dataclass(frozen=True)
class Constraints:
    """Rules for tables, groups of tables to keep together, and memory to keep free.

    A key of `tables` is a table's name or a shell pattern (``C1*``). All rules that match a table
    apply. Groups of `together` have tables or patterns. One GPU must serve all tables of a group,
    each of them whole. Groups that share a table become one group. `reserve` has bytes to keep free
    on a device (``gpu:0``), or on all devices of a kind (``gpu``, ``host``). The entry of a device
    overrides the entry of its kind.

    >>> from placer import TableRule
    >>> constraints = Constraints.of({"C1*": TableRule(tier="hbm")}, reserve={"gpu": "2GiB"})
    >>> constraints.rule_of("C12").tier, constraints.rule_of("C2").tier
    ('hbm', None)
    """

    tables: tuple[tuple[str, TableRule], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    reserve: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls,
        tables: Mapping[str, TableRule] | None = None,
        together: Iterable[Sequence[str]] = (),
        reserve: Mapping[str, str | int] | None = None,
    ) -> "Constraints":
        """Make constraints from Python values: ``of({"C3": rule}, reserve={"gpu": "2GiB"})``."""
        return cls(
            tuple((tables or {}).items()),
            tuple(tuple(group) for group in together),
            tuple((device, parse_bytes(size)) for device, size in (reserve or {}).items()),
        )

    def __bool__(self) -> bool:
        return bool(self.tables or self.together or self.reserve)

    @cached_property
    def _exact(self) -> dict[str, list[tuple[str, TableRule]]]:
        exact: dict[str, list[tuple[str, TableRule]]] = {}
        for key, rule in self.tables:
            exact.setdefault(key, []).append((key, rule))
        return exact

    @cached_property
    def _patterns(self) -> list[tuple[str, TableRule]]:
        return [(key, rule) for key, rule in self.tables if _is_pattern(key)]

    @cached_property
    def _rules(self) -> dict[str, TableRule]:
        return {}

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        return {name: group for group in _merged(self.together) for name in group}

    def rule_of(self, table: str) -> TableRule:
        """Return all rules that match a table, combined into one.

        Devices of several rules are compared by name. Call `on` first to add the GPUs of hosts.

        Raises ProblemError if two rules ask for different tiers, or have no device in common.
        """
        if table not in self._rules:
            loose = [(key, rule) for key, rule in self._patterns if key != table]
            matching = [(key, rule) for key, rule in loose if matches(key, table)]
            self._rules[table] = _combined(table, self._exact.get(table, []) + matching)
        return self._rules[table]

    def group_of(self, table: str) -> tuple[str, ...]:
        """Return the group of tables with this table, which one GPU must serve; () if none."""
        return self._groups.get(table, ())

    def on(self, topology: Topology, tables: Sequence[str]) -> "Constraints":
        """Apply the constraints to these tables and devices, without patterns.

        In the result, each table with a rule is listed once by name. Hosts in rules are followed by
        their GPUs. Groups list names. Applying the result again does not change it.

        Raises ProblemError if a key matches no table, a device does not exist, or constraints
        contradict: two rules of a table, or tables of a group that are pinned to different GPUs.
        """
        order = {name: number for number, name in enumerate(tables)}
        for key in (*(key for key, _ in self.tables), *(k for g in self.together for k in g)):
            _require_match(key, order)
        # Escape names with brackets or stars, which would be patterns.
        spelled = tuple(
            (glob.escape(key) if key in order else key, _with_gpus(key, rule, topology))
            for key, rule in self.tables
        )
        by_name = replace(self, tables=spelled)
        rules = {name: by_name.rule_of(name) for name in tables}
        merged = _merged(_members(group, order) for group in self.together)
        together = sorted(
            (tuple(sorted(group, key=order.__getitem__)) for group in merged),
            key=lambda group: order[group[0]],
        )
        for group in together:
            _require_common_gpu(group, rules, topology)
        listed = ((glob.escape(name), rule) for name, rule in rules.items() if rule != TableRule())
        return Constraints(tuple(listed), tuple(together), self.reserve)

    def reserved(self, topology: Topology) -> Topology:
        """Return the machine without the memory to keep free.

        `Problem` calls this once; afterwards, its own constraints reserve nothing.

        Raises ProblemError if a device does not exist, or has less memory than is to be kept free.
        """
        reserve = dict(self.reserve)
        known = ["gpu", "host", *topology.gpus_by_id, *topology.hosts_by_id]
        for device in reserve:
            if device not in known:
                raise ProblemError(
                    f"reserve: no device is called {device!r}; there are gpu and host for all of "
                    f"them, and {_some(known[2:], device)}"
                )
        return replace(
            topology,
            gpus=tuple(_reserving(gpu, reserve, "gpu") for gpu in topology.gpus),
            hosts=tuple(_reserving(host, reserve, "host") for host in topology.hosts),
        )

    def reserving_on(self, devices: Collection[str], topology: Topology) -> "Constraints":
        """Return the constraints with the reserve of these devices alone.

        >>> from placer import Topology
        >>> some = Constraints.of(reserve={"gpu": "1GiB", "host": "2GiB"})
        >>> some.reserving_on(["gpu:1"], Topology.parse("2xt4")).reserve
        (('gpu:1', 1073741824),)
        """
        reserve = dict(self.reserve)
        kinds = dict.fromkeys(topology.gpus_by_id, "gpu") | dict.fromkeys(
            topology.hosts_by_id, "host"
        )
        # Keep unknown names, which are errors.
        kept = {name: size for name, size in reserve.items() if name not in {*kinds, "gpu", "host"}}
        every = {name: reserve.get(name, reserve.get(kind, 0)) for name, kind in kinds.items()}
        kept |= {name: size for name, size in every.items() if size and name in devices}
        return replace(self, reserve=tuple(kept.items()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Constraints":
        """Read constraints from a YAML or TOML file; see docs/constraints.md.

        Raises ProblemError if the file is missing or damaged, or a field is unknown or has the
        wrong type.
        """
        from placer.constraints import file  # not above: pydantic and YAML load slowly

        return cls(**file.read(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the constraints as YAML, atomically."""
        from placer.config_file import write_yaml
        from placer.constraints import file

        write_yaml(path, file.dumps(self), "constraints", ProblemError)


def matches(key: str, table: str) -> bool:
    """Return whether a key is a table's name, or a shell pattern that matches the name."""
    return key == table or (_is_pattern(key) and fnmatchcase(table, key))


def _is_pattern(key: str) -> bool:
    return any(character in key for character in "*?[")


def _combined(table: str, rules: Sequence[tuple[str, TableRule]]) -> TableRule:
    """Combine all rules for a table into one. Errors name the keys that contradict."""
    tiers = {rule.tier: key for key, rule in rules if rule.tier is not None}
    if len(tiers) > 1:
        claims = " and ".join(f"{key!r} for tier {tier}" for tier, key in tiers.items())
        raise ProblemError(f"table {table!r}: {claims} contradict each other; drop one")
    devices: tuple[str, ...] | None = None
    pins = [(key, rule.devices) for key, rule in rules if rule.devices is not None]
    for _, named in pins:
        devices = named if devices is None else tuple(d for d in devices if d in named)
    if devices == ():
        claims = ", ".join(f"{key!r} to {', '.join(named)}" for key, named in pins)
        raise ProblemError(
            f"table {table!r} is pinned by {claims}: no device is in all of them; drop one"
        )
    try:
        return TableRule(
            devices, next(iter(tiers), None), frozenset().union(*(r.forbid for _, r in rules))
        )
    except ProblemError as error:
        raise ProblemError(f"table {table!r}: {error}") from None


def _merged(groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Merge groups that share a member, until none do."""
    merged: dict[int, tuple[str, ...]] = {}
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        touching = sorted({group_of[name] for name in group if name in group_of})
        parts = [*(merged.pop(other) for other in touching), group]
        merged[number] = tuple(dict.fromkeys(name for part in parts for name in part))
        group_of |= dict.fromkeys(merged[number], number)
    return list(merged.values())


def _members(group: Sequence[str], tables: Mapping[str, int]) -> list[str]:
    """Return the tables of a group, with patterns replaced by the names that match."""
    named = {key for key in group if key in tables}
    patterns = [key for key in group if key not in named]
    if patterns:
        named |= {name for name in tables if any(matches(key, name) for key in patterns)}
    if len(named) < 2:
        raise ProblemError(
            f"together: {list(group)} is of {len(named)} table; a group needs two or more"
        )
    return list(named)


def _with_gpus(key: str, rule: TableRule, topology: Topology) -> TableRule:
    """Return the rule with each host followed by its GPUs."""
    if rule.devices is None:
        return rule
    devices: list[str] = []
    for device in rule.devices:
        if device not in topology.gpus_by_id and device not in topology.hosts_by_id:
            known = [*topology.gpus_by_id, *topology.hosts_by_id]
            raise ProblemError(
                f"tables: {key!r} is pinned to {device!r}, which the topology "
                f"{topology.name!r} lacks; it has {_some(known, device)}"
            )
        devices += [device, *(gpu.id for gpu in topology.gpus_of(device))]
    if not any(device in topology.serving_numbers for device in devices):
        raise ProblemError(
            f"tables: {key!r} is pinned to {', '.join(devices)}, where no GPU can serve it"
        )
    return replace(rule, devices=tuple(dict.fromkeys(devices)))


def _require_match(key: str, tables: Mapping[str, int]) -> None:
    if key in tables or (_is_pattern(key) and any(matches(key, name) for name in tables)):
        return
    what = "matches" if _is_pattern(key) else "is called"
    raise ProblemError(
        f"constraints: no table {what} {key!r}; there are {_some(list(tables), key)}"
    )


def _require_common_gpu(
    group: Sequence[str], rules: Mapping[str, TableRule], topology: Topology
) -> None:
    """Raise ProblemError unless one GPU or one host without GPUs may serve the whole group."""
    pins = {name: rules[name].devices for name in group if rules[name].devices is not None}
    for gpu in topology.serving_numbers:
        if all(gpu in (devices or ()) for devices in pins.values()):
            return
    pinned = ", ".join(f"{name!r} to {', '.join(devices or ())}" for name, devices in pins.items())
    raise ProblemError(
        f"together: {', '.join(group)} have to share a GPU, but {pinned} are pinned: no GPU is in "
        "all of them"
    )


def _reserving(device: _Device, reserve: Mapping[str, int], kind: str) -> _Device:
    """Return a device without the memory to keep free."""
    kept_bytes = reserve.get(device.id, reserve.get(kind, 0))
    if kept_bytes > device.memory_bytes:
        raise ProblemError(
            f"reserve: {format_bytes(kept_bytes)} ({kept_bytes} bytes) of {device.id} are to be "
            f"kept free, but it has {format_bytes(device.memory_bytes)} ({device.memory_bytes} "
            "bytes); reserve less, or raise its budget"
        )
    return replace(device, memory_bytes=device.memory_bytes - kept_bytes)


def _some(names: Sequence[str], wanted: str) -> str:
    """Return existing names for an error about an unknown name: all, or the nearest."""
    if len(names) <= 8:
        return ", ".join(names)
    return ", ".join(get_close_matches(wanted, names, n=3) or names[:8]) + " and others"
