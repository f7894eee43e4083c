"""Public figures of hardware and kernels beside what placer says of the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from _published import FOLDER

from cost_models import Roofline
from cost_models.roofline import RooflineConstants
from placer import AccessCdf, Feature, Plan, Problem, Profile, Shard, Table, TableProfile, Topology
from placer.topology.presets import kinds

NEAR = 0.15
"""How far apart they may be without a reason."""

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Figure:
    """What a source says, and what placer says; `reason` where they are far apart."""

    facts: Mapping[str, Any]
    ours: float

    @property
    def error(self) -> float:
        """Ours over theirs, less 1."""
        return self.ours / float(self.facts["value"]) - 1

    @property
    def explained(self) -> bool:
        """Whether they are near each other, or there is a reason that they are not."""
        return abs(self.error) <= NEAR or "reason" in self.facts

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.facts, "placer": self.ours, "error": self.error}


def _link(topology: Topology, share: float = 1.0) -> float:
    return topology.host_link_bytes_per_s(topology.gpus[0].id) / _GB * share


def _peer(topology: Topology) -> float:
    return topology.peer_bytes_per_s(topology.gpus[0].id) / _GB


def _network(topology: Topology) -> float:
    """A GPU's part of its host's network."""
    (link, *_) = (link for link in topology.links if link.kind == "network")
    return link.bytes_per_s / len(topology.gpus_of(link.a)) / _GB


def _lookup_share(topology: Topology) -> float:
    """Of the vendor's peak."""
    found = kinds(topology.name)
    assert found is not None, "a preset"
    return found[0].hbm.share * RooflineConstants().lookup_share


def _narrow_rows(topology: Topology) -> float:
    """Lookup of 16 tables of 100,000 rows, 8,192 bags of 9.5: 128 columns over 16 columns."""
    return _lookup_s(topology, 128) / _lookup_s(topology, 16)


def _lookup_s(topology: Topology, dim: int) -> float:
    tables = [
        Table(f"t{n}", 100_000, dim, optimizer="adagrad", features=(Feature(f"f{n}", 9.5),))
        for n in range(16)
    ]
    cdf = AccessCdf.zipf(100_000, 0.0)
    gpu = topology.gpus[0].id
    shards = tuple(
        Shard(table.name, (0, table.rows, 1), (0, dim), (gpu,), "hbm", "device") for table in tables
    )
    problem = Problem(Profile(tuple(TableProfile(one, cdf) for one in tables)), topology, 8192)
    plan = Plan(tuple(tables), topology, shards, batch_size=8192)
    report = Roofline().evaluate(problem, plan)
    return next(phase.slowest_s for phase in report.phases if phase.name == "lookup")


_CONSTANTS = RooflineConstants()
_OURS: dict[str, Callable[[Topology], float]] = {
    "copy": _link,
    "copy-busy": lambda topology: _link(topology, _CONSTANTS.copy_share),
    "in-place": lambda topology: _link(topology, _CONSTANTS.in_place_share),
    "nvlink": _peer,
    "allreduce": _peer,
    "network": _network,
    "hbm": lambda topology: topology.gpus[0].hbm_bytes_per_s / _GB,
    "lookup-share": _lookup_share,
    "narrow-rows": _narrow_rows,
}


def figures(predicted_ms: Mapping[tuple[str, str], float]) -> list[Figure]:
    """All figures, those of rows from predictions by source and name."""
    path = FOLDER / "figures" / "figures.yaml"
    found = []
    for facts in yaml.safe_load(path.read_text(encoding="utf-8")):
        kind, _, row = str(facts["ours"]).partition(": ")
        if kind == "row":
            source, _, name = row.partition(" / ")
            found.append(Figure(facts, predicted_ms[source, name]))
        else:
            found.append(Figure(facts, _OURS[kind](Topology.parse(facts["machine"]))))
    return found
