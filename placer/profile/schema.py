"""What a profile's JSON holds, and of which types; files hold nothing else that is read."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.errors import ProfileError
from placer.growing.key_map import Eviction


class _Strict(BaseModel):
    """Values of exactly these types; keys of later versions are passed over."""

    model_config = ConfigDict(strict=True)


class _Counted(_Strict):
    lookups: int = Field(ge=0)
    bags: int = Field(ge=0)


class _Unknown(_Strict):
    lookups: int = Field(ge=0)
    ids: int | None = Field(default=0, ge=0)


class _Feature(_Strict):
    name: str
    pooling_factor: float
    coverage: float
    pooling: str


class _HitRate(_Strict):
    capacity: int = Field(ge=1)
    eviction: Eviction
    hit_rate: float = Field(ge=0, le=1)


class _Table(_Strict):
    name: str
    rows: int
    dim: int
    dtype: str
    optimizer: str
    zipf_exponent: float | None
    features: list[_Feature]
    counted: dict[str, _Counted]
    locality: list[list[int]] = []
    unknown: _Unknown | None = None
    hit_rates: list[_HitRate] = []


class _Mapping(_Strict):
    kind: str
    rows: int | None = None


class _Encoding(_Strict):
    mappings: dict[str, _Mapping]
    feature_tables: dict[str, str]
    dense: list[str]
    label: str | None
    missing: Literal["zero", "empty"]


class _File(_Strict):
    name: str
    bytes: int = Field(ge=0)
    sha256: str


class _Document(_Strict):
    source: str
    samples: int = Field(ge=0)
    sampling: float
    encoding: _Encoding | None
    tables: list[_Table]
    files: dict[str, _File]


def check_document(document: Any, file: object) -> None:
    """Check the types of a profile's JSON.

    Raises ProfileError, which names the first value of another type.

    Examples
    --------
    >>> check_document({"source": 3}, "profile.json")
    Traceback (most recent call last):
    placer.errors.ProfileError: profile.json: source: Input should be a valid string
    """
    try:
        _Document.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ProfileError(f"{file}: {where}: {first['msg']}") from error
