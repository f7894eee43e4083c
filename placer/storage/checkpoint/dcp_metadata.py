"""The ``.metadata`` of a `torch.distributed.checkpoint` folder, read without trusting it."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from placer.errors import CheckpointError

NAME = ".metadata"

_ADMITTED = {
    "torch": {"Size", *(name for name, kind in vars(torch).items() if type(kind) is torch.dtype)},
    "torch.serialization": {"_get_layout"},  # A look-up of ``torch.strided`` and the like.
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # Where it was written to.
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
"""All that such a file is made of, besides Python's own containers, texts and numbers. None of it
does anything but hold values."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"it wants {module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """What a folder says of its tensors.

    The file is a pickle. It is read by an unpickler that knows the classes of such metadata and
    refuses all others, so that no code of a file is run.

    Raises
    ------
    CheckpointError
        If it is missing, damaged, or holds anything that does not belong there.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            metadata = _Reader(file).load()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    # A damaged pickle may raise anything.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or no metadata of torch.distributed.checkpoint: {error}; "
            "nothing of it was run"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    return metadata
