"""Plans for inference: their cache has the hit rate asked for, and tables are only read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fast_and_full import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from placer import (
    AccessCdf,
    Feature,
    Plan,
    Profile,
    Shard,
    Table,
    TableProfile,
    Topology,
    apply_plan,
)
from placer.errors import CapacityError, CheckpointError, PlanMismatchError, ProblemError
from placer.executor import BagBatch
from placer.plan.serving import serving_plan
from placer.profile.table_profile import FeatureCounts, RowCounts
from placer.storage.checkpoint import save_tables
from placer.storage.manifest import Checkpoint, Position
from placer.storage.serving import load_read_only
from placer.storage.table_files import write_tables

ONE = Topology.parse("1xh100")


def counted(name: str, counts: list[int], dim: int = 4) -> TableProfile:
    lookups = sum(counts)
    table = Table(name, len(counts), dim, features=(Feature(name, lookups / 100),))
    features = {name: FeatureCounts(100, lookups)}
    return TableProfile.counted(table, RowCounts.from_dense(counts), features)


def hits(profile: Profile, cached: dict[str, int]) -> int:
    """Lookups of the hottest rows of each table."""
    return sum(int(np.sort(one.counts.counts)[::-1][: cached[one.name]].sum()) for one in profile)


def cached_rows(plan) -> dict[str, int]:
    return {
        shard.table: shard.row_count if shard.lookup == "device" else shard.cache_rows
        for shard in plan.shards
    }


@examples(200)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=3),
    st.floats(0, 1),
)
@example(counts=[[0, 1, 3, 6, 8, 12], [0, 1]], hit_rate=1.0)
def test_the_cache_is_the_smallest_that_has_the_hit_rate(
    counts: list[list[int]], hit_rate: float
) -> None:
    counts = [each for each in counts if sum(each)] or [[1]]
    profile = Profile(tuple(counted(f"t{i}", each) for i, each in enumerate(counts)))
    plan = serving_plan(profile, ONE, hit_rate)
    total = sum(map(sum, counts))
    ours = cached_rows(plan)
    assert hits(profile, ours) >= hit_rate * total - 1e-6
    # Tables of one width: the fewest rows are the hottest of all.
    every = np.sort(np.concatenate(counts))[::-1].cumsum()
    fewest = int(np.searchsorted(every, hit_rate * total - 1e-6)) + 1 if hit_rate > 0 else 0
    assert sum(ours.values()) <= fewest


def test_what_cannot_be_planned() -> None:
    profile = Profile((counted("t", [3, 2, 1]),))
    with pytest.raises(ProblemError, match=r"hit_rate 1.5 must lie within 0..1"):
        serving_plan(profile, ONE, 1.5)
    with pytest.raises(ProblemError, match="is for one GPU, and the topology has 2"):
        serving_plan(profile, Topology.parse("2xh100"), 0.5)
    large = Table("t", 10_000, 64, features=(Feature("t"),))
    spread = Profile((TableProfile(large, AccessCdf.zipf(10_000, 0.1)),))
    with pytest.raises(CapacityError):
        serving_plan(spread, Topology.parse("1xh100", hbm="64KiB"), 0.9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:all trainable parameters")
def test_a_server_has_the_trained_rows_and_the_hit_rate(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    probabilities = 1 / np.arange(1, 501) ** 1.1
    probabilities /= probabilities.sum()
    scattered = generator.permutation(500)
    log = scattered[generator.choice(500, 20_000, p=probabilities)]
    profile = Profile((counted("t", np.bincount(log, minlength=500).tolist()),))
    plan = serving_plan(profile, ONE, 0.8)
    model = nn.ModuleDict({"t": nn.EmbeddingBag(500, 4, mode="sum")})
    applied = apply_plan(model, plan, "adagrad", backend="tiered")
    save_tables(tmp_path / "tables", applied)
    served = load_read_only(plan, tmp_path / "tables", backend="tiered")
    assert list(served.parameters()) == []
    assert served.state_dict() == {}
    for start in range(0, log.size, 1000):
        ids = torch.from_numpy(log[start : start + 1000])
        bags = {"t": (ids, torch.arange(0, 1001, 10), None)}
        pooled = served(BagBatch.from_features(bags, served.feature_names))["t"]
        torch.testing.assert_close(pooled, model["t"](ids.view(100, 10)).detach())
        assert not pooled.requires_grad
    rates = served.hit_rates()
    # A cache that follows the log is about as good as the best fixed one.
    assert rates.hbm_hit_rate == pytest.approx(0.8, abs=0.05)

    weights = {"embeddings": {"t.weight": applied.tables["t"].weight()}}
    file = tmp_path / "tables.safetensors"
    write_tables(plan, Checkpoint(Position(step=3), {}, weights), file)
    again = load_read_only(plan, file, backend="torch")
    assert torch.equal(again(BagBatch.from_features(bags, ("t",)))["t"], pooled)
    other = serving_plan(Profile((counted("u", [3, 2, 1]),)), ONE, 0.5)
    with pytest.raises(CheckpointError, match=r"tables.u.weight is missing"):
        load_read_only(other, tmp_path / "tables")
    with pytest.raises(CheckpointError, match=r"tables.u.weight is missing"):
        load_read_only(other, file)


@pytest.mark.filterwarnings("ignore:all trainable parameters")
def test_a_server_leaves_out_the_padding_of_a_model(tmp_path: Path) -> None:
    table = Table("t", 9, 4, features=(Feature("t", 2.0, pooling="mean"),))
    shard = Shard("t", (0, 9, 1), (0, 4), ("gpu:0",), "hbm", "device")
    plan = Plan((table,), ONE, (shard,))
    model = nn.ModuleDict({"t": nn.EmbeddingBag(9, 4, mode="mean", padding_idx=8)})
    save_tables(tmp_path / "tables", apply_plan(model, plan, backend="torch"))
    ids = torch.tensor([[1, 8, 3], [8, 8, 2]])
    bags = {"t": (ids.flatten(), torch.tensor([0, 3, 6]), None)}
    served = load_read_only(plan, tmp_path / "tables", backend="torch", padding_idx={"t": 8})
    assert torch.equal(served(BagBatch.from_features(bags, ["t"]))["t"], model["t"](ids))
    assert served.to("cpu") is served
    with pytest.raises(PlanMismatchError, match=r"cannot become torch\.float16 on cpu"):
        nn.Sequential(served, nn.Linear(4, 1)).half()
