"""The plan file as pydantic models: what is checked when a file is read, and the JSON Schema.

`placer/plan/plan.schema.json` is `json_schema()` as shipped; a test holds them equal.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from placer.dense.file import DenseEntry
from placer.growing.options import Eviction
from placer.pipeline import Pipeline
from placer.plan.fields import SCHEMA_VERSION
from placer.plan.shard import Lookup, Memory
from placer.tables import ColdDType, DType, OptimizerName, Pooling
from placer.topology.devices import LinkKind

NonNegative = Annotated[int, Field(ge=0, lt=1 << 63)]
Place = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class FeatureModel(_Strict):
    """A feature that reads a table."""

    name: str
    pooling_factor: float = Field(1.0, ge=0, description="mean lookups of a non-empty bag")
    coverage: float = Field(1.0, ge=0, le=1, description="share of samples with a non-empty bag")
    pooling: Pooling = "sum"


class TableModel(_Strict):
    """An embedding table."""

    name: str
    rows: NonNegative
    dim: int = Field(ge=1)
    dtype: DType = "float32"
    optimizer: OptimizerName = "rowwise_adagrad"
    features: list[FeatureModel] = Field([], strict=False)


class DriveModel(_Strict):
    """A host's SSD: bytes, and blocks of 4 KiB a second."""

    memory_bytes: NonNegative
    reads_per_s: float = Field(gt=0)
    writes_per_s: float = Field(gt=0)


class DeviceModel(_Strict):
    """A GPU or a host. GPUs have `host`; bandwidths are bytes per second of random rows."""

    id: str
    kind: Literal["gpu", "host"]
    memory_bytes: NonNegative
    host: str | None = None
    bandwidth_bytes_per_s: float = Field(gt=0)
    launch_s: float | None = Field(None, ge=0, description="GPUs: time of a kernel launch")
    chip: str = Field("", description="GPUs: what it is, such as h100")
    drive: DriveModel | None = Field(None, description="hosts: their SSD")


class LinkModel(_Strict):
    """A full-duplex link; bytes per second each way."""

    a: str
    b: str
    kind: LinkKind
    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(0.0, ge=0)


class TopologyModel(_Strict):
    """The machine that the plan was made for."""

    name: str = ""
    emulated: bool = False
    devices: list[DeviceModel]
    links: list[LinkModel]


class ShardModel(_Strict):
    """A rectangle of a table on one tier of one device, or replicated on several."""

    table: str
    rows: list[Place] = Field(
        strict=False, min_length=3, max_length=3, description="[start, stop, step] over ranks"
    )
    cols: list[Place] = Field(strict=False, min_length=2, max_length=2, description="[start, stop]")
    devices: list[str] = Field(strict=False, min_length=1)
    memory: Memory
    lookup: Lookup
    cache_rows: NonNegative = 0
    staging_rows: NonNegative = 0
    buffer_bytes: NonNegative = 0
    dtype: ColdDType | None = Field(None, description="type of cold rows, if not the table's")


class RowOrderModel(_Strict):
    """How ranks map to ids; tables that are not listed have kind `id`."""

    kind: Literal["id", "profile"]
    file: str | None = None
    sha256: str | None = None


class GrowingModel(_Strict):
    """How a table gives its rows to keys, which may be any int64."""

    capacity: int = Field(ge=1, description="keys that have rows at a time; the table has one more")
    admission: int = Field(1, ge=1, le=255, description="readings until a key gets a row")
    eviction: Eviction = "lfu"
    ttl: NonNegative = Field(0, description="steps until a key that is not read goes; 0: never")


class DenseLayersModel(DenseEntry):
    """The layers that are trained beside the embeddings, on every GPU."""

    model_config = _Strict.model_config

    reserved_bytes: NonNegative = Field(0, description="taken off memory_bytes of each GPU")


class MeasuredDenseModel(_Strict):
    """What is trained beside the embeddings, as the time that it takes."""

    step_s: float = Field(ge=0)


class SolverModel(_Strict):
    """Which solver made the plan, and what it proved."""

    name: str
    status: Literal["optimal", "feasible"]
    step_time_s: float | None = None
    bound_s: float | None = None
    seconds: float = 0.0
    seed: int = 0
    cost_model: str = ""
    search_space: str = ""


class ProvenanceModel(_Strict):
    """Where the plan comes from."""

    problem_sha256: str = ""
    placer_version: str = ""
    created: str = ""
    profile: str = ""
    ids_sha256: dict[str, str] = Field(
        {}, description="by table, the hash of how ids became rows; none where nothing is known"
    )


class PlanModel(_Strict):
    """A placement of embedding tables on a machine."""

    schema_version: Literal[1] = Field(description="version of this format")
    batch_size: int = Field(1, ge=1, lt=1 << 31, description="samples per GPU and step")
    pipeline: Pipeline = "look-ahead"
    widths: list[ColdDType] = Field([], description="types that cold rows might have had")
    exchange_dtype: DType = Field("float32", description="type of pooled rows between GPUs")
    dense: DenseLayersModel | MeasuredDenseModel | None = None
    tables: list[TableModel]
    topology: TopologyModel
    shards: list[ShardModel]
    row_order: dict[str, RowOrderModel] = {}
    growing: dict[str, GrowingModel] = Field({}, description="tables without a vocabulary")
    solver: SolverModel
    provenance: ProvenanceModel
    sha256: str = Field("", description="of all other keys, as `placer.seal` has it")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan file."""
    schema = PlanModel.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "placer plan",
        **{key: value for key, value in schema.items() if key != "title"},
        "$comment": f"schema_version {SCHEMA_VERSION}; docs/plan-format.md says what it means",
    }
