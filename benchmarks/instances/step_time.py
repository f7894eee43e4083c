"""The step time of a plan, written from docs/cost-model.md alone ("In full").

Plain NumPy: nothing of placer, its cost models or its solvers is imported. An instance and a
plan's shards are the JSON of docs/instances.md.
"""

from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Shard = dict[str, Any]

WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATE_BYTES = {
    "sgd": lambda width: 0,
    "rowwise_adagrad": lambda width: 4,
    "adagrad": lambda width: 4 * width,
    "adam": lambda width: 8 * width,
}
PHASES = ("ids", "copies", "lookup", "outputs", "gradients", "update")


class Table:
    """A table of an instance: sizes of its rows, its bags, and how its rows are read."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.name: str = entry["name"]
        self.rows: int = entry["rows"]
        self.dim: int = entry["dim"]
        self.dtype: str = entry["dtype"]
        self.optimizer: str = entry["optimizer"]
        read = [f for f in entry["features"] if f["coverage"] > 0]
        self.lookups = sum(f["pooling_factor"] * f["coverage"] for f in entry["features"])
        self.features = len(read)
        self.bags = sum(f["pooling"] != "none" for f in read)
        self.max_bags = sum(f["pooling"] == "max" for f in read)
        self.unpooled_share = self._share(read, "none")
        self.max_share = self._share(read, "max")
        self._access = entry["access"]
        self._touched: dict[float, Float] = {}

    def _share(self, read: list[dict[str, Any]], pooling: str) -> float:
        """Share of the table's lookups that features of this pooling read."""
        own = sum(f["pooling_factor"] * f["coverage"] for f in read if f["pooling"] == pooling)
        return own / self.lookups if self.lookups else 0.0

    def weight_bytes(self, width: int) -> int:
        """Bytes of the weights of a row of `width` columns."""
        return width * WEIGHT_BYTES[self.dtype]

    def row_bytes(self, width: int) -> int:
        """Bytes of the weights and the optimizer state of a row of `width` columns."""
        return self.weight_bytes(width) + STATE_BYTES[self.optimizer](width)

    @property
    def weight_share(self) -> float:
        """Weights' share of the bytes of a whole row."""
        return self.weight_bytes(self.dim) / self.row_bytes(self.dim)

    @cached_property
    def _cdf(self) -> tuple[npt.NDArray[np.int64], Float]:
        """Ends of segments of ranks that are read alike, and the share of a row of each."""
        if "zipf" in self._access:
            ranks, shares = zipf(self.rows, self._access["zipf"])
        else:
            ranks, shares = (np.array(self._access[key]) for key in ("ranks", "shares"))
        return ranks, np.diff(shares) / np.diff(ranks)

    def _members(self, rows: tuple[int, int, int]) -> Float:
        """How many ranks of a slice lie in each segment."""
        start, stop, step = rows
        return np.diff(np.ceil((np.clip(self._cdf[0], start, stop) - start) / step))

    def loads(self, rows: tuple[int, int, int], lookups: float) -> tuple[float, float]:
        """Lookups of a slice, and distinct rows among them, of `lookups` lookups of the table."""
        share = self._cdf[1]
        if lookups not in self._touched:
            with np.errstate(divide="ignore", invalid="ignore"):
                touched = -np.expm1(lookups * np.log1p(-np.minimum(share, 1.0)))
            self._touched[lookups] = touched if lookups else np.zeros_like(share)
        members = self._members(rows)
        return float(members @ share) * lookups, float(members @ self._touched[lookups])


def zipf(rows: int, exponent: float) -> tuple[npt.NDArray[np.int64], Float]:
    """Ranks and shares of an access CDF by Zipf's law, on the grid of docs/instances.md."""
    if rows == 0:
        return np.zeros(1, np.int64), np.zeros(1)
    edges = np.arange(min(rows, 256) + 1, dtype=np.int64)
    if rows > 256:
        points = int(np.ceil(np.log10(rows / 256) * 64)) + 1
        wider = np.rint(np.geomspace(256, rows, points)).astype(np.int64)
        edges = np.unique(np.concatenate((edges, wider)))
    low, high = edges[:-1] + 0.5, edges[1:] + 0.5
    if abs(exponent - 1) < 1e-9:
        mass = np.log(high / low)
    else:
        mass = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    single = np.diff(edges) == 1
    mass[single] = (edges[:-1][single] + 1.0) ** -exponent
    slopes = np.minimum.accumulate(mass / np.diff(edges))
    shares = np.concatenate(([0.0], np.cumsum(slopes * np.diff(edges))))
    shares /= shares[-1]
    shares[-1] = 1.0
    return edges, shares


class Machine:
    """GPUs, hosts and links of an instance."""

    def __init__(self, instance: dict[str, Any]) -> None:
        self.gpus = {gpu["id"]: number for number, gpu in enumerate(instance["gpus"])}
        self.host_of = [gpu["host"] for gpu in instance["gpus"]]
        self.hbm = [gpu["hbm_bytes_per_s"] for gpu in instance["gpus"]]
        self.launch_s = [gpu["launch_s"] for gpu in instance["gpus"]]
        self.dram = {host["id"]: host["dram_bytes_per_s"] for host in instance["hosts"]}
        self.memory = {d["id"]: d["memory_bytes"] for d in instance["gpus"] + instance["hosts"]}
        self._links = {(one["a"], one["kind"]): one for one in instance["links"]}
        self.gpus_of: dict[str, list[int]] = defaultdict(list)
        for number, host in enumerate(self.host_of):
            self.gpus_of[host].append(number)
        ids = list(self.gpus)
        self.link = [self._links[name, "pcie"]["bytes_per_s"] for name in ids]
        self.exchange_byte_s = [self._exchange_byte_s(at, name) for at, name in enumerate(ids)]

    def _exchange_byte_s(self, number: int, name: str) -> float:
        """Seconds for a byte that a GPU spreads evenly over all GPUs, itself included."""
        total, host = len(self.gpus), self.host_of[number]
        beside = len(self.gpus_of[host])
        peers = self._links.get((name, "nvlink"), self._links[name, "pcie"])["bytes_per_s"]
        near_s = (beside - 1) / total / peers
        if beside == total:
            return near_s
        network = self._links[host, "network"]["bytes_per_s"] / beside
        return max(near_s, (total - beside) / total / network)

    @property
    def latency_s(self) -> float:
        """Of a collective: the longest of the kinds of links that it uses."""
        kinds = {"network"} if len(self.gpus_of) > 1 else set()
        if any(len(gpus) > 1 for gpus in self.gpus_of.values()):
            known = {kind for _, kind in self._links}
            kinds.add("nvlink" if "nvlink" in known else "pcie")
        links = [one for (_, kind), one in self._links.items() if kind in kinds]
        return max((one["latency_s"] for one in links), default=0.0)


class StepTime:
    """Adds up what shards take of each GPU in each phase, and of each host's memory."""

    def __init__(self, instance: dict[str, Any]) -> None:
        self.machine = Machine(instance)
        self.tables = {entry["name"]: Table(entry) for entry in instance["tables"]}
        self.constants: dict[str, float] = instance["constants"]
        self.serial = instance["pipeline"] == "serial"
        self.gpus = len(self.machine.gpus)
        self.batch = instance["batch_size"] * self.gpus
        self.phase_s = {name: np.zeros(self.gpus) for name in PHASES}
        self.in_place_s = np.zeros(self.gpus)  # Of lookups, the end that uses the link.
        self.in_place_update_s = np.zeros(self.gpus)
        self.dram_s = dict.fromkeys(self.machine.dram, 0.0)

    def seconds(self, shards: list[Shard]) -> float:
        """Step time of a plan whose shards are well formed."""
        slices = _column_slices(self.tables, shards)
        groups: dict[tuple[Any, ...], list[Shard]] = defaultdict(list)
        arenas: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        for shard in shards:
            key = (shard["table"], tuple(shard["cols"]), tuple(shard["devices"]))
            groups[key].append(shard)
            table, width = self.tables[shard["table"]], shard["cols"][1] - shard["cols"][0]
            for device in shard["devices"]:
                arenas[device].add((table.dtype, table.optimizer, width))
        for (name, _, _), group in groups.items():
            table = self.tables[name]
            all_rows = sum(row_count(shard) for shard in group) == table.rows
            for shard in group:
                self._add(table, shard, shard is group[0], all_rows, slices[name])
        for device, number in self.machine.gpus.items():
            launch_s = len(arenas[device]) * self.machine.launch_s[number]
            self.phase_s["lookup"][number] += launch_s
            self.phase_s["update"][number] += self.constants["update_kernels"] * launch_s
        return max(self._chain_s(), max(self.dram_s.values()))

    def _add(self, table: Table, shard: Shard, first: bool, all_rows: bool, slices: int) -> None:
        """All that a shard takes; `first` of its group."""
        replicas, width = len(shard["devices"]), shard["cols"][1] - shard["cols"][0]
        samples = self.batch // replicas
        looked_up = samples * table.lookups
        start, stop, step = shard["rows"]
        cached = min(stop, start + shard.get("cache_rows", 0) * step)
        reads = [(shard["lookup"], *table.loads((start, stop, step), looked_up))]
        if shard["lookup"] == "cached":
            hits = table.loads((start, cached, step), looked_up)
            missed = (reads[0][1] - hits[0], reads[0][2] - hits[1])
            reads = [("hit", *hits), ("miss", *missed)]
        lookups = sum(read[1] for read in reads)
        distinct = sum(read[2] for read in reads)
        vectors = samples * table.bags + lookups * table.unpooled_share
        for device in shard["devices"]:
            for kind, read_lookups, read_rows in reads:
                self._read(table, device, kind, width, read_lookups, read_rows, vectors)
        # What is returned and exchanged.
        c, samples = self.constants, samples if first else 0
        returned = samples * table.bags + lookups * table.unpooled_share
        if table.max_bags and not all_rows:
            returned += lookups * table.max_share - samples * table.max_bags
        output = returned * width * c["output_bytes"]
        ids = lookups * c["id_bytes"] + samples * table.features * c["length_bytes"]
        spread = self.gpus / (self.gpus - 1) if self.gpus > 1 else 0.0
        outputs, gradients = output, output
        if replicas > 1:
            others = (1 - replicas / self.gpus) * spread
            touched = table.loads((start, stop, step), self.batch * table.lookups)[1]
            summed = (distinct + touched) * (width * c["output_bytes"] + c["id_bytes"])
            ids, outputs = ids * others, output * others
            gradients = outputs + summed * (replicas - 1) / replicas * spread
        elif table.optimizer == "rowwise_adagrad":
            gradients += distinct * c["output_bytes"] * max(0, slices - 1) * spread
        for device in shard["devices"]:
            number = self.machine.gpus.get(device)
            if number is None:
                continue  # A host sends what it pools over its GPUs' links.
            byte_s = self.machine.exchange_byte_s[number]
            self.phase_s["ids"][number] += ids * byte_s
            self.phase_s["outputs"][number] += outputs * byte_s
            self.phase_s["gradients"][number] += gradients * byte_s
            written_s = output / self.machine.hbm[number]
            written_s *= (1 / c["lookup_share"] + 1 / c["update_share"]) / 2
            self.phase_s["lookup"][number] += written_s
            self.phase_s["update"][number] += written_s

    def _read(
        self, table: Table, device: str, kind: str, width: int,
        lookups: float, rows: float, vectors: float,
    ) -> None:  # fmt: skip
        """Rows that are looked up and updated in one way, on one device."""
        machine, c = self.machine, self.constants
        weights, row_bytes = table.weight_bytes(width), table.row_bytes(width)
        looked_up, touched = lookups * weights, rows * row_bytes
        if kind == "host":
            host = device if device in self.dram_s else machine.host_of[machine.gpus[device]]
            moved = (c["id_bytes"] + c["sort_bytes"]) * lookups + 2 * looked_up + 2 * touched
            self.dram_s[host] += moved / machine.dram[host]
            alone = device in self.dram_s
            numbers = machine.gpus_of[host] if alone else [machine.gpus[device]]
            for number in numbers:
                link_s = vectors * weights / machine.link[number] / len(numbers)
                hbm_s = 0.0 if alone else vectors * weights / machine.hbm[number]
                self._in_place(number, link_s, link_s)
                self.phase_s["lookup"][number] += hbm_s
                self.phase_s["update"][number] += hbm_s
            return
        number = machine.gpus[device]
        hbm, link, dram = machine.hbm[number], machine.link[number], machine.host_of[number]
        once = (1 - c["repeat_share"]) * table.weight_share
        look, update = c["lookup_share"], c["update_share"]
        lookup_s = lookups * (c["id_bytes"] + c["lookup_bytes"]) / look / hbm
        update_s = lookups * (c["sort_bytes"] + c["update_bytes"]) / update / hbm
        update_s += looked_up / update / hbm
        if kind == "uva":
            read = once / c["in_place_share"]
            both = (read + 1 / c["in_place_update_share"]) * touched / link
            bare = (1 - c["repeat_share"]) / c["in_place_share"]
            part = bare / (bare + 1 / c["in_place_update_share"])
            again = c["repeat_share"] * looked_up
            self._in_place(
                number, again / c["in_place_share"] / link + both * part, both * (1 - part)
            )
            self.dram_s[dram] += (again + (once + 2) * touched) / machine.dram[dram]
        else:
            copied = 1.0 if kind in ("staged", "miss") else 0.0
            bare = (1 - c["repeat_share"]) / look
            part = (bare + copied) / (bare + 2 / update + 2 * copied)
            both = (once / look + 2 / update + 2 * copied) * touched / hbm
            lookup_s += c["repeat_share"] * looked_up / look / hbm + both * part
            update_s += both * (1 - part)
            if copied:
                self.phase_s["copies"][number] += touched / c["copy_share"] / link
                self.dram_s[dram] += 2 * touched / machine.dram[dram]
            if kind in ("hit", "miss"):
                lookup_s += lookups * c["probe_bytes"] / hbm
        self.phase_s["lookup"][number] += lookup_s
        self.phase_s["update"][number] += update_s

    def _in_place(self, number: int, lookup_s: float, update_s: float) -> None:
        """Seconds of the link that are part of a lookup, and of an update."""
        self.phase_s["lookup"][number] += lookup_s
        self.phase_s["update"][number] += update_s
        self.in_place_s[number] += lookup_s
        self.in_place_update_s[number] += update_s

    def _chain_s(self) -> float:
        """The longest chain of phases."""
        phase, latency_s = self.phase_s, self.machine.latency_s
        if self.serial:
            return float(sum(phase[name].max() for name in PHASES)) + 4 * latency_s
        copies, ids, begin_s = phase["copies"], phase["ids"], 2 * latency_s
        # Reads in place are the end of a lookup; copies have used the link until then.
        left = np.minimum(copies, copies - (phase["lookup"] - self.in_place_s))
        lookup = phase["lookup"] + np.maximum(np.minimum(self.in_place_s, left), 0.0)
        waited = lookup.max()
        # Pooled rows leave when the slowest lookup has ended; ids began after their latencies.
        both = phase["outputs"] - max(begin_s - waited, 0.0)
        left = np.minimum(ids, begin_s + ids - waited)
        outputs = phase["outputs"] + np.maximum(np.minimum(both, left), 0.0)
        main_s = waited + outputs.max() + phase["gradients"].max() + phase["update"].max()
        link = copies + self.in_place_s + self.in_place_update_s
        network = ids + phase["outputs"] + phase["gradients"]
        chains = (main_s + 2 * latency_s, ids.max() + begin_s, link.max(), network.max())
        return float(max(chains))


def row_count(shard: Shard) -> int:
    """Rows of a shard."""
    return len(range(*shard["rows"]))


def _column_slices(tables: dict[str, Table], shards: list[Shard]) -> dict[str, int]:
    """Column slices of each table, replicas aside; columns in none of them are one more."""
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in tables}
    for shard in shards:
        if len(shard["devices"]) == 1:
            found[shard["table"]].add(tuple(shard["cols"]))
    covered = {name: sum(b - a for a, b in cols) for name, cols in found.items()}
    return {n: len(found[n]) + (0 < covered[n] < table.dim) for n, table in tables.items()}
