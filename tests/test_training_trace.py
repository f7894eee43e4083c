"""Traces of training steps: files that a viewer reads, with every phase of the executor."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType
from training_cases import QUICK, plan_for, small_log

from placer.errors import PlacerError
from placer.executor.streams import PHASE_PREFIX
from placer.training.config import CheckpointPolicy, TraceRequest
from placer.training.loop import train
from placer.training.trace import summarize

LOG = small_log(640)


def phases_in(path: Path) -> dict[str, int]:
    """How often each phase is in a trace."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    counts: dict[str, int] = {}
    for event in events:
        # A range begins with "X"; others of that name are its shadows.
        name = str(event.get("name"))
        if name.startswith(PHASE_PREFIX) and event.get("ph") == "X":
            counts[name.removeprefix(PHASE_PREFIX)] = counts.get(name[len(PHASE_PREFIX) :], 0) + 1
    return counts


@pytest.mark.parametrize(
    ("backend", "phases"),
    [
        ("torch", {"read", "map", "forward", "backward", "update"}),
        ("numba", {"read", "map", "forward", "backward", "update"}),
        (
            "tiered",
            {"read", "map", "sort", "stage", "write-back", "forward", "backward", "update"},
        ),
    ],
)
def test_a_trace_has_the_phases_of_its_steps(
    tmp_path: Path, backend: str, phases: set[str]
) -> None:
    request = TraceRequest(tmp_path / "trace.json", steps=3, warm_up=2)
    config = replace(QUICK, max_steps=8, backend=backend)
    result = train(plan_for(LOG, "staged"), LOG, config, trace=request)
    counts = phases_in(request.path)
    assert set(counts) >= phases
    assert counts["forward"] == counts["backward"] == counts["update"] == 3
    assert {phase.name for phase in result.trace.phases} == {*counts, "other"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert result.trace.steps == 3
    times = [phase.host_s for phase in result.trace.phases]
    assert min(times) >= 0
    assert sum(times) == pytest.approx(result.trace.step_s)


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    config = replace(QUICK, max_steps=8)
    traced = train(plan_for(LOG), LOG, config, trace=TraceRequest(tmp_path / "t.json"))
    plain = train(plan_for(LOG), LOG, config)
    assert traced.losses == plain.losses
    assert plain.trace is None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a full disk the profiler says nothing, and leaves a part beside the file."""

    def export(self: object, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr("placer.training.trace.profile.export_chrome_trace", export)
    request = TraceRequest(tmp_path / name, steps=2, warm_up=1)
    with pytest.raises(PlacerError, match=rf"cannot write .*{name}: the profiler wrote nothing"):
        train(plan_for(LOG), LOG, replace(QUICK, max_steps=6), trace=request)
    assert not list(tmp_path.iterdir())


def test_a_compressed_trace_of_a_run_that_ends_early(tmp_path: Path) -> None:
    request = TraceRequest(tmp_path / "trace.json.gz", steps=10, warm_up=1)
    result = train(plan_for(LOG), LOG, replace(QUICK, max_steps=5), trace=request)
    assert result.trace.steps == 4
    assert phases_in(request.path)["update"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_run_within_its_warm_up_has_no_trace(tmp_path: Path) -> None:
    request = TraceRequest(tmp_path / "trace.json")
    assert train(plan_for(LOG), LOG, replace(QUICK, max_steps=5), trace=request).trace is None
    assert not list(tmp_path.iterdir())


def test_a_failing_run_leaves_no_trace_and_its_own_error(tmp_path: Path) -> None:
    config = replace(QUICK, lr=1e30, optimizer="sgd")
    request = TraceRequest(tmp_path / "trace.json", steps=500, warm_up=1)
    with pytest.raises(PlacerError, match="the training has diverged"):
        train(plan_for(LOG), LOG, config, trace=request)
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file" / "trace.json"
    request = TraceRequest(path, steps=1, warm_up=1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlacerError, match=r"cannot write .*trace.json"):
        train(plan_for(LOG), LOG, QUICK, trace=request)
    with pytest.raises(PlacerError, match=r"cannot write .*trace.json"):
        TraceRequest(path)
    with pytest.raises(PlacerError, match="it is a folder"):
        TraceRequest(tmp_path)
    for values in ({"steps": 0}, {"warm_up": 0}):
        with pytest.raises(PlacerError, match="trace 1 step or more"):
            TraceRequest(tmp_path / "trace.json", **values)


def test_checkpoints_are_written_while_tracing(tmp_path: Path) -> None:
    request = TraceRequest(tmp_path / "trace.json", steps=4, warm_up=1)
    policy = CheckpointPolicy(tmp_path / "saved", every_steps=2)
    result = train(plan_for(LOG), LOG, QUICK, checkpoints=policy, trace=request)
    assert result.trace.steps == 4


def recorded(
    name: str, start_s: float, stop_s: float, device_s: float = 0.0, within: Any = None
) -> SimpleNamespace:
    """An event as the profiler has it."""
    return SimpleNamespace(
        name=name,
        cpu_parent=within,
        device_type=DeviceType.CPU,
        time_range=SimpleNamespace(start=start_s * 1e6),
        cpu_time_total=(stop_s - start_s) * 1e6,
        device_time_total=device_s * 1e6,
    )


def test_a_phase_within_another_counts_for_itself() -> None:
    step = "ProfilerStep#1"
    stage = recorded(f"{PHASE_PREFIX}stage", 1.0, 5.0, 3.0)
    operator = recorded("aten::add", 3.5, 4.5, within=stage)
    events = [
        recorded(step, 20.0, 99.0),  # Begun, and not of the run.
        recorded(step, 0.0, 10.0, 6.0),
        stage,
        recorded(f"{PHASE_PREFIX}write-back", 1.0, 3.0, 1.0, within=stage),
        operator,
        recorded(f"{PHASE_PREFIX}sort", 3.5, 4.0, within=operator),
        recorded(f"{PHASE_PREFIX}stage", 5.0, 6.0, 1.0),
        recorded(f"{PHASE_PREFIX}update", 2.0, 4.0, 1.0),  # Of another thread: within nothing.
        recorded(step, 10.0, 20.0),
    ]
    summary = summarize(events, Path("t"), steps=2)
    assert summary.step_s == 10.0
    host_s = {phase.name: 2 * phase.host_s for phase in summary.phases}
    assert host_s == {
        "sort": 0.5, "stage": 2.5, "update": 2.0, "write-back": 2.0, "other": 13.0,
    }  # fmt: skip
    device_s = {phase.name: 2 * phase.device_s for phase in summary.phases}
    assert device_s == {
        "sort": 0.0, "stage": 3.0, "update": 1.0, "write-back": 1.0, "other": 1.0,
    }  # fmt: skip
