"""From TorchRec's `ShardingPlan` to a plan, so that it can be shown, verified and compared."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from placer.adapters.torchrec.export import require_torchrec
from placer.adapters.torchrec.sharding import Part, sharding_of
from placer.adapters.torchrec.split import split_tables_of
from placer.errors import PlanMismatchError
from placer.plan.buffers import buffered
from placer.plan.fields import RowOrder, SolverRecord
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Shard
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
"""How rows are read, by TorchRec's kernel. Its kernels for disks and inference are left out."""

_MS = 1e-3

DEFAULT_LOAD_FACTOR = 0.2
"""The load factor of caches that name none (TorchRec's ``UVM_CACHING_RATIO``)."""


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

    The model, `module`, is not sharded yet. Tables that `split_tables` made become the hot and the
    cold rows of one table again. The topology is placer's or TorchRec's, `batch_size` samples per
    GPU and step. With a profile, the tables are the profile's, and shards have the buffers that
    `roofline` counts. `optimizer` is that of tables whose module names none, `pooling_factors` the
    mean lookups of a bag by feature, 1 by default, which TorchRec's modules do not know.

    Raises PlanMismatchError if a table is missing, a kernel or sharding type has no counterpart, or
    TorchRec would accept the plan and train it wrong: uneven row blocks, or blocks not in the order
    of ranks. Raises BackendError if torchrec is not installed.
    """
    require_torchrec()
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
            part, parts, ranks = split[name]
            rows = max(one.stop for one in parts)
            table = replace(part.table, name=part.source, rows=rows)
            own = [_as_ranks(shard, part) for shard in own]
            hot_ids[table.name] = ranks.listed
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
    """Return the machine of TorchRec's planner as our topology.

    Rank r is ``gpu:r``. TorchRec takes host memory as a cap for each rank; ours is one for each
    host, the sum of its ranks'. Where ranks compute on CPUs, each rank's memory is taken for its
    GPU's, because it is the only tier that there is. Launches take no time, as in TorchRec.
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
        shards.append(
            Shard(
                table.name,
                (row, row + rows, 1),
                (column, column + width),
                (gpus[rank],),
                "hbm" if lookup == "device" else "dram",
                lookup,
                min(rows, max(1, round(factor * rows))) if lookup == "cached" else 0,
            )
        )
    if sharding.sharding_type in ("row_wise", "table_row_wise", "grid_shard"):
        sharding_of(machine, table, shards)  # TorchRec would take others, and train them wrong.
    return shards


def _as_ranks(shard: Shard, part: Part) -> Shard:
    first, last, step = shard.rows
    return replace(shard, table=part.source, rows=(part.start + first, part.start + last, step))


def _require_same(tables: Mapping[str, Table], profile: Profile) -> None:
    for name, table in tables.items():
        known = profile[name].table
        if (known.rows, known.dim) != (table.rows, table.dim):
            raise PlanMismatchError(
                f"table {name!r} is {table.rows} × {table.dim} in the model but "
                f"{known.rows} × {known.dim} in the profile"
            )
