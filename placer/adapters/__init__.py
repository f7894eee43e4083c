"""Convert plans for other trainers: plain PyTorch, TorchRec, HugeCTR, dynamicemb."""

from typing import Any, Literal

from placer.errors import PlacerError
from placer.plan.plan import Plan

TRAINERS = ("torchrec", "hugectr", "dynamicemb")


def document_for(
    trainer: str,
    plan: Plan,
    *,
    module: str = "",
    staged_as: Literal["uva", "cached"] | None = None,
) -> Any:
    """Return a plan as the JSON document that one of `TRAINERS` reads.

    `module` is the path of TorchRec's embedding module in the model. TorchRec cannot stage rows:
    `staged_as` says how it reads staged rows instead. Raises PlacerError if the trainer cannot run
    the plan. The message says what it cannot run.

    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> problem = Problem(named_workload("random-2@1"), Topology.parse("1xh100"), batch_size=64)
    >>> document_for("hugectr", solve(problem, "greedy-size").plan)["shard_matrix"]
    [['t1', 't2']]
    """
    if trainer == "torchrec":
        from placer.adapters import torchrec

        return torchrec.document(plan, module=module, staged_as=staged_as)
    if trainer == "hugectr":
        from placer.adapters.hugectr import to_hugectr

        return to_hugectr(plan)
    if trainer == "dynamicemb":
        from placer.adapters.dynamicemb import table_options

        return table_options(plan, module=module, staged_as=staged_as)
    raise PlacerError(f"no trainer is called {trainer!r}; choose from {', '.join(TRAINERS)}")
