"""Plans that are kept: never stale, never half there, of bounded size."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import invoke, succeed
from fast_and_full import combinations, examples
from hypothesis import given
from hypothesis import strategies as st

import placer
from cost_models import Roofline
from cost_models.calibrated.model import Calibrated, Calibration, Constant
from cost_models.roofline import RooflineConstants
from placer import (
    AccessCdf,
    Constraints,
    Feature,
    Problem,
    Profile,
    Table,
    TableProfile,
    TableRule,
    Topology,
)
from placer.dense import DenseLayers
from placer.files.atomic import sealed
from placer.profile.locality import WindowCounts
from placer.profile.table_profile import RowCounts
from solvers import CachedSolver, Limits, PlanCache, SolveResult, solve, solver
from solvers import cache as plan_cache
from solvers.cache import content_of, key_of


@dataclass(frozen=True)
class Asked:
    """A search; each field is something that its plan depends on."""

    dim: int = 16
    exponent: float = 1.0
    locality: bool = False
    hottest: int | None = None
    machine: str = "1xh100"
    hbm: str = "64MiB"
    link: float = 1.0
    tier: str | None = None
    reserve: str | None = None
    batch_size: int = 64
    pipeline: str = "look-ahead"
    dense: int | None = None
    lookup_share: float = 0.8
    solver: str = "greedy-size"
    gap: float = 1e-3
    seed: int = 0
    steps: int | None = None
    threads: int = 0

    def problem(self) -> Problem:
        rows = 50_000
        table = Table("a", rows, self.dim, features=(Feature("f", 3.0),))
        known: dict[str, Any] = {}
        if self.hottest is not None:
            counts = np.ones(rows, dtype=np.int64)
            counts[self.hottest] = 9
            known["counts"] = RowCounts.from_dense(counts)
        if self.locality:
            known["locality"] = (WindowCounts(64, 10, 1920, 900),)
        cdf = AccessCdf.zipf(rows, self.exponent)
        if "counts" in known:
            cdf = AccessCdf.from_counts(known["counts"].counts)
        one = TableProfile(table, cdf, **known)
        other = TableProfile(
            Table("b", 70_000, 8, features=(Feature("g"),)), AccessCdf.zipf(70_000, self.exponent)
        )
        machine = Topology.parse(self.machine, hbm=self.hbm)
        first, *links = machine.links
        faster = replace(first, bytes_per_s=first.bytes_per_s * self.link)
        rules = {} if self.tier is None else {"a": TableRule(tier=self.tier)}  # type: ignore[arg-type]
        return Problem(
            Profile((one, other)),
            replace(machine, links=(faster, *links)),
            self.batch_size,
            Constraints.of(rules, reserve=None if self.reserve is None else {"gpu": self.reserve}),
            self.pipeline,  # type: ignore[arg-type]
            None if self.dense is None else DenseLayers((self.dense, 1)),
        )

    @property
    def model(self) -> Roofline:
        return Roofline(RooflineConstants(lookup_share=self.lookup_share))

    @property
    def limits(self) -> Limits:
        return Limits(20.0, self.gap, self.seed, self.threads, self.steps)

    def key(self) -> str:
        key = key_of(self.problem(), self.model, solver(self.solver), self.limits)
        assert key is not None
        return key

    def solved(self, cache: PlanCache | None, notes: list[str] | None = None) -> SolveResult:
        wanted = solver(self.solver)
        if cache is not None:
            wanted = CachedSolver(wanted, cache, [].append if notes is None else notes.append)
        return wanted.solve(self.problem(), self.model, self.limits)


CHANGES: dict[str, tuple[Any, ...]] = {
    "dim": (16, 32),
    "exponent": (1.0, 1.01),
    "locality": (False, True),
    "hottest": (None, 7, 8),
    "machine": ("1xh100", "1xt4", "2xh100"),
    "hbm": ("64MiB", "65MiB"),
    "link": (1.0, 1.5),
    "tier": (None, "dram"),
    "reserve": (None, "1MiB"),
    "batch_size": (64, 65),
    "pipeline": ("look-ahead", "serial"),
    "dense": (None, 16, 17),
    "lookup_share": (0.8, 0.81),
    "solver": ("greedy-size", "greedy-dim"),
    "gap": (1e-3, 2e-3),
    "seed": (0, 1),
    "steps": (None, 5),
    "threads": (0, 1),
}
SEARCHES = st.builds(Asked, **{name: st.sampled_from(values) for name, values in CHANGES.items()})
BASE = Asked()


@pytest.fixture(scope="module", autouse=True)
def source_hashed_once() -> Iterator[None]:
    """It does not change while tests run, and takes longest of a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "source_sha256", lru_cache(plan_cache.source_sha256))
        yield


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


def same(one: SolveResult, other: SolveResult) -> bool:
    """Whether two results are the same, but for when they were found."""
    assert one.plan is not None
    assert other.plan is not None
    ids = one.plan.hot_ids, other.plan.hot_ids
    return (
        one.plan.shards == other.plan.shards
        and one.plan.row_order == other.plan.row_order
        and ids[0].keys() == ids[1].keys()
        and all((ids[0][name] == ids[1][name]).all() for name in ids[0])
        and one.plan.topology == other.plan.topology
        and (one.step_time_s, one.bound_s) == (other.step_time_s, other.bound_s)
        and one.termination == other.termination
    )


def test_every_field_has_a_change() -> None:
    assert asdict(BASE).keys() == CHANGES.keys()


@examples(50)
@given(SEARCHES, st.sampled_from(sorted(CHANGES)), st.data())
def test_whatever_is_changed_has_another_key(asked: Asked, name: str, data: st.DataObject) -> None:
    others = [value for value in CHANGES[name] if value != getattr(asked, name)]
    changed = replace(asked, **{name: data.draw(st.sampled_from(others))})
    assert changed.key() != asked.key()
    assert asked.key() == replace(asked).key()


@pytest.mark.slow
@examples(20)
@given(st.lists(SEARCHES, min_size=2, max_size=3))
def test_a_kept_plan_is_that_of_its_own_search(
    tmp_path_factory: pytest.TempPathFactory, searches: list[Asked]
) -> None:
    cache = PlanCache(tmp_path_factory.mktemp("plans"))
    for asked in [*searches, *searches]:
        result, alone = asked.solved(cache), asked.solved(None)
        if alone.plan is None:
            assert result.plan is None
        else:
            assert same(result, alone)


@pytest.mark.parametrize("name", ["ortools", "numpy", "numba", "placer", "python"])
def test_another_version_has_another_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = BASE.key()
    if name == "placer":
        monkeypatch.setattr(placer, "__version__", "999")
    elif name == "python":
        monkeypatch.setattr(plan_cache.platform, "python_version", lambda: "999")
    else:
        known = plan_cache.version
        other: Callable[[str], str] = lambda asked: "999" if asked == name else known(asked)  # noqa: E731
        monkeypatch.setattr(plan_cache, "version", other)
    assert BASE.key() != before


def test_changed_source_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "one_package_to_hash"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    module = package / "inner" / "moves.py"
    module.write_text("STEPS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def hashed() -> str:
        return plan_cache.source_sha256.__wrapped__((package.name,))  # type: ignore[attr-defined]

    before, status = hashed(), module.stat()
    module.write_text("STEPS = 2\n")
    os.utime(module, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashed() != before
    module.write_text("STEPS = 1\n")
    assert hashed() == before
    module.rename(package / "inner" / "other.py")
    assert hashed() != before


def test_constants_of_a_file_have_another_key_each() -> None:
    def key(seconds: float) -> str | None:
        model = Calibrated(Calibration({"lookup": Constant(seconds, seconds, seconds)}))
        return key_of(BASE.problem(), model, solver("greedy-size"), Limits())

    assert key(1e-9) == key(1e-9) != key(2e-9)


def test_counts_of_a_file_are_known_by_its_hash(tmp_path: Path) -> None:
    profile = replace(BASE, hottest=7).problem().profile
    profile.save(tmp_path / "profile")
    loaded = [Profile.load(tmp_path / "profile") for _ in range(2)]
    first, again = (one.tables[0].counts for one in loaded)
    assert first is not None
    assert again is not None
    assert first.sha256 == again.sha256
    assert replace(first, counts=first.counts + 1).sha256 != first.sha256


def test_models_and_solvers_of_ones_own_are_asked_each_time(cache: PlanCache) -> None:
    class OwnModel(Roofline):
        """Its source is nowhere that placer knows."""

    for _ in range(2):
        result = CachedSolver(solver("greedy-size"), cache).solve(
            BASE.problem(), OwnModel(), Limits()
        )
        assert "from_cache" not in result.stats
    assert cache.size().plans == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content.replace(b'"gpu:0"', b'"gpu:1"', 1),
        lambda content: content + b" ",
        lambda content: b"\x80\x04\x95" + content,
    ],
    ids=["cut", "half", "empty", "altered", "longer", "foreign"],
)
def test_damaged_files_are_left_out_and_written_anew(
    cache: PlanCache, damage: Callable[[bytes], bytes]
) -> None:
    asked = replace(BASE, hottest=7)
    result, notes = asked.solved(cache), list[str]()
    (file,) = cache.folder.iterdir()
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    again = asked.solved(cache, notes)
    assert same(again, result)
    assert "from_cache" not in again.stats
    assert len(notes) == 1
    assert str(file) in notes[0]
    assert asked.solved(cache).stats["from_cache"]


def rewrite(file: Path, change: Callable[[Any], object]) -> None:
    """Alter what a file says, with its hash written anew, as whoever shares the folder can."""
    first, line, ids = file.read_bytes().split(b"\n", 2)
    body = json.dumps(change(json.loads(line))).encode() + b"\n" + ids
    file.write_bytes(first.split()[0] + b" " + sha256(body).hexdigest().encode() + b"\n" + body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: said | {"plan": said["plan"] | {"shards": []}}, "not sound"),
        (lambda said: said | {"key": "0" * 64}, "another problem"),
        (lambda said: [], "damaged"),
        (lambda said: said | {"plan": {}}, "schema_version"),
    ],
)
def test_an_altered_plan_with_the_right_hash_is_still_looked_at(
    cache: PlanCache, change: Callable[[Any], object], words: str
) -> None:
    BASE.solved(cache)
    rewrite(*cache.folder.iterdir(), change)
    notes: list[str] = []
    assert BASE.solved(cache, notes).plan is not None
    assert words in notes[0]


def test_a_plan_with_the_key_and_hash_of_another_search_is_not_taken(cache: PlanCache) -> None:
    asked = replace(BASE, tier="dram")
    key, notes = asked.key(), list[str]()
    assert key is not None
    cache.save(key, content_of(BASE.solved(None), key, Limits(60.0)))
    found = asked.solved(cache, notes)
    assert "from_cache" not in found.stats
    assert "not taken from the cache" in notes[0]
    assert found.plan is not None
    assert {one.memory for one in found.plan.shards if one.table == "a"} == {"dram"}
    assert asked.solved(cache).stats["from_cache"]


def test_a_folder_in_place_of_a_file_is_left_out(cache: PlanCache) -> None:
    (cache.folder / f"{BASE.key()}.plan").mkdir(parents=True)
    notes: list[str] = []
    assert BASE.solved(cache, notes).plan is not None
    assert len(notes) == 2
    assert "not taken" in notes[0]
    assert "not kept" in notes[1]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    assert BASE.solved(PlanCache(tmp_path / "file" / "plans"), notes).plan is not None
    assert "the plan is not kept" in notes[-1]


def test_more_time_is_a_new_search_unless_the_plan_is_optimal(cache: PlanCache) -> None:
    problem, model = replace(BASE, machine="2xh100").problem(), Roofline()

    def is_kept(name: str, seconds: float, gap: float) -> bool:
        limits = Limits(seconds, gap, max_steps=3)
        result = CachedSolver(solver(name), cache).solve(problem, model, limits)
        assert (result.termination.reason == "optimal") == (gap > 1)
        return "from_cache" in result.stats

    tight, loose = 0.0, 1e9
    asked = [(10, tight), (10, tight), (5, tight), (11, tight), (10.5, tight), (12, tight)]
    kept = [is_kept("greedy-size", seconds, gap) for seconds, gap in asked]
    assert kept == [False, True, True, False, True, False]
    assert [is_kept("greedy-size", seconds, loose) for seconds in (10, 60)] == [False, True]


def test_what_was_stopped_or_has_no_plan_is_not_kept(cache: PlanCache) -> None:
    asked = replace(BASE, gap=0.0, machine="2xh100")
    stopped = replace(asked.limits, stop=lambda: True)
    result = CachedSolver(solver("greedy-cost"), cache).solve(asked.problem(), asked.model, stopped)
    assert result.plan is not None
    assert result.termination.limit == "stop"
    assert replace(BASE, hbm="10KiB").solved(cache).plan is None
    assert cache.size().plans == 0


def test_plans_that_were_not_used_for_longest_are_removed(cache: PlanCache) -> None:
    searches = [replace(BASE, seed=seed) for seed in range(3)]
    for age, asked in enumerate(searches[:2]):
        asked.solved(cache)
        os.utime(cache.folder / f"{asked.key()}.plan", ns=(age, age))
    searches[0].solved(cache)  # It is the newest now.
    small = replace(cache, most_bytes=cache.size().bytes + 500)  # Sizes differ a little.
    searches[2].solved(small)
    assert small.size().bytes <= small.most_bytes
    kept = [small.load(asked.key()) is not None for asked in searches]
    assert kept == [True, False, True]
    notes: list[str] = []
    BASE.solved(replace(cache, folder=cache.folder / "inner", most_bytes=99), notes)
    assert "too many" in notes[0]


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert plan_cache.default_folder() == tmp_path / "plans"
    monkeypatch.delenv("PLACER_CACHE")
    assert plan_cache.default_folder() == Path("/caches/placer/plans")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # To be ignored, says XDG.
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_cache.default_folder() == tmp_path / ".cache/placer/plans"


def test_from_python_it_is_opt_in() -> None:
    problem = BASE.problem()
    results = [solve(problem, "greedy-size", cache=cached) for cached in (False, True, True, False)]
    assert ["from_cache" in result.stats for result in results] == [False, False, True, False]


def test_the_command_says_where_its_plan_is_from(tmp_path: Path) -> None:
    asked = ("plan", "--workload", "random-2@3", "--topology", "1xh100", "--solver", "greedy-size")
    plans = []
    for number, (more, is_taken) in enumerate([((), False), ((), True), (("--no-cache",), False)]):
        file = tmp_path / f"{number}.json"
        result = succeed(*asked, *more, "-o", str(file))
        assert ("from the cache" in result.stderr) == is_taken
        plans.append(placer.Plan.load(file))
    assert plans[0].shards == plans[1].shards == plans[2].shards
    assert json.loads(succeed("cache", "--format", "json").stdout)["plans"] == 1
    assert "1 plan, " in succeed("cache", "--clear").stdout
    assert "0 plans" in succeed("cache").stdout
    assert invoke("cache", "--nothing").exit_code == 2


def _use(folder: str, seed: int, times: int) -> int:
    """Solve, and now and then clear; how often a plan was taken. Ends badly if one was damaged."""
    cache, taken = PlanCache(Path(folder)), 0
    for number in range(times):
        notes: list[str] = []
        asked = replace(BASE, seed=number % 2)
        taken += "from_cache" in asked.solved(cache, notes).stats
        assert not [note for note in notes if "the plan is that of" not in note], notes
        if number % 7 == seed:
            cache.clear()
    return taken


@pytest.mark.slow
def test_processes_share_a_cache(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(3) as pool:
        taken = pool.starmap(_use, [(str(tmp_path), seed, 20) for seed in range(3)])
    assert sum(taken) > 0


@combinations(
    "name, value, is_sealed",
    ["step_time_s", "bound_s"],
    [1e9, -0.99, 0, float("nan"), float("inf"), "1e9", None],
    [True, False],
)
def test_what_a_kept_plan_claims_is_not_believed(
    cache: PlanCache, name: str, value: object, is_sealed: bool
) -> None:
    def claim(document: Any) -> object:
        claims = document["plan"]["solver"]
        claims[name] = value
        claims["status"] = "feasible" if claims["status"] == "optimal" else "optimal"
        return document | {"plan": sealed(document["plan"])} if is_sealed else document

    true = BASE.solved(cache)
    rewrite(*cache.folder.iterdir(), claim)
    found = BASE.solved(cache)
    assert same(found, true)
    assert found.plan is not None
    assert true.plan is not None
    for one in ("status", "step_time_s", "bound_s"):
        assert getattr(found.plan.solver, one) == getattr(true.plan.solver, one)
