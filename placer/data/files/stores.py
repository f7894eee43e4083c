"""Find the files that paths and URIs stand for, on this machine or on a remote store.

Arrow's file systems read ``s3:``, ``gs:``, ``hdfs:`` and ``abfs:``; fsspec reads other schemes,
such as ``hf:``. These libraries find credentials in the environment, configuration files and roles.
Nothing here asks for credentials or keeps them.
"""

import atexit
import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from stat import S_ISCHR, S_ISDIR, S_ISFIFO
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from placer.errors import DataError, PlacerError
from placer.units import format_bytes

_URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ARROW_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_FSSPEC_SCHEMES = ("hf", "memory", "http", "https", "az", "adl", "oci", "oss", "webhdfs", "dbfs")
SCHEMES = ("file", *_ARROW_SCHEMES, *_FSSPEC_SCHEMES)

STANDARD_INPUT = "-"
_MAGIC = re.compile(r"[*?\[]")
_PARTITION = re.compile(r"^([^=]+)=(.*)$")
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The value of a Hive partition of missing values."""

METADATA = "_metadata"
"""Name of a Parquet file that lists the other files of its folder."""

AnyPath = str | os.PathLike[str]


def is_uri(file: str) -> bool:
    """Return whether a name is a URI, instead of a path on this machine.

    >>> is_uri("s3://bucket/day_0.csv"), is_uri("day_0.csv"), is_uri("C:/day_0.csv")
    (True, False, False)
    """
    return _URI.match(file) is not None


COPY_THERE = "write it here, and copy it there"


def here(path: AnyPath, fix: str = "copy it here first") -> str:
    """Return a path of this machine. Raises PlacerError, which ends in `fix`, for a store's URI.

    Only logs are read from stores: plans, profiles and other results are on this machine.

    >>> here("file:///tmp/plan.json")
    '/tmp/plan.json'
    """
    text = os.fspath(path)
    if is_uri(text) and text.partition("://")[0].lower() != "file":
        raise PlacerError(f"{shown(text)} is on a store: {fix}")
    return local_path(text)


_PIPES: dict[str, str] = {}
"""Names of pipes, by their copies."""


def shown(file: str) -> str:
    """Return a file's name for messages and profiles: a URI without credentials and settings.

    A copy of a pipe is called as the pipe.

    >>> shown("s3://key:secret@bucket/day_0.csv?endpoint_override=localhost:9000")
    's3://bucket/day_0.csv'
    """
    if not is_uri(file):
        return _PIPES.get(file, file)
    parts = urlsplit(file)
    host = parts.netloc
    if parts.scheme not in ("abfs", "abfss"):  # Here the part before @ is a container, no secret.
        host = host.rpartition("@")[2]
    return f"{parts.scheme}://{host}{unquote(parts.path)}"


def scheme_of(file: str) -> str:
    """Return the scheme of a URI, in lower case; ``file`` for a path."""
    scheme = file.partition("://")[0].lower() if is_uri(file) else "file"
    if scheme not in SCHEMES:
        raise DataError(
            f"{shown(file)}: files at {scheme}:// cannot be read; those of this machine can, "
            f"and at {', '.join(f'{one}://' for one in SCHEMES[1:])}"
        )
    return scheme


def store_of(file: str) -> tuple[Any, str]:
    """Return the `pyarrow.fs.FileSystem` that holds a file, and the file's path there."""
    from pyarrow import fs

    scheme = scheme_of(file)
    if scheme == "file":
        return fs.LocalFileSystem(), local_path(file)
    if scheme in _FSSPEC_SCHEMES:
        with (
            reported(f"reading {shown(file)} needs another library", (ImportError,)),
            reported(f"cannot reach {shown(file)}", (OSError, ValueError)),
        ):
            import fsspec  # type: ignore[import-untyped]

            system, path = fsspec.core.url_to_fs(file)
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path
    parts = urlsplit(file)
    query = f"?{parts.query}" if parts.query else ""
    system, root = _arrow_store(f"{parts.scheme}://{parts.netloc}", query)
    return system, f"{root.rstrip('/')}/{unquote(parts.path).lstrip('/')}".rstrip("/")


def local_path(file: str) -> str:
    """Return the path of a local file, given as a path or a ``file://`` URI."""
    return unquote(urlsplit(file).path) if is_uri(file) else file


def path_of(file: str) -> PurePosixPath:
    """Return the path part of a path or URI, which ends in the file's name."""
    return PurePosixPath(urlsplit(file).path if is_uri(file) else file)


def beside(file: str, name: str) -> str:
    """Return the file `name`, a path relative to the folder of `file`, as `find` spells it.

    >>> beside("s3://bucket/log/_metadata?region=eu", "day=1/a b.parquet")
    's3://bucket/log/day=1/a%20b.parquet?region=eu'
    """
    if not is_uri(file):
        return str(Path(file).parent / name)
    parts = urlsplit(file)
    path = f"{parts.path.rpartition('/')[0]}/{quote(name, safe='/=')}"
    return parts._replace(path=path).geturl()


@lru_cache(maxsize=64)
def _arrow_store(root: str, query: str) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow import fs

    errors = (OSError, ValueError, NotImplementedError, pa.ArrowException)
    with reported(f"cannot reach {shown(root)}", errors):
        found: tuple[Any, str] = fs.FileSystem.from_uri(f"{root}/{query}")
        return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def reported(what: str, errors: tuple[type[Exception], ...], fix: str = "") -> Iterator[None]:
    """Turn errors that libraries raise in the block into one that says in a line what failed."""
    try:
        yield
    except errors as error:
        raise DataError(f"{what}: {first_line(error)}{fix}") from error


def find(paths: AnyPath | Sequence[AnyPath], metadata: list[str] | None = None) -> list[str]:
    """Return the files that paths stand for, in order.

    A folder stands for all files below it, ordered by name with numbers by value. Names that begin
    with a dot or an underscore are left out. A pattern (``*``, ``?``, ``[``, ``**``) stands for the
    paths that it matches, and ``-`` for standard input. Pipes are copied into a temporary file
    first, because a log is read more than once.

    Files called ``_metadata`` in folders are not returned but added to `metadata`.

    Raises DataError if there is no file, or a store cannot be reached.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("day=2/a.csv", "day=10/a.csv", "day=2/_SUCCESS"):
    ...         Path(folder, name).parent.mkdir(exist_ok=True)
    ...         Path(folder, name).touch()
    ...     [os.path.relpath(file, folder) for file in find(folder)]
    ['day=2/a.csv', 'day=10/a.csv']
    """
    every: Any = [paths] if isinstance(paths, str | os.PathLike | Mapping) else paths
    named: list[AnyPath] = list(every) if isinstance(every, Iterable) else [every]
    if not all(isinstance(one, str | os.PathLike) for one in named):
        raise DataError(
            f"a log cannot be read from {type(paths).__name__}; give paths, or a table, such as "
            "pyarrow.table({'user': ids}) makes of arrays"
        )
    if not named:
        raise DataError("no file to read; name at least one")
    if "" in named:  # As of an unset shell variable. It would be the working folder.
        raise DataError("the path of a log is empty; name a file or folder")
    files: list[str] = []
    for path in (os.fspath(one) for one in named):
        if path == STANDARD_INPUT:
            files.append(_copied(sys.stdin.buffer, "stdin"))
        elif scheme_of(path) == "file":
            files += _local(local_path(path))
        else:
            files += _remote(path)
    lists = [file for file in files if path_of(file).name == METADATA and file not in named]
    if len(lists) == len(files):
        raise DataError(f"{shown(lists[0])} lists files, and none is there")
    if metadata is not None:
        metadata += lists
    return [file for file in files if file not in lists]


def partitions(file: str) -> dict[str, str | None]:
    """Return the Hive partition values in the names of a file's folders.

    >>> partitions("log/day=3/country=__HIVE_DEFAULT_PARTITION__/part-0.parquet")
    {'day': '3', 'country': None}
    """
    folders = (unquote(urlsplit(file).path) if is_uri(file) else file).split("/")[:-1]
    found = (match for match in map(_PARTITION.match, folders) if match)
    return {match[1]: None if match[2] == NULL_PARTITION else unquote(match[2]) for match in found}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value: day_2 before day_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _local(path: str) -> list[str]:
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        mode = 0
    if S_ISFIFO(mode) or S_ISCHR(mode):
        with Path(path).open("rb") as pipe:
            return [_copied(pipe, path)]
    if S_ISDIR(mode):
        return _inside(path)
    if mode or not _MAGIC.search(path):
        return [path]  # Opening it reports that it is missing.
    files: list[str] = []
    for one in sorted(glob.glob(path, recursive=True), key=natural):  # noqa: PTH207
        files += _inside(one) if Path(one).is_dir() else [one]
    if not files:
        raise DataError(f"no file matches {path}")
    return list(dict.fromkeys(files))


def _inside(folder: str) -> list[str]:
    if Path(folder, "profile.json").is_file():
        raise DataError(f"{folder} is a profile and no log; name the files of a log")
    inside = [
        str(file)
        for file in Path(folder).rglob("*")
        if file.is_file() and not _is_hidden(str(file.relative_to(folder)))
    ]
    if not inside:
        raise DataError(f"folder {folder} has no file to read")
    return sorted(inside, key=natural)


def _is_hidden(relative: str) -> bool:
    parts = relative.split("/")
    return any(part.startswith((".", "_")) for part in parts[:-1]) or (
        parts[-1].startswith((".", "_")) and parts[-1] != METADATA
    )


def _remote(uri: str) -> list[str]:
    from pyarrow import fs

    system, path = store_of(uri)
    with reported(f"cannot list {shown(uri)}", (OSError,)):
        kind = system.get_file_info(path).type
        if kind == fs.FileType.File:
            return [uri]
        magic = _MAGIC.search(path)
        if kind == fs.FileType.NotFound and not magic:
            raise DataError(f"cannot open {shown(uri)}: no such file")
        folder = path[: magic.start()].rpartition("/")[0] if magic else path
        found = [
            one.path
            for one in system.get_file_info(fs.FileSelector(folder, recursive=True))
            if one.type == fs.FileType.File
        ]
    if magic:
        pattern = re.compile(_regex(path))
        found = [one for one in found if pattern.fullmatch(one)]
    found = [one for one in found if not _is_hidden(one[len(folder) :].lstrip("/"))]
    if not found:
        raise DataError(f"{shown(uri)} has no file to read")
    # Extend the path of the given URI and keep its settings.
    # Where a URI has no settings, a question mark is part of its path.
    parts = urlsplit(uri.replace("?", "%3F") if scheme_of(uri) in _FSSPEC_SCHEMES else uri)
    given = unquote(parts.path).rstrip("/")
    above = path[: len(path) - len(given.lstrip("/"))]
    return [
        parts._replace(path="/" + quote(one[len(above) :].lstrip("/"), safe="/=")).geturl()
        for one in sorted(found, key=natural)
    ]


def _regex(pattern: str) -> str:
    """Return a path pattern as a regular expression. Only ``**`` matches across folders."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", pattern)
    spelt = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        spelt.get(part) or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )


def _copied(stream: IO[bytes], name: str) -> str:
    """Copy a pipe into a temporary file, which is deleted when the process ends."""
    with suppress(OSError):  # Bytes in memory are no file at all.
        device = os.fstat(stream.fileno())
        ends = stream.isatty() or os.path.samestat(device, Path(os.devnull).stat())
        if S_ISCHR(device.st_mode) and not ends:
            raise DataError(
                f"{shown(name)} is a device, not a log; name a file, a folder or a pipe"
            )
    folder = tempfile.mkdtemp(prefix="placer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, Path(name).name)
    _PIPES[str(copy)] = name
    try:
        with copy.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
    except OSError as error:
        read = copy.stat().st_size if copy.exists() else 0
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(
            f"cannot copy {shown(name)}, a pipe, into {folder} ({first_line(error)} after"
            f" {format_bytes(read)}); write it into a file first, or set TMPDIR to a larger disk"
        ) from error
    return str(copy)
