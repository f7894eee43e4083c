"""What is recorded of files: hashes, and contents where some of them differ from run to run."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor

VOLATILE = frozenset({"seconds", "created", "placer_version", "stats", "solve_s", "search_space"})
"""Keys whose values are measured times, dates, versions or sentences; or whose keys may change."""


def stable(value: Any, drop: frozenset[str] = VOLATILE) -> Any:
    """A value of JSON without the keys that are left out."""
    if isinstance(value, dict):
        # A plan's own hash is of its dates, too.
        left_out = drop | {"sha256"} if "provenance" in value else drop
        return {key: stable(held, drop) for key, held in value.items() if key not in left_out}
    if isinstance(value, list):
        return [stable(held, drop) for held in value]
    return value


def sha256(content: bytes) -> str:
    """The hash of some bytes."""
    return hashlib.sha256(content).hexdigest()


def bits_of(tensor: Tensor) -> dict[str, Any]:
    """A tensor's type, shape, and hash of its bytes."""
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "sha256": sha256(held)}


def all_bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`bits_of` by name."""
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def tensors_in(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: bits_of(file.get_tensor(name)) for name in sorted(file.keys())}


def pinned() -> dict[str, str]:
    """Versions of what writes the bytes around tensors: with others, those may differ."""
    return {"torch": torch.__version__.partition("+")[0], "pyarrow": pa.__version__}


def folder_bits(folder: Path) -> dict[str, Any]:
    """Every file of a folder: its hash, or its content where some of it is volatile.

    - ``.metadata`` of a checkpoint is a pickle with a random id and the folder's path: what it
      says of tensors is taken instead.
    - ``checkpoint.json`` lists that file's size and hash, and has a hash over itself: without.
    - ``*.distcp`` has the frame of torch's files around the tensors: its hash is compared where
      torch is the version that it was recorded with; the tensors in it always are.
    - ``vocabulary-*.parquet`` names pyarrow's version: its rows are taken, and ``profile.json``
      goes without its name, size and hash, and with numbers instead of bytes, as an exponent in it
      is a fit.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, content = path.relative_to(folder).as_posix(), path.read_bytes()
        if path.name == ".metadata":
            found[name] = _metadata(path.parent)
            found[f"{name}: tensors"] = all_bits(read_dcp(path.parent))
        elif path.name == "checkpoint.json":
            document = json.loads(content)
            del document["sha256"], document["files"][".metadata"]
            for each in document["files"].values():
                each["torch sha256"] = each.pop("sha256")
            found[name] = document
        elif path.suffix == ".distcp":
            found[name] = {"torch sha256": sha256(content)}
        elif path.name.startswith("vocabulary-"):
            rows = pq.read_table(path).to_pydict()
            found["vocabulary-*.parquet"] = sha256(json.dumps(rows).encode())
        elif path.name == "profile.json":
            document = json.loads(content)
            del document["sha256"]
            document["files"].pop("vocabulary", None)
            found[name] = document
        else:
            found[name] = sha256(content)
    return found


def _metadata(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its tensors, and where their bytes are."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: {
            "dtype": str(held.properties.dtype),
            "size": list(held.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in held.chunks],
        }
        for name, held in metadata.state_dict_metadata.items()
    }
    stored = [
        [index.fqn, None if index.offset is None else list(index.offset), at.relative_path]
        for index, at in metadata.storage_data.items()
    ]
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    return {"tensors": tensors, "stored": stored, "paths": paths}


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder in torch's own format, read by torch alone."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: torch.empty(held.size, dtype=held.properties.dtype)
        for name, held in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def without_pinned(value: Any, recorded: dict[str, str]) -> Any:
    """A recording without what other versions of other packages write otherwise."""
    return stable(value, frozenset(f"{n} sha256" for n, v in pinned().items() if recorded[n] != v))
