"""Describe a machine: GPUs, hosts and the links between them."""

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from placer.errors import TopologyError
from placer.topology.devices import (
    Drive,
    Gpu,
    Host,
    Link,
    LinkKind,
    TopologyFields,
    check_devices,
    check_links,
)
from placer.topology.kinds import GPU_KINDS
from placer.topology.presets import kinds, machine_called
from placer.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import networkx as nx

_ROUND_NUMBERS = 1.08
"""Allow this multiple of a card's memory: people write 80GiB for a card that reports 79.6 GiB."""


@dataclass(frozen=True)
class Topology(TopologyFields):
    """A machine: GPUs, hosts and the links between them.

    Raises TopologyError if a link or GPU names a missing device, a GPU has no link to its host's
    memory, a host has no link to hosts without GPUs, or a bandwidth is not positive.

    Examples
    --------
    >>> topology = Topology.parse("2x8xh100", hbm="8GiB")
    >>> len(topology.gpus), len(topology.hosts), topology.gpus[0].memory_bytes
    (16, 2, 8589934592)
    """

    def __post_init__(self) -> None:
        ids = [*(gpu.id for gpu in self.gpus), *(host.id for host in self.hosts)]
        if len(set(ids)) != len(ids):
            twice = sorted(name for name, times in Counter(ids).items() if times > 1)[:9]
            raise TopologyError(f"topology {self.name!r} names devices more than once: {twice}")
        if not self.gpus:
            raise TopologyError(f"topology {self.name!r} has no GPU to serve lookups")
        check_devices(self)
        check_links(self, {*ids, "network"})
        for gpu in self.gpus:
            if self.link_of(gpu.id, "pcie") is None:
                raise TopologyError(
                    f"{gpu.id} has no pcie link to {gpu.host}; without one it cannot read DRAM"
                )

    @cached_property
    def graph(self) -> "nx.Graph":
        """The machine as a networkx graph: devices are nodes, links are edges.

        It is a multigraph, because PCIe and NVLink can both join a GPU to its host.
        """
        import networkx as nx  # Takes 0.1 s to load, and is rarely needed.

        graph = nx.MultiGraph(name=self.name)
        for gpu in self.gpus:
            graph.add_node(gpu.id, kind="gpu", device=gpu)
        for host in self.hosts:
            graph.add_node(host.id, kind="host", device=host)
        for link in self.links:
            graph.add_edge(
                link.a,
                link.b,
                key=link.kind,
                bytes_per_s=link.bytes_per_s,
                latency_s=link.latency_s,
            )
        return graph

    @cached_property
    def _links_by_end(self) -> dict[tuple[str, str], Link]:
        return {(end, link.kind): link for link in self.links for end in (link.a, link.b)}

    def link_of(self, device: str, kind: LinkKind) -> Link | None:
        """Return a device's link of a kind, or None."""
        return self._links_by_end.get((device, kind))

    @cached_property
    def gpus_by_id(self) -> dict[str, Gpu]:
        """GPUs by id."""
        return {gpu.id: gpu for gpu in self.gpus}

    @cached_property
    def gpu_numbers(self) -> dict[str, int]:
        """Index of each GPU in `gpus`, by id."""
        return {gpu.id: number for number, gpu in enumerate(self.gpus)}

    @cached_property
    def hosts_by_id(self) -> dict[str, Host]:
        """Hosts by id."""
        return {host.id: host for host in self.hosts}

    @cached_property
    def servers(self) -> tuple[Host, ...]:
        """Hosts without GPUs. Their CPUs pool rows in their memory and send the sums.

        Examples
        --------
        >>> [host.id for host in Topology.parse("2x8xh100+2xcpu").servers]
        ['host:2', 'host:3']
        """
        return tuple(host for host in self.hosts if host.id not in self._gpus_by_host)

    @cached_property
    def serving(self) -> tuple[Gpu | Host, ...]:
        """All devices that can serve shards: GPUs, then hosts without GPUs."""
        return (*self.gpus, *self.servers)

    @cached_property
    def serving_numbers(self) -> dict[str, int]:
        """Index of each device in `serving`, by id."""
        return {device.id: number for number, device in enumerate(self.serving)}

    def gpus_of(self, host: str) -> tuple[Gpu, ...]:
        """Return the GPUs attached to a host."""
        return self._gpus_by_host.get(host, ())

    @cached_property
    def _gpus_by_host(self) -> dict[str, tuple[Gpu, ...]]:
        attached: dict[str, list[Gpu]] = {}
        for gpu in self.gpus:
            attached.setdefault(gpu.host, []).append(gpu)
        return {host: tuple(gpus) for host, gpus in attached.items()}

    @cached_property
    def kind_of_gpu(self) -> tuple[int, ...]:
        """Number of the kind of each device in `serving`. Devices of one kind are equally fast.

        Examples
        --------
        >>> Topology.parse("2xh100").kind_of_gpu
        (0, 0)
        """
        kinds: dict[tuple[object, ...], int] = {}
        numbers = []
        for gpu in self.gpus:
            host = self.hosts_by_id[gpu.host]
            drive = host.drive and (host.drive.reads_per_s, host.drive.writes_per_s)
            speeds = (
                gpu.hbm_bytes_per_s,
                gpu.launch_s,
                host.dram_bytes_per_s,
                drive,
                len(self.gpus_of(gpu.host)),
                self.host_link_bytes_per_s(gpu.id),
                self.peer_bytes_per_s(gpu.id),
                self._gpus_in_rack(gpu.host),
                self.rack_bytes_per_s(gpu.id),
                self.network_bytes_per_s(gpu.id),
            )
            numbers.append(kinds.setdefault(speeds, len(kinds)))
        for server in self.servers:
            of_server = (server.dram_bytes_per_s, self.server_bytes_per_s(server.id))
            numbers.append(kinds.setdefault(of_server, len(kinds)))
        return tuple(numbers)

    def host_link_bytes_per_s(self, gpu: str) -> float:
        """Return the bandwidth between a GPU and its host's memory, each way."""
        link = self.link_of(gpu, "pcie")
        assert link is not None, "checked when the topology was made"
        return link.bytes_per_s

    def peer_bytes_per_s(self, gpu: str) -> float:
        """Return the bandwidth between a GPU and the other GPUs of its host, each way.

        Without NVLink, peers use PCIe.
        """
        link = self.link_of(gpu, "nvlink") or self.link_of(gpu, "pcie")
        assert link is not None, "checked when the topology was made"
        return link.bytes_per_s

    @cached_property
    def _rack_sizes(self) -> dict[str, int]:
        """Number of GPUs in each rack, by the rack's name."""
        sizes: Counter[str] = Counter()
        for link in self.links:
            if link.kind == "rack":
                sizes[link.b] += len(self.gpus_of(link.a))
        return sizes

    def _gpus_in_rack(self, host: str) -> int:
        """Return the number of GPUs in the host's rack, or on the host if it is in no rack."""
        link = self.link_of(host, "rack")
        return len(self.gpus_of(host)) if link is None else self._rack_sizes[link.b]

    def rack_bytes_per_s(self, gpu: str) -> float:
        """Return a GPU's share of its host's bandwidth to its rack, each way; 0 without a rack."""
        return self._host_share(gpu, "rack")

    def network_bytes_per_s(self, gpu: str) -> float:
        """Return a GPU's share of its host's network bandwidth, each way; 0 without a network."""
        return self._host_share(gpu, "network")

    def server_bytes_per_s(self, server: str) -> float:
        """Return the bandwidth between a host without GPUs and all GPUs, each way.

        If links of GPUs or their hosts are slower than all servers together, each server has an
        even part of those links.
        """
        ports = [self.link_of(host.id, "network") for host in self.hosts]
        own = self.link_of(server, "network")
        assert own is not None, "checked when the topology was made"
        of_hosts = sum(port.bytes_per_s for port in ports if port and self.gpus_of(port.a))
        of_gpus = sum(self.host_link_bytes_per_s(gpu.id) for gpu in self.gpus)
        return min(own.bytes_per_s, min(of_hosts, of_gpus) / len(self.servers))

    def _host_share(self, gpu: str, kind: LinkKind) -> float:
        host = self.gpus_by_id[gpu].host
        link = self.link_of(host, kind)
        return 0.0 if link is None else link.bytes_per_s / len(self.gpus_of(host))

    def allreduce_s(self, summed_bytes: float) -> float:
        """Return the seconds of an all-reduce of `summed_bytes` over all GPUs.

        It uses rings (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002): each of N GPUs
        sends 2 (N − 1) / N of the bytes to its neighbour, and a ring leaves each host once.
        """
        total = len(self.gpus)
        sent_bytes = 2 * summed_bytes * (total - 1) / total
        slowest = 0.0
        for host, gpus in self._gpus_by_host.items():
            if len(gpus) > 1:
                slowest = max(slowest, *(1 / self.peer_bytes_per_s(gpu.id) for gpu in gpus))
            rack, in_rack = self.link_of(host, "rack"), self._gpus_in_rack(host)
            if rack is not None and len(gpus) < in_rack:
                slowest = max(slowest, 1 / rack.bytes_per_s)
            if in_rack < total:
                network = self.link_of(host, "network")
                if network is None:
                    raise self._without_network(gpus[0].id)
                slowest = max(slowest, 1 / network.bytes_per_s)
        return sent_bytes * slowest

    def exchange_s(self, gpu: str, sent_bytes: float) -> float:
        """Return the seconds for a GPU to send `sent_bytes` evenly to all GPUs, itself included.

        This is one direction of an all-to-all. The part that stays on the GPU is free. Parts to
        peers, to other hosts of the rack and to other racks are sent at the same time.
        """
        total, host = len(self.gpus), self.gpus_by_id[gpu].host
        peers, in_rack = len(self.gpus_of(host)) - 1, self._gpus_in_rack(host)
        slowest_s = sent_bytes * peers / total / self.peer_bytes_per_s(gpu) if peers else 0.0
        near = in_rack - 1 - peers
        if near:
            slowest_s = max(slowest_s, sent_bytes * near / total / self.rack_bytes_per_s(gpu))
        remote = total - in_rack
        if not remote:
            return slowest_s
        bandwidth = self.network_bytes_per_s(gpu)
        if bandwidth == 0:
            raise self._without_network(gpu)
        return max(slowest_s, sent_bytes * remote / total / bandwidth)

    @cached_property
    def exchange_latency_s(self) -> float:
        """Seconds of a collective without data, over all GPUs and servers.

        It is the largest latency of the links that it uses; 0 if links state none.
        """
        return self._latency_s(bool(self.servers))

    @cached_property
    def gpu_exchange_latency_s(self) -> float:
        """Seconds of a collective without data, over all GPUs."""
        return self._latency_s(False)

    def _latency_s(self, with_servers: bool) -> float:
        reached = {host: self._gpus_in_rack(host) for host in self._gpus_by_host}
        is_wide = min(reached.values()) < len(self.gpus) or with_servers
        kinds = {"network"} if is_wide else set()
        if any(len(self.gpus_of(host)) < gpus for host, gpus in reached.items()):
            kinds.add("rack")
        if any(len(gpus) > 1 for gpus in self._gpus_by_host.values()):
            kinds.add("nvlink" if any(one.kind == "nvlink" for one in self.links) else "pcie")
        idle = set() if with_servers else {host.id for host in self.servers}
        used = (one for one in self.links if one.kind in kinds and not idle & {one.a, one.b})
        return max((one.latency_s for one in used), default=0.0)

    def _without_network(self, gpu: str) -> TopologyError:
        return TopologyError(
            f"{gpu} is on another host, or in another rack, than others of {self.name!r}, "
            "but its host has no network link"
        )

    def with_memory(
        self,
        *,
        hbm: str | int | None = None,
        dram: str | int | None = None,
        ssd: str | int | None = None,
    ) -> "Topology":
        """Return the machine with other budgets: `hbm` of each GPU, `dram` and `ssd` of each host.

        Hosts without GPUs keep their memory.

        Raises TopologyError if a GPU would have more memory than its card.
        """
        gpus, hosts = self.gpus, []
        if hbm is not None:
            gpus = tuple(replace(gpu, memory_bytes=parse_bytes(hbm)) for gpu in gpus)
        for host in self.hosts:
            if dram is not None and self.gpus_of(host.id):
                host = replace(host, memory_bytes=parse_bytes(dram))
            if ssd is not None and self.gpus_of(host.id):
                drive = replace(host.drive or Drive(0), memory_bytes=parse_bytes(ssd))
                host = replace(host, drive=drive)
            hosts.append(host)
        return replace(self, gpus=gpus, hosts=tuple(hosts))._checked()

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        hbm: str | int | None = None,
        dram: str | int | None = None,
        ssd: str | int | None = None,
    ) -> "Topology":
        """Make the machine of a preset (``8xh100+4xcpu``), a YAML/TOML file, or ``auto``.

        `hbm` and `dram` set the memory of each GPU and of its host. By default, presets reserve a
        part of it for the rest of the model (see `placer.topology.presets`). `ssd` gives the host
        of each GPU a drive of this size, or changes the size of its drive.

        Raises TopologyError if the text is unknown; the message lists the presets. Raises it if a
        GPU or host would have more memory than such a device has.
        """
        from placer.config_file import SUFFIXES  # not above: pydantic and YAML load slowly

        if Path(text).suffix.lower() in SUFFIXES:
            return cls.load(text).with_memory(hbm=hbm, dram=dram, ssd=ssd)
        if text.strip().lower() == "auto":
            from placer.topology.detect import detect, host_memory_bytes

            machine: TopologyFields = detect(hbm=hbm, dram=dram)
            known_bytes = host_memory_bytes()
        else:
            machine, known = machine_called(text), kinds(text)
            assert known is not None, "`machine_called` refuses other names"
            known_bytes = known[1].memory_bytes
        return cls(**vars(machine)).with_memory(hbm=hbm, dram=dram, ssd=ssd)._checked(known_bytes)

    def _checked(self, host_bytes: float = float("inf")) -> "Topology":
        """Return the topology, or raise if a GPU exceeds its card or a host `host_bytes`."""
        for gpu in self.gpus:
            if gpu.chip in GPU_KINDS:
                most = GPU_KINDS[gpu.chip].memory_bytes
                if gpu.memory_bytes > _ROUND_NUMBERS * most:
                    raise self._too_much(gpu.id, gpu.memory_bytes, f"its card, {gpu.chip!r},", most)
        for host in self.hosts:
            if host.memory_bytes > host_bytes and self.gpus_of(host.id):
                raise self._too_much(host.id, host.memory_bytes, "such a host", host_bytes)
        return self

    def _too_much(self, device: str, asked: float, owner: str, most: float) -> TopologyError:
        return TopologyError(
            f"{device} of {self.name!r} would have {format_bytes(asked)} of memory, but {owner} "
            f"has {format_bytes(most)}: give it no more, or describe another machine: placer "
            "topology NAME -o machine.yaml, where a GPU without chip may have any"
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Topology":
        """Read a topology from a YAML or TOML file; see docs/topology.md."""
        from placer.config_file import read_file
        from placer.topology.file import TopologyFile, machine_in

        entries = read_file(path, TopologyFile, "topology", TopologyError)
        try:
            return cls(**vars(machine_in(entries, Path(path).stem)))._checked()
        except TopologyError as error:
            raise TopologyError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the topology as YAML, atomically; `load` returns an equal topology."""
        from placer.config_file import write_yaml
        from placer.topology.file import dumps

        write_yaml(path, dumps(self), "topology", TopologyError)
