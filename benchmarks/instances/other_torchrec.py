"""TorchRec's own planner, with each of its proposers, as benchmarks/torchrec_planner.py runs it."""

import sys
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from expand import HERE
from others import DoesNotApplyError, Shards, Task, fitting, need_equal_gpus
from plans import shards_json

from placer import PlacerError
from placer.adapters.torchrec import from_sharding_plan


def run(task: Task) -> tuple[Shards | None, dict[str, Any]]:
    """Plan with the proposer `task.variant`; its plan in our words."""
    sys.path.insert(0, str(HERE.parent))
    from torchrec_planner import Contender, quiet

    quiet()
    problem = task.problem
    need_equal_gpus(problem)
    profiles = problem.profile
    if any(f.pooling == "max" for one in profiles for f in one.table.features):
        raise DoesNotApplyError("it has no pooling max")

    def plan_with(share: float) -> Shards | str:
        gpus = tuple(
            replace(gpu, memory_bytes=int(gpu.memory_bytes * share))
            for gpu in problem.topology.gpus
        )
        told = replace(problem, topology=replace(problem.topology, gpus=gpus))
        contender = Contender(told)
        found = contender.run(task.variant or "default")
        if found.rating is None:
            return f"no plan: {found.message}"
        plan = from_sharding_plan(
            found.rating.sharding_plan,
            contender.model,
            problem.topology,
            problem.batch_size,
            profile=problem.profile,
        )
        return shards_json(plan)

    try:
        shards, options = fitting(problem, plan_with)
    except PlacerError as error:
        raise DoesNotApplyError(str(error)) from error
    return shards, options | {"version": version("torchrec")}
