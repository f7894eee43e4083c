"""Make the plan of one rank's part of a shared plan."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from placer.executor.distributed.placement.division import RowSlice, Target, holders_of
from placer.plan.fields import RowOrder, Shard
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

_GPU, _HOST = "gpu:0", "host:0"


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The plan of one process, and the origin of its shards."""

    plan: Plan
    # For each local shard: the index of its shard in the whole plan, and its rows there.
    origins: tuple[tuple[int, RowSlice], ...]


HeldShards = Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, Shard]]]
"""Shards and their indices in the plan, by table and by holding ranks."""


def shards_by_holders(plan: Plan, ranks: Mapping[str, int]) -> HeldShards:
    """Group a plan's shards by table and by the ranks that hold them."""
    held: dict[tuple[str, tuple[int, ...]], list[tuple[int, Shard]]] = defaultdict(list)
    for number, shard in enumerate(plan.shards):
        held[shard.table, holders_of(shard, ranks)].append((number, shard))
    return held


def local_plan(
    plan: Plan,
    targets: Sequence[Target],
    features: Mapping[str, Sequence[Feature]],
    shards: HeldShards,
    optimizers: Mapping[str, OptimizerName],
    gpus: Sequence[Gpu],
) -> LocalPlan:
    """Return a plan that holds `targets` on one GPU, which stands for all `gpus`, and one host.

    Targets with part of a table's rows have the order of their parts. Whole tables keep their row
    order. `features` has the features that read each target, by its name.
    """
    tables: list[Table] = []
    local: list[tuple[Shard, tuple[int, RowSlice]]] = []
    orders, hot_ids = {}, {}
    for target in targets:
        whole, read_by = target.table, tuple(features.get(target.name, ()))
        optimizer = optimizers[whole.name]
        table = Table(target.name, target.rows, target.width, whole.dtype, optimizer, read_by)
        tables.append(table)
        local += [
            (own, (number, rows))
            for number, shard in shards[whole.name, target.holders]
            for own, rows in _within(shard, target)
        ]
        if target.by_id and whole.name in plan.hot_ids:
            orders[target.name] = RowOrder(plan.order_of(whole.name).kind)
            hot_ids[target.name] = plan.hot_ids[whole.name]
    topology = _machine(plan.topology, gpus)
    own_shards = tuple(shard for shard, _ in local)
    own = Plan(tuple(tables), topology, own_shards, orders, hot_ids, plan.batch_size)
    return LocalPlan(own, tuple(origin for _, origin in local))


def _within(shard: Shard, target: Target) -> Iterator[tuple[Shard, RowSlice]]:
    """Yield a shard's parts in a target, numbered by the target; and their original rows."""
    first, last = max(shard.cols[0], target.cols[0]), min(shard.cols[1], target.cols[1])
    if first >= last:
        return
    for part, base in zip(target.parts, target.bases, strict=True):
        met = part.meet(RowSlice(*shard.rows))
        if met is None:
            continue
        rows = part.local(met)
        share = met.count / shard.row_count
        local = replace(
            shard,
            table=target.name,
            rows=(base + rows.start, base + rows.stop, rows.step),
            cols=(first - target.cols[0], last - target.cols[0]),
            devices=(_GPU,),
            cache_rows=_share(shard.cache_rows, share, met.count, int(shard.cache_rows > 0)),
            staging_rows=_share(shard.staging_rows, share, met.count, 0),
            buffer_bytes=int(shard.buffer_bytes * share * (last - first) / shard.width),
        )
        yield local, met


def _share(rows: int, share: float, most: int, least: int) -> int:
    return max(least, min(most, int(rows * share)))


def _machine(topology: Topology, gpus: Sequence[Gpu]) -> Topology:
    """Return a topology of one GPU, with the memory of all `gpus`, and one host.

    The host has all hosts' memory, as capacities were checked for the whole plan.
    """
    model = gpus[0] if gpus else topology.gpus[0]
    dram_bytes = sum(host.memory_bytes for host in topology.hosts)
    # A host without a GPU keeps in DRAM what others keep in HBM, such as row maps.
    hbm_bytes = sum(gpu.memory_bytes for gpu in gpus) if gpus else dram_bytes
    gpu = Gpu(_GPU, _HOST, hbm_bytes, model.hbm_bytes_per_s, model.launch_s)
    drives = [host.drive for host in topology.hosts if host.drive is not None]
    drive = replace(drives[0], memory_bytes=sum(d.memory_bytes for d in drives)) if drives else None
    host = Host(_HOST, dram_bytes, topology.hosts[0].dram_bytes_per_s, drive)
    link = Link(_GPU, _HOST, "pcie", topology.host_link_bytes_per_s(model.id))
    return Topology(f"a rank of {topology.name}", (gpu,), (host,), (link,))
