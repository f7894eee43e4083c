"""benchmarks/gpu.py: all of it in Triton's interpreter, and the model that it draws."""

import gc
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from placer.plan.verify import violations

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

KINDS = (
    "staged",
    "staged + look-ahead",
    "cached",
    "cached + look-ahead",
    "uva",
    "host",
)


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs the script in this process: another one takes seconds to import torch."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("TRITON_INTERPRET")
    threads, script = torch.get_num_threads(), importlib.import_module("gpu")

    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        code, said = script.main(), capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    yield run
    torch.set_num_threads(threads)
    gc.freeze()  # As conftest.py did, before the benchmark undid it.


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _gpu_model

    return _gpu_model


def expected_rows() -> set[tuple[int, str, float, str]]:
    rows: set[tuple[int, str, float, str]] = set()
    for batch_size, skew in product((6, 3), ("zipf-1.05", "criteo")):
        at: dict[float, tuple[str, ...]] = {
            1.0: ("device", "nn.EmbeddingBag + Adagrad"),
            0.25: KINDS,
            0.1: KINDS,
            0.015: KINDS,
            0.0: tuple(kind for kind in KINDS if not kind.startswith("cached")),
        }
        if batch_size == 6:
            at[1.0] += ("training, device + look-ahead",)
            at[0.1] += ("training, staged + look-ahead",)
            at[0.015] += ("training, staged + look-ahead",)
        rows |= {(batch_size, skew, share, name) for share, names in at.items() for name in names}
    return rows


@pytest.mark.slow
def test_everything_runs_in_the_interpreter(tmp_path: Path, run_benchmark: Run) -> None:
    output = tmp_path / "gpu.json"
    result = run_benchmark("--tiny", "--time-limit", "3600", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    report: dict[str, Any] = json.loads(output.read_text())
    records = report["records"]
    found = [(r["batch_size"], r["skew"], r["hbm_row_share"], r["contender"]) for r in records]
    assert len(found) == len(set(found))
    assert set(found) == expected_rows()
    for record in records:
        figures = [value for value in record.values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in figures), record
        assert record["step_s"] > 0
        assert record["samples_per_s"] > 0
        if record["hbm_row_share"] < 1 and record["contender"] in KINDS:
            assert record["link_share"] > 0
            assert 0 <= record["split_hit_rate"] <= record["hbm_hit_rate"] <= 1
        if record["contender"].startswith(("staged", "cached")):
            assert record["in_place_share"] == 0
    assert set(report["equivalence"]) == {"device", *KINDS}
    for kind, outcome in report["equivalence"].items():
        assert outcome["equal"], (kind, outcome)
        # The host sums its part of a bag by itself; elsewhere placement changes no bit.
        assert outcome["same_bits"] or kind == "host", (kind, outcome)
    assert len(report["targets"]) == 9
    assert all(target["measured"] is not None for target in report["targets"])
    assert all(value > 0 for value in report["copies"].values())


@pytest.mark.slow
def test_what_does_not_fit_the_time_is_a_row_that_says_so(
    tmp_path: Path, run_benchmark: Run
) -> None:
    output = tmp_path / "gpu.json"
    result = run_benchmark("--tiny", "--time-limit", "0", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(output.read_text())
    assert len(report["records"]) == len(expected_rows())
    assert all("left out" in record["note"] for record in report["records"])
    assert all(target["met"] is None for target in report["targets"])
    assert "not measured" in result.stdout


@pytest.mark.slow
def test_tables_that_grow_are_timed_beside_fixed_ones(run_benchmark: Run) -> None:
    result = run_benchmark("--growing", "--tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()[2:]
    assert [line.split(",")[0] for line in lines] == ["fixed"] * 2 + ["growing"] * 5
    assert [float(line.split()[-1]) > 0 for line in lines] == [False] * 6 + [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine", "off"),
    [
        ("gpu-nvidia-h100-80gb-hbm3", "1xh100", 0.45),
        ("gpu-nvidia-h200", "1xh200", 0.56),
    ],
)
def test_measured_steps_are_held_against_plan_and_cost_model(
    name: str, machine: str, off: float, run_benchmark: Run
) -> None:
    """Records of a newer executor than the one that constants are fitted to, too."""
    measured = BENCHMARKS / "results" / f"{name}.json"
    result = run_benchmark("--predict", str(measured), "--topology", machine)
    assert result.returncode == 0, result.stderr
    timed = [record for record in json.loads(measured.read_text())["records"] if record["step_s"]]
    placed = [record for record in timed if record["hbm_plan_bytes"]]
    lines = result.stdout.splitlines()
    steps = lines[1 : lines.index("")]
    assert len(steps) == len(placed)
    for line, record in zip(steps, placed, strict=True):
        used, planned, share, found, predicted, ratio = map(float, line.split()[-6:])
        assert used == round(record["hbm_peak_bytes"] / 1e9, 3)
        assert share == pytest.approx(planned / used, abs=0.005)
        assert 0.985 < share < 1.055
        assert found == round(record["step_s"] * 1e3, 2)
        assert ratio == pytest.approx(predicted / found, abs=0.01)
        assert 1 - off < ratio < 1 + off


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(run_benchmark: Run) -> None:
    result = run_benchmark()
    assert result.returncode == 2
    assert "--tiny" in result.stderr


@pytest.mark.parametrize("skew", ["zipf-1.05", "criteo"])
def test_draws_follow_the_access_cdf(model_module: ModuleType, skew: str) -> None:
    model = model_module.dcnv2(skew, 0.01)
    drawn = model_module.draw(model, 2_000, 1, torch.device("cpu"), seed=3)
    batch = drawn.batches[0]
    for index, profile in enumerate(model.profiles):
        ids, offsets = model_module.bags_of(batch, index)
        assert offsets.tolist() == [i * model.lookups[index] for i in range(2_001)]
        for rows in {1, 10, profile.table.rows // 10, profile.table.rows}:
            share = float(profile.cdf.share(rows))
            error = 5 * math.sqrt(share * (1 - share) / ids.numel()) + 1e-9
            assert abs(float((ids < rows).double().mean()) - share) <= error
    distinct = [torch.unique(model_module.bags_of(batch, i)[0]) for i in range(26)]
    assert drawn.distinct_rows() == sum(ids.numel() for ids in distinct)
    hot = model.hottest(0.1)
    cold = sum(int((ids >= first).sum()) for ids, first in zip(distinct, hot, strict=True))
    assert drawn.distinct_rows(hot) == cold


def test_the_hottest_rows_are_those_read_most(model_module: ModuleType) -> None:
    model = model_module.shrunk(model_module.dcnv2("criteo", 0.01), 500, 7, 8, tables=6)
    rates = np.concatenate(
        [
            np.repeat(p.cdf.row_share * p.table.lookups_per_sample, np.diff(p.cdf.ranks))
            for p in model.profiles
        ]
    )
    for share in (0.0, 0.015, 0.1, 0.25, 1.0):
        hot = model.hottest(share)
        assert sum(hot) == round(share * model.rows)
        held = sum(
            float(p.cdf.share(first)) * p.table.lookups_per_sample
            for p, first in zip(model.profiles, hot, strict=True)
        )
        best = np.sort(rates)[::-1][: sum(hot)].sum()
        assert held == pytest.approx(best)


@pytest.mark.parametrize(
    ("lookup", "share"),
    [("device", 1.0), *product(["staged", "cached", "uva", "host"], [0.0, 0.015, 1.0])],
)
def test_plans_are_sound(model_module: ModuleType, lookup: str, share: float) -> None:
    model = model_module.dcnv2("zipf-1.05", 0.01)
    plan = model_module.make_plan(model, lookup, share, 1024)
    assert not violations(plan)
    in_hbm = sum(
        shard.row_count if shard.memory == "hbm" else shard.cache_rows for shard in plan.shards
    )
    assert in_hbm == round(share * model.rows)
    for shard in plan.shards:
        if shard.lookup in ("staged", "cached"):
            assert 0 < shard.staging_rows <= shard.row_count - shard.cache_rows
