"""Public measurements as placer states them: a machine, tables, a placement and a time.

``published/*.yaml`` has one file a source, with where its figures come from, what had to be
assumed, its problems, dense parts and rows. A row names its machine, problem, dense part,
placement (`_published_plans`), samples per GPU and step, what the time includes (`KINDS`), and
the time as it was published: milliseconds, steps a second or samples a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from placer import Feature, Problem, Profile, Table, TableProfile, Topology
from placer.dense import DenseLayers
from placer.plan.fields import Pipeline
from placer.topology.presets import RESERVED_HBM_SHARE
from placer.workloads import named_workload

FOLDER = Path(__file__).with_name("published")

KINDS = ("step", "embedding", "forward")
"""A training step with its dense layers; lookup, update and exchange of embeddings; or the
lookup alone, rows on their way to the GPUs that need them included."""

SOURCE_KEYS = frozenset(
    ("source", "url", "file", "commit", "date", "framework", "assumed", "problems", "rows")
)
OPTIONAL_KEYS = frozenset(("dense", "defaults", "judged"))
"""``judged`` says why constants are not fitted to a source: it only judges them."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A published time, and the problem and placement that it is of.

    `machine` is a preset, a file in ``published/machines``, or ``COUNT of MACHINE``: so many GPUs
    of one whose host is all theirs. `tables` and `dense` are what the source's file says of the
    problem and of the dense layers (fields of `placer.dense.DenseLayers`), `placement` has its name
    and its own keys, and `kind` is one of `KINDS`. In `eager` trainers Python launches every kernel
    in every step, as opposed to graphs of them. `batch_size` is samples per GPU and step.
    """

    source: str
    name: str
    machine: str
    tables: Mapping[str, Any]
    dense: Mapping[str, Any] | None
    pipeline: Pipeline
    eager: bool
    placement: Mapping[str, Any]
    batch_size: int
    kind: str
    measured_s: float

    @property
    def math(self) -> str:
        """The type in which the dense layers are multiplied."""
        return str((self.dense or {}).get("math", "float32"))

    def problem(self) -> Problem:
        """The problem; its memory is the machine's, all of it."""
        layers = None
        if self.dense is not None:
            sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in self.dense.items()}
            layers = DenseLayers(**sizes)
        topology = self.topology()
        whole = tuple(
            replace(gpu, memory_bytes=int(gpu.memory_bytes / (1 - RESERVED_HBM_SHARE)))
            for gpu in topology.gpus
        )
        return Problem(
            _profile(self.tables),
            replace(topology, gpus=whole),
            self.batch_size,
            pipeline=self.pipeline,
            dense=layers,
            exchange_dtype=self.tables.get("exchange", "float32"),
        )

    def topology(self) -> Topology:
        """The machine."""
        return _topology(self.machine)


@dataclass(frozen=True, slots=True)
class Source:
    """A publication: what its file says besides the rows, and the rows."""

    facts: Mapping[str, Any]
    rows: tuple[Measurement, ...] = field(default=())

    @property
    def title(self) -> str:
        """Name of the source."""
        return str(self.facts["source"])


@cache
def sources() -> tuple[Source, ...]:
    """All sources, by file name.

    Raises
    ------
    ValueError
        If a file lacks a field, has one that is not known, or a row has no time or two.
    """
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.yaml")))


def _read(path: Path) -> Source:
    facts: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    missing, unknown = SOURCE_KEYS - set(facts), set(facts) - SOURCE_KEYS - OPTIONAL_KEYS
    if missing or unknown:
        raise ValueError(f"{path.name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    rows = facts.pop("rows")
    defaults, problems = facts.pop("defaults", {}), facts.pop("problems")
    dense = facts.pop("dense", {})
    return Source(facts, tuple(_row(facts, problems, dense, {**defaults, **row}) for row in rows))


def _row(
    facts: Mapping[str, Any],
    problems: Mapping[str, Any],
    dense: Mapping[str, Any],
    row: dict[str, Any],
) -> Measurement:
    name, machine, batch = str(row.pop("id")), row.pop("machine"), int(row.pop("batch"))
    kind = row.pop("kind")
    if kind not in KINDS:
        raise ValueError(f"{facts['source']}, {name}: kind {kind!r} is none of {KINDS}")
    layers = row.pop("dense", None)
    if (layers is None) == (kind == "step"):
        raise ValueError(f"{facts['source']}, {name}: dense layers go with whole steps alone")
    found = Measurement(
        facts["source"],
        name,
        machine,
        problems[row.pop("problem")],
        None if layers is None else dense[layers],
        row.pop("pipeline", "serial"),
        row.pop("eager", False),
        {},
        batch,
        kind,
        0.0,
    )
    units = {"ms": 1e-3, "steps_per_s": None, "samples_per_s": None}
    times = {unit: float(row.pop(unit)) for unit in units if unit in row}
    if len(times) != 1 or min(times.values()) <= 0:
        raise ValueError(f"{facts['source']}, {name}: one of {', '.join(units)}, not {times}")
    ((unit, value),) = times.items()
    samples = batch * len(found.topology().gpus)
    seconds = {"ms": value * 1e-3, "steps_per_s": 1 / value, "samples_per_s": samples / value}
    return replace(found, placement=row, measured_s=seconds[unit])


@cache
def _topology(name: str) -> Topology:
    count, _, whole = name.rpartition(" of ")
    path = FOLDER / "machines" / whole
    topology = Topology.parse(str(path) if path.exists() else whole)
    if not count:
        return topology
    gpus = topology.gpus[: int(count)]
    ends = {*(gpu.id for gpu in gpus), *(host.id for host in topology.hosts)}
    links = tuple(link for link in topology.links if link.a in ends)
    return replace(topology, name=name, gpus=gpus, links=links)


def _profile(facts: Mapping[str, Any]) -> Profile:
    """Tables and accesses of a problem: a workload, or groups of tables as workloads have them."""
    optimizer, pooling = facts["optimizer"], facts.get("pooling", "sum")
    if "workload" in facts:
        changes = {"dim": facts["dim"]} if "dim" in facts else {}
        return named_workload(facts["workload"]).with_tables(optimizer=optimizer, **changes)
    tables: list[TableProfile] = []
    for count, rows, dim, lookups in facts["tables"]:
        for _ in range(count):
            name = f"t{len(tables) + 1}"
            features = tuple(
                Feature(f"{name}_{number}", float(each), pooling=pooling)
                for number, each in enumerate(lookups, 1)
            )
            table = Table(name, rows, dim, optimizer=optimizer, features=features)
            tables.append(TableProfile.zipf(table, float(facts["zipf"])))
    return Profile(tuple(tables), source="published measurement")
