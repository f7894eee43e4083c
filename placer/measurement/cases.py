"""A case to measure: tables, how they are looked up, GPUs and a plan; small enough to keep."""

from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from placer.errors import DataError
from placer.plan.buffers import with_buffers
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Memory, Shard
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.profile.zipf import zipf_cdf
from placer.tables import Feature, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

_FEATURE = [field.name for field in fields(Feature)]
_ROOM_BYTES = 1 << 50
"""Memory of every device of a case: what fits where is not what is measured."""


@dataclass(frozen=True)
class Case:
    """Tables with Zipf accesses, samples of a step, and shards for one host's GPUs."""

    workload: str  # Cases of one workload differ in their shards alone.
    tables: tuple[Table, ...]
    exponents: tuple[float, ...]  # Zipf exponent of each table's accesses; ranks are ids.
    batch_size: int  # Samples per GPU and step.
    gpus: int
    shards: tuple[Shard, ...]
    kind: str = "random"  # What the case was made for, such as ``random``.

    @cached_property
    def profile(self) -> Profile:
        """Tables and their accesses."""
        return Profile(
            tuple(
                TableProfile(table, zipf_cdf(table.rows, exponent), zipf_exponent=exponent)
                for table, exponent in zip(self.tables, self.exponents, strict=True)
            ),
            source=f"case {self.workload}",
        )

    def topology(self, like: Topology | None = None) -> Topology:
        """Make one host with the case's GPUs, as fast as those of `like`, and room for anything."""
        gpu, host = Gpu("gpu:0", "host:0", 0, 1e10), Host("host:0", 0, 1e10)
        link = 1e10
        if like is not None:
            gpu, host = like.gpus[0], like.hosts[0]
            link = like.host_link_bytes_per_s(gpu.id)
        ids = [f"gpu:{number}" for number in range(self.gpus)]
        return Topology(
            "case",
            tuple(replace(gpu, id=name, host="host:0", memory_bytes=_ROOM_BYTES) for name in ids),
            (replace(host, id="host:0", memory_bytes=_ROOM_BYTES),),
            tuple(Link(name, "host:0", "pcie", link) for name in ids),
            emulated=True,
        )

    def problem(self, like: Topology | None = None) -> Problem:
        """Return the problem that a cost model estimates."""
        topology = self.topology(like)
        return Problem(self.profile, topology, self.batch_size, pipeline="serial")

    def plan(self, like: Topology | None = None) -> Plan:
        """Return what is measured."""
        return Plan(
            self.tables,
            self.topology(like),
            self.shards,
            batch_size=self.batch_size,
            pipeline="serial",
        )

    def shard(
        self,
        table: int,
        lookup: Lookup,
        rows: tuple[int, int, int],
        cols: tuple[int, int],
        devices: tuple[str, ...],
        *,
        is_first: bool,
        cache_rows: int = 0,
    ) -> Shard:
        """Make a shard of table number `table`; the first of its columns returns bags."""
        profile = self.profile.tables[table]
        memory: Memory = "hbm" if lookup == "device" else "dram"
        bare = Shard(profile.name, rows, cols, devices, memory, lookup, cache_rows=cache_rows)
        samples = self.batch_size * self.gpus // len(devices)
        return with_buffers(profile, bare, samples=samples, returns_bags=is_first)

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON."""
        return {
            "workload": self.workload,
            "kind": self.kind,
            "batch_size": self.batch_size,
            "gpus": self.gpus,
            "tables": [
                asdict(table)
                | {"zipf_exponent": exponent, "features": [astuple(f) for f in table.features]}
                for table, exponent in zip(self.tables, self.exponents, strict=True)
            ],
            "shards": [asdict(shard) for shard in self.shards],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Case":
        """Return what `to_json` gave; raises DataError if it is something else."""
        try:
            tables = [
                {
                    **table,
                    "features": [
                        dict(zip(_FEATURE, one, strict=True)) for one in table["features"]
                    ],
                }
                for table in data["tables"]
            ]
            exponents = [table.pop("zipf_exponent") for table in tables]
            known = {**data, "tables": tables, "exponents": exponents}
            return TypeAdapter(cls).validate_python(known)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no case that was measured: {error!r}") from error
