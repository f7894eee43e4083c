"""Planners of others on instances of the library; nothing of theirs is part of this project.

They know less of a machine's memory than the library counts: most leave out buffers. So each is run
with all of a GPU's memory, then with less and less, until its plan fits (`fitting`). What they
choose is judged by the library's equation, whatever they were made to minimise.
"""

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expand import Recipe
from outcome import Outcome
from plans import plan_of

from placer import Problem
from placer.plan.memory import device_memory

PLANNERS = {
    "torchrec": "other_torchrec",
    "hugectr": "other_hugectr",
    "neuroshard": "other_neuroshard",
    "recshard": "other_recshard",
}
"""The module of each family; what follows a hyphen is its variant."""

SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Of each GPU's memory, that planners are told they have."""

PATIENCE_S = 30.0
"""Processor seconds after which no smaller share is tried."""

Shards = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """What a planner of others is asked."""

    recipe: Recipe
    problem: Problem
    variant: str
    time_limit_s: float
    checkout: Path | None

    def need_checkout(self, where: str) -> Path:
        """The folder of the planner's own code; ends the program without one."""
        if self.checkout is None or not (self.checkout / where).is_dir():
            sys.exit(f"give --checkout, a folder with {where}")
        return self.checkout / where


class DoesNotApplyError(Exception):
    """The planner has no plan for such a problem, whatever its search would do."""


def run(
    planner: str, recipe: Recipe, problem: Problem, time_limit_s: float, checkout: Path | None
) -> Outcome:
    """Run another's planner on an instance."""
    family, _, variant = planner.partition("-")
    if family not in PLANNERS:
        sys.exit(f"no planner is called {planner!r}; there are {', '.join(PLANNERS)}, and ours")
    module = importlib.import_module(PLANNERS[family])
    task = Task(recipe, problem, variant, time_limit_s, checkout)
    started = time.process_time()
    try:
        if problem.constraints:
            raise DoesNotApplyError("it knows no such constraints")
        shards, options = module.run(task)
    except DoesNotApplyError as error:
        return Outcome(None, _facts({}, started) | {"reason": f"does not apply: {error}"})
    reason = {} if shards is not None else {"reason": options.pop("reason")}
    return Outcome(shards, _facts(options, started) | reason)


def _facts(options: dict[str, Any], started: float) -> dict[str, Any]:
    used_s = round(time.process_time() - started, 2)
    return {"version": options.pop("version", ""), "options": options, "seconds": used_s}


def fitting(
    problem: Problem, plan_with: Callable[[float], Shards | str]
) -> tuple[Shards | None, dict[str, Any]]:
    """The first plan that fits, of planners that are told they have a share of the memory.

    `plan_with` takes the share, and answers with shards or says why there are none.
    """
    reason, started = "", time.process_time()
    for share in SHARES:
        shards = plan_with(share)
        if isinstance(shards, str):
            # With less memory there would be none either.
            return None, {"reason": reason or shards, "memory_share": share}
        short = short_bytes(problem, shards)
        if not short:
            return shards, {"memory_share": share}
        reason = f"its plans take more memory than there is, up to {max(short.values())} bytes"
        if time.process_time() - started > PATIENCE_S:
            break
    return None, {"reason": reason, "memory_share": share}


def short_bytes(problem: Problem, shards: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Devices that lack memory for shards and their buffers, and how much."""
    memory = device_memory(plan_of(problem, shards))
    return {name: -use.free_bytes for name, use in memory.items() if use.free_bytes < 0}


def need_all_in_hbm(problem: Problem) -> None:
    """Refuse problems whose tables are larger than all HBM, for planners that know only HBM."""
    if problem.profile.total_bytes > sum(gpu.memory_bytes for gpu in problem.topology.gpus):
        raise DoesNotApplyError("it places all rows in HBM, and they take more than there is")


def need_equal_gpus(problem: Problem) -> int:
    """GPUs of a host, for planners to whom all hosts and GPUs are alike."""
    topology = problem.topology
    kinds = {(g.memory_bytes, g.hbm_bytes_per_s) for g in topology.gpus}
    counts = {len(topology.gpus_of(host.id)) for host in topology.hosts}
    if len(kinds) > 1 or len(counts) > 1:
        raise DoesNotApplyError("its GPUs and hosts are all alike")
    return counts.pop()


def shard_json(
    table: str, rows: Sequence[int], cols: Sequence[int], device: str, lookup: str = "device"
) -> dict[str, Any]:
    """A shard on one device, as short plans have them."""
    return {
        "table": table,
        "rows": list(rows),
        "cols": list(cols),
        "devices": [device],
        "memory": "hbm" if lookup == "device" else "dram",
        "lookup": lookup,
    }
