"""The table of `gpu.py`, and its targets: what was asked, what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _gpu_run import BAGS_IN_HBM, Record

HEADER = (
    f"{'batch':>7} {'skew':<10}{'HBM rows':>9}  {'contender':<27}{'step ms':>9}{'Msamples/s':>11}"
    f"{'roofline':>9}{'link':>7}{'HBM hit':>8}{'in place':>9}{'HBM GiB':>8}{'planned':>8}  note"
)


def line(record: Record) -> str:
    """A record as a row of the table."""
    rate = None if record.samples_per_s is None else record.samples_per_s / 1e6
    ms = None if record.step_s is None else record.step_s * 1e3
    gib = None if record.hbm_peak_bytes is None else record.hbm_peak_bytes / 2**30
    planned = None if record.hbm_plan_bytes is None else record.hbm_plan_bytes / 2**30
    note = record.note
    if record.host_waits and not record.host_waits.startswith("not asked"):
        note = f"{note}; " if note else ""
        note += f"host waits: {record.host_waits}"
    return (
        f"{record.batch_size:>7} {record.skew:<10}{record.hbm_row_share:>9.1%}  "
        f"{record.contender:<27}{_number(ms, 9, '.3f')}{_number(rate, 11, '.4f')}"
        f"{_number(record.roofline_share, 9, '.1%')}{_number(record.link_share, 7, '.0%')}"
        f"{_number(record.hbm_hit_rate, 8, '.1%')}{_number(record.in_place_share, 9, '.1%')}"
        f"{_number(gib, 8, '.2f')}{_number(planned, 8, '.2f')}  {note}"
    )


def _number(value: float | None, width: int, kind: str) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:>{width}{kind}}"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that the executor is to reach; `measured` is None where a row is missing."""

    where: str
    asked: float
    measured: float | None
    met: bool | None


def targets(records: Sequence[Record], batch_size: int) -> list[Target]:
    """The targets at the large batch, held against the records."""
    table = {
        (record.skew, record.hbm_row_share, record.contender): record
        for record in records
        if record.batch_size == batch_size and record.step_s is not None
    }

    def rate(skew: str, share: float, *contenders: str) -> float | None:
        """Samples per second of the fastest of the contenders."""
        found = [table.get((skew, share, name)) for name in contenders]
        return max((r.samples_per_s for r in found if r and r.samples_per_s), default=None)

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    def value(skew: str, share: float, name: str, of: Callable[[Record], float | None]) -> float:
        record = table.get((skew, share, name))
        found = None if record is None else of(record)
        return float("nan") if found is None else found

    def hits(record: Record) -> float | None:
        """What was in HBM by frequency; what a split model staged before does not count."""
        is_cache = record.contender.startswith("cached")
        return record.hbm_hit_rate if is_cache else record.split_hit_rate

    zipf, criteo, ahead = "zipf-1.05", "criteo", "staged + look-ahead"
    in_hbm = rate(zipf, 1.0, "device")
    fang = ("staged + look-ahead", "cached + look-ahead")
    asked: list[tuple[str, float, float | None]] = [
        (f"all rows in HBM: times {BAGS_IN_HBM}", 5.0, ratio(in_hbm, rate(zipf, 1.0, BAGS_IN_HBM))),
        (
            "all rows in HBM: share of the HBM roofline",
            0.6,
            value(zipf, 1.0, "device", lambda record: record.roofline_share),
        ),
        (
            "10% in HBM, staged + look-ahead: share of all-HBM",
            0.75,
            ratio(rate(zipf, 0.1, ahead), in_hbm),
        ),
        (
            "10% in HBM, staged + look-ahead: times in-place gather (our uva kernel)",
            5.0,
            ratio(rate(zipf, 0.1, ahead), rate(zipf, 0.1, "uva")),
        ),
        (
            "1.5% in HBM, Criteo skew, best of staged and cached: share of all-HBM",
            0.5,
            ratio(rate(criteo, 0.015, *fang), rate(criteo, 1.0, "device")),
        ),
        (
            "1.5% in HBM, Criteo skew: hit rate of the better of split and cache",
            0.9,
            max(value(criteo, 0.015, name, hits) for name in fang),
        ),
        (
            "0% in HBM, staged + look-ahead: share of the link",
            0.9,
            value(zipf, 0.0, ahead, lambda record: record.link_share),
        ),
        (
            "10% in HBM, staged + look-ahead: shortest step over longest",
            0.8,
            value(zipf, 0.1, ahead, lambda record: min(record.seconds) / max(record.seconds)),
        ),
        (
            "1.5% in HBM, Criteo skew, whole training: share of all-HBM",
            0.93,
            ratio(
                rate(criteo, 0.015, f"training, {ahead}"),
                rate(criteo, 1.0, "training, device + look-ahead"),
            ),
        ),
    ]
    return [
        Target(where, figure, None, None)
        if found is None or found != found
        else Target(where, figure, found, found >= figure)
        for where, figure, found in asked
    ]


def target_lines(found: Sequence[Target]) -> list[str]:
    """Targets as rows: asked, measured, met."""
    lines = [f"{'target':<76}{'asked':>8}{'measured':>10}  met"]
    for target in found:
        kind = ".1f" if target.asked > 1 else ".0%"
        measured = "–" if target.measured is None else f"{target.measured:{kind}}"
        met = {True: "yes", False: "NO", None: "not measured"}[target.met]
        lines.append(f"{target.where:<76}{target.asked:>8{kind}}{measured:>10}  {met}")
    return lines
