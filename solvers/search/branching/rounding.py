"""Round a node's relaxation to a placement."""

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, TableShard
from solvers.search.branching.formulation import Formulation
from solvers.search.branching.nodes import Node, Relaxed


def rounded(
    instance: Instance, formulation: Formulation, node: Node, relaxation: Relaxed
) -> Assignment | None:
    """Give each table the option of its largest share, and each shard its main group.

    Within a group, the GPU with the fewest shards serves the next one. Return None if that does not
    fit or violates constraints. The assignment is of `instance`.
    """
    f = formulation
    gpus = _gpus_of_groups(formulation, node)
    left, shards_on = relaxation.served.copy(), np.zeros(instance.gpus)
    pairs: list[tuple[TableShard, int]] = []
    replicas: list[TableShard] = []
    # Tables that stay together are on the GPU of the first of them.
    before, at_gpu = {other: one for one, other in f.together}, dict[int, int]()
    for table in range(instance.tables):
        at = np.flatnonzero(f.table_of[node.options] == table)
        number = int(node.options[at[relaxation.chosen[at].argmax()]])
        option, used = f.options[number], set[int]()
        replica = instance.replica(table, option)
        if replica is not None:
            replicas.append(replica)
        parts = np.flatnonzero(f.option_of == number)
        for shard in instance.shards(table, option):
            if shard.home_gpu is not None:
                pairs.append((shard, shard.home_gpu))
                continue
            mine = parts[f.width_of[parts] == instance.arena_of(shard)[2]]
            wanted = np.argsort(-left[mine].sum(axis=0), kind="stable").tolist()
            group = next((g for g in wanted if set(gpus[g]) - used), None)
            if group is None:
                return None
            gpu = min(set(gpus[group]) - used, key=lambda gpu: (shards_on[gpu], gpu))
            gpu = at_gpu[table] = at_gpu.get(before.get(table, -1), gpu)
            of_group = mine[f.kind_of[mine] == node.groups[group].kind]
            left[of_group, group] -= 1 / max(1, of_group.size)
            shards_on[gpu] += 1
            used.add(gpu)
            pairs.append((shard, gpu))
    for shard, gpu in pairs:
        if not instance.may_serve(shard, gpu):
            return None
    return Assignment.of(instance, pairs, replicas)


def _gpus_of_groups(formulation: Formulation, node: Node) -> list[list[int]]:
    """Return the GPUs of each of a node's groups."""
    instance = formulation.instance
    hbm = (instance.hbm_bytes / formulation.unit_bytes).tolist()
    free: dict[tuple[int, float, int], list[int]] = {}
    for gpu, of in enumerate(zip(instance.kind_of_gpu, hbm, formulation.pins_of_gpu, strict=True)):
        free.setdefault(of, []).append(gpu)
    return [
        [free[group.kind, group.hbm, group.pins].pop(0) for _ in range(group.gpus)]
        for group in node.groups
    ]
