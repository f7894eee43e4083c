"""Fixtures that several test files share."""

import functools
import gc
import inspect
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Workbench, make_few_tables, make_workbench
from hypothesis import HealthCheck, settings

# Python looks for garbage after every 700 new objects, and collecting tests makes very many.
gc.set_threshold(50_000, 20, 20)

# Triton's kernels run in its interpreter, for which it looks when a kernel's module is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background ignores Ctrl-C in all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes of ranks are forked from one that has imported what they need: that takes seconds.
multiprocessing.set_forkserver_preload(
    [
        *("hypothesis", "numba.np.arraymath", "placer.storage.checkpoint", "placer.training.loop"),
        *("pytest", "torch._dynamo"),  # The latter is what DistributedDataParallel imports.
    ]
)

# A run that gates a change repeats: its examples depend on the tests alone. Elsewhere every run
# looks at new ones. No test fails because the machine was slow, nor because one contract of tests
# is inherited by many classes.
settings.register_profile(
    "here",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.register_profile(
    "ci", settings.get_profile("here"), derandomize=True, database=None, print_blob=True
)
settings.register_profile("fast", settings.get_profile("ci"), max_examples=6)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread whose tests are all slow: what they import takes seconds."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("not slow"):
        return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None
    return None


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[object] | None:
    """Leave slow tests uncollected, whatever number of cases they have.

    A class that inherits tests has the names of those that are slow for it in ``slow_tests``.
    """
    if not collector.config.option.markexpr.startswith("not slow"):
        return None
    marks = getattr(obj, "pytestmark", ())
    slow = name in getattr(getattr(collector, "obj", None), "slow_tests", ())
    return [] if slow or any(mark.name == "slow" for mark in marks) else None


def pytest_collection_finish() -> None:
    """Keep collections of garbage from looking at what lives as long as the tests."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Make Triton's interpreter quicker, once something has loaded it."""
    if "triton.runtime.interpreter" in sys.modules:
        _quicken(sys.modules["triton.runtime.interpreter"])


@functools.cache
def _quicken(interpreter: Any) -> None:
    """Patch Triton's language once, instead of at each call, and remember its list of types.

    The interpreter does both again at each call, which takes a third of a launch.
    """
    patch, patched = interpreter._patch_lang, set()
    dtype_of, known = interpreter._get_np_dtype, {}

    def patch_once(function: Any) -> Any:
        modules = frozenset(
            name for name, value in function.__globals__.items() if inspect.ismodule(value)
        )
        if modules not in patched:
            patched.add(modules)
            patch(function)
        return interpreter._LangPatchScope()  # Nothing is restored.

    def dtype_once(dtype: Any) -> Any:
        key = str(dtype.scalar)
        if key not in known:
            known[key] = dtype_of(dtype)
        return known[key]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once


REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real logs, which may not be redistributed and so is not in the project."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real logs are not on this machine (see docs/data.md)")
    return folder


@pytest.fixture(scope="session")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A log, a profile and a plan for the tests of the command line, which only read them."""
    return make_workbench(tmp_path_factory.mktemp("workbench"))


@pytest.fixture(scope="session")
def few_tables(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Seven of its tables and a plan of them, without a log."""
    return make_few_tables(tmp_path_factory.mktemp("few_tables"), workbench)


@pytest.fixture(autouse=True)
def usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as wide as off a terminal: libraries that other tests import may set COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)
