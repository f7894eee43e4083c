"""What a solver solves: tables with their profile, a machine, a batch size and constraints."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from placer.constraints.constraints import Constraints
from placer.constraints.rules import TableRule
from placer.errors import ProblemError
from placer.plan.drift import in_plan_order
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.topology.topology import Topology


@dataclass(frozen=True)
class Problem:
    """Tables and their accesses, a machine, samples per GPU and step, and the user's constraints.

    Attributes
    ----------
    profile : Profile
    topology : Topology
        The memory that embeddings may take: of what is given, `constraints.reserve` is taken
        off when the problem is made.
    batch_size : int
        Samples per GPU and step.
    constraints : Constraints
        As they apply to these tables and devices (`Constraints.on`). They reserve nothing any
        more, so that a problem made from this one does not take the reserve off again.

    Raises
    ------
    ProblemError
        If there is no table, the batch is not positive, or the constraints name what does not
        exist or contradict one another.

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

    def __post_init__(self) -> None:
        if not len(self.profile):
            raise ProblemError("the profile has no table to place")
        if self.batch_size < 1:
            raise ProblemError(
                f"batch_size must be at least 1 sample per GPU, not {self.batch_size}"
            )
        if self.constraints:
            applied = self.constraints.on(self.topology, self.profile.table_names)
            object.__setattr__(self, "topology", applied.reserved(self.topology))
            object.__setattr__(self, "constraints", replace(applied, reserve=()))

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all GPUs."""
        return self.batch_size * len(self.topology.gpus)

    @cached_property
    def lookup_bytes_per_sample(self) -> float:
        """Bytes of weights that a sample looks up in all tables."""
        return sum(
            p.table.lookups_per_sample * p.table.weight_bytes_per_row() for p in self.profile
        )

    def gpus_of(self, table: str) -> tuple[int, ...]:
        """Numbers of the GPUs that may serve a table: pins of its own and of its group obeyed."""
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
        """The problem that a plan solves, from what its file tells and the profile beside it.

        `reserve` of the constraints is left out: the plan's machine is without that memory.
        """
        rules = replace(constraints or Constraints(), reserve=())
        return cls(profile, plan.topology, plan.batch_size, rules)

    def in_plan_order(self, plan: Plan) -> "Problem":
        """The problem with accesses over the ranks of a plan's row order; see `plan.drift`."""
        profile = in_plan_order(self.profile, plan)
        return self if profile is self.profile else replace(self, profile=profile)

    @cached_property
    def sha256(self) -> str:
        """Hash of all that a placement depends on: tables, accesses, machine, batch, constraints.

        Names of sources and other words for people do not enter. Without constraints nothing of
        them does either; with them, two ways to ask the same of every table are the same.
        """
        facts: dict[str, Any] = {
            "tables": [asdict(profile.table) for profile in self.profile],
            "gpus": [asdict(gpu) for gpu in self.topology.gpus],
            "hosts": [asdict(host) for host in self.topology.hosts],
            "links": [asdict(link) for link in self.topology.links],
            "batch_size": self.batch_size,
        }
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
        return digest.hexdigest()
