"""RecShard's integer program, from its paper (Sethi et al. 2022, doi:10.1145/3503222.3507777).

Each table is on one GPU with its hottest rows in HBM and the others in the host's memory, read in
place. A binary variable says that table j is on GPU m with the i-th of `STEPS` + 1 shares of
its lookups served from HBM. What is minimised is the busiest GPU's time of the lookups:

    min C   subject to   Σ over j, i of y[m,j,i] · B · l_j · w_j · (i/S / HBM + (1 − i/S) / link)
                         ≤ C on each GPU m

and each GPU's HBM, and its part of its host's memory. The paper takes 100 steps and Gurobi; here
HiGHS solves it, in SciPy, with fewer.
"""

from importlib.metadata import version
from typing import Any

import numpy as np
from others import Shards, Task, fitting, need_equal_gpus, shard_json
from plans import plan_of
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from placer import Problem
from placer.plan.memory import device_memory

STEPS = 10


def run(task: Task) -> tuple[Shards | None, dict[str, Any]]:
    """Solve the program within `task.time_limit_s` for each share of memory."""
    local = need_equal_gpus(task.problem)
    shards, options = fitting(
        task.problem, lambda share: _plan(task.problem, local, share, task.time_limit_s)
    )
    found = {"steps": STEPS, "time_limit_s": task.time_limit_s}
    return shards, options | found | {"version": f"scipy {version('scipy')}"}


def _plan(problem: Problem, local: int, share: float, time_limit_s: float) -> Shards | str:
    topology, profiles = problem.topology, problem.profile.tables
    gpus, gpu, steps = len(topology.gpus), topology.gpus[0], np.arange(STEPS + 1) / STEPS
    # Its memory is what the model's other needs leave: here, buffers that any plan has.
    whole = [
        shard_json(one.name, (0, one.table.rows, 1), (0, one.table.dim), gpu.id) for one in profiles
    ]
    buffers = device_memory(plan_of(problem, whole))[gpu.id].buffer_bytes / gpus
    hbm = share * gpu.memory_bytes - buffers
    dram = topology.hosts[0].memory_bytes / local
    link = topology.host_link_bytes_per_s(gpu.id)
    hot = np.array([[one.cdf.hot_rows_for(step) for step in steps] for one in profiles])
    rows = np.array([one.table.rows for one in profiles])
    hot[:, -1] = rows
    row_bytes = np.array([one.table.bytes_per_row() for one in profiles])
    read = np.array(
        [one.table.lookups_per_sample * one.table.weight_bytes_per_row() for one in profiles]
    )
    per_byte = steps / gpu.hbm_bytes_per_s + (1 - steps) / link
    cost = problem.global_batch_size * read[:, None] * per_byte
    in_hbm = hot * row_bytes[:, None]
    in_dram = (rows[:, None] - hot) * row_bytes[:, None]
    chosen = _solve(cost, in_hbm / hbm, in_dram / dram, gpus, time_limit_s)
    if chosen is None:
        return "no plan: HiGHS found none in its time"
    shards: Shards = []
    for profile, number_hot, (at, step) in zip(profiles, hot, chosen, strict=True):
        table, edge = profile.table, int(number_hot[step])
        cols, device = (0, table.dim), topology.gpus[at].id
        if edge:
            shards.append(shard_json(table.name, (0, edge, 1), cols, device))
        if edge < table.rows:
            shards.append(shard_json(table.name, (edge, table.rows, 1), cols, device, "uva"))
    return shards


def _solve(
    cost: Any, in_hbm: Any, in_dram: Any, gpus: int, time_limit_s: float
) -> list[tuple[int, int]] | None:
    """GPU and step of each table; arrays are of shape (tables, steps), memory as a share."""
    tables, steps = cost.shape
    one_gpu = tables * steps
    count = gpus * one_gpu + 1  # The last variable is the busiest GPU's time.
    scale = cost[:, -1].sum() / gpus or 1.0
    places = np.arange(gpus * one_gpu)
    gpu_of, table_of = places // one_gpu, places % one_gpu // steps

    def matrix(values: Any, rows: Any, size: int, last: float = 0.0) -> Any:
        ends = np.full(size, count - 1)
        data = np.concatenate((np.broadcast_to(values, places.shape), np.full(size, last)))
        at = (np.concatenate((rows, np.arange(size))), np.concatenate((places, ends)))
        return coo_array((data, at), shape=(size, count)).tocsr()

    every = [np.tile(values.ravel(), gpus) for values in (cost / scale, in_hbm, in_dram)]
    constraints = [
        LinearConstraint(matrix(1.0, table_of, tables), 1.0, 1.0),
        LinearConstraint(matrix(every[0], gpu_of, gpus, -1.0), -np.inf, 0.0),
        LinearConstraint(matrix(every[1], gpu_of, gpus), -np.inf, 1.0),
        LinearConstraint(matrix(every[2], gpu_of, gpus), -np.inf, 1.0),
    ]
    upper = np.ones(count)
    upper[-1] = np.inf
    goal, integral = np.zeros(count), np.ones(count)
    goal[-1], integral[-1] = 1.0, 0.0
    found = milp(
        goal,
        integrality=integral,
        bounds=Bounds(0.0, upper),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-3},
    )
    if found.x is None:
        return None
    picked = found.x[:-1].reshape(gpus, tables, steps) > 0.5
    return [tuple(np.argwhere(picked[:, table])[0].tolist()) for table in range(tables)]
