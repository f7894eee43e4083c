"""Plans that are kept, and a solver that looks for one before it searches and keeps what it finds.

A kept plan is one file in a folder of bounded size, so that it is there whole or not at all: a line
with the SHA-256 of the rest, a line of JSON, and the hot ids as safetensors. Nothing in it is ever
run.
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
from placer.files import sha256_json, write_bytes
from placer.plan.file import from_dict, to_dict
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from placer.read_files import MOST_JSON_BYTES, LimitError, parse_json, read_limited
from solvers.result import Limit, Limits, Solver, SolveResult, Termination

FOLDER_VARIABLE = "PLACER_CACHE"
"""The variable that names another folder than the user's own for caches."""

MOST_BYTES = 512 << 20
"""Of all plans together: some 2,000 plans of 400 tables that list no hot ids."""

_NAMES = "[0-9a-f]" * 64 + ".plan"


def default_folder() -> Path:
    """Return ``plans`` in `FOLDER_VARIABLE`, or else in ``placer`` of the user's folder for caches.

    That is ``$XDG_CACHE_HOME``, or ``~/.cache``, as the XDG Base Directory Specification has it.
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
    """Plans in a cache, and the bytes of their files."""

    plans: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Plans on disk, by the hash of what they answer.

    Processes may share one: files appear whole, and are removed whole.

    Beyond `most_bytes` of all files, those that were used longest ago are removed.

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
        """Read what was saved under a key, or None; a `PlacerError` says what is in the way."""
        path = self.path(key)
        try:
            content = read_limited(path, min(self.most_bytes, MOST_JSON_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, LimitError) as error:
            raise PlacerError(f"it cannot be read: {error}") from error
        with contextlib.suppress(OSError):  # A folder that others own is read all the same.
            os.utime(path)
        return content

    def save(self, key: str, content: bytes) -> None:
        """Write a plan's file, atomically, and remove others where all are too large together.

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
        """Return where the plan with a key is kept."""
        return self.folder / f"{key}.plan"

    def size(self) -> CacheSize:
        """Count the plans and their bytes."""
        files = self._files()
        return CacheSize(len(files), sum(size for _, size, _ in files))

    def clear(self) -> CacheSize:
        """Remove all plans; return how much was there."""
        before = self.size()
        for _, _, path in self._files():
            _remove(path)
        return before

    def _files(self) -> list[tuple[int, int, Path]]:
        """List when each plan was last used, its bytes and its path; the oldest first."""
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
"""Those whose source decides what is found; nothing else is known well enough to be kept."""

_LIBRARIES = ("ortools", "numpy", "numba")

_EXACT = 1e-6
"""Share by which sums of floats may differ from one processor to another."""


class CachedSolver:
    """A solver whose plans are kept: the same search has the same answer at once.

    A plan is taken for the same time limit or a shorter one, and for any if it is proven to be
    within the gap. Its step time is computed, and a bound that it cannot have is not believed.
    Kept is what has a plan and was not stopped by hand. Files that are damaged, altered or of
    something else are left out with a note, and written again; where nothing can be written, the
    search goes on without.

    Solvers that are not placer's own search each time. The cache is by default that of the user;
    `note` takes what a person may want to know, in one line.

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
        """Return the kept result, or search and keep the new one. See `Solver.solve`."""
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
            where = f"from the cache in {cache.folder}; --no-cache searches anew"
            self._note(f"the plan is that of {made}, {where}")
            return kept
        result = self._solver.solve(*search)
        # Who edits the source while it searches has a plan of neither version.
        keep = result.plan is not None and result.termination.limit != "stop"
        if keep and key_of(problem, cost_model, self._solver, limits) == key:
            try:
                cache.save(key, content_of(result, key, limits))
            except PlacerError as error:
                self._note(f"the plan is not kept in the cache: {error}")
        return result


def content_of(result: SolveResult, key: str, limits: Limits) -> bytes:
    """Write the result of a search, which has a plan, as the content of a file."""
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
    """Read the result of a search from a file's content; None if it needs more time.

    Others may have written the file. What can be computed is computed: names, sizes and the
    machine are those of the problem, the plan is verified, and its step time is the cost model's.
    A bound is believed up to the step time.

    Raises a `PlacerError` if it is another file, cut short or altered, or was made for another key;
    if its plan breaks a rule, or has another step time or a bound than it can have.
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
    """Turn what a solver counts into a value of JSON."""
    return value.item() if isinstance(value, np.generic) else str(value)


def key_of(problem: Problem, cost_model: CostModel, solver: Solver, limits: Limits) -> str | None:
    """Hash a search, as 64 hexadecimal digits; return None for models and solvers of a user's own.

    What enters stands in the code below. The source of `PACKAGES` enters by its content: a change
    of one line makes other keys. The time limit does not; see `CachedSolver`.

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
