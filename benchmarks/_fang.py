"""Criteo Terabyte with a small share of its rows in HBM: static split, cache, and both."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _access_caches import LfuCache, LruCache
from _batch_caches import FACTORIES
from _markdown import markdown
from _replays import Batch, Step, cache_step, pool_step
from _runs import print_table

from placer.profile.cdf import AccessCdf
from placer.profile.zipf import ZipfMandelbrot
from placer.workloads import named_workload
from placer.workloads.synthetic_log import CATEGORICAL

Int = npt.NDArray[np.int64]

WORKLOAD = "criteo-terabyte"
HBM_SHARE = 0.015
PUBLISHED = {
    "source": "Fang et al. 2022, arXiv:2208.05321, and the README of its repository",
    "parameters_in_hbm": "1 to 1.5%",
    "all_in_hbm": {"steps_per_s": 45, "hbm_gb": 66.5},
    "cached": {"steps_per_s": 42, "hbm_gb": 3.75},
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated.

    Attributes
    ----------
    scale : float
        Share of each table's rows; tables keep up to 1,000.
    samples : int
        Of a step; one lookup of each table.
    warm, measured : int
        Steps before the hits are counted, and while they are.
    """

    scale: float = 1 / 8
    samples: int = 16384
    warm: int = 150
    measured: int = 50


SIZE, QUICK = Size(), Size(1 / 512, 256, 20, 5)


def laws(skew: str, scale: float) -> list[ZipfMandelbrot]:
    """The law of each table's lookups.

    ``fitted``: exponents and shifts that were fitted to the columns of the Criteo Kaggle sample
    (`placer.workloads.synthetic_log`), the largest column's for the largest table, and so on: which
    column of the one log is which of the other is not published. ``assumed``: the workload's.
    """
    tables = named_workload(WORKLOAD).tables
    columns = sorted(CATEGORICAL.values(), key=lambda column: -column.rows)
    found = {}
    for place, table in enumerate(sorted(tables, key=lambda profile: -profile.table.rows)):
        rows = table.table.rows
        rows = min(rows, max(1000, round(rows * scale)))
        if skew == "fitted":
            column = columns[place]
            found[table.name] = ZipfMandelbrot(rows, column.exponent, column.shift)
        else:
            assert table.zipf_exponent is not None, "named workloads have one"
            found[table.name] = ZipfMandelbrot(rows, table.zipf_exponent)
    return [found[profile.name] for profile in tables]


def best_static_share(tables: list[ZipfMandelbrot], rows: int) -> float:
    """Expected share of lookups in the `rows` hottest rows of all tables, by their CDFs."""
    cdfs = [AccessCdf.zipf(law.rows, law.exponent, law.shift) for law in tables]
    chance = np.concatenate([cdf.row_share for cdf in cdfs])
    width = np.concatenate([np.diff(cdf.ranks) for cdf in cdfs])
    hottest = np.argsort(-chance, kind="stable")
    held = np.concatenate(([0], np.cumsum(width[hottest])))
    share = np.concatenate(([0.0], np.cumsum((width * chance)[hottest]))) / len(tables)
    return float(np.interp(rows, held, share))


class Lookups:
    """Steps of independent lookups; rows of all tables are numbered by their chance, hottest 0."""

    def __init__(self, tables: list[ZipfMandelbrot], samples: int, seed: int = 0) -> None:
        self._tables, self._samples = tables, samples
        self._rng = np.random.default_rng(seed)
        self._starts = np.cumsum([0, *(law.rows for law in tables)])
        self.rows = int(self._starts[-1])
        chance = np.concatenate(
            [
                np.diff(
                    AccessCdf.zipf(law.rows, law.exponent, law.shift).share(np.arange(law.rows + 1))
                )
                for law in tables
            ]
        )
        self._rank = np.empty(self.rows, dtype=np.int32)
        self._rank[np.argsort(-chance, kind="stable")] = np.arange(self.rows, dtype=np.int32)

    def steps(self, number: int) -> Iterator[npt.NDArray[np.int32]]:
        """The rows that each step looks up, sample by sample."""
        for _ in range(number):
            columns = [
                start + law.draw(self._rng, self._samples)
                for start, law in zip(self._starts, self._tables, strict=False)
            ]
            yield self._rank[np.stack(columns, axis=1).ravel()]


def both(static_rows: int, cache: Step) -> Step:
    """The hottest rows always in HBM, a cache over the others."""

    def step(rows: Int, counts: Int) -> npt.NDArray[np.bool_]:
        hot = int(np.searchsorted(rows, static_rows))
        return np.concatenate(
            (np.ones(hot, dtype=np.bool_), cache(rows[hot:] - static_rows, counts[hot:]))
        )

    return step


def policies(hbm_rows: int, rows: int) -> dict[str, Step]:
    """What fills HBM: static rows, a cache, or half and half."""

    def static(read: Int, counts: Int) -> npt.NDArray[np.bool_]:
        return np.asarray(read < hbm_rows)

    half = hbm_rows // 2
    makers: dict[str, Callable[[int, int], Step]] = {
        "pool lfu": lambda entries, all_rows: pool_step(entries, all_rows, "lfu"),
        "pool rank": lambda entries, all_rows: pool_step(entries, all_rows, "rank"),
    }
    for name, make in FACTORIES.items():
        makers[name] = lambda entries, all_rows, make=make: cache_step(make(entries, all_rows))
    return (
        {"static": static}
        | {name: make(hbm_rows, rows) for name, make in makers.items()}
        | {
            f"half static, half {name}": both(half, make(hbm_rows - half, rows - half))
            for name, make in makers.items()
            if name in ("pool lfu", "lru")
        }
    )


def run(size: Size) -> dict[str, Any]:
    """Both skews."""
    return {
        "workload": named_workload(WORKLOAD).source,
        "hbm_share": HBM_SHARE,
        "size": asdict(size),
        "published": PUBLISHED,
        "skews": {skew: _simulated(skew, size) for skew in ("fitted", "assumed")},
    }


def _simulated(skew: str, size: Size) -> dict[str, Any]:
    tables, whole = laws(skew, size.scale), laws(skew, 1.0)
    lookups = Lookups(tables, size.samples)
    hbm_rows = round(HBM_SHARE * lookups.rows)
    print(f"\n{skew} skew: {hbm_rows:,} of {lookups.rows:,} rows in HBM", flush=True)
    steps = policies(hbm_rows, lookups.rows)
    hits, missed = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    distinct = 0
    stream = []
    for number, keys in enumerate(lookups.steps(size.warm + size.measured)):
        stream.append(keys)
        rows, counts = _batch(keys)
        for name, step in steps.items():
            found = step(rows, counts)
            if number >= size.warm:
                hits[name] += int(counts[found].sum())
                missed[name] += int(np.count_nonzero(~found))
        if number >= size.warm:
            distinct += rows.size
    asked = size.measured * size.samples * len(tables)
    everything = np.concatenate(stream)
    del stream
    per_access = {
        "lru": float(LruCache(hbm_rows).replay(everything)[-asked:].mean()),
        "lfu": float(LfuCache(hbm_rows).replay(everything)[-asked:].mean()),
    }
    rows_of_all = sum(law.rows for law in whole)
    record = {
        "rows": lookups.rows,
        "hbm_rows": hbm_rows,
        "laws": [asdict(law) for law in whole],
        "lookups_per_step": asked // size.measured,
        "rows_per_step": distinct / size.measured,
        "hit_share": {name: found / asked for name, found in hits.items()},
        "missed_rows_per_step": {name: rows / size.measured for name, rows in missed.items()},
        "hit_share_per_access": per_access,
        "expected_static": best_static_share(tables, hbm_rows),
        "expected_static_at_full_size": best_static_share(whole, round(HBM_SHARE * rows_of_all)),
    }
    _print(record)
    return record


def _batch(keys: npt.NDArray[np.int32]) -> Batch:
    rows, counts = np.unique(keys, return_counts=True)
    return rows.astype(np.int64), counts


def _print(record: dict[str, Any]) -> None:
    asked = record["rows_per_step"]
    rows = [
        (name, f"{share:.2%}", f"{record['missed_rows_per_step'][name]:,.0f}")
        for name, share in record["hit_share"].items()
    ]
    rows += [
        (f"{name}, per access", f"{share:.2%}", "-")
        for name, share in record["hit_share_per_access"].items()
    ]
    print_table(("in HBM", "lookups served", f"rows missed of {asked:,.0f} a step"), rows)
    print(
        f"  static, expected: {record['expected_static']:.2%}; at full size "
        f"{record['expected_static_at_full_size']:.2%}"
    )


def tables(report: dict[str, Any]) -> list[str]:
    """One table of both skews, as docs/studies.md has it."""
    skews = report["skews"]
    headers = ["in HBM"]
    for skew in skews:
        headers += [f"{skew} skew", "rows missed a step"]
    rows = []
    for name in next(iter(skews.values()))["hit_share"]:
        row = [name]
        for record in skews.values():
            row += [
                f"{record['hit_share'][name]:.2%}",
                f"{record['missed_rows_per_step'][name]:,.0f}",
            ]
        rows.append(row)
    for name in next(iter(skews.values()))["hit_share_per_access"]:
        row = [f"{name}, access by access"]
        for record in skews.values():
            row += [f"{record['hit_share_per_access'][name]:.2%}", "–"]
        rows.append(row)
    for title, key in (
        ("static, expected", "expected_static"),
        ("static, expected at full size", "expected_static_at_full_size"),
    ):
        row = [title]
        for record in skews.values():
            row += [f"{record[key]:.2%}", "–"]
        rows.append(row)
    return [markdown(headers, rows)]


def plot(report: dict[str, Any], path: Path) -> None:
    """Lookups that HBM does not serve, a bar for each way to use it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    width = 0.4
    for place, (skew, record) in enumerate(report["skews"].items()):
        missed = {name: 100 * (1 - share) for name, share in record["hit_share"].items()}
        at = np.arange(len(missed)) + (place - 0.5) * width
        bars = axes.barh(at, list(missed.values()), width, label=f"{skew} skew")
        axes.bar_label(bars, fmt="%.2f%%", fontsize=7, padding=2)
        axes.set_yticks(np.arange(len(missed)), list(missed))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(
        f"lookups that miss HBM with {report['hbm_share']:.1%} of the rows in it, % (fewer: better)"
    )
    figure.legend(loc="upper center", ncols=2)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
