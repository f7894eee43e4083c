"""Hashes all that the plan of a search depends on: equal keys, equal searches."""

import hashlib
import importlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import placer
from cost_models import CostModel
from placer.files import sha256_json
from placer.problem import Problem
from solvers.result import Limits, Solver

PACKAGES = ("placer", "cost_models", "solvers")
"""Those whose source decides what is found; nothing else is known well enough to be kept."""

_LIBRARIES = ("ortools", "numpy", "numba")


def key_of(problem: Problem, cost_model: CostModel, solver: Solver, limits: Limits) -> str | None:
    """Hash a search, as 64 hexadecimal digits; return None where it cannot be known.

    It is of the problem's own hash (`Problem.sha256`: tables, access CDFs, locality, machine,
    constraints, batch, pipeline, dense layers; memory that is reserved is taken off the machine),
    the exact counts, which decide the row order, the cost model with its constants, the solver with
    its parameters, gap, seed, threads and steps, and the versions of `PACKAGES`, of Python and of
    the libraries that search. The source of `PACKAGES` enters by its content, not by the times of
    its files: a change of one line makes other keys. The time limit does not enter; see
    `CachedSolver`.

    Cost models and solvers of a user's own have no key: their source is not known.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solver
    >>> problem = Problem(named_workload("random-3@7"), Topology.parse("8xh100"), batch_size=64)
    >>> search = problem, Roofline(), solver("greedy-cost")
    >>> key_of(*search, Limits(seed=1)) == key_of(*search, Limits(seed=2))
    False
    """
    identity = getattr(cost_model, "identity", None)
    if identity is None or not (_is_ours(cost_model) and _is_ours(solver)):
        return None
    facts = {
        "problem": problem.sha256,
        "chips": [gpu.chip for gpu in problem.topology.gpus],
        "counts": [None if one.counts is None else one.counts.sha256 for one in problem.profile],
        "cost_model": [_class_of(cost_model), cost_model.name, identity()],
        "solver": [_class_of(solver), solver.name, repr(sorted(vars(solver).items()))],
        "limits": [limits.gap, limits.seed, limits.threads, limits.max_steps],
        "versions": [placer.__version__, *map(_version, _LIBRARIES)],
        "python": [platform.python_version(), platform.machine()],
        "source": source_sha256(),
    }
    return sha256_json(facts)


def source_sha256(packages: tuple[str, ...] = PACKAGES) -> str:
    """Hash of all modules of packages, by their names and contents."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(str(importlib.import_module(package).__file__)).parent
        for file in sorted(root.rglob("*.py")):
            name, content = file.relative_to(root).as_posix(), file.read_bytes()
            digest.update(f"{package}/{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _is_ours(one: object) -> bool:
    """Return true if the source of a value's class is part of `source_sha256`."""
    return type(one).__module__.partition(".")[0] in PACKAGES


def _class_of(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
