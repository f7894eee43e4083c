"""Plans as Hugging Face's ``device_map``: which device each embedding module is on.

accelerate places modules whole: one on a GPU keeps its weights there, one on ``cpu`` keeps them in
host memory. `dispatch_model` copies the whole weight of a ``cpu`` module to a GPU for each forward
pass, unless the main device is the CPU.
"""

from collections.abc import Mapping

from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.verify import verify


def to_device_map(plan: Plan, modules: Mapping[str, str] | None = None) -> dict[str, int | str]:
    """Device of each table: the number of a GPU, or ``cpu`` where the host pools the rows.

    Parameters
    ----------
    plan : Plan
        For one host: a device map is for one process.
    modules : mapping of table name to module path, optional
        Where the model has its tables; by default under their names.

    Raises
    ------
    PlanError
        If the plan is not sound.
    PlanMismatchError
        If a table is not whole on one device, the plan is for several hosts, or `modules` lacks
        a table.
    """
    verify(plan)
    hosts = {gpu.host for gpu in plan.topology.gpus}
    if len(hosts) > 1:
        raise PlanMismatchError(
            f"the plan is for {len(hosts)} hosts; a device_map is for one process on one host"
        )
    numbers = plan.topology.gpu_numbers
    placed: dict[str, int | str] = {}
    for table in plan.tables:
        name = table.name if modules is None else modules.get(table.name)
        if name is None:
            raise PlanMismatchError(f"modules does not say where the model has {table.name!r}")
        shards = [shard for shard in plan.shards_by_table[table.name] if shard.row_count]
        shards = shards or list(plan.shards_by_table[table.name][:1])
        if len(shards) != 1 or len(shards[0].devices) != 1:
            raise PlanMismatchError(
                f"table {table.name!r} has {len(shards)} shards on "
                f"{len({device for shard in shards for device in shard.devices})} devices; a "
                "device_map has whole tables on one device each"
            )
        (shard,) = shards
        if shard.lookup not in ("device", "host"):
            raise PlanMismatchError(
                f"table {table.name!r} is in DRAM and a GPU reads its rows (lookup "
                f"{shard.lookup!r}); in a device_map it would be copied whole for each step"
            )
        placed[name] = numbers[shard.devices[0]] if shard.lookup == "device" else "cpu"
    return placed
