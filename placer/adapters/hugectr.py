"""Convert plans for HugeCTR: the arguments of `EmbeddingCollectionConfig.shard`.

``shard_matrix`` lists the tables of each GPU. ``shard_strategy`` says which tables are
model-parallel (``mp``) and which are replicated (``dp``). Take a model-parallel table with c column
slices on n GPUs, in ascending order. The first n / c GPUs hold the first column slice, the next
n / c the second, and so on. The n / c GPUs of a slice divide its rows by id modulo n / c. All rows
are in HBM, column slices are equally wide, and a GPU holds one shard of a table. This is the layout
of HugeCTR 23 (`split_column_wise_sharding_config`, embedding_collection.cpp).
"""

from collections.abc import Mapping
from typing import Any

from placer.errors import PlanMismatchError
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing, verify
from placer.tables import Table


def to_hugectr(plan: Plan) -> dict[str, Any]:
    """Return ``shard_matrix`` and ``shard_strategy`` of a plan as JSON types, for ``json.dump``.

    A table with several column slices is ``[name, slices]``. HugeCTR wants tuples for these lists
    and for the pairs of ``shard_strategy``; see `as_arguments`.

    Raises PlanError if the plan is not sound. Raises PlanMismatchError if HugeCTR has no such
    placement. The message names the table and says why.
    """
    verify(plan)
    refuse_growing(plan, "HugeCTR")
    numbers = plan.topology.gpu_numbers
    matrix: list[list[str]] = [[] for _ in numbers]
    parallel: list[str | list[Any]] = []
    replicated: list[str] = []
    for table in plan.tables:
        shards = [shard for shard in plan.shards_by_table[table.name] if shard.row_count]
        gpus, slices = _placed(plan, table, shards, numbers)
        for gpu in gpus:
            matrix[gpu].append(table.name)
        if len(shards) == 1 and len(shards[0].devices) > 1:
            replicated.append(table.name)
        else:
            parallel.append([table.name, slices] if slices > 1 else table.name)
    empty = [number for number, tables in enumerate(matrix) if not tables]
    if empty:
        raise PlanMismatchError(
            f"{plan.topology.gpus[empty[0]].id} holds no table; HugeCTR wants one on each GPU"
        )
    strategy: list[list[Any]] = [["mp", parallel], ["dp", replicated]]
    return {"shard_matrix": matrix, "shard_strategy": [own for own in strategy if own[1]]}


def as_arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with tuples, for ``ebc_config.shard(**as_arguments(document))``."""
    return {
        "shard_matrix": document["shard_matrix"],
        "shard_strategy": [
            (kind, [tuple(own) if isinstance(own, list) else own for own in tables])
            for kind, tables in document["shard_strategy"]
        ],
    }


def _placed(
    plan: Plan, table: Table, shards: list[Shard], numbers: dict[str, int]
) -> tuple[list[int], int]:
    """Return the GPUs of a table, ascending, and its number of column slices."""

    def refuse(reason: str) -> PlanMismatchError:
        return PlanMismatchError(f"HugeCTR cannot place table {table.name!r} so: {reason}")

    if not shards:
        raise refuse("it has no rows")
    if any(feature.pooling == "max" for feature in table.features):
        raise refuse(
            "it has features with pooling max; HugeCTR pools by sum or mean, or not at all"
        )
    for shard in shards:
        if shard.memory != "hbm":
            raise refuse(f"rows {list(shard.rows)} are in DRAM; it keeps all rows in HBM")
        if len(shard.devices) > 1 and (
            len(shards) > 1 or {numbers[gpu] for gpu in shard.devices} != set(numbers.values())
        ):
            raise refuse(
                f"rows {list(shard.rows)} are replicated on {len(shard.devices)} GPUs; it "
                f"replicates whole tables on all {len(numbers)}"
            )
    if len(shards[0].devices) > 1:
        return sorted(numbers.values()), 1
    by_gpu = sorted(shards, key=lambda shard: numbers[shard.devices[0]])
    gpus = [numbers[shard.devices[0]] for shard in by_gpu]
    if len(set(gpus)) < len(gpus):
        raise refuse("a GPU holds several shards of it; it can hold one")
    columns = sorted({shard.cols for shard in shards})
    slices, ways = len(columns), len(shards) // len(columns)
    width = table.dim // slices
    if columns != [(width * n, width * (n + 1)) for n in range(slices)] or table.dim % slices:
        raise refuse(f"its {table.dim} columns are not in even column slices")
    if ways > 1 and plan.order_of(table.name).kind != "id":
        raise refuse(
            "it is row-wise in the order of a profile; HugeCTR shards by ids, modulo the GPUs of a "
            "column slice, which would balance other rows"
        )
    for number, shard in enumerate(by_gpu):
        column_slice, way = divmod(number, ways)
        cols = columns[column_slice]
        if shard.cols != cols or range(*shard.rows) != range(way, table.rows, ways):
            raise refuse(
                f"{shard.devices[0]} holds rows {list(shard.rows)} of columns {list(shard.cols)}; "
                f"it would hold rows {[way, table.rows, ways]} of columns {list(cols)}"
            )
    return gpus, slices
