"""Instances of the library: from a recipe to the problem, and to JSON that states all of it.

    python benchmarks/instances/expand.py NAME -o NAME.json    (.json.gz compresses)
    python benchmarks/instances/expand.py --plan PLANNER NAME -o plan.json

The second writes a plan of the library as placer's commands read it. docs/instances.md describes
recipes, instances and plans.
"""

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from placer import (
    AccessCdf,
    Constraints,
    Feature,
    Problem,
    Profile,
    Table,
    TableProfile,
    TableRule,
    Topology,
)
from placer.files.atomic import write_bytes, write_text
from placer.topology.devices import Gpu, Host, Link

HERE = Path(__file__).resolve().parent
CATALOGUE = HERE / "instances.json"
FORMAT = "embedding-placement-instance"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """An instance by names and seeds, of which the problem is made.

    Attributes
    ----------
    workload : str
        A named workload (docs/workloads.md).
    topology : str
        A preset or a file of the benchmarks; several, joined by ``+``, are hosts of one machine.
    hbm : str or sequence of str
        Of each GPU; ``50%`` is that part of the tables' bytes over all GPUs. Several are dealt out
        to GPUs in turn. None is the preset's.
    dram : str, optional
        Of each host.
    edits : sequence of mapping
        Changes of tables: see `_edited`.
    constraints : mapping
        ``tables``, ``together`` and ``reserve``, as in a constraints file.
    tables, gpus : int
        Of the instance that the recipe makes, for who does not make it.
    sha256 : str
        Of that instance.
    """

    name: str
    workload: str
    topology: str
    hbm: str | Sequence[str] | None = None
    dram: str | None = None
    batch_size: int = 8192
    pipeline: str = "look-ahead"
    edits: Sequence[Mapping[str, Any]] = ()
    constraints: Mapping[str, Any] | None = None
    tables: int = 0
    gpus: int = 0
    sha256: str = ""

    def problem(self) -> Problem:
        """The problem, as placer has it."""
        profile = _named(self.workload)
        for edit in self.edits:
            profile = _edited(profile, edit)
        machine = machine_of(self.topology)
        gpus, total = len(machine.gpus), profile.total_bytes
        sizes = [self.hbm] if self.hbm is None or isinstance(self.hbm, str) else self.hbm
        given = [
            total * int(size[:-1]) // 100 // gpus if size and size.endswith("%") else size
            for size in sizes
        ]
        each = [machine.with_memory(hbm=size).gpus for size in given]
        mixed = tuple(each[number % len(each)][number] for number in range(gpus))
        machine = replace(machine, gpus=mixed).with_memory(dram=self.dram)
        rules = self.constraints or {}
        constraints = Constraints.of(
            {key: _rule(rule) for key, rule in rules.get("tables", {}).items()},
            rules.get("together", ()),
            rules.get("reserve"),
        )
        return Problem(profile, machine, self.batch_size, constraints, self.pipeline)

    def to_json(self) -> dict[str, Any]:
        """What the catalogue has of it: what is not as usual."""
        usual = asdict(Recipe(self.name, self.workload, self.topology))
        told = {key: value for key, value in asdict(self).items() if value != usual[key]}
        return {"name": self.name, "workload": self.workload, "topology": self.topology} | told


@cache
def catalogue() -> dict[str, Any]:
    """The library: its version, the constants of the step equation, and recipes by name."""
    content: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    content["recipes"] = {one["name"]: Recipe(**one) for one in content["instances"]}
    return content


def recipe_of(name: str) -> Recipe:
    """The recipe of an instance; an unknown name ends the program with what there is."""
    recipes: dict[str, Recipe] = catalogue()["recipes"]
    if name not in recipes:
        sys.exit(f"no instance is called {name!r}; {CATALOGUE} lists {len(recipes)}")
    return recipes[name]


def document_of(name: str) -> dict[str, Any]:
    """An instance of the library as JSON; its hash is that of the catalogue."""
    recipe = recipe_of(name)
    made = document(name, recipe.problem(), catalogue()["constants"])
    if recipe.sha256 and made["sha256"] != recipe.sha256:
        sys.exit(f"{name}: the recipe makes another instance than {recipe.sha256} of the catalogue")
    return made


def document(name: str, problem: Problem, constants: Mapping[str, float]) -> dict[str, Any]:
    """A problem as self-contained JSON, with its hash.

    Reserved memory is taken off, hosts in pins are followed by their GPUs, patterns are names.
    """
    rules = {name: problem.constraints.rule_of(name) for name in problem.profile.table_names}
    machine = problem.topology
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "batch_size": problem.batch_size,
        "pipeline": problem.pipeline,
        "constants": dict(constants),
        "tables": [_table_json(profile) for profile in problem.profile],
        "gpus": [{k: v for k, v in asdict(one).items() if k != "chip"} for one in machine.gpus],
        "hosts": [{k: v for k, v in asdict(one).items() if k != "drive"} for one in machine.hosts],
        "links": [asdict(link) for link in machine.links],
        "constraints": {
            "tables": {
                table: {
                    "devices": None if rule.devices is None else list(rule.devices),
                    "tier": rule.tier,
                    "forbid": sorted(rule.forbid),
                }
                for table, rule in rules.items()
                if rule != TableRule()
            },
            "together": [list(group) for group in problem.constraints.together],
        },
    }
    return content | {"sha256": sha256_of(content)}


def sha256_of(document: Mapping[str, Any]) -> str:
    """SHA-256 of an instance: of `json.dumps(..., sort_keys=True)` of all but its hash."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def problem_of(document: Mapping[str, Any]) -> Problem:
    """The problem that an instance's JSON states."""
    rules = document["constraints"]
    return Problem(
        Profile(tuple(map(_table_of, document["tables"])), source=document["name"]),
        Topology(
            document["name"],
            tuple(Gpu(**gpu) for gpu in document["gpus"]),
            tuple(Host(**host) for host in document["hosts"]),
            tuple(Link(**link) for link in document["links"]),
        ),
        document["batch_size"],
        Constraints.of(
            {name: _rule(rule) for name, rule in rules["tables"].items()}, rules["together"]
        ),
        document["pipeline"],
    )


def _table_json(profile: TableProfile) -> dict[str, Any]:
    exponent = profile.zipf_exponent or 1.0
    by_law = AccessCdf.zipf(profile.table.rows, exponent)
    access: dict[str, Any] = {"zipf": exponent}
    if not np.array_equal(by_law.shares, profile.cdf.shares):
        access = {"ranks": profile.cdf.ranks.tolist(), "shares": profile.cdf.shares.tolist()}
    features = [asdict(feature) for feature in profile.table.features]
    return asdict(profile.table) | {"features": features, "access": access}


def _table_of(entry: Mapping[str, Any]) -> TableProfile:
    facts = {key: value for key, value in entry.items() if key not in ("features", "access")}
    table = Table(**facts, features=tuple(Feature(**one) for one in entry["features"]))
    access = entry["access"]
    if "zipf" in access:
        exponent = access["zipf"]
        return TableProfile(table, AccessCdf.zipf(table.rows, exponent), zipf_exponent=exponent)
    return TableProfile(table, AccessCdf(access["ranks"], access["shares"]))


def _rule(rule: Mapping[str, Any]) -> TableRule:
    devices = rule.get("devices")
    return TableRule(
        None if devices is None else tuple(devices),
        rule.get("tier"),
        frozenset(rule.get("forbid", ())),
    )


def _named(workload: str) -> Profile:
    from placer.workloads import named_workload

    return named_workload(workload)


def _edited(profile: Profile, edit: Mapping[str, Any]) -> Profile:
    """Tables ``first``, ``first + every``, … with other fields.

    ``dim``, ``dtype`` and ``optimizer`` are the table's, ``pooling`` is that of all its features,
    and ``features`` is by how many it is read, each with all the lookups that one had.
    """
    changed = list(profile.tables)
    for number in range(edit.get("first", 0), len(changed), edit.get("every", 1)):
        table = changed[number].table
        fields = {key: edit[key] for key in ("dim", "dtype", "optimizer") if key in edit}
        features = table.features
        if "features" in edit:
            one, copies = features[0], range(1, edit["features"] + 1)
            features = tuple(replace(one, name=f"{one.name}_{copy}") for copy in copies)
        if "pooling" in edit:
            features = tuple(replace(one, pooling=edit["pooling"]) for one in features)
        edited = replace(table, features=features, **fields)
        changed[number] = replace(changed[number], table=edited)
    return replace(profile, tables=tuple(changed))


def machine_of(text: str) -> Topology:
    """A preset, a file of the benchmarks, or several presets' hosts in one machine."""
    if text.endswith(".yaml"):
        return Topology.load(HERE.parent / text)
    parts = [Topology.parse(part) for part in text.split("+")]
    if len(parts) == 1:
        return parts[0]
    gpus: list[Gpu] = []
    hosts: list[Host] = []
    links: list[Link] = []
    for part, name in zip(parts, text.split("+"), strict=True):
        known = len(hosts)
        names = {host.id: f"host:{known + n}" for n, host in enumerate(part.hosts)}
        names |= {gpu.id: f"gpu:{len(gpus) + n}" for n, gpu in enumerate(part.gpus)}
        own = list(part.links)
        if len(part.hosts) == 1:  # A preset of one host has no network; of two, it has.
            twins = Topology.parse(f"2x{name}").links
            own += [link for link in twins if link.kind == "network" and link.a == "host:0"]
        links += [replace(x, a=names[x.a], b=names.get(x.b, x.b)) for x in own]
        hosts += [replace(host, id=names[host.id]) for host in part.hosts]
        gpus += [replace(g, id=names[g.id], host=names[g.host]) for g in part.gpus]
    return Topology(text, tuple(gpus), tuple(hosts), tuple(links))


def main() -> None:
    """Write an instance, or a plan of the library."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the instance")
    parser.add_argument("--plan", metavar="PLANNER", help="write this planner's plan")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.plan:
        from plans import read, to_plan

        recipe = recipe_of(options.name)
        to_plan(recipe.problem(), read(options.plan, recipe.name)).save(options.output)
        return
    text = json.dumps(document_of(options.name), indent=1) + "\n"
    if options.output.suffix == ".gz":
        write_bytes(options.output, gzip.compress(text.encode(), mtime=0))
    else:
        write_text(options.output, text)


if __name__ == "__main__":
    main()
