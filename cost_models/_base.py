"""What a cost model is asked and what it answers."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from placer.errors import PlanMismatchError
from placer.plan.memory import MemoryUse
from placer.plan.plan import Plan
from placer.problem import Problem

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GpuCost:
    """Time that one GPU spends on embeddings in one step, by what it waits for, in seconds.

    Attributes
    ----------
    hbm_s : float
        Reads and writes of its own memory.
    link_s : float
        Copies between its host's memory and its own.
    communication_s : float
        Exchanges of ids, pooled rows and gradients with other GPUs.
    launch_s : float
        Fixed cost of its shards.
    """

    device: str
    hbm_s: float
    link_s: float
    communication_s: float
    launch_s: float

    @property
    def total_s(self) -> float:
        """All together: the parts do not overlap in this model."""
        return self.hbm_s + self.link_s + self.communication_s + self.launch_s


@dataclass(frozen=True, slots=True)
class HostCost:
    """Time that one host's memory is busy with embeddings in one step, in seconds."""

    device: str
    dram_s: float


@dataclass(frozen=True, slots=True)
class CostReport:
    """Cost of a plan: times per GPU and host, memory per device, lookups by tier.

    `hbm_lookup_share` is the share of all lookups that are served from HBM (device
    shards, and hits of caches).
    """

    cost_model: str
    gpus: tuple[GpuCost, ...]
    hosts: tuple[HostCost, ...]
    memory: dict[str, MemoryUse]
    hbm_lookup_share: float

    @property
    def step_time_s(self) -> float:
        """Time of the slowest GPU, or of the busiest host's memory if that is longer."""
        return max(
            max((gpu.total_s for gpu in self.gpus), default=0.0),
            max((host.dram_s for host in self.hosts), default=0.0),
        )

    @property
    def bottleneck(self) -> str:
        """The device that the step waits for, and what that device waits for."""
        slowest = max(self.gpus, key=lambda gpu: gpu.total_s)
        busiest = max(self.hosts, key=lambda host: host.dram_s, default=None)
        if busiest is not None and busiest.dram_s > slowest.total_s:
            return f"{busiest.device} dram"
        parts = {
            "hbm": slowest.hbm_s,
            "link": slowest.link_s,
            "communication": slowest.communication_s,
            "launches": slowest.launch_s,
        }
        return f"{slowest.device} {max(parts, key=lambda part: parts[part])}"

    @property
    def balance(self) -> float:
        """Mean over maximum of the GPUs' times: 1 when all finish together."""
        times = [gpu.total_s for gpu in self.gpus]
        return sum(times) / len(times) / max(times) if max(times) > 0 else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class PieceCurve:
    """Cost of one piece of a table on one GPU, as a function of how many rows are in HBM.

    A piece is a strided slice ``[index, rows, ways]`` of a table's ranks, `width` columns
    wide. Its hottest rows are in HBM and the rest in DRAM; all arrays have shape (m,) over
    `hot_rows`, and linear in between.

    Attributes
    ----------
    hot_rows : int64
        Rows of the piece in HBM: from 0 to all, strictly increasing.
    gpu_s : float64
        Time of the GPU, convex and not increasing; without `split_s`.
    dram_s : float64
        Time of the host's memory.
    hbm_bytes, dram_bytes : float64
        Memory on the GPU and on its host; without `split_hbm_bytes`.
    split_s, split_hbm_bytes : float
        What is added when the piece has rows in both tiers: one more shard, a row map.
    """

    hot_rows: Int
    gpu_s: Float
    dram_s: Float
    hbm_bytes: Float
    dram_bytes: Float
    split_s: float
    split_hbm_bytes: float


@runtime_checkable
class CostModel(Protocol):
    """Time and memory of placements. Stateless: the same question has the same answer."""

    name: str

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Cost of a whole plan: what is reported and compared.

        Raises
        ------
        PlanMismatchError
            If the plan's shards are of tables or on devices that the problem does not have.
        """
        ...

    def piece_curve(
        self,
        problem: Problem,
        table: int,
        ways: int,
        index: int,
        width: int,
        gpu: int,
    ) -> PieceCurve:
        """Cost of slice `index` of `ways` of table number `table`, on GPU number `gpu`.

        The piece has `width` of the table's columns. Summed over the pieces of a GPU it
        equals `evaluate` of the same placement.
        """
        ...


def require_match(problem: Problem, plan: Plan) -> None:
    """Raise unless the problem has the tables and devices of all the plan's shards.

    Raises
    ------
    PlanMismatchError
    """
    tables = {profile.name: profile.table for profile in problem.profile}
    devices = problem.topology.gpus_by_id.keys() | problem.topology.hosts_by_id.keys()
    for name in dict.fromkeys(shard.table for shard in plan.shards):
        known, planned = tables.get(name), plan.tables_by_name.get(name)
        if known is None or planned is None:
            owner = "profile" if known is None else "plan's list of tables"
            raise PlanMismatchError(f"the plan places table {name!r}, which the {owner} lacks")
        if (known.rows, known.dim) != (planned.rows, planned.dim):
            raise PlanMismatchError(
                f"table {name!r} is {planned.rows} × {planned.dim} in the plan "
                f"but {known.rows} × {known.dim} in the profile"
            )
    for device in sorted({device for shard in plan.shards for device in shard.devices} - devices):
        raise PlanMismatchError(
            f"the plan uses {device}, which the topology {problem.topology.name!r} lacks"
        )
