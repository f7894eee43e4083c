"""Files of facebookresearch/dlrm_datasets: tensors (indices, offsets, lengths).

`lengths` has shape (tables, samples); bag b of table t holds
``indices[offsets[t * samples + b]:offsets[t * samples + b + 1]]``. ``torch.save`` wrote the files,
plain or compressed. They hold pickles, from which only tensors are read
(`placer.files.torch_files`): a file that would run code is refused.
"""

import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from placer.data.files.opening import open_unpacked, suffixes
from placer.data.files.stores import first_line, local_path, scheme_of, shown
from placer.data.keys import offsets_of
from placer.data.layout import Columns
from placer.data.log import Bags, Chunk
from placer.data.source import Place, RawBatch, Source, Span
from placer.errors import DataError
from placer.files.torch_files import OtherContentError, TensorFileError, read_tensors

MOST_UNPACKED = 200
"""Unpack a compressed log to at most this multiple of its size, plus `_FREE_BYTES`."""
_FREE_BYTES = 1 << 26


class DlrmSource(Source):
    """Files of dlrm_datasets, in order; their features are called t0, t1, …"""

    is_fixed = True

    def __init__(self, files: Sequence[str], *_: object) -> None:
        self.files = tuple(files)
        # Only the tensors show the number of tables.
        first = _load(self.files[0]).chunk
        self.columns = Columns(tuple(first.features))
        self.samples = first.samples if len(self.files) == 1 else None

    def spans(self) -> Generator[Span]:
        """Yield one file after another, each loaded into memory."""
        for file in self.files:
            batch = _load(file)
            tables, known = len(batch.chunk.features), len(self.columns.sparse)
            if tables != known:
                raise DataError(f"{file} has {tables} tables, but the log's first file has {known}")
            yield Span(batch.chunk.samples, batch.slice)
            del batch  # Free a file before loading the next.


def _load(file: str) -> RawBatch:
    """Return all samples of a file."""
    content = _torch_load(file)
    try:
        indices, offsets, lengths = (tensor.detach().cpu().numpy() for tensor in content)
        tables, samples = lengths.shape
        offsets = offsets.astype(np.int64, copy=False)
        fits = (
            (indices.dtype.kind, indices.ndim) == ("i", 1)
            and lengths.dtype.kind in "iu"
            and np.array_equal(offsets, offsets_of(lengths.ravel()))
            and offsets[-1] == indices.size
            and not (lengths < 0).any()
        )
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not fits:
        raise DataError(
            f"{file} does not hold the three tensors (indices, offsets, lengths) of dlrm_datasets: "
            "integers, lengths of shape (tables, samples), and offsets that run over the bags "
            "table by table, from 0 to the number of indices"
        )
    if not tables or not samples:
        raise DataError(f"{file} is empty; a log needs at least one sample")
    every = Bags(indices.astype(np.int64, copy=False), offsets)  # One table after another.
    features = {
        f"t{table}": every.of_samples(slice(table * samples, (table + 1) * samples))
        for table in range(tables)
    }
    dense = np.empty((samples, 0), dtype=np.float32)
    return RawBatch(Place(file, range(samples), "sample"), Chunk(samples, features, dense))


def _torch_load(file: str) -> Any:
    if scheme_of(file) != "file":
        raise DataError(
            f"{shown(file)}: torch.save's files are read from this machine alone; copy it here"
        )
    path = Path(local_path(file))
    if not path.is_file():
        raise DataError(f"cannot open {file}: no such file")
    try:
        if not suffixes(file)[1]:
            with path.open("rb") as plain:
                return read_tensors(plain)
        # A zip file is read from its end, and a compressed stream only from its start.
        with open_unpacked(file) as packed, tempfile.TemporaryFile() as unpacked:
            _unpack(packed, unpacked, path.stat().st_size)
            return read_tensors(unpacked)
    except OtherContentError as error:
        raise DataError(
            f"{file} holds more than tensors and was not opened, as it could run code ({error}); "
            "save (indices, offsets, lengths) with torch.save"
        ) from error
    except TensorFileError as error:
        raise DataError(
            f"cannot read {file} as what torch.save writes since PyTorch 1.6: {error}; "
            "is it cut short?"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {first_line(error)}; is it cut short?") from error


def _unpack(packed: IO[bytes], unpacked: IO[bytes], packed_bytes: int) -> None:
    """Copy the content of a compressed file, unless it is far larger than ids can be."""
    most_bytes = _FREE_BYTES + MOST_UNPACKED * packed_bytes
    done = 0
    while block := packed.read(1 << 20):
        done += len(block)
        if done > most_bytes:
            raise OSError(
                f"it unpacks to more than {most_bytes} bytes from {packed_bytes}, "
                "which no log does; unpack it yourself if it is sound"
            )
        unpacked.write(block)
