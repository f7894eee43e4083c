"""The executor's pool beside caches, static sets and the optimum, on real traces of keys."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _access_caches import LfuCache, LruCache
from _batch_caches import FACTORIES
from _markdown import markdown
from _replays import batches_of, cache_step, hit_share, most_hits, pool_step
from _runs import print_table

Int = npt.NDArray[np.int64]

TRACES = {
    "scarab-recs": "key accesses of a product-recommendation cache (ben-manes/caffeine)",
    "orm-busy": "key accesses of a busy shop's object mapper (cache2k, CC BY 4.0, headissue GmbH)",
}
SHARES = (0.01, 0.05, 0.2)
BATCHES = (1024, 16384)
QUICK_ACCESSES = 131_072

PER_ACCESS = ("optimum", "static, own half", "static, first half", "lru", "lfu")
PER_BATCH = ("pool lfu", "pool rank", *FACTORIES)


def run(folder: Path, *, quick: bool) -> dict[str, Any]:
    """All traces; hit shares of the second half, after the first."""
    records = []
    for name, what in TRACES.items():
        with np.load(folder / f"{name}.npz") as file:
            keys = file["id"]
        if quick:
            keys = keys[:QUICK_ACCESSES]
        # Halves of whole batches of any size.
        half = keys.size // 2 // max(BATCHES) * max(BATCHES)
        keys = _ranked(keys[: 2 * half], half)
        distinct = int(keys.max()) + 1
        print(f"\n{name}: {keys.size:,} accesses to {distinct:,} keys", flush=True)
        found = [_at(keys, half, distinct, share) for share in SHARES]
        _print(found)
        records.append(
            {
                "trace": name,
                "what": what,
                "accesses": keys.size,
                "keys": distinct,
                "new_in_second_half": _new_share(keys, half),
                "capacities": found,
            }
        )
    return {"batch_sizes": BATCHES, "traces": records}


def _ranked(keys: npt.NDArray[Any], half: int) -> Int:
    """Keys as ranks of a profile of the first half: the hottest is 0, ties by key."""
    distinct, dense = np.unique(keys, return_inverse=True)
    counts = np.bincount(dense[:half], minlength=distinct.size)
    rank = np.empty(distinct.size, dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(distinct.size)
    return rank[dense]


def _new_share(keys: Int, half: int) -> float:
    """Share of the second half's accesses to keys that the first half never read."""
    return float(np.isin(keys[half:], keys[:half], invert=True).mean())


def _at(keys: Int, half: int, distinct: int, share: float) -> dict[str, Any]:
    capacity = max(1, int(share * distinct))
    later = keys[half:]
    own = np.sort(np.bincount(later))[::-1]
    per_access = {
        "optimum": most_hits(later, capacity) / half,
        "static, own half": float(own[:capacity].sum()) / half,
        "static, first half": float((later < capacity).mean()),
        "lru": float(LruCache(capacity).replay(keys)[half:].mean()),
        "lfu": float(LfuCache(capacity).replay(keys)[half:].mean()),
    }
    per_batch = {}
    for size in BATCHES:
        batches = list(batches_of(keys, size))
        steps = {
            "pool lfu": pool_step(capacity, distinct, "lfu"),
            "pool rank": pool_step(capacity, distinct, "rank"),
        } | {name: cache_step(make(capacity, distinct)) for name, make in FACTORIES.items()}
        per_batch[str(size)] = {
            name: hit_share(step, batches, half // size) for name, step in steps.items()
        }
    return {
        "share": share,
        "capacity": capacity,
        "per_access": per_access,
        "per_batch": per_batch,
    }


def _print(found: list[dict[str, Any]]) -> None:
    rows = [(name, *(f"{one['per_access'][name]:.2%}" for one in found)) for name in PER_ACCESS]
    for size in BATCHES:
        rows += [
            (
                f"{name}, steps of {size:,}",
                *(f"{one['per_batch'][str(size)][name]:.2%}" for one in found),
            )
            for name in PER_BATCH
        ]
    print_table(("policy", *(f"{one['share']:.0%} of keys" for one in found)), rows)


def tables(report: dict[str, Any]) -> list[str]:
    """A table of each trace, as docs/studies.md has it."""
    found = []
    for trace in report["traces"]:
        capacities = trace["capacities"]
        headers = [f"{one['share']:.0%} of the keys" for one in capacities]
        rows = [
            [name, *(f"{one['per_access'][name]:.1%}" for one in capacities)] for name in PER_ACCESS
        ]
        rows += [
            [
                f"{name}, steps of {size:,}",
                *(f"{one['per_batch'][str(size)][name]:.1%}" for one in capacities),
            ]
            for size in report["batch_sizes"]
            for name in PER_BATCH
        ]
        found.append(markdown([trace["trace"], *headers], rows))
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """Hit shares over capacity, a panel for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(report["traces"]), figsize=(11, 4.5), squeeze=False)
    for axes, trace in zip(panels[0], report["traces"], strict=True):
        found = trace["capacities"]
        shares = [one["share"] for one in found]
        for name in PER_ACCESS:
            style = "k-" if name == "optimum" else ":" if name.startswith("static") else "--"
            axes.plot(
                shares, [one["per_access"][name] for one in found], style, marker=".", label=name
            )
        size = str(BATCHES[0])
        for name in PER_BATCH:
            axes.plot(
                shares,
                [one["per_batch"][size][name] for one in found],
                marker="o",
                label=f"{name} (steps)",
            )
        axes.set_xscale("log")
        axes.set_xlabel("capacity, share of the keys")
        axes.set_title(f"{trace['trace']}, {trace['accesses']:,} accesses")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of the second half's accesses that hit")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
