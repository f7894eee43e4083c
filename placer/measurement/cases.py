"""Describe cases to measure, and measured times: tables, lookups, shards; and draw random cases."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from pydantic import TypeAdapter

from placer.errors import DataError, PlacerError
from placer.executor import MOST_THREADS
from placer.executor.backends import make_backend, usable_device
from placer.plan.fields import Lookup, Memory, Shard
from placer.plan.memory import with_buffers
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, OptimizerName, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

_FEATURE = [field.name for field in fields(Feature)]
_ROOM_BYTES = 1 << 50
"""Memory of every device of a case: ample, because capacity is not measured."""


@dataclass(frozen=True)
class Case:
    """Tables with Zipf accesses, a batch size, and shards for the GPUs of one host."""

    workload: str  # Cases of one workload only differ in their shards.
    tables: tuple[Table, ...]
    exponents: tuple[float, ...]  # Zipf exponent of each table's accesses; row ranks are ids.
    batch_size: int  # Samples per GPU and step.
    gpus: int
    shards: tuple[Shard, ...]
    kind: str = "random"  # Purpose of the case, such as ``random``.

    @cached_property
    def profile(self) -> Profile:
        """Profile of the tables and their accesses."""
        return Profile(
            tuple(
                TableProfile.zipf(table, exponent)
                for table, exponent in zip(self.tables, self.exponents, strict=True)
            ),
            source=f"case {self.workload}",
        )

    def topology(self, like: Topology | None = None) -> Topology:
        """Return a host with the case's GPUs, as fast as those of `like`, with ample memory."""
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
        """Return the case as a problem, for cost models."""
        topology = self.topology(like)
        return Problem(self.profile, topology, self.batch_size, pipeline="serial")

    def plan(self, like: Topology | None = None) -> Plan:
        """Return the plan to measure."""
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
        """Make a shard of table number `table`. The first shard of its columns returns bags."""
        profile = self.profile.tables[table]
        memory: Memory = "hbm" if lookup == "device" else "dram"
        bare = Shard(profile.name, rows, cols, devices, memory, lookup, cache_rows=cache_rows)
        samples = self.batch_size * self.gpus // len(devices)
        return with_buffers(profile, bare, samples=samples, returns_bags=is_first)

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON."""
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
        """Make a case from the JSON of `to_json`; raise DataError for other data."""
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


DIMS = (4, 8, 16, 32, 64, 128)
_MOST_TABLES = 12
_ROWS = (1e3, 2e6)
_POOLING = (1.0, 60.0)
_COVERAGE = (0.3, 1.0)
_MOST_EXPONENT = 1.3
_BATCH_SIZES = (64, 16384)
_OPTIMIZERS: tuple[OptimizerName, ...] = ("rowwise_adagrad", "adagrad", "sgd", "adam")
_OPTIMIZER_ODDS = (0.4, 0.25, 0.2, 0.15)
_WORKLOAD_BYTES = 256 << 20
"""Most bytes of weights and state of a workload's tables together."""

_STEP_LOOKUPS = (3e4, 3e5)
"""Range of one GPU's lookups in a step. With fewer, Python's overhead would dominate."""

_HOT_SHARES = (0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
"""Possible shares of a split table's rows in HBM, or in a cache."""

_PLAN_STYLES = ("device", "staged", "uva", "host", "cached", "split", "mixed", "mixed", "mixed")


def random_cases(
    seed: int, workloads: int, *, plans: int = 1, gpus: int = 1, first: int = 0, load: int = 1
) -> Iterator[Case]:
    """Yield `plans` random placements of each of `workloads` random sets of tables on `gpus` GPUs.

    Workload n of a seed is the same for any number of workloads and any `first`, the number of the
    first workload. `load` multiplies the lookups that one CPU core would get, in larger tables.
    """
    for number in range(first, first + workloads):
        rng = np.random.default_rng([seed, number, gpus])
        # Tables grow less than lookups, because they must be created and filled.
        tables, exponents = _tables(rng, max(1, load // 4))
        per_sample = sum(table.lookups_per_sample for table in tables)
        wanted = math.log2(_log_uniform(rng, *_STEP_LOOKUPS) / per_sample)
        batch_size = min(max(2 ** round(wanted), _BATCH_SIZES[0]), _BATCH_SIZES[1]) * load
        bare = Case(f"random-{seed}-{number}", tables, exponents, batch_size, gpus, ())
        for _ in range(plans):
            style = str(rng.choice(_PLAN_STYLES))
            shards = [_table_shards(rng, bare, table, style) for table in range(len(tables))]
            yield replace(bare, shards=tuple(chain.from_iterable(shards)))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _tables(rng: np.random.Generator, times: int) -> tuple[tuple[Table, ...], tuple[float, ...]]:
    count = int(rng.integers(1, _MOST_TABLES + 1))
    # Models have one optimizer and few widths. Tables of one width share an arena.
    optimizer = _OPTIMIZERS[int(rng.choice(len(_OPTIMIZERS), p=_OPTIMIZER_ODDS))]
    widths = rng.choice(DIMS, size=int(rng.integers(1, 4)))
    tables: list[Table] = []
    exponents = []
    for number in range(count):
        rows = round(_log_uniform(rng, *_ROWS)) * times
        feature = Feature(
            f"t{number}",
            round(_log_uniform(rng, *_POOLING), 2),
            round(float(rng.uniform(*_COVERAGE)), 3),
        )
        table = Table(f"t{number}", rows, int(rng.choice(widths)), "float32", optimizer, (feature,))
        room = times * _WORKLOAD_BYTES - sum(other.total_bytes for other in tables)
        if table.total_bytes > room:
            table = replace(table, rows=max(1000, room // (2 * table.bytes_per_row())))
        tables.append(table)
        exponents.append(round(float(rng.uniform(0.0, _MOST_EXPONENT)), 3))
    return tuple(tables), tuple(exponents)


def _table_shards(rng: np.random.Generator, case: Case, number: int, style: str) -> Iterator[Shard]:
    """Draw the shards of one table: slices of columns and rows, with random lookup kinds."""
    table = case.tables[number]
    gpus = [f"gpu:{number}" for number in range(case.gpus)]
    sharding = str(
        rng.choice(["whole", "columns", "rows", "replicated"], p=[0.7, 0.12, 0.12, 0.06])
    )
    if sharding == "replicated" and case.gpus > 1:
        yield from _hot_cold_shards(
            rng, case, number, "device", (0, table.rows, 1), (0, table.dim), tuple(gpus)
        )
        return
    column_slices, ways = [(0, table.dim)], 1
    if sharding == "columns" and table.dim >= 8:
        column_slices = [(0, table.dim // 2), (table.dim // 2, table.dim)]
    elif sharding == "rows":
        ways = int(rng.choice([2, 4]))
    order = rng.permutation(case.gpus)
    turn = 0
    for cols in column_slices:
        for offset in range(ways):
            gpu = gpus[order[turn % case.gpus]]
            turn += 1
            own = style
            if style == "mixed":
                own = str(rng.choice(["device", "staged", "uva", "host", "cached", "split"]))
            yield from _hot_cold_shards(
                rng, case, number, own, (offset, table.rows, ways), cols, (gpu,)
            )


def _hot_cold_shards(
    rng: np.random.Generator,
    case: Case,
    number: int,
    style: str,
    rows: tuple[int, int, int],
    cols: tuple[int, int],
    devices: tuple[str, ...],
) -> Iterator[Shard]:
    """Yield one slice as one shard, or as its hottest rows in HBM and the rest in DRAM."""
    start, stop, step = rows
    members = len(range(*rows))
    share = float(rng.choice(_HOT_SHARES))
    hot = min(members - 1, max(1, round(members * share)))

    if style == "split":
        colds: tuple[Lookup, ...] = ("staged", "staged", "uva", "host")
        edge = start + hot * step
        hot_rows, cold_rows = (start, min(stop, edge), step), (edge, stop, step)
        yield case.shard(number, "device", hot_rows, cols, devices, is_first=True)
        cold = colds[int(rng.integers(len(colds)))]
        yield case.shard(number, cold, cold_rows, cols, devices, is_first=False)
    elif style == "cached":
        yield case.shard(number, "cached", rows, cols, devices, is_first=True, cache_rows=hot)
    else:
        yield case.shard(number, cast(Lookup, style), rows, cols, devices, is_first=True)


Clock = Literal["wall", "cpu"]
"""Elapsed time, or processor time. Both are equal on a quiet machine with one thread."""

NOISY_SPREAD = 0.15
"""Times are noisy if their interquartile range exceeds this share of their median."""

_GPU_LOAD = 32
"""Give a GPU this many times a core's lookups; with fewer, it only waits for kernel launches."""

NOISY_WAIT = 0.15
"""Times are noisy if elapsed time exceeds processor time by this share: other programs ran."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many steps to measure, and for how long."""

    # Least and most steps to time, after a few warm-up steps.
    least_steps: int = 8
    most_steps: int = 100
    # Stop after `least_s` seconds and `least_steps` steps, or in any case after `most_s` seconds.
    least_s: float = 0.25
    most_s: float = 2.0
    batches: int = 12  # Number of batches that the steps cycle through.


QUICK = Effort(least_steps=4, most_steps=8, least_s=0.02, most_s=0.5, batches=6)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each step: prefetch of the next batch, forward, backward and update."""

    wall_s: tuple[float, ...]  # Elapsed time; with several ranks, of the slowest.
    cpu_s: tuple[float, ...]  # Processor time of all threads; with several ranks, of the busiest.

    def seconds(self, clock: Clock = "wall") -> float:
        """Return the lower quartile of the times, because other programs only add time."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

    def spread(self, clock: Clock = "wall") -> float:
        """Return the interquartile range of the times, divided by their median."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        if len(times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / statistics.median(times)

    @property
    def noisy(self) -> bool:
        """Whether other programs ran on the machine, or the times differ too much."""
        waited = self.seconds("wall") > (1 + NOISY_WAIT) * self.seconds("cpu")
        return waited or self.spread() > NOISY_SPREAD


def step_s(measured: Iterable[Measured], clock: Clock = "wall") -> float:
    """Return the least step time of several measurements, because other load comes in bursts."""
    return min(times.seconds(clock) for times in measured)


@dataclass(frozen=True, slots=True)
class Setting:
    """How steps are measured. Only compare times of equal settings."""

    backend: str = "auto"  # Backend of the executor; see `PlacedEmbeddings`.
    device: str = "cpu"
    ranks: int = 1  # Processes that train together over gloo, one for each GPU of the plan.
    threads: int = 1  # Threads of each process.
    pinned: bool = True  # Whether each process is bound to its own cores.

    def __post_init__(self) -> None:
        if not 1 <= self.ranks * self.threads <= MOST_THREADS:
            raise PlacerError(
                f"{self.ranks} ranks of {self.threads} threads are not from 1 to {MOST_THREADS} "
                "threads together; lower --ranks or --threads"
            )

    @property
    def load(self) -> int:
        """Factor for a step's lookups, relative to a core's, so that launches do not dominate."""
        return _GPU_LOAD if self.device.startswith("cuda") else 1

    @property
    def tiers(self) -> bool:
        """Whether the backend has separate tiers for HBM and DRAM."""
        return self.backend not in ("numba", "torch")


def resolved(setting: Setting) -> Setting:
    """Return the setting with the backend that ``auto`` selects on this machine."""
    backend = make_backend(setting.backend, usable_device(setting.device))
    return replace(setting, backend=backend.name)
