"""`Problem`: a solver's input: tables with their profile, a topology, batch size, constraints."""

import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, SupportsIndex

from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.dense import Dense, DenseLayers, DenseMemory, DenseNetwork, dense_memory
from placer.errors import ProblemError, check_kinds
from placer.growing.options import Growing
from placer.plan.drift import in_plan_order
from placer.plan.fields import PIPELINES, Pipeline
from placer.plan.plan import Plan
from placer.profile.growing_tables import with_growing
from placer.profile.profile import Profile
from placer.tables import COLD_DTYPES, DTYPE_BYTES, ColdDType, DType
from placer.topology.topology import Topology
from placer.units import Summarized, format_bytes

_ROWS_WITHOUT_ORDER = TableRule(forbid=frozenset(("split", "replicated")))


@dataclass(frozen=True, repr=False)
class Problem(Summarized):
    """A placement problem: tables and their accesses, a topology, batch size and constraints.

    Raises ProblemError if there is no table, the batch size is not positive, an option is unknown,
    constraints name unknown things or contradict each other, or a GPU has too little memory for the
    dense part.

    Attributes
    ----------
    profile : Profile
        The tables and their accesses.
    topology : Topology
        The machine, with the memory that embeddings may take. Making the problem subtracts
        `constraints.reserve` and the memory of `dense` from the given topology.
    batch_size : int
        Samples per GPU and step.
    constraints : Constraints
        The constraints, applied to these tables and devices (`Constraints.on`). Their `reserve` is
        empty, so that a problem made from this one does not subtract it again.
    pipeline : {"look-ahead", "serial"}
        ``look-ahead``: while a batch trains, rows of the next one are copied, and ids of the one
        after it exchanged, as `placer train` does. ``serial``: a step begins after the previous
        one has ended.
    dense : DenseLayers, MeasuredDense, optional
        The dense part that each GPU trains beside the embeddings. Its `reserved_bytes` were
        subtracted from each GPU. None: steps contain only the embeddings' work.
    widths : tuple of {"float16", "bfloat16", "int8"}
        Types that cold rows may have instead of their table's.
    growing : mapping of table name to Growing
        Growing tables and their options. In this problem's `profile` they have capacity + 1 rows
        (`with_growing`). Nobody knows which of their rows will be hot, so they are neither split
        between memories nor replicated.
    exchange_dtype : {"float32", "bfloat16", "float16"}
        Type of pooled rows and their gradients when they are sent between GPUs.

    Examples
    --------
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> problem = Problem(named_workload("random-3@7"), Topology.parse("8xh100"), batch_size=64)
    >>> problem.global_batch_size
    512
    """

    profile: Profile
    topology: Topology
    batch_size: int = 8192
    constraints: Constraints = field(default_factory=Constraints)
    pipeline: Pipeline = "look-ahead"
    dense: Dense | None = None
    widths: tuple[ColdDType, ...] = ()
    growing: Mapping[str, Growing] = field(default_factory=dict)
    exchange_dtype: DType = "float32"

    def __post_init__(self) -> None:
        check_kinds(
            profile=(self.profile, Profile), topology=(self.topology, Topology),
            constraints=(self.constraints, Constraints), growing=(self.growing, Mapping),
        )  # fmt: skip
        if not len(self.profile):
            raise ProblemError("the profile has no table to place")
        if not isinstance(self.batch_size, SupportsIndex) or self.batch_size < 1:
            words = "batch_size must be a whole number of samples per GPU, at least 1"
            raise ProblemError(f"{words}, not {self.batch_size!r}")
        object.__setattr__(self, "batch_size", int(self.batch_size))  # NumPy's have no JSON.
        hosts = [one for one in self.topology.hosts if self.topology.gpus_of(one.id)]
        lacking = [host.id for host in hosts if host.drive is None]
        if 0 < len(lacking) < len(hosts):
            raise ProblemError(
                f"{lacking[0]} has no drive, but other hosts with GPUs have one; rows are on "
                "drives only if all of these hosts have one: give it one, or take the others away"
            )
        if self.growing:
            object.__setattr__(self, "profile", with_growing(self.profile, self.growing))
            rules = tuple((glob.escape(name), _ROWS_WITHOUT_ORDER) for name in self.growing)
            tables = (*self.constraints.tables, *rules)
            object.__setattr__(self, "constraints", replace(self.constraints, tables=tables))
        if self.constraints:
            applied = self.constraints.on(self.topology, self.profile.table_names)
            object.__setattr__(self, "topology", applied.reserved(self.topology))
            object.__setattr__(self, "constraints", replace(applied, reserve=()))
        if self.pipeline not in PIPELINES:
            known = " and ".join(PIPELINES)
            raise ProblemError(f"no pipeline is called {self.pipeline!r}; there are {known}")
        for dtype in self.widths:
            if dtype not in COLD_DTYPES:
                raise ProblemError(f"width {dtype!r} is none of {', '.join(COLD_DTYPES)}")
        if self.exchange_dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ProblemError(f"exchange type {self.exchange_dtype!r} is none of {known}")
        if isinstance(self.dense, DenseLayers):
            self._reserve(self.dense)

    def _reserve(self, dense: DenseLayers) -> None:
        """Subtract the dense part's memory from each GPU, except what was subtracted before."""
        memory = self.dense_memory
        assert memory is not None, "there are layers"
        needed, before = memory.total_bytes, dense.reserved_bytes
        if needed == before:
            return
        gpus = self.topology.gpus
        for gpu in gpus:
            if needed > gpu.memory_bytes + before:
                has = gpu.memory_bytes + before
                raise ProblemError(
                    f"{gpu.id} has {format_bytes(has)} ({has} bytes), but the dense layers alone "
                    f"take {format_bytes(needed)} ({needed} bytes) at batch size "
                    f"{self.batch_size}, activations {format_bytes(memory.activation_bytes)} of "
                    "it: make the batch smaller, or give GPUs more memory"
                )
        left = tuple(replace(g, memory_bytes=g.memory_bytes + before - needed) for g in gpus)
        object.__setattr__(self, "topology", replace(self.topology, gpus=left))
        object.__setattr__(self, "dense", replace(dense, reserved_bytes=needed))

    @cached_property
    def dense_network(self) -> DenseNetwork | None:
        """The dense layers over the problem's tables; None if the layers are unknown."""
        if not isinstance(self.dense, DenseLayers):
            return None
        return DenseNetwork.of(self.dense, (profile.table for profile in self.profile))

    @property
    def dense_memory(self) -> DenseMemory | None:
        """Memory of the dense layers on each GPU; None if the layers are unknown."""
        if self.dense_network is None:
            return None
        return dense_memory(self.dense_network, self.batch_size, len(self.topology.gpus))

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all GPUs."""
        return self.batch_size * len(self.topology.gpus)

    @cached_property
    def lookup_bytes_per_sample(self) -> float:
        """Bytes of weights that a sample looks up in all tables."""
        return sum(
            p.table.lookups_per_sample * p.table.weight_bytes_per_row() for p in self.profile
        )

    def summary(self) -> dict[str, str]:
        """Return the numbers to show of the problem; see `Summarized`."""
        gpus = self.topology.gpus
        return {
            "tables": str(len(self.profile)),
            "bytes": format_bytes(sum(one.table.total_bytes for one in self.profile)),
            "GPUs": str(len(gpus)),
            "HBM": format_bytes(sum(gpu.memory_bytes for gpu in gpus)),
            "DRAM": format_bytes(sum(host.memory_bytes for host in self.topology.hosts)),
            "batch per GPU": f"{self.batch_size:,}",
        }

    def gpus_of(self, table: str) -> tuple[int, ...]:
        """Return the numbers of GPUs that may serve a table under its and its group's pins."""
        names = self.constraints.group_of(table) or (table,)
        pins = [self.constraints.rule_of(name).devices for name in names]
        return tuple(
            number
            for number, gpu in enumerate(self.topology.gpus)
            if all(devices is None or gpu.id in devices for devices in pins)
        )

    @classmethod
    def of_plan(
        cls, plan: Plan, profile: Profile, constraints: Constraints | None = None
    ) -> "Problem":
        """Return the problem that a plan solves, given the plan and its profile.

        The constraints' `reserve` is ignored: the plan's topology does not have that memory.
        """
        rules = replace(constraints or Constraints(), reserve=())
        how: Any = plan.pipeline, plan.dense, plan.widths, plan.growing, plan.exchange_dtype
        return cls(profile, plan.topology, plan.batch_size, rules, *how)

    @property
    def fields_of_plans(self) -> dict[str, Any]:
        """Fields of `Plan` that describe this problem, by name."""
        names = "topology", "batch_size", "pipeline", "dense", "widths", "exchange_dtype"
        own = {name: getattr(self, name) for name in names}
        tables = tuple(one.table for one in self.profile)
        return {"tables": tables, "growing": dict(self.growing), **own}

    def in_plan_order(self, plan: Plan) -> "Problem":
        """Return the problem with accesses in a plan's row order; see `plan.drift`."""
        profile = in_plan_order(self.profile, plan)
        return self if profile is self.profile else replace(self, profile=profile)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that a placement depends on: tables, accesses, topology, batch size, …

        It leaves out words for people, such as names of sources. It also leaves out defaults: no
        constraints, no dense part, no growing tables, exchange in float32, pipeline with
        look-ahead. Constraints that mean the same for every table have the same hash.
        """
        facts: dict[str, Any] = {
            "tables": [asdict(profile.table) for profile in self.profile],
            "gpus": [asdict(gpu) for gpu in self.topology.gpus],
            "hosts": [asdict(host) for host in self.topology.hosts],
            "links": [asdict(link) for link in self.topology.links],
            "batch_size": self.batch_size,
        }
        for gpu in facts["gpus"] if self.dense is None else ():
            del gpu["chip"]  # It matters only for dense layers.
        for host in facts["hosts"]:
            if host["drive"] is None:
                del host["drive"]
        if self.pipeline != "look-ahead":
            facts["pipeline"] = self.pipeline
        if self.dense is not None:
            facts["dense"] = asdict(self.dense)
        if self.widths:
            facts["widths"] = sorted(self.widths)
        if self.exchange_dtype != "float32":
            facts["exchange_dtype"] = self.exchange_dtype
        if self.growing:
            facts["growing"] = {name: asdict(how) for name, how in self.growing.items()}
        if self.constraints:
            rules = {name: self.constraints.rule_of(name) for name in self.profile.table_names}
            facts["constraints"] = {
                "tables": {
                    name: {
                        "devices": None if rule.devices is None else sorted(rule.devices),
                        "tier": rule.tier,
                        "forbid": sorted(rule.forbid),
                    }
                    for name, rule in rules.items()
                    if rule != TableRule()
                },
                "together": self.constraints.together,
            }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for profile in self.profile:
            digest.update(profile.cdf.ranks.tobytes())
            digest.update(profile.cdf.shares.tobytes())
            if profile.locality:
                digest.update(repr(profile.locality).encode())
        return digest.hexdigest()


def before_dense(dense: Dense | None) -> Dense | None:
    """Return a plan's dense part for a new problem, which takes off its memory itself."""
    return replace(dense, reserved_bytes=0) if isinstance(dense, DenseLayers) else dense


def machine_of(
    plan: Plan,
    constraints: Constraints,
    *,
    hbm: str | int | None = None,
    dram: str | int | None = None,
    ssd: str | int | None = None,
) -> tuple[Topology, Constraints]:
    """Return a plan's machine with other budgets, and constraints for another problem on it.

    The machine has the memory of the plan's dense layers. It does not have the memory that was
    reserved, so the returned constraints reserve only memory of devices with a new budget.
    """
    taken = plan.dense.reserved_bytes if isinstance(plan.dense, DenseLayers) else 0
    gpus = tuple(replace(g, memory_bytes=g.memory_bytes + taken) for g in plan.topology.gpus)
    machine = replace(plan.topology, gpus=gpus).with_memory(hbm=hbm, dram=dram, ssd=ssd)
    budgeted = [] if hbm is None else [gpu.id for gpu in gpus]
    budgeted += [] if dram is None else [gpu.host for gpu in gpus]
    return machine, constraints.reserving_on(budgeted, machine)
