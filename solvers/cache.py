"""A cache of plans on disk, and a solver that takes plans from it and saves new ones.

Each plan is one file in a folder of bounded size. The file has a line with the SHA-256 of the rest,
a line of JSON, and the hot ids as safetensors. It contains no code.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

import placer
from cost_models import CostModel
from placer.constraints.unmet import unmet
from placer.errors import PlacerError
from placer.files.atomic import sha256_json, write_bytes
from placer.files.reading import MOST_JSON_BYTES, LimitError, parse_json, read_limited
from placer.plan.file import from_dict, to_dict
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.result import Limit, Limits, Solver, SolveResult, Termination

FOLDER_VARIABLE = "PLACER_CACHE"
"""The environment variable that names another folder for caches than the user's default."""

MOST_BYTES = 512 << 20
"""Default limit of all plans together: about 2,000 plans of 400 tables without lists of hot ids."""

_NAMES = "[0-9a-f]" * 64 + ".plan"


def default_folder() -> Path:
    """Return the folder of plans: in `FOLDER_VARIABLE`, or ``placer`` in the user's cache folder.

    The latter is ``$XDG_CACHE_HOME`` or ``~/.cache``, by the XDG Base Directory Specification.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute() / "plans"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        home = caches if caches.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        words = f"there is no folder for caches ({error}); name one in {FOLDER_VARIABLE}"
        raise PlacerError(words) from error
    return home / "placer" / "plans"


class CacheSize(NamedTuple):
    """The number of plans in a cache, and the bytes of their files."""

    plans: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans on disk, each under the hash of its search.

    Processes may share a folder, because files appear and disappear whole. If all files together
    exceed `most_bytes`, the least recently used files are removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = PlanCache(folder)
    ...     print(cache.load("0" * 64), cache.size())
    None CacheSize(plans=0, bytes=0)
    """

    folder: Path = field(default_factory=default_folder)
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    def load(self, key: str) -> bytes | None:
        """Return the content saved under a key, or None; raise PlacerError if it is unreadable."""
        path = self.path(key)
        try:
            content = read_limited(path, min(self.most_bytes, MOST_JSON_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, LimitError) as error:
            raise PlacerError(f"it cannot be read: {error}") from error
        with contextlib.suppress(OSError):  # The folder may be read-only.
            os.utime(path)
        return content

    def save(self, key: str, content: bytes) -> None:
        """Write a plan's file, atomically, and remove old files if all are too large together.

        Raises a `PlacerError` if it cannot be written, or is too large by itself.
        """
        if len(content) > min(self.most_bytes, MOST_JSON_BYTES):
            raise PlacerError(f"the plan takes {len(content)} bytes, too many for {self.folder}")
        write_bytes(self.path(key), content)
        files = self._files()
        too_many = sum(size for _, size, _ in files) - self.most_bytes
        for _, size, path in files:
            if too_many <= 0:
                break
            _remove(path)
            too_many -= size

    def path(self, key: str) -> Path:
        """Return the path of the plan with a key."""
        return self.folder / f"{key}.plan"

    def size(self) -> CacheSize:
        """Count the plans and their bytes."""
        files = self._files()
        return CacheSize(len(files), sum(size for _, size, _ in files))

    def clear(self) -> CacheSize:
        """Remove all plans; return their number and bytes."""
        before = self.size()
        for _, _, path in self._files():
            _remove(path)
        return before

    def _files(self) -> list[tuple[int, int, Path]]:
        """List each plan's time of last use, bytes and path, least recently used first."""
        found = []
        for path in self.folder.glob(_NAMES):
            with contextlib.suppress(OSError):  # Another process has removed it.
                status = path.lstat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


MAGIC = "placer-cached-plan-4"

PACKAGES = ("placer", "cost_models", "solvers")
"""The packages whose source is part of a key. Solvers and models of others are not cached."""

_LIBRARIES = ("ortools", "numpy", "numba")

_EXACT = 1e-6
"""Relative difference that sums of floats may have between processors."""


class CachedSolver:
    """A solver with a cache: a repeated search returns the saved plan at once.

    A saved plan is used if the time limit is the same or shorter, or if the plan is proven to be
    within the gap. If nothing can be written, the search runs without the cache. By default, the
    cache is the user's. `note` is called with messages of one line for people.

    "Plans that are kept" in docs/solvers.md says which results are kept and which are used.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from cost_models import Roofline
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solver
    >>> problem = Problem(named_workload("random-3@7"), Topology.parse("2xh100"), batch_size=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = CachedSolver(solver("greedy-cost"), PlanCache(Path(folder)))
    ...     results = [kept.solve(problem, Roofline(), Limits()) for _ in range(2)]
    >>> [result.stats.get("from_cache", False) for result in results]
    [False, True]
    """

    def __init__(
        self,
        solver: Solver,
        cache: PlanCache | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = solver.name
        self._solver, self._cache, self._note = solver, cache, note

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Return the saved result, or search and save the new one. See `Solver.solve`."""
        search = problem, cost_model, limits
        key = key_of(problem, cost_model, self._solver, limits)
        try:
            cache = PlanCache() if self._cache is None else self._cache
        except PlacerError as error:
            self._note(f"plans are not kept: {error}")
            key = None
        if key is None:
            return self._solver.solve(*search)
        try:
            content = cache.load(key)
            kept = None if content is None else kept_result(content, key, *search)
        except PlacerError as error:
            self._note(f"not taken from the cache: {cache.path(key)}: {error}")
            kept = None
        if kept is not None and kept.plan is not None:
            made = kept.plan.provenance.created
            where = f"from the cache in {cache.folder}; --no-cache searches again"
            self._note(f"the plan is that of {made}, {where}")
            return kept
        result = self._solver.solve(*search)
        # If the source was edited during the search, the plan belongs to neither version.
        keep = result.plan is not None and result.termination.limit != "stop"
        if keep and key_of(problem, cost_model, self._solver, limits) == key:
            try:
                cache.save(key, content_of(result, key, limits))
            except PlacerError as error:
                self._note(f"the plan is not kept in the cache: {error}")
        return result


def content_of(result: SolveResult, key: str, limits: Limits) -> bytes:
    """Return the content of the file for a result with a plan."""
    assert result.plan is not None, "only plans are kept"
    document = {
        "key": key,
        "time_limit_s": limits.time_limit_s,
        "plan": to_dict(result.plan),
        "limit": result.termination.limit,
        "detail": result.termination.detail,
        "stats": result.stats,
    }
    ids = {n: np.ascontiguousarray(ids, np.int64) for n, ids in result.plan.hot_ids.items()}
    body = json.dumps(document, default=_plain).encode() + b"\n" + save(ids)
    return f"{MAGIC} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def kept_result(
    content: bytes, key: str, problem: Problem, cost_model: CostModel, limits: Limits
) -> SolveResult | None:
    """Return the result in a file's content; None if these limits allow a longer search.

    Anybody may have written the file, so trust little of it. Names, sizes and the machine are those
    of the problem. The plan is verified, and its step time is computed by the cost model. The bound
    is trusted up to the step time.

    Raises a `PlacerError` if the file is of another kind, cut short, altered or for another key, or
    if the plan breaks a rule, or its step time or bound is impossible.
    """
    first, _, body = content.partition(b"\n")
    magic, *hashes = first.decode("ascii", "replace").split(" ")
    if magic != MAGIC:
        raise PlacerError("it is no plan of this version's cache")
    if [hashlib.sha256(body).hexdigest()] != hashes:
        raise PlacerError("it is cut short or was altered")
    line, _, ids = body.partition(b"\n")
    try:
        document = parse_json(line)
        if document["key"] != key:
            raise PlacerError("it holds the plan of another problem")
        plan = Plan(**from_dict(document["plan"], load(ids)))
        had_time = limits.time_limit_s <= float(document["time_limit_s"])
        limit, detail, stats = document["limit"], str(document["detail"]), dict(document["stats"])
    except (LimitError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise PlacerError(f"it is damaged: {error!r}") from error
    if limit not in (None, *get_args(Limit)):
        raise PlacerError(f"it says that its search ended by {limit!r}")
    profile = problem.profile
    plan = replace(plan, **problem.fields_of_plans)
    for fault in violations(plan) + unmet(plan, problem.constraints):
        raise PlacerError(f"its plan is not sound here: {fault.message}")
    step_s = cost_model.evaluate(problem, plan).step_time_s
    said_s, bound_s = plan.solver.step_time_s or 0.0, plan.solver.bound_s or 0.0
    if not math.isclose(step_s, said_s, rel_tol=_EXACT):
        raise PlacerError(f"it says {said_s} s of a plan that takes {step_s} s")
    if not 0 < bound_s <= step_s * (1 + _EXACT):
        raise PlacerError(f"it says that no plan takes less than {bound_s} s, and its own does")
    bound_s = min(step_s, bound_s)
    is_optimal = step_s <= bound_s * (1 + limits.gap)
    if not is_optimal and not had_time:
        return None
    status: Any = "optimal" if is_optimal else "feasible"
    found: Any = {"step_time_s": step_s, "bound_s": bound_s, "cost_model": cost_model.name}
    record = replace(plan.solver, status=status, seed=limits.seed, **found)
    named: Any = {"profile": profile.reference, "ids_sha256": profile.ids_sha256}
    source = replace(plan.provenance, problem_sha256=problem.sha256, **named)
    end = Termination(status, limit, detail)
    plan = replace(plan, solver=record, provenance=source)
    return SolveResult(plan, end, step_s, bound_s, stats | {"from_cache": True})


def _plain(value: Any) -> Any:
    """Turn a value of a solver's stats into a value of JSON."""
    return value.item() if isinstance(value, np.generic) else str(value)


def key_of(problem: Problem, cost_model: CostModel, solver: Solver, limits: Limits) -> str | None:
    """Return a search's key: a hash of 64 hexadecimal digits; None for a user's model or solver.

    The code below lists what is hashed. It includes the source of `PACKAGES`, so a change of one
    line changes all keys. It does not include the time limit; see `CachedSolver`.

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
    """Return a hash of the names and contents of all modules of some packages."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(str(importlib.import_module(package).__file__)).parent
        for file in sorted(root.rglob("*.py")):
            name, content = file.relative_to(root).as_posix(), file.read_bytes()
            digest.update(f"{package}/{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _is_ours(one: object) -> bool:
    """Return whether the source of a value's class is part of `source_sha256`."""
    return type(one).__module__.partition(".")[0] in PACKAGES


def _class_of(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
