"""The working set of a log beside counts by hand, and beside maps that really serve it."""

from collections import OrderedDict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import Workbench, invoke, json_of, misuse

from placer.data import open_log
from placer.data.reader import EncodedLog
from placer.errors import DataError
from placer.growing import Growing, KeyMap, working_sets
from placer.growing.options import KeyCounts

SAMPLES, WINDOW = 1000, 300


def _columns() -> dict[str, Any]:
    """Samples whose items come into fashion and go."""
    random = np.random.default_rng(0)
    newest = np.arange(SAMPLES) // 4
    items = [
        (now + 20 - random.geometric(0.1, random.integers(0, 4))).clip(0).tolist() for now in newest
    ]
    return {"label": random.integers(0, 2, SAMPLES), "item": items}


def _log() -> tuple[EncodedLog, list[list[int]]]:
    """A log of these samples, and its items by sample."""
    columns = _columns()
    log = open_log(pa.table(columns), label="label", sparse=["item"], id_mapping="identity")
    return log, columns["item"]


def test_windows_are_as_counted_by_hand() -> None:
    log, items = _log()
    found = working_sets(log, WINDOW, {}, batch_size=64)["item"]
    seen: set[int] = set()
    starts = range(0, SAMPLES, WINDOW)  # Which are no multiples of a step.
    windows = [list(chain(*items[start : start + WINDOW])) for start in starts]
    assert found.distinct == len({item for window in windows for item in window})
    assert found.distinct_of_windows == tuple(len(set(window)) for window in windows)
    for window, unknown in zip(windows, found.unknown_of_windows, strict=True):
        assert unknown == pytest.approx(np.mean([item not in seen for item in window]))
        seen.update(window)
    assert found.unknown_of_windows[0] == 1.0
    assert found.whole_windows == 3
    assert 0 < found.unknown_of_windows[-1] < 0.8  # A third of a window.


def test_hit_rates_are_those_of_maps_that_serve_the_log() -> None:
    log, items = _log()
    rates = working_sets(log, WINDOW, {"item": [30, 60]}, batch_size=50)["item"].hit_rates
    served_by = [(rate.capacity, rate.eviction) for rate in rates]
    assert served_by == [(30, "lfu"), (60, "lfu"), (30, "lru"), (60, "lru")]
    for rate in rates:
        keys = KeyMap(Growing(rate.capacity, eviction=rate.eviction))
        ends = []  # Of the windows: the last one is a third of one.
        for start in range(0, SAMPLES, 50):
            if start % WINDOW == 0:
                ends.append(keys.counts)
            keys.read(np.array(list(chain(*items[start : start + 50])), np.int64))
        _, warm, second, third = ends
        assert rate.hit_rate == pytest.approx(_rate(warm, keys.counts))
        assert rate.of_windows == pytest.approx(sorted([_rate(warm, second), _rate(second, third)]))


def _rate(before: KeyCounts, after: KeyCounts) -> float:
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses)


def test_the_range_is_of_whole_windows_after_the_first() -> None:
    log, items = _log()
    found = working_sets(log, 500, batch_size=50)["item"].hit_rates
    assert all(rate.of_windows == pytest.approx([rate.hit_rate] * 2) for rate in found)
    seen = set(chain(*items[:500]))
    second = list(chain(*items[500:]))
    assert found[-1].hit_rate == pytest.approx(1 - len(set(second) - seen) / len(second))
    for window in (501, 2000):  # The second one is not whole, and there is none.
        rates = working_sets(log, window, batch_size=50)["item"].hit_rates
        assert {rate.of_windows for rate in rates} == {None}


def test_small_steps_have_the_hit_rate_of_a_plain_lru_cache() -> None:
    log, items = _log()
    found = working_sets(log, WINDOW, {"item": [40]}, evictions=["lru"], batch_size=1)
    (rate,) = found["item"].hit_rates
    cache: OrderedDict[int, None] = OrderedDict()
    hits = lookups = 0
    for sample, read in enumerate(items):
        for item in read:
            if sample >= WINDOW:
                hits, lookups = hits + (item in cache), lookups + 1
            cache[item] = cache.pop(item, None)
            if len(cache) > 40:
                cache.popitem(last=False)
    # Rows of the last step stay where a plain cache may let them go.
    assert rate.hit_rate == pytest.approx(hits / lookups, abs=0.01)


def test_the_command_shows_what_the_function_finds(workbench: Workbench, tmp_path: Path) -> None:
    log, window = tmp_path / "log.parquet", 300  # The last window has 100 samples.
    pq.write_table(pa.table(_columns()), log)
    asked = ("profile", log, "--label", "label", "--id-mapping", "hash", "--rows", "500")
    shown = json_of(*asked, "--window", str(window))["ids_in_use"]
    opened = open_log(log, label="label", id_mapping="hash", rows=500)
    found = working_sets(opened, window)
    assert [row["table"] for row in shown] == list(found) == ["item"]
    for row in shown:
        table = found[row["table"]]
        assert row["ids"] == table.distinct
        assert row["ids_of_window"] == pytest.approx(np.mean(table.distinct_of_windows[:3]))
        assert row["new_share"] == pytest.approx(np.mean(table.unknown_of_windows[1:3]))
        rates = [rate.hit_rate for rate in table.hit_rates[:8]]
        names = [f"{how}_hit_rate_{share}%" for how in ("lfu", "lru") for share in (1, 3, 10, 30)]
        assert [row[name] for name in names] == rates
        ranges = [list(rate.of_windows or ()) for rate in table.hit_rates[:8]]
        assert [row[f"{name}_of_windows"] for name in names] == ranges
        assert all(low <= rate <= high for rate, (low, high) in zip(rates, ranges, strict=True))
    table = invoke(*asked, "--window", str(window))
    assert "Ids in use" in table.stdout
    assert "10% range" in table.stdout
    options = "--log-format", "counts", "--samples", "9", "--window", "9"
    assert "--window" in misuse("profile", workbench.log, *options)


def test_a_window_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="at least one sample, not 0"):
        working_sets(_log()[0], 0, {})


@pytest.mark.real
@pytest.mark.parametrize("trace", ["orm-busy", "scarab-recs"])
def test_real_traces_read_new_ids_all_the_time(trace: str, real_data: Path) -> None:
    ids = np.load(real_data / f"{trace}.npz")["id"][:300_000]
    log = open_log(pa.table({"id": ids}), sparse=["id"], id_mapping="vocabulary")
    found = working_sets(log, 50_000, {"id": [2000, 20_000]}, batch_size=1024)["id"]
    assert found.distinct == np.unique(ids).size
    assert min(found.unknown_of_windows) > 0.01
    for few, many in (found.hit_rates[:2], found.hit_rates[2:]):
        assert few.hit_rate < many.hit_rate < 1
