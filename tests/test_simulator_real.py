"""The simulator and the executor count alike on real logs and on traces of real caches."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from executor_cases import machine
from simulator_cases import executor_rates, one_id_chunk, replay, simulated_rates

from placer import Feature, Plan, Shard, Table
from placer.data.reader import open_log
from placer.plan.fields import RowOrder
from placer.profile.count import profile_log
from placer.simulator.replay import ReplayOptions
from placer.tables import OPTIMIZERS
from placer.training.reading import batches as batches_of

pytestmark = pytest.mark.real


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_criteo_sample(real_data: Path, optimizer: str) -> None:
    log = open_log(real_data / "criteo_sample.train.xz", id_mapping="hash", rows=5000)
    profile = profile_log(log, dim=2, optimizer=optimizer)  # type: ignore[arg-type]
    shards, hot_ids = [], {}
    for number, one in enumerate(profile):
        table, gpu = one.table, f"gpu:{number % 2}"
        assert one.counts is not None
        hot_ids[table.name] = one.counts.hottest(400)
        if number % 3:
            shards.append(Shard(table.name, (0, 300, 1), (0, 2), (gpu,), "hbm", "device"))
            rows = (300, table.rows, 1)
            shards.append(
                Shard(table.name, rows, (0, 2), (gpu,), "dram", "staged", staging_rows=12)
            )
        else:
            rows = (0, table.rows, 1)
            shards.append(Shard(table.name, rows, (0, 2), (gpu,), "dram", "cached", 60, 8))
    plan = Plan(
        tuple(one.table for one in profile),
        machine(2),
        tuple(shards),
        {name: RowOrder("profile") for name in hot_ids},
        hot_ids,
    )
    batches = list(islice(batches_of(log, 256), 12))
    ahead, policy = optimizer != "sgd", "rank" if optimizer == "adagrad" else "lfu"
    found, totals = replay(plan, batches, ReplayOptions(1, policy, ahead))  # type: ignore[arg-type]
    expected = executor_rates(plan, batches, policy=policy, ahead=ahead)
    assert simulated_rates(found, totals) == expected
    assert expected.row_cache.in_place_rows
    assert expected.row_cache.written_back_rows


@pytest.mark.parametrize("trace", ["scarab-recs.npz", "orm-busy.npz"])
@pytest.mark.parametrize("policy", ["lfu", "rank"])
def test_the_traces_of_caches(real_data: Path, trace: str, policy: str) -> None:
    with np.load(real_data / trace) as file:
        keys = file[file.files[0]][:100_000]
    _, ids = np.unique(keys, return_inverse=True)
    rows = int(ids.max()) + 1
    hottest = np.argsort(-np.bincount(ids[:20_000], minlength=rows), kind="stable")[: rows // 20]
    table = Table("t", rows, 1, optimizer="sgd", features=(Feature("f"),))
    shard = Shard("t", (0, rows, 1), (0, 1), ("gpu:0",), "dram", "cached", rows // 20, 500)
    plan = Plan((table,), machine(1), (shard,), {"t": RowOrder("profile")}, {"t": hottest})
    batches = [one_id_chunk(ids[at : at + 2000]) for at in range(0, ids.size, 2000)]
    found, totals = replay(plan, batches, ReplayOptions(1, policy))  # type: ignore[arg-type]
    expected = executor_rates(plan, batches, policy=policy, ahead=True)
    assert simulated_rates(found, totals) == expected
    assert 0.05 < expected.hbm_hit_rate < 0.95
