"""Sum up counts: lookups, copies, exchanges and memory by device, and windows of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from placer.errors import DataError
from placer.executor.distributed.division import servers_of
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, device_memory
from placer.plan.migration import break_even_steps
from placer.profile.cdf import Float
from placer.simulator.counts import Int, PartCounts, StepCounts
from placer.simulator.parts import Arrangement


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """Counts of one device over all steps."""

    device: str
    # Lookups that it served, and their distinct rows, summed over steps. A lookup of a column slice
    # counts as the slice's share of columns; a row counts once for each slice.
    lookups: int = 0
    rows: int = 0
    # Lookups of rows that the plan keeps in HBM, or that had a copy there before the step.
    hbm_lookups: int = 0
    # Rows copied to HBM; rows read and updated in DRAM over the link; and updated copies that were
    # written back.
    staged_rows: int = 0
    in_place_rows: int = 0
    written_back_rows: int = 0
    # Weights and optimizer state read from and written to HBM, by lookups, updates and copies.
    hbm_read_bytes: int = 0
    hbm_written_bytes: int = 0
    # Bytes over the link from its host, and to its host.
    link_in_bytes: int = 0
    link_out_bytes: int = 0
    # Bytes to and from other processes.
    sent_bytes: int = 0
    received_bytes: int = 0
    # Only for hosts: weights and optimizer state of rows in DRAM.
    dram_read_bytes: int = 0
    dram_written_bytes: int = 0
    # HBM entries for copies of rows; the most that held one; and the most rows that the steps in
    # flight wanted there.
    cache_entries: int = 0
    most_held: int = 0
    most_needed: int = 0
    # Bytes of HBM that the plan takes with every entry in use, and the most that were in use.
    hbm_bytes: int = 0
    most_hbm_bytes: int = 0

    @property
    def hbm_share(self) -> float | None:
        """Share of its lookups that HBM served; None without lookups."""
        return self.hbm_lookups / self.lookups if self.lookups else None


@dataclass(frozen=True, slots=True)
class Served:
    """Lookups and rows of some steps, by the tier that served them."""

    # A lookup counts once. With column slices, HBM serves the share of the row's columns that are
    # in HBM.
    lookups: int
    hbm_lookups: int
    # Distinct rows that came from DRAM, summed over steps: copied, read in place, or pooled by the
    # host.
    slow_rows: int

    @property
    def slow_lookups(self) -> int:
        """Lookups of rows that were not in HBM."""
        return self.lookups - self.hbm_lookups


def served(arrangement: Arrangement, counts: PartCounts) -> Served:
    """Return lookups and rows by tier, over all parts."""
    in_hbm = [part.lookup == "device" for part in arrangement.parts]
    slow = np.where(in_hbm, 0, counts.rows - counts.hit_rows)
    lookups, hbm = (round(one.sum()) for one in _lookups(arrangement, counts))
    return Served(lookups, hbm, int(slow.sum()))


def device_totals(
    arrangement: Arrangement, totals: StepCounts, cache_entries: Int
) -> tuple[DeviceTotals, ...]:
    """Return totals of all devices that may serve rows, then of hosts with GPUs."""
    plan, parts, counts = arrangement.plan, arrangement.parts, totals.parts
    gpus, memory = plan.topology.gpus_by_id, device_memory(plan)
    devices = [*dict.fromkeys([*plan.topology.serving_numbers, *plan.topology.hosts_by_id])]
    number = {device: at for at, device in enumerate(devices)}
    found = {one.name: np.zeros(len(devices)) for one in fields(DeviceTotals)[1:]}

    def add(name: str, at: Sequence[int], values: npt.ArrayLike) -> None:
        found[name] += np.bincount(np.array(at, dtype=np.intp), values, len(devices))

    def of_parts(name: str) -> Int:
        return np.array([getattr(part, name) for part in parts], dtype=np.int64)

    weights, whole = of_parts("weight_bytes"), of_parts("row_bytes")
    pooled = np.array([part.lookup == "host" for part in parts], dtype=bool)
    away = pooled | [part.lookup == "uva" for part in parts]
    updated = np.where(of_parts("replicated"), counts.update_rows, counts.rows)
    left_lookups = np.where(away, counts.lookups, counts.in_place_lookups)
    left = np.where(away, updated, counts.in_place_rows)
    here_lookups, here = counts.lookups - left_lookups, np.maximum(updated - left, 0)
    copied, back = counts.staged_rows * whole, counts.written_back_rows * whole
    read, written = copied + left_lookups * weights + left * whole, back + left * whole
    # If the host pools, vectors cross the link instead of rows. Servers have no link.
    columns = [part.cols[1] - part.cols[0] for part in parts]
    vectors = counts.vectors * columns * 4 * [part.device in gpus for part in parts]
    server = [number[part.device] for part in parts]
    lookups, hbm_lookups = _lookups(arrangement, counts)
    add("lookups", server, lookups)
    add("hbm_lookups", server, hbm_lookups)
    for name in ("rows", "staged_rows", "written_back_rows"):
        add(name, server, getattr(counts, name))
    add("in_place_rows", server, np.where(pooled, 0, left))
    add("hbm_read_bytes", server, here_lookups * weights + here * whole + back)
    add("hbm_written_bytes", server, here * whole + copied)
    add("link_in_bytes", server, np.where(pooled, vectors, read))
    add("link_out_bytes", server, np.where(pooled, vectors, written))
    home = [number[gpus[one.device].host if one.device in gpus else one.device] for one in parts]
    add("dram_read_bytes", home, read)
    add("dram_written_bytes", home, written)
    # The first of a process's GPUs, or the server, stands for the process.
    trainers, count = arrangement.trainers, len(gpus)
    processes = [number[[*gpus][-(-one * count // trainers)]] for one in range(trainers)]
    others = servers_of(plan)[: arrangement.processes - trainers]
    processes += [number[server] for server in others]
    every = sum(totals.sent.values(), np.zeros((len(processes),) * 2, np.int64))
    np.fill_diagonal(every, 0)
    add("sent_bytes", processes, every.sum(1))
    add("received_bytes", processes, every.sum(0))
    first = np.array([one[0] for one in arrangement.row_caches.values()], dtype=np.intp)
    cached = [server[at] for at in first]
    add("cache_entries", cached, cache_entries)
    add("most_held", cached, totals.held)
    add("most_needed", cached, totals.needed)
    found["hbm_bytes"][: len(gpus)] = [memory[gpu].total_bytes for gpu in gpus]
    free = cache_entries - totals.held
    add("most_hbm_bytes", cached, -free * (whole[first] + ROW_CACHE_ENTRY_BYTES))
    found["most_hbm_bytes"] += found["hbm_bytes"]
    rows = zip(*(values.round().astype(int).tolist() for values in found.values()), strict=True)
    return tuple(DeviceTotals(device, *row) for device, row in zip(devices, rows, strict=True))


def _lookups(arrangement: Arrangement, counts: PartCounts) -> tuple[Float, Float]:
    """Return lookups of each part and its HBM lookups, weighted by its share of columns."""
    parts, tables = arrangement.parts, arrangement.plan.tables
    shares = np.array([(one.cols[1] - one.cols[0]) / tables[one.table].dim for one in parts])
    in_hbm = [part.lookup == "device" for part in parts]
    hbm = np.where(in_hbm, counts.lookups, counts.hit_lookups)
    return counts.lookups * shares, hbm * shares


@dataclass(frozen=True, slots=True)
class StepRecord(Served):
    """Counts and time of one step."""

    # HBM entries for copies of rows over all row caches; see `StepCounts`.
    held: int
    needed: int
    # Step time if copies run beside the step before, and if they run one after the other.
    step_s: float
    sum_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """Summary of some consecutive steps under a plan, with windows to compare it to."""

    name: str
    steps: int
    hbm_share: float  # Share of lookups of rows in HBM; 1 without lookups.
    # Per step: lookups of rows that were not in HBM, and distinct rows that came from DRAM.
    slow_lookups: float
    slow_rows: float
    # Mean and 99th percentile of the step times.
    mean_s: float
    p99_s: float
    first: "Window | None" = None  # The log's first window under the plan.
    other: "Window | None" = None  # The same steps under another plan.
    migration_s: float | None = None  # Time of migrating to the other plan.

    @classmethod
    def of(cls, name: str, records: Sequence[StepRecord]) -> "Window":
        """Return the summary of the steps, of which there must be at least one."""
        steps, lookups = len(records), sum(one.lookups for one in records)
        hbm = sum(one.hbm_lookups for one in records)
        seconds = np.array([one.step_s for one in records])
        return cls(
            name,
            steps,
            hbm / lookups if lookups else 1.0,
            (lookups - hbm) / steps,
            sum(one.slow_rows for one in records) / steps,
            float(seconds.mean()),
            float(np.quantile(seconds, 0.99)),
        )

    @property
    def lost_share(self) -> float:
        """Share of lookups that HBM served in the first window, minus this window's share."""
        return 0.0 if self.first is None else self.first.hbm_share - self.hbm_share

    @property
    def break_even_steps(self) -> float | None:
        """Number of steps like these after which migrating pays off; None if it never does.

        0 if nothing moves.
        """
        if self.other is None or self.migration_s is None:
            return None
        return break_even_steps(self.migration_s, self.mean_s, self.other.mean_s)


def equal_windows(name: str, records: Sequence[StepRecord], windows: int) -> list[Window]:
    """Divide a log's steps into equal windows. If they do not divide, some are a step longer.

    Raises DataError if there are fewer steps than windows.
    """
    if len(records) < windows:
        raise DataError(
            f"{name} has {len(records)} steps, which do not make {windows} windows; ask for "
            "fewer windows, or for a smaller batch"
        )
    ends = [len(records) * number // windows for number in range(windows + 1)]
    return [
        Window.of(name if windows == 1 else f"{name} {number}/{windows}", records[low:high])
        for number, (low, high) in enumerate(pairwise(ends), 1)
    ]


def drifted(
    windows: Sequence[Window], others: Sequence[Window] | None, migration_s: float | None
) -> tuple[Window, ...]:
    """Return each window with `first`, and with the other plan's window if given."""
    beside: Sequence[Window | None] = others or [None] * len(windows)
    return tuple(
        replace(own, first=windows[0], other=other, migration_s=migration_s)
        for own, other in zip(windows, beside, strict=True)
    )
