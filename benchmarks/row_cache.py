"""What the executor's row cache serves of real logs, beside what a plan counts on.

    python benchmarks/row_cache.py FOLDER

FOLDER has NumPy archives of accesses in their order: `scarab-recs.npz`, `orm-busy.npz` and
`gowalla_1m.npz` (docs/data.md says where they come from). Two questions of each: the share of the
first 200,000 accesses that a cache for 30% of their rows serves, which begins with the hottest; and
of 150,000 accesses that follow 150,000 others, a cache for 20% that begins with the hottest of
those. Steps have 512 accesses. Results go to `benchmarks/results/row-cache.json`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from _machine import RESULTS, machine

from placer.executor.memory import row_cache
from placer.executor.memory.cache_range import CacheRange
from placer.executor.names import Policy
from placer.files import write_text

Int = npt.NDArray[np.int64]
LOGS = {"scarab-recs": 0, "orm-busy": 0, "gowalla_1m": 1}
"""The number of the array of each archive."""

STEP = 512


def rows_of_a_step(ids: Int) -> float:
    """Distinct rows that a step reads, in the mean."""
    return float(
        np.mean([np.unique(ids[at : at + STEP]).size for at in range(0, ids.size - STEP + 1, STEP)])
    )


def served(
    ids: Int,
    rows: int,
    hot: Int,
    policy: Policy,
    expected_lookups: float,
    staged_steps: float = 2.6,
) -> float:
    """Share of accesses that a cache serves, which begins with rows `hot`.

    Rows that no entry is kept for are staged in entries for those of so many steps.
    """
    row_cache.EXPECTED_LOOKUPS = expected_lookups
    steps = [np.unique(ids[at : at + STEP], return_counts=True)
             for at in range(0, ids.size - STEP + 1, STEP)]  # fmt: skip
    staging = int(staged_steps * np.mean([slots.size for slots, _ in steps]))
    cache = row_cache.RowCache([CacheRange(0, rows, staging, hot.size, hot)], 0, "cpu", policy)
    for ticket, (slots, counts) in enumerate(steps):
        cache.resolve(
            torch.from_numpy(slots.astype(np.int32)),
            torch.from_numpy(counts.astype(np.int32)),
            ticket,
            ticket,
        )
    return cache.stats().hit_rate or 0.0


def still_staged(counts: Int, hot: Int, entries: int) -> float:
    """Share of accesses to rows that are not hot and still staged, were accesses drawn at random.

    After H. Che et al., "Hierarchical Web Caching Systems", IEEE JSAC 20(7), 2002: a row is still
    there if it was read within the accesses that fill the entries with others.
    """
    shares = np.delete(counts, hot) / counts.sum()
    few, many = 0.0, float(1 << 40)
    for _ in range(80):
        middle = (few + many) / 2
        filled = -np.expm1(-shares * middle).sum()
        few, many = (middle, many) if filled < entries else (few, middle)
    return float(shares @ -np.expm1(-shares * few))


def measured(known: Int, ids: Int, share: float) -> dict[str, float]:
    """What is counted on by accesses `known`, and served of `ids`, by policy."""
    rows = int(max(known.max(), ids.max())) + 1
    counts = np.bincount(known, minlength=rows)
    hot = np.argsort(-counts, kind="stable")[: int(rows * share)]
    plan = float(counts[hot].sum() / counts.sum())
    usual = row_cache.EXPECTED_LOOKUPS
    results = {
        "plan": plan,
        "lfu": served(ids, rows, hot, "lfu", usual),
        "lfu without weight": served(ids, rows, hot, "lfu", 0.0),
        "rank": served(ids, rows, hot, "rank", usual),
        "plan and still staged": plan + still_staged(counts, hot, int(2.6 * rows_of_a_step(ids))),
        "lfu, one step staged": served(ids, rows, hot, "lfu", usual, 1.05),
    }
    row_cache.EXPECTED_LOOKUPS = usual
    return results


def main() -> None:
    """Measure, print and write."""
    results = {}
    for name, number in LOGS.items():
        with np.load(Path(sys.argv[1]) / f"{name}.npz") as archive:
            accesses = archive[archive.files[number]][:300_000]
        # Rows by first appearance, as a vocabulary has them.
        begun = np.unique(accesses[:200_000], return_index=True, return_inverse=True)
        ids = np.argsort(np.argsort(begun[1]))[begun[2]]
        all_ids = np.unique(accesses, return_inverse=True)[1]
        results[name] = {
            "whole": measured(ids, ids, 0.3),
            "later": measured(all_ids[:150_000], all_ids[150_000:], 0.2),
        }
        print(name, results[name], flush=True)
    report = {"machine": machine(), "results": results}
    write_text(RESULTS / "row-cache.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
