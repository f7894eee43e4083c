"""Plans and profiles on remote stores: read through copies on this machine, sent when complete.

A store shows an object only when it is complete. A result may take several objects. The object that
names the others (``plan.json``, ``profile.json``) is sent last, so readers find the old result or
the new one. Then objects that only the old result named are removed.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from placer.data.files.stores import StagedPath, local_path, reported, scheme_of, shown, store_of
from placer.errors import PlacerError
from placer.files.reading import MOST_JSON_BYTES

_PROFILE = "profile.json"
_PART = re.compile(
    r"(counts|vocabulary)-[0-9a-f]{16}\.(safetensors|parquet)"
    r"|[^/\\]+\.rows-[0-9a-f]{12}\.safetensors"
)
"""Matches names of the files that profiles and plans refer to."""
_TRIES = 5
_OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "memory")
"""Stores without folders."""
_FAILURES = (OSError, ValueError, NotImplementedError, pa.ArrowException)


class Staging:
    """A context with local copies of results on stores. At its end, new results are sent.

    Nothing is sent if the block raises an error.

    >>> with Staging() as staging:
    ...     _ = staging.output("memory://bucket/plan.json").write_text("{}")
    >>> with Staging() as staging:
    ...     staging.input("memory://bucket/plan.json").read_text()
    '{}'
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="placer-")
        self._places: dict[Path, str] = {}
        self._outputs: list[StagedPath] = []

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                for output in self._outputs:
                    _send(output)
            elif isinstance(error, PlacerError):
                error.args = tuple(self._renamed(one) for one in error.args)
        finally:
            self.close()

    def close(self) -> None:
        """Remove the local copies."""
        self._folder.cleanup()

    def input(self, uri: str) -> Path:
        """Return a local copy of a profile's folder, or of a file and the files that it names."""
        if scheme_of(uri) == "file":
            return Path(local_path(uri))
        place = self._place(uri)
        with reported(f"cannot read {shown(uri)}", _FAILURES, kind=PlacerError):
            return _copy(uri, place)

    def output(self, uri: str) -> Path:
        """Return the local path to write a result to, which is sent to a store at the end."""
        if scheme_of(uri) == "file":
            return Path(local_path(uri))
        system, path = store_of(uri)
        bucket = path.split("/")[0]
        with reported(f"cannot write {shown(uri)}", _FAILURES, kind=PlacerError):
            if scheme_of(uri) in ("s3", "gs", "gcs") and not _kind(system, bucket):
                raise PlacerError(f"cannot write {shown(uri)}: there is no bucket {bucket!r}")
        self._outputs.append(self._place(uri))
        return self._outputs[-1]

    def _place(self, uri: str) -> StagedPath:
        path = store_of(uri)[1].rstrip("/")
        folder = Path(self._folder.name, f"{len(self._places)}")
        folder.mkdir()
        place = StagedPath(folder, path.rpartition("/")[2] or "store")
        place.uri = uri
        self._places[folder] = uri
        return place

    def _renamed(self, message: object) -> object:
        for folder, uri in self._places.items():
            if isinstance(message, str):
                above = shown(uri).rstrip("/").rpartition("/")[0]
                message = message.replace(str(folder), above)
        return message


def _kind(system: Any, path: str) -> Any:
    """Return the type of a path, file or folder; None if nothing is there."""
    from pyarrow import fs

    kind = system.get_file_info(path).type
    return None if kind == fs.FileType.NotFound else kind


def _copy(uri: str, place: StagedPath) -> StagedPath:
    from pyarrow import fs

    system, path = store_of(uri)
    kind, file, copy = _kind(system, path), path.rstrip("/"), Path(place)
    if kind == fs.FileType.Directory:
        file, copy = f"{file}/{_PROFILE}", copy / _PROFILE
        copy.parent.mkdir()
        if not _kind(system, file):
            raise PlacerError(f"{shown(uri)} is a folder without {_PROFILE}, and so no profile")
    elif kind is None:
        raise PlacerError(f"there is nothing at {shown(uri)}")
    content = _read(system, file, uri)
    for _ in range(_TRIES):
        copy.write_bytes(content)
        missing: OSError | None = None
        for name in _parts(content):
            try:
                fs.copy_files(f"{_above(file)}{name}", str(copy.with_name(name)), system)
            except FileNotFoundError as error:
                missing = error  # The result was replaced; otherwise the reader reports the file.
        before, content = content, _read(system, file, uri)
        if content == before:
            return place
    raise PlacerError(f"{shown(uri)} is replaced again and again; try later") from missing


def _above(file: str) -> str:
    return file[: file.rfind("/") + 1]


def _read(system: Any, file: str, uri: str) -> bytes:
    with system.open_input_stream(file) as source:
        content: bytes = source.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise PlacerError(
            f"{shown(uri)} has more than {MOST_JSON_BYTES} bytes, which no plan and no profile has"
        )
    return content


def _parts(content: bytes) -> list[str]:
    """Return the files that the JSON of a plan or a profile names."""
    texts = re.findall(rb'"((?:[^"\\]|\\.)*)"', content)
    names = (text.decode("utf-8", "replace") for text in texts)
    return list(dict.fromkeys(name for name in names if _PART.fullmatch(name)))


def _send(place: StagedPath) -> None:
    """Send a result and all files beside it. Send the file that names the others last."""
    from pyarrow import fs

    if not place.exists():
        return
    system, path = store_of(place.uri)
    above, folder = _above(path.rstrip("/")), place.parent
    is_folder = place.is_dir()
    naming = path.rstrip("/") + (f"/{_PROFILE}" if is_folder else "")
    with reported(f"cannot write {shown(place.uri)}", _FAILURES, kind=PlacerError):
        before = _parts(_read(system, naming, place.uri)) if _kind(system, naming) else []
        files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
        # In folders of checkpoints, too, JSON files name the others.
        files.sort(key=lambda file: (file.name == place.name, file.suffix == ".json", str(file)))
        for file in files:
            target = f"{above}{file.as_posix()}"
            if scheme_of(place.uri) not in _OBJECT_STORES:
                system.create_dir(_above(target), recursive=True)
            fs.copy_files(str(folder / file), target, None, system)
        now = {f"{above}{file.as_posix()}" for file in files}
        for name in before:
            if (old := f"{_above(naming)}{name}") not in now and _kind(system, old):
                system.delete_file(old)
