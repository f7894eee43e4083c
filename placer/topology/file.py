"""Read topology files in YAML or TOML, and write them as YAML.

docs/topology.md describes the schema.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from placer.config_file import StrictModel
from placer.errors import PlacerError, TopologyError, did_you_mean
from placer.topology.devices import Drive, Gpu, Host, Link, LinkKind, TopologyFields
from placer.topology.kinds import GPU_KINDS
from placer.units import LEAST_WITHOUT_UNIT, listed, parse_bytes

_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*")
_RATE_UNITS = {
    "": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8,
}  # fmt: skip


def parse_rate(text: str | int | float) -> float:
    """Parse bytes per second from ``"55GB/s"``, ``"400Gbit/s"`` or a plain number.

    Case matters: ``Gb/s`` could mean bits or bytes and is refused.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _RATE_UNITS:
        raise ValueError("not a bandwidth; write it like 55GB/s, 400Gbit/s or 5.5e10")
    return float(match[1]) * _RATE_UNITS[match[2]]


def _is_small(value: object) -> bool:
    """Return true if a value is a number too small to be meant in bytes."""
    return isinstance(value, int | float) and 0 < value < LEAST_WITHOUT_UNIT


def _kind_of_gpu(value: str) -> str:
    if value and value not in GPU_KINDS:
        more = did_you_mean(value.lower(), GPU_KINDS)
        raise ValueError(f"no known kind of GPU, leave it out for another{more}")
    return value


def _bandwidth(value: Any) -> float:
    match, rate = _RATE.fullmatch(str(value)), parse_rate(value)
    if match and not match[2] and _is_small(rate):
        number = match[1]
        raise ValueError(f"it has no unit: write {number}GB/s, or {number}B/s if bytes are meant")
    return rate


def _size(value: object) -> object:
    if isinstance(value, bool):  # Else a yes of YAML would be one byte.
        raise ValueError("not a size; write it like 8GiB, 24GB or 512MiB")
    if isinstance(value, str) or _is_small(value):
        try:
            return parse_bytes(str(value))
        except PlacerError as error:
            raise ValueError(str(error)) from None
    return value


def format_size(size_bytes: int) -> str | int:
    """Return a size as files have it.

    >>> format_size(2**30), format_size(1000), format_size(2**30 + 1)
    ('1GiB', '1000B', 1073741825)
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B" if _is_small(size_bytes) else size_bytes


def _format_rate(bytes_per_s: float) -> str | float:
    text = f"{bytes_per_s / 1e9:.12g}GB/s"
    if "e" not in text and parse_rate(text) == bytes_per_s:
        return text
    return f"{bytes_per_s!r}B/s" if _is_small(bytes_per_s) else bytes_per_s


Size = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=1 << 63), PlainSerializer(format_size)]
_Positive = Field(gt=0, allow_inf_nan=False)
PerSecond = Annotated[float, BeforeValidator(parse_rate), _Positive]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth), _Positive, PlainSerializer(_format_rate)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class GpuEntry(StrictModel):
    """One GPU, or equal GPUs with an id such as ``gpu:[0-7]``."""

    id: str
    host: str
    memory_bytes: Size = Field(alias="memory")
    hbm_bytes_per_s: Bandwidth = Field(alias="hbm_bandwidth")
    launch_s: Seconds = 5e-6
    chip: Annotated[str, AfterValidator(_kind_of_gpu)] = ""


class DriveEntry(StrictModel):
    """A host's SSD, or several as one. Rates are in blocks of 4 KiB a second."""

    memory_bytes: Size = Field(alias="memory")
    reads_per_s: PerSecond = Drive(0).reads_per_s
    writes_per_s: PerSecond = Drive(0).writes_per_s


class HostEntry(StrictModel):
    """One host, or equal hosts with an id such as ``host:[0-3]``."""

    id: str
    memory_bytes: Size = Field(alias="memory")
    dram_bytes_per_s: Bandwidth = Field(alias="dram_bandwidth")
    drive: DriveEntry | None = None


class LinkEntry(StrictModel):
    """One link, or equal links with an end such as ``gpu:[0-7]``."""

    a: str
    b: str
    kind: LinkKind
    bytes_per_s: Bandwidth = Field(alias="bandwidth")
    latency_s: Seconds = 0.0


class TopologyFile(StrictModel):
    """A topology file."""

    name: str = ""
    emulated: bool = False
    gpus: list[GpuEntry] = Field(min_length=1)
    hosts: list[HostEntry] = Field(min_length=1)
    links: list[LinkEntry] = Field([])
    sources: dict[str, str] = Field({})


def dumps(topology: TopologyFields) -> str:
    """Return a topology as YAML text. Entries that only differ in a number are written as one."""
    document: dict[str, Any] = {"name": topology.name}
    if topology.emulated:
        document["emulated"] = True
    document["hosts"] = []
    for id_, host in _grouped(topology.hosts, "id"):
        drive = host.drive and DriveEntry.model_construct(**asdict(host.drive))
        document["hosts"].append(_document(HostEntry, host, id=id_, drive=drive))
    gpus, links = _grouped(topology.gpus, "id"), _grouped(topology.links, "a")
    document["gpus"] = [_document(GpuEntry, gpu, id=id_) for id_, gpu in gpus]
    document["links"] = [_document(LinkEntry, link, a=id_) for id_, link in links]
    if topology.sources:
        document["sources"] = dict(topology.sources)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _document(entry: type[StrictModel], value: object, **changed: Any) -> dict[str, Any]:
    """Return a value as an entry of a file, without fields that are empty by default."""
    known = entry.model_fields
    values = {name: getattr(value, name) for name in known} | changed
    kept = {name: one for name, one in values.items() if one or known[name].default != one}
    return entry.model_construct(**kept).model_dump(by_alias=True, exclude_unset=True)


def _check_number(entries: TopologyFile) -> None:
    """Raise if there are too many devices or links, before making them."""
    gpus, hosts = (sum(_number(one.id) for one in each) for each in (entries.gpus, entries.hosts))
    links = sum(_number(link.a) * _number(link.b) for link in entries.links)
    for count, what in ((gpus, "GPUs"), (hosts, "hosts"), (links, "links")):
        if count > _MOST_DEVICES:
            raise TopologyError(f"it has {count} {what}, and at most {_MOST_DEVICES} are read")


def machine_in(entries: TopologyFile, default_name: str) -> TopologyFields:
    """Return the machine that a file describes.

    Raises TopologyError if an id is malformed, or a drive serves no GPU.
    """
    _check_number(entries)
    machine = TopologyFields(
        name=entries.name or default_name,
        gpus=tuple(
            Gpu(**dict(gpu) | {"id": id_}) for gpu in entries.gpus for id_ in _expand(gpu.id)
        ),
        hosts=tuple(
            Host(**dict(host) | {"id": id_, "drive": host.drive and Drive(**dict(host.drive))})
            for host in entries.hosts
            for id_ in _expand(host.id)
        ),
        links=tuple(
            Link(**dict(link) | {"a": a, "b": b})
            for link in entries.links
            for a in _expand(link.a)
            for b in _expand(link.b)
        ),
        emulated=entries.emulated,
        sources=entries.sources,
    )
    served = {gpu.host for gpu in machine.gpus}
    unused = [host.id for host in machine.hosts if host.drive and host.id not in served]
    # A GPU of a host that is not listed is refused later, and may be meant for this host.
    if unused and served <= {host.id for host in machine.hosts}:
        raise TopologyError(
            f"no GPU can use the drive of {listed(unused, 3)}, a host without GPUs: leave the "
            "drive out"
        )
    return machine


_RANGE = re.compile(
    r"(?P<prefix>[^\[\]]*)\[(?P<first>[0-9]{1,9})-(?P<last>[0-9]{1,9})\]", re.DOTALL
)
_MOST_DEVICES = 65536


def _expand(id_: str) -> list[str]:
    """Return the ids of ``gpu:[0-2]``: ``gpu:0``, ``gpu:1``, ``gpu:2``; of another id, itself."""
    match = _RANGE.fullmatch(id_)
    if match is None:
        return [id_]
    first, count = int(match["first"]), _number(id_)
    return [f"{match['prefix']}{number}" for number in range(first, first + count)]


def _number(id_: str) -> int:
    """Return the number of devices that an id stands for."""
    match = _RANGE.fullmatch(id_)
    if match is None:
        if "[" in id_ or not id_:
            raise TopologyError(f"not an id: {id_!r}; write gpu:0, or gpu:[0-7] for eight of them")
        return 1
    first, last = int(match["first"]), int(match["last"])
    if not first <= last < first + _MOST_DEVICES:
        raise TopologyError(f"id {id_!r} must ascend and name at most {_MOST_DEVICES} devices")
    return last - first + 1


_T = TypeVar("_T", Gpu, Host, Link)
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)")


def _grouped(items: Iterable[_T], name: str) -> list[tuple[str, _T]]:
    """Group equal items with consecutive numbers under one id such as ``gpu:[0-7]``."""
    runs: list[tuple[str, int, int, _T]] = []
    nameless: Any = {name: ""}
    for item in items:
        match = _NUMBERED.fullmatch(getattr(item, name))
        prefix, number = (match[1], int(match[2])) if match else (getattr(item, name), -1)
        if runs and number > 0:
            previous, first, last, before = runs[-1]
            is_alike = replace(before, **nameless) == replace(item, **nameless)
            if is_alike and (previous, last + 1) == (prefix, number):
                runs[-1] = (prefix, first, number, before)
                continue
        runs.append((prefix, number, number, item))
    return [
        (getattr(item, name) if first == last else f"{prefix}[{first}-{last}]", item)
        for prefix, first, last, item in runs
    ]
