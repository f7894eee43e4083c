"""Step time from bytes over bandwidths, per shard and per GPU.

With L lookups of a step in a shard, U distinct rows among them, rows of w bytes of weights
and s bytes of optimizer state, and V output vectors:

* rows in HBM: the forward pass reads L·w, the backward pass gathers a gradient of w bytes
  for each lookup, sorts the lookups by row, and reads and writes U·(w + s);
* staged rows: U·(w + s) over the link each way at once, twice the same bytes of host
  memory, and in HBM the copies land and leave besides the work of rows in HBM;
* rows read in place (uva): L·w + U·(w + s) over the link and in host memory;
* rows pooled by the host: V·w over the link each way, and in host memory what rows in HBM
  cost there;
* communication: ids and lengths of bags come in, V vectors of float32 go out and their
  gradients come back, by all-to-all; replicas look up their own samples and all-reduce the
  gradients of the touched rows; see `cost_models.step_equation.exchanged_bytes`;
* a constant for each kernel that is launched: one for every arena's lookup, and
  `UPDATE_KERNELS` for its update.

These bytes over the topology's bandwidths are the constants of the step equation
(`cost_models.step_equation.equation`), of which RecShard (doi:10.1145/3503222.3507777), TorchRec's
estimators and HugeCTR's planner are special cases.
"""

from functools import lru_cache

import numpy as np

from cost_models.base import Float
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.exchanged_bytes import ID_BYTES
from cost_models.step_equation.phases import LOOKUP, UPDATE, with_lanes
from cost_models.step_equation.unit_costs import Rates, ReadCosts, UnitCosts
from placer.problem import Problem

SORT_BYTES_PER_LOOKUP = 112
"""HBM bytes to sort one (row, bag) pair of 12 bytes: four radix passes that read and write
it, 96, and a histogram pass with its ids, 16."""

UPDATE_KERNELS = 10
"""Kernels of an arena's update: four passes of a radix sort and its histogram, run lengths and
their sums, and updates of short and of long runs. A count of what FBGEMM launches."""


class Roofline(StepEquation):
    """The cost model of this module's docstring; see `cost_models.CostModel`.

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

    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Unit costs, which are the same for all tables. See `StepEquation.unit_costs`."""
        topology = problem.topology
        device = topology.gpus[gpu]
        return _costs(
            device.hbm_bytes_per_s,
            topology.host_link_bytes_per_s(device.id),
            topology.hosts_by_id[device.host].dram_bytes_per_s,
            topology.exchange_s(device.id, 1.0),
        )

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Launches of an arena's kernels. See `CostModel.launches`."""
        launch_s = problem.topology.gpus[gpu].launch_s
        phase_s = np.zeros(7)
        phase_s[[LOOKUP, UPDATE]] = launch_s, UPDATE_KERNELS * launch_s
        return with_lanes(phase_s, problem.pipeline)

    def host_rates(self, problem: Problem, table: int, host: str) -> Rates:
        """Rates of a host's memory, as of a GPU's. See `StepEquation.host_rates`."""
        return _in_memory(1 / problem.topology.hosts_by_id[host].dram_bytes_per_s)

    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """Nothing, as what shards return and sort is never less. See `CostModel`.

        None where no GPU is the fastest at everything: hot rows may then be best on one kind
        of GPU and cold ones on another, which a whole table cannot have.
        """
        topology = problem.topology
        speeds = {
            (
                gpu.hbm_bytes_per_s,
                topology.host_link_bytes_per_s(gpu.id),
                -topology.exchange_s(gpu.id, 1.0),
            )
            for gpu in topology.gpus
        }
        if tuple(map(max, zip(*speeds, strict=True))) not in speeds:
            return None
        return 0.0


def _in_memory(byte_s: float) -> Rates:
    """Rows looked up and updated in a memory that takes `byte_s` a byte."""
    return Rates(
        lookup_s=(ID_BYTES + SORT_BYTES_PER_LOOKUP) * byte_s,
        lookup_byte_s=2 * byte_s,
        row_byte_s=2 * byte_s,
    )


@lru_cache(maxsize=64)
def _costs(
    hbm_bytes_per_s: float,
    link_bytes_per_s: float,
    dram_bytes_per_s: float,
    exchange_byte_s: float,
) -> UnitCosts:
    hbm, link, dram = 1 / hbm_bytes_per_s, 1 / link_bytes_per_s, 1 / dram_bytes_per_s
    device = ReadCosts(_in_memory(hbm))
    staged = ReadCosts(
        _in_memory(hbm) + Rates(row_byte_s=2 * hbm),
        Rates(row_byte_s=link),
        Rates(row_byte_s=2 * dram),
    )
    in_place = ReadCosts(
        Rates(lookup_s=(ID_BYTES + SORT_BYTES_PER_LOOKUP) * hbm, lookup_byte_s=hbm),
        Rates(lookup_byte_s=link, row_byte_s=link),
        Rates(lookup_byte_s=dram, row_byte_s=2 * dram),
    )
    # Vectors come for the lookup, and their gradients go back after it.
    vectors = Rates(vector_byte_s=2 * link)
    by_host = ReadCosts(Rates(vector_byte_s=2 * hbm), vectors, _in_memory(dram))
    return UnitCosts(
        device=device,
        staged=staged,
        uva=in_place,
        host=by_host,
        hit=device,
        miss=staged,
        output_byte_s=2 * hbm,
        exchange_byte_s=exchange_byte_s,
    )
