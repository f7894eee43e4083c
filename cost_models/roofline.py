"""The roofline cost model: time is bytes moved over bandwidth, for each shard and GPU.

docs/cost-model.md lists the bytes of each way to read rows, and the share of a bandwidth that each
reaches. Each lookup and update moves some bytes besides its row, so narrow rows cost more.

These bytes over bandwidths are the constants of the step equation
(`cost_models.step_equation.equation`). RecShard (doi:10.1145/3503222.3507777), TorchRec's
estimators and HugeCTR's planner are special cases of it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cost_models.arenas import ArenaCosts
from cost_models.base import Float
from cost_models.schedule import Schedule
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.loads import ID_BYTES, SORT_BYTES_PER_LOOKUP
from cost_models.step_equation.phases import (
    LOOKUP,
    LOOKUP_SHARES,
    READ_KINDS,
    ROWS,
    UPDATE,
    Rates,
    ReadCosts,
    UnitCosts,
    with_lanes,
)
from cost_models.step_equation.work import drive_rows_per_s, one_is_fastest
from placer.dense import DenseLayers
from placer.problem import Problem

UPDATE_KERNELS = 10
"""Number of kernels that FBGEMM launches for an arena's update: a histogram and four passes of a
radix sort, run lengths and their sums, and updates of short and of long runs."""


@dataclass(frozen=True, slots=True)
class RooflineConstants:
    """Shares of bandwidths that kernels reach, and bytes that they move besides rows.

    docs/cost-model.md has the source of each. Several are fitted to the measurements of
    docs/published.md; ``python benchmarks/published.py --fit`` repeats the fit.
    """

    # Share of `Gpu.hbm_bytes_per_s`, which streams reach, for lookups. The same for sorting
    # lookups, gathering gradients and updating rows.
    lookup_share: float = 0.80
    update_share: float = 0.63
    # Other bytes of a lookup than its id and its row, and other bytes of its update than the sort.
    lookup_bytes: float = 35.0
    update_bytes: float = 95.0
    # Share of a row's bytes that a lookup reads if the step has read the row before. The GPU's L2
    # cache serves the rest, of HBM and of the host.
    repeat_share: float = 0.24
    probe_bytes: float = 6200.0  # Cost of looking up an id in a cache, as bytes of HBM.
    copy_share: float = 0.75  # Share of the host link's bandwidth for copies both ways at once.
    # Share of the link for rows that a kernel reads at random, and for rows that it reads and
    # writes back, both ways at once.
    in_place_share: float = 0.64
    in_place_update_share: float = 0.76
    # Share of the host memory's bandwidth that its processors reach when they pool and update rows.
    # Share of that time that a GPU waits.
    host_pool_share: float = 0.58
    host_wait_share: float = 1.0
    # Seconds that a trainer adds to a step with dense layers if it launches graphs of kernels (up
    # to 18 ms if Python launches each). Additional seconds with several GPUs.
    step_s: float = 0.36e-3
    exchange_step_s: float = 1.02e-3
    arena_s: float = 0.0  # Seconds of Python that starts an arena's kernels, besides launches.
    staging_s: float = 0.0  # Additional seconds of an arena to make room for copied rows.
    # Share of the time of copies beside a step by which they delay the step's other kernels.
    beside_copies_share: float = 0.0
    # Median relative error for steps of sources that these constants were not fitted to.
    relative_error: float = 0.27

    @property
    def looked_up(self) -> float:
        """Bytes of a lookup besides its row, over `lookup_share`."""
        return (ID_BYTES + self.lookup_bytes) / self.lookup_share

    @property
    def sorted(self) -> float:
        """Bytes of a lookup's sort and update besides its row, over `update_share`."""
        return (SORT_BYTES_PER_LOOKUP + self.update_bytes) / self.update_share


EXECUTOR = RooflineConstants(
    update_share=0.91,
    probe_bytes=0.0,
    copy_share=1.18,
    in_place_update_share=0.45,
    arena_s=1.25e-3,
    staging_s=2.6e-3,
    beside_copies_share=0.59,
)
"""Constants of placer's own executor, for ``Roofline(EXECUTOR)``; see docs/cost-model.md."""


class Roofline(StepEquation):
    """A cost model of bytes over bandwidths (docs/cost-model.md); see `cost_models.CostModel`.

    Examples
    --------
    >>> from cost_models import TableShard
    >>> from placer import AccessCdf, Feature, Profile, Table, TableProfile, Topology
    >>> table = Table("ads", rows=100_000, dim=64, features=(Feature("ad"),))
    >>> profile = Profile((TableProfile(table, AccessCdf.zipf(100_000, 1.0)),))
    >>> problem = Problem(profile, Topology.parse("1xt4"), batch_size=1024)
    >>> curve = Roofline().cost_curve(problem, TableShard(0), gpu=0)
    >>> bool(curve.gpu_s[0] > curve.gpu_s[-1])  # No row in HBM takes longer than all rows there.
    True
    """

    name = "roofline"

    def __init__(self, constants: RooflineConstants | None = None) -> None:
        self.constants = constants or RooflineConstants()
        self.lookup_shares = _lookup_shares(self.constants)

    def relative_error(self, problem: Problem) -> float | None:
        """Return the error for published steps that were not fitted; None for emulated GPUs."""
        return None if problem.topology.emulated else self.constants.relative_error

    def schedule(self, problem: Problem, *, with_servers: bool = True) -> Schedule:
        """Return the schedule with the time that trainers add. See `CostModel.schedule`."""
        schedule = super().schedule(problem, with_servers=with_servers)
        if not isinstance(problem.dense, DenseLayers):
            return schedule
        added_s = self.constants.step_s
        added_s += self.constants.exchange_step_s * (len(problem.topology.gpus) > 1)
        main_s, *others_s = schedule.fixed_s
        return replace(schedule, fixed_s=(main_s + added_s, *others_s))

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Return unit costs from bandwidths. See `StepEquation.unit_costs`."""
        topology, spec = problem.topology, problem.profile.tables[table].table
        device = topology.gpus[gpu]
        return _costs(
            device.hbm_bytes_per_s,
            topology.host_link_bytes_per_s(device.id),
            topology.hosts_by_id[device.host].dram_bytes_per_s,
            topology.exchange_s(device.id, 1.0),
            spec.weight_bytes_per_row() / spec.bytes_per_row(),
            self.constants,
            problem.pipeline == "look-ahead",
        )

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Return seconds to launch an arena's kernels. See `CostModel.launches`."""
        launch_s = getattr(problem.topology.serving[gpu], "launch_s", 0.0)  # Servers have none.
        phase_s = np.zeros(ROWS)
        phase_s[[LOOKUP, UPDATE]] = launch_s, UPDATE_KERNELS * launch_s
        phase_s[LOOKUP] += self.constants.arena_s * (gpu < len(problem.topology.gpus))
        return with_lanes(phase_s, problem.pipeline)

    def arena_costs(self, problem: Problem, gpu: int) -> ArenaCosts | None:
        """Return the executor's time to make room for copies. See `CostModel.arena_costs`."""
        if not self.constants.staging_s:
            return None
        seconds = np.zeros((len(ArenaCosts._fields), ROWS))
        seconds[0, LOOKUP] = self.constants.staging_s
        return ArenaCosts(*(with_lanes(one, problem.pipeline) for one in seconds))

    def host_rates(self, problem: Problem, table: int, host: str) -> Rates:
        """Return rates of a host that pools rows. See `StepEquation.host_rates`."""
        dram_s = 1 / problem.topology.hosts_by_id[host].dram_bytes_per_s
        return _by_processors(dram_s / self.constants.host_pool_share)

    def least_shard_s(self, problem: Problem) -> float | None:
        """Return 0, or None if no GPU is best in all. See `StepEquation.least_shard_s`."""
        topology = problem.topology
        speeds = {
            (
                gpu.hbm_bytes_per_s,
                topology.host_link_bytes_per_s(gpu.id),
                -topology.exchange_s(gpu.id, 1.0),
                topology.hosts_by_id[gpu.host].dram_bytes_per_s,
                drive_rows_per_s(topology, gpu.id),
            )
            for gpu in topology.gpus
        }
        return 0.0 if one_is_fastest(speeds) else None


def _by_processors(byte_s: float) -> Rates:
    """Return the rates at which a host's processors look up and update rows in its memory."""
    return Rates(
        lookup_s=(ID_BYTES + SORT_BYTES_PER_LOOKUP) * byte_s,
        lookup_byte_s=2 * byte_s,
        row_byte_s=2 * byte_s,
    )


@lru_cache(maxsize=256)
def _costs(
    hbm_bytes_per_s: float,
    link_bytes_per_s: float,
    dram_bytes_per_s: float,
    exchange_byte_s: float,
    weights: float,
    constants: RooflineConstants,
    ahead: bool,
) -> UnitCosts:
    """Return unit costs; `weights` is the share of a row's bytes that is not optimizer state."""
    hbm, link, dram = 1 / hbm_bytes_per_s, 1 / link_bytes_per_s, 1 / dram_bytes_per_s
    lookup, update = constants.lookup_share, constants.update_share
    in_hbm = Rates(
        lookup_s=(constants.looked_up + constants.sorted) * hbm,
        lookup_byte_s=(constants.repeat_share / lookup + 1 / update) * hbm,
        row_byte_s=((1 - constants.repeat_share) / lookup * weights + 2 / update) * hbm,
    )
    repeat, once = constants.repeat_share, (1 - constants.repeat_share) * weights
    device = ReadCosts(in_hbm)
    copied = link / constants.copy_share
    staged = ReadCosts(
        in_hbm + Rates(row_byte_s=2 * hbm + ahead * constants.beside_copies_share * copied),
        Rates(row_byte_s=copied),
        Rates(row_byte_s=2 * dram),
    )
    in_place = ReadCosts(
        Rates(lookup_s=in_hbm.lookup_s, lookup_byte_s=hbm / update),
        Rates(
            lookup_byte_s=repeat * link / constants.in_place_share,
            row_byte_s=once * link / constants.in_place_share
            + link / constants.in_place_update_share,
        ),
        Rates(lookup_byte_s=repeat * dram, row_byte_s=(once + 2) * dram),
    )
    # Vectors cross the link for the lookup, and gradients for the update.
    pooled = _by_processors(dram / constants.host_pool_share)
    waits = _by_processors(dram / constants.host_pool_share * constants.host_wait_share)
    vectors = Rates(vector_byte_s=2 * link)
    by_host = ReadCosts(Rates(vector_byte_s=2 * hbm), waits + vectors, pooled)
    probe = Rates(lookup_s=constants.probe_bytes * hbm)
    return UnitCosts(
        device=device,
        staged=staged,
        uva=in_place,
        host=by_host,
        hit=device._replace(hbm=device.hbm + probe),
        miss=staged._replace(hbm=staged.hbm + probe),
        output_byte_s=(1 / lookup + 1 / update) * hbm,
        exchange_byte_s=exchange_byte_s,
    )


def _lookup_shares(constants: RooflineConstants) -> Float:
    """Return the lookup's share of each constant of `_costs`; see `StepEquation`."""
    shares = LOOKUP_SHARES.copy()
    looked_up, update = constants.looked_up, constants.sorted
    reads = constants.repeat_share / constants.lookup_share
    once = (1 - constants.repeat_share) / constants.lookup_share
    rows = 2 / constants.update_share
    # For a row with little state. With more state, the update's share is larger.
    read_once = once / (once + rows)
    in_place = (1 - constants.repeat_share) / constants.in_place_share
    for number, kind in enumerate(READ_KINDS):
        probe = constants.probe_bytes if kind in ("hit", "miss") else 0.0
        shares[number, 0, 0] = (looked_up + probe) / (looked_up + update + probe)
        if kind == "uva":
            shares[number, 1, 3] = in_place / (in_place + 1 / constants.in_place_update_share)
            continue
        if kind == "host":
            shares[number, 1, :4] = shares[number, 2, :4]
        shares[number, 0, 1] = reads / (reads + 1 / constants.update_share)
        # Copies arrive before the lookup and leave after the update.
        staged = kind in ("staged", "miss")
        shares[number, 0, 3] = (once + 1) / (once + rows + 2) if staged else read_once
    return shares
