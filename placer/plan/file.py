"""Read and write plan files: check their form and their row orders.

`placer/plan/plan.schema.json` is the JSON Schema of `PlanModel`; tests/test_plan_file.py makes it.
"""

import glob
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as serialize

from placer.dense import Dense, DenseLayers, MeasuredDense
from placer.dense.layers import DenseEntry
from placer.errors import PlacerError, PlanError
from placer.files.atomic import (
    SEAL,
    StrPath,
    is_name,
    read_parts,
    replacing_parts,
    sealed,
    sha256_file,
    write_bytes,
    write_text,
)
from placer.files.reading import LimitError, kind_of, open_file, read_json
from placer.growing.options import Growing
from placer.plan.fields import SCHEMA_VERSION, Pipeline, Provenance, RowOrder, Shard, SolverRecord
from placer.tables import ColdDType, Count, DType, Table
from placer.topology.devices import Drive, Gpu, Host, Link, Rate
from placer.topology.topology import Topology

if TYPE_CHECKING:
    from placer.plan.plan import Plan


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DeviceModel(_Strict):
    """A GPU or a host. A GPU has a `host`. Bandwidths are for random rows, in bytes a second."""

    id: str
    kind: Literal["gpu", "host"]
    memory_bytes: Count
    host: str | None = None
    bandwidth_bytes_per_s: Rate
    launch_s: float | None = Field(None, ge=0, description="GPUs: time of a kernel launch")
    chip: str = Field("", description="GPUs: what it is, such as h100")
    drive: Drive | None = Field(None, description="hosts: their SSD")


class TopologyModel(_Strict):
    """The machine that the plan was made for."""

    name: str = ""
    emulated: bool = False
    devices: list[DeviceModel]
    links: tuple[Link, ...]


class DenseLayersModel(DenseEntry):
    """The layers that are trained beside the embeddings, on every GPU."""

    model_config = _Strict.model_config

    reserved_bytes: Annotated[Count, Field(description="taken off memory_bytes of each GPU")] = 0


class PlanModel(_Strict):
    """A placement of embedding tables on a machine."""

    schema_version: Literal[1] = Field(description="version of this format")
    batch_size: int = Field(1, ge=1, lt=1 << 31, description="samples per GPU and step")
    pipeline: Pipeline = "look-ahead"
    widths: tuple[ColdDType, ...] = Field((), description="types that cold rows might have had")
    exchange_dtype: DType = Field("float32", description="type of pooled rows between GPUs")
    dense: DenseLayersModel | MeasuredDense | None = None
    tables: tuple[Table, ...]
    topology: TopologyModel
    shards: tuple[Shard, ...]
    row_order: dict[str, RowOrder] = {}
    growing: dict[str, Growing] = Field({}, description="tables without a vocabulary")
    solver: SolverRecord
    provenance: Provenance
    sha256: str = Field("", description="of all other keys, as `placer.files.atomic` has it")


def write(plan: "Plan", path: StrPath) -> None:
    """Write the row order first, then the plan that names it, each atomically.

    The name of the row order's file has its hash. So a crash in between leaves an older plan with
    its own row order. Row orders that the plan at `path` no longer names are removed.
    """
    target = Path(path)
    ordered = [
        name
        for name, order in sorted(plan.row_order.items())
        if order.kind == "profile" or name in plan.hot_ids
    ]
    unlisted = [name for name in ordered if name not in plan.hot_ids]
    if unlisted:
        raise PlanError(f"cannot write {target}: no hot_ids for the row orders of {unlisted}")
    listed = {name: np.ascontiguousarray(plan.hot_ids[name], np.int64) for name in ordered}
    content = serialize(listed)
    sha256 = hashlib.sha256(content).hexdigest()
    file = f"{target.name}.rows-{sha256[:12]}.safetensors"
    orders = {name: RowOrder(plan.row_order[name].kind, file, sha256) for name in ordered}
    text = _text(to_dict(replace(plan, row_order=orders) if ordered else plan))
    row_orders = f"{glob.escape(target.name)}.rows-*.safetensors"
    with replacing_parts(target, lambda: list(target.parent.glob(row_orders))) as names:
        if ordered:
            write_bytes(target.with_name(file), content)
            names.add(file)
        write_text(target, text)


def _text(document: dict[str, Any]) -> str:
    return json.dumps(sealed(document), indent=1) + "\n"


def seal(path: StrPath) -> None:
    """Update the hash of a plan that somebody has edited.

    Raises PlanError if the file is no plan, with any hash.
    """
    source = Path(path)
    document, model = parse(source)
    _with_row_orders(source, model)
    write_text(source, _text(document))


def read(path: StrPath, *, edited: bool = False) -> dict[str, Any]:
    """Read the fields of a plan and its row orders, which belong together; see `Plan.load`.

    If the plan is `edited`, its hash may be of other content.
    """
    source = Path(path)
    return read_parts(source, lambda: _read(source, edited))


def _read(source: Path, edited: bool) -> dict[str, Any]:
    document, model = parse(source)
    plan = _with_row_orders(source, model)
    if not edited and document.get(SEAL) and document[SEAL] != sealed(document)[SEAL]:
        raise PlanError(
            f"{source} was altered since it was written: restore it; if you edited it by hand, "
            "`placer verify --seal` takes it as it is now"
        )
    return plan


def _with_row_orders(source: Path, model: PlanModel) -> dict[str, Any]:
    files: dict[tuple[str, str | None], dict[str, npt.NDArray[np.int64]]] = {}
    hot_ids: dict[str, npt.NDArray[np.int64]] = {}
    for name, order in model.row_order.items():
        if order.kind == "id" and order.file is None:
            continue
        if order.file is None or not is_name(order.file):
            raise PlanError(
                f"{source}: row_order.{name} of kind 'profile' must name a file beside the plan, "
                f"not {order.file!r}"
            )
        key = (order.file, order.sha256)
        if key not in files:
            files[key] = _load_row_order(_beside(source, order.file), order.sha256)
        if name not in files[key]:
            raise PlanError(f"{source}: {order.file} holds no row order of table {name!r}")
        hot_ids[name] = files[key][name]
    fields, dense = dict(model), model.dense
    del fields["schema_version"], fields["sha256"]
    try:
        fields["topology"] = _topology(model.topology)
        fields["dense"] = dense.layers() if isinstance(dense, DenseLayersModel) else dense
    except PlacerError as error:
        raise PlanError(f"{source}: {error}") from error
    return fields | {"hot_ids": hot_ids}


def parse(source: Path) -> tuple[dict[str, Any], PlanModel]:
    """Read a plan file and check its form, but not its row order or its hash.

    Raises PlanError if the file is missing, no JSON (cut short), of a newer version, or breaks the
    schema.
    """
    try:
        document = read_json(source)
    except FileNotFoundError:
        raise PlanError(f"there is no plan at {source}") from None
    except IsADirectoryError:
        raise PlanError(_folder_for_plan(source)) from None
    except OSError as error:
        reason = error.strerror or error
        raise PlanError(f"cannot read the plan {source}: {reason}") from error
    except LimitError as error:
        with open_file(source) as file:
            start = file.read(80).lstrip()
        # A plan is one object, so it starts with a brace, and nothing follows its end.
        if start[:1] not in (b"", b"{", b"\x1f") or str(error).startswith("Extra data"):
            raise PlanError(
                f"{source} is a log or another file, and no plan; a plan is what "
                "`placer plan` wrote"
            ) from error
        raise PlanError(
            f"{source} is not JSON of a plan ({error}): cut short or edited; "
            "make it again with `placer plan`"
        ) from error
    kind = kind_of(document)
    if kind not in ("", "a plan"):
        raise PlanError(f"{source} is {kind} and no plan; a plan is what `placer plan` wrote")
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise PlanError(f"{source} is not a plan: it has no schema_version that is a number")
    if version > SCHEMA_VERSION:
        raise PlanError(
            f"{source} has schema_version {version}, this placer reads up to "
            f"{SCHEMA_VERSION}: upgrade placer"
        )
    return document, _validated(document, str(source))


def _folder_for_plan(folder: Path) -> str:
    """Return the error message for a folder that is given as a plan."""
    if (folder / "profile.json").exists():
        return (
            f"{folder} is a profile and no plan; make one with "
            f"`placer plan --profile {folder} -o plan.json`"
        )
    plans = sorted(file.name for file in folder.glob("*.json") if file.name != "checkpoint.json")
    inside = f", such as {folder / plans[0]}" if plans else ""
    return f"{folder} is a folder; a plan is the JSON file that `placer plan` wrote{inside}"


def _validated(document: object, source: str) -> PlanModel:
    try:
        # As JSON, so that dataclasses take dictionaries.
        return PlanModel.model_validate_json(json.dumps(document))
    except PlacerError as error:
        raise PlanError(f"{source}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        same = {"unexpected_keyword_argument": "Extra inputs are not permitted"}
        reason = same.get(first["type"], first["msg"])
        more, given = error.error_count() - 1, repr(first["input"])
        given = given if len(given) <= 60 else given[:57] + "..."
        raise PlanError(
            f"{source}: {where}: {reason} (got {given})" + (f"; and {more} more" if more else "")
        ) from error


def to_dict(plan: "Plan") -> dict[str, Any]:
    """Return the plan as the JSON document that `write` writes."""
    topology = plan.topology
    document = {
        "schema_version": SCHEMA_VERSION,
        "batch_size": plan.batch_size,
        "tables": [asdict(table) for table in plan.tables],
        "topology": {
            "name": topology.name,
            "emulated": topology.emulated,
            "devices": [
                *(_device("gpu", gpu, gpu.hbm_bytes_per_s) for gpu in topology.gpus),
                *(_device("host", host, host.dram_bytes_per_s) for host in topology.hosts),
            ],
            "links": [asdict(link) for link in topology.links],
        },
        "shards": [_said(shard, dtype=None) for shard in plan.shards],
        "row_order": {name: asdict(order) for name, order in plan.row_order.items()},
        "solver": asdict(plan.solver),
        "provenance": _said(plan.provenance, ids_sha256={}),
    }
    optional: dict[str, tuple[Any, Any]] = {
        "pipeline": (plan.pipeline, "look-ahead"),
        "widths": (list(plan.widths), []),
        "exchange_dtype": (plan.exchange_dtype, "float32"),
        "dense": (plan.dense and _dense(plan.dense), None),
        "growing": ({name: asdict(how) for name, how in plan.growing.items()}, {}),
    }
    document |= {name: value for name, (value, usual) in optional.items() if value != usual}
    _validated(document, "the plan")
    return document


def _device(kind: str, device: Gpu | Host, bytes_per_s: float) -> dict[str, Any]:
    """Return a GPU or a host for a plan file, without fields that are empty."""
    known = asdict(device) | {"kind": kind, "bandwidth_bytes_per_s": float(bytes_per_s)}
    named = [name for name in DeviceModel.model_fields if known.get(name) not in (None, "")]
    return {name: known[name] for name in named}


def _said(part: Shard | Provenance | DenseLayers, **usual: Any) -> dict[str, Any]:
    """Return a part of a plan for a plan file, without fields that have their `usual` values."""
    return {
        name: value
        for name, value in asdict(part).items()
        if name not in usual or value != usual[name]
    }


def _dense(dense: Dense) -> dict[str, Any]:
    """Return a dense part for a plan file, without fields that have their default values."""
    if not isinstance(dense, DenseLayers):
        return asdict(dense)
    given = _said(dense, **asdict(DenseLayers(dense.top)))
    return given | {"top": dense.top, "bottom": dense.bottom}


def _topology(model: TopologyModel) -> Topology:
    gpus, hosts = [], []
    for device in model.devices:
        size, speed = device.memory_bytes, device.bandwidth_bytes_per_s
        if device.kind == "host":
            hosts.append(Host(device.id, size, speed, device.drive))
            continue
        if device.host is None:
            raise PlanError(f"{device.id} is a gpu but names no host")
        launch = {} if device.launch_s is None else {"launch_s": device.launch_s}
        gpus.append(Gpu(device.id, device.host, size, speed, **launch, chip=device.chip))
    return Topology(model.name, tuple(gpus), tuple(hosts), model.links, model.emulated)


def _beside(source: Path, name: str) -> Path:
    """Return the path of a file beside a plan, or beside the target of the plan's symbolic link."""
    here = source.with_name(name)
    return here if here.exists() or not source.is_symlink() else source.resolve().with_name(name)


def _load_row_order(path: Path, sha256: str | None) -> dict[str, npt.NDArray[np.int64]]:
    if not path.is_file():
        raise PlanError(f"the plan's row order {path} is missing; it belongs beside the plan")
    if sha256 is not None and sha256_file(path) != sha256:
        raise PlanError(
            f"{path} is not the row order that the plan was made with (its SHA-256 differs): "
            "cut short or replaced; copy it again, or plan again"
        )
    try:
        row_order = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise PlanError(f"cannot read the row order {path}: {error}") from error
    for name, ids in row_order.items():
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise PlanError(
                f"the row order {path} has {ids.dtype} of shape {ids.shape} for table {name!r}; "
                "ids are a list of int64"
            )
    return row_order
