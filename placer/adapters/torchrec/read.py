"""Read TorchRec's `ShardingPlan` as a plan, which can be shown, verified and compared."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from placer.adapters.torchrec.export import require_torchrec
from placer.adapters.torchrec.sharding import sharding_of
from placer.adapters.torchrec.split import split_tables_of
from placer.errors import PlanMismatchError
from placer.plan.fields import Lookup, Memory, RowOrder, Shard, SolverRecord
from placer.plan.memory import buffered
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.tables import OptimizerName, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

LOOKUPS: dict[str, Lookup] = {
    "dense": "device",
    "fused": "device",
    "fused_triton": "device",
    "fused_uvm": "uva",
    "fused_uvm_caching": "cached",
}
"""Lookup kind of each TorchRec kernel, except its kernels for drives and inference."""

_MS = 1e-3

DEFAULT_LOAD_FACTOR = 0.2
"""Load factor of caches that do not name one (TorchRec's ``UVM_CACHING_RATIO``)."""


def from_sharding_plan(
    sharding_plan: Any,
    module: Any,
    topology: Any,
    batch_size: int = 1,
    *,
    profile: Profile | None = None,
    optimizer: OptimizerName = "rowwise_adagrad",
    pooling_factors: Mapping[str, float] | None = None,
) -> Plan:
    """Read TorchRec's `ShardingPlan` of a model as a plan.

    The model `module` must not be sharded yet. The parts that `split_tables` made become one table
    again. The topology is placer's or TorchRec's. `batch_size` is in samples per GPU and step. With
    a profile, its tables are used, and shards get the buffers that `roofline` counts. `optimizer`
    applies to tables whose module names none. TorchRec's modules do not know the mean lookups per
    bag: give them as `pooling_factors`, by feature; the default is 1.

    Raises PlanMismatchError if a table is missing, a kernel or sharding type has no counterpart, or
    TorchRec would accept the plan but train the wrong rows: with uneven row blocks, or blocks out
    of rank order. Raises BackendError if torchrec is not installed.
    """
    with require_torchrec():
        from placer.adapters.torchrec.modules import tables_of
    machine = topology if isinstance(topology, Topology) else topology_of(topology)
    split = split_tables_of(module)
    tables: dict[str, Table] = {}
    shards: list[Shard] = []
    hot_ids = {}
    for name, model_table in tables_of(module).items():
        table = model_table.as_table(optimizer, dict(pooling_factors or {}))
        path = model_table.path
        sharding = (sharding_plan.plan.get(path) or {}).get(name)
        if sharding is None:
            raise PlanMismatchError(
                f"table {name!r} of {path or 'the model'!r} is not in the sharding plan"
            )
        own = _shards_of(machine, table, sharding)
        if name in split:
            part, start = split[name].part, split[name].part.start
            table = replace(part.table, name=part.source, rows=split[name].rows)
            own = [
                replace(shard, table=part.source, rows=(start + first, start + stop, step))
                for shard in own
                for first, stop, step in [shard.rows]
            ]
            hot_ids[table.name] = split[name].ranks.listed
        tables[table.name] = table
        shards += own
    if profile is not None:
        _require_same(tables, profile)
        tables = {name: profile[name].table for name in tables}
        shards = buffered(shards, profile, batch_size * len(machine.gpus))
    order = {name: RowOrder("profile") for name in hot_ids}
    table_values, record = tuple(tables.values()), SolverRecord("torchrec")
    return Plan(table_values, machine, tuple(shards), order, hot_ids, batch_size, record)


def topology_of(topology: Any) -> Topology:
    """Convert the topology of TorchRec's planner to placer's.

    Rank r becomes ``gpu:r``. TorchRec limits host memory for each rank; a host gets the sum over
    its ranks. If ranks compute on CPUs, a rank's host memory becomes its GPU's memory, because
    there is no other tier. Launches take no time, as in TorchRec.
    """
    local = topology.local_world_size
    on_cpu = topology.compute_device == "cpu"
    hosts: dict[str, int] = {}
    gpus = []
    for device in topology.devices:
        host = f"host:{device.rank // local}"
        own = device.storage.ddr if on_cpu else device.storage.hbm
        hosts[host] = hosts.get(host, 0) + (0 if on_cpu else max(0, int(device.storage.ddr)))
        bandwidth = topology.ddr_mem_bw if on_cpu else topology.hbm_mem_bw
        gpus.append(Gpu(f"gpu:{device.rank}", host, max(0, int(own)), bandwidth / _MS, 0.0))
    links = []
    for gpu in gpus:
        links.append(Link(gpu.id, gpu.host, "pcie", topology.hbm_to_ddr_mem_bw / _MS))
        links.append(Link(gpu.id, gpu.host, "nvlink", topology.intra_host_bw / _MS))
    if len(hosts) > 1:
        links += [
            Link(host, "network", "network", topology.inter_host_bw / _MS * local) for host in hosts
        ]
    return Topology(
        f"{topology.world_size} ranks of TorchRec",
        tuple(gpus),
        tuple(Host(name, size, topology.ddr_mem_bw / _MS) for name, size in hosts.items()),
        tuple(links),
        emulated=on_cpu,
    )


def _shards_of(machine: Topology, table: Table, sharding: Any) -> list[Shard]:
    if sharding.compute_kernel not in LOOKUPS:
        raise PlanMismatchError(
            f"table {table.name!r} has kernel {sharding.compute_kernel!r}; plans know "
            f"{', '.join(LOOKUPS)}"
        )
    lookup = LOOKUPS[sharding.compute_kernel]
    memory: Memory = "hbm" if lookup == "device" else "dram"
    gpus = [gpu.id for gpu in machine.gpus]
    if sharding.sharding_type == "data_parallel":
        whole = ((0, table.rows, 1), (0, table.dim))
        return [Shard(table.name, *whole, tuple(gpus), "hbm", "device")]
    factor = DEFAULT_LOAD_FACTOR
    if sharding.cache_params is not None and sharding.cache_params.load_factor is not None:
        factor = sharding.cache_params.load_factor
    shards = []
    for metadata in sharding.sharding_spec.shards:
        rank = metadata.placement.rank()
        if rank is None or not 0 <= rank < len(gpus):
            raise PlanMismatchError(
                f"table {table.name!r} has a shard on rank {rank}, but {machine.name!r} has "
                f"{len(gpus)} GPUs"
            )
        (row, column), (rows, width) = metadata.shard_offsets, metadata.shard_sizes
        if not rows:
            continue
        place = (row, row + rows, 1), (column, column + width), (gpus[rank],)
        cache_rows = min(rows, max(1, round(factor * rows))) if lookup == "cached" else 0
        shards.append(Shard(table.name, *place, memory, lookup, cache_rows))
    if sharding.sharding_type in ("row_wise", "table_row_wise", "grid_shard"):
        sharding_of(machine, table, shards)  # TorchRec accepts other blocks but trains wrong rows.
    return shards


def _require_same(tables: Mapping[str, Table], profile: Profile) -> None:
    for name, table in tables.items():
        known = profile[name].table
        if (known.rows, known.dim) != (table.rows, table.dim):
            raise PlanMismatchError(
                f"table {name!r} is {table.rows} × {table.dim} in the model but "
                f"{known.rows} × {known.dim} in the profile"
            )
