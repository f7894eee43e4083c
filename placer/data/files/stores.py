"""Where a file is: on this machine, or on a store that a URI names.

Arrow's own file systems read ``s3:``, ``gs:``, ``hdfs:`` and ``abfs:``; fsspec reads what Arrow
does not, such as ``hf:``. Credentials are found as these libraries find them: environment,
configuration files, roles. Nothing here asks for or keeps them.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from placer.errors import DataError

_URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ARROW_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_FSSPEC_SCHEMES = ("hf", "memory", "http", "https", "az", "adl", "oci", "oss", "webhdfs", "dbfs")
SCHEMES = ("file", *_ARROW_SCHEMES, *_FSSPEC_SCHEMES)


def is_uri(file: str) -> bool:
    """Return whether a name is a URI, not a path of this machine.

    >>> is_uri("s3://bucket/day_0.csv"), is_uri("day_0.csv"), is_uri("C:/day_0.csv")
    (True, False, False)
    """
    return _URI.match(file) is not None


class StagedPath(type(Path())):  # type: ignore[misc]  # What Path makes on this system.
    """The copy on this machine of what a URI names; messages show the URI."""

    uri = ""

    def __format__(self, spec: str) -> str:
        return format(shown(self.uri) if self.uri else str(self), spec)


def uri_of(path: object) -> str:
    """Return the URI that a path is, or is a copy of, without credentials; else an empty text.

    >>> uri_of("s3://key:secret@bucket/plan.json"), uri_of("plan.json")
    ('s3://bucket/plan.json', '')
    """
    uri = getattr(path, "uri", "") or str(path)
    return shown(uri) if is_uri(uri) and scheme_of(uri) != "file" else ""


def shown(file: str) -> str:
    """Return a file for messages and profiles: a URI without credentials and settings.

    >>> shown("s3://key:secret@bucket/day_0.csv?endpoint_override=localhost:9000")
    's3://bucket/day_0.csv'
    """
    if not is_uri(file):
        return file
    parts = urlsplit(file)
    host = parts.netloc
    if parts.scheme not in ("abfs", "abfss"):  # There it is the container, and no secret.
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
    scheme = scheme_of(file)
    if scheme == "file":
        from pyarrow import fs

        return fs.LocalFileSystem(), local_path(file)
    if scheme in _FSSPEC_SCHEMES:
        return _fsspec_store(file)
    parts = urlsplit(file)
    query = f"?{parts.query}" if parts.query else ""
    system, root = _arrow_store(f"{parts.scheme}://{parts.netloc}", query)
    return system, f"{root.rstrip('/')}/{unquote(parts.path).lstrip('/')}".rstrip("/")


def local_path(file: str) -> str:
    """Return the path of a file of this machine, which may be a ``file://`` URI."""
    return unquote(urlsplit(file).path) if is_uri(file) else file


def beside(file: str, name: str) -> str:
    """Return the file that a path leads to from the folder of another, as `finding` spells it.

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

    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(f"{root}/{query}")
    except (OSError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise DataError(f"cannot reach {shown(root)}: {first_line(error)}") from error
    return found


def _fsspec_store(file: str) -> tuple[Any, str]:
    from pyarrow import fs

    try:
        import fsspec  # type: ignore[import-untyped]

        system, path = fsspec.core.url_to_fs(file)
    except ImportError as error:
        raise DataError(
            f"reading {shown(file)} needs another library: {first_line(error)}"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot reach {shown(file)}: {first_line(error)}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
