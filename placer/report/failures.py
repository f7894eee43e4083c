"""Turn every error of a command into one line."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from placer.errors import PlacerError
from placer.interrupt import end_interrupted
from placer.units import shortened

_LEFT_OUT = {"torch": "PyTorch", "pyarrow": "Apache Arrow"}
"""By pip's name, libraries that are not needed for planning."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line on stderr and status 1 at any error; see `end_interrupted`.

    For a `PlacerError`, the line is its message. For other errors, the traceback goes to a file
    that the line names; if ``PLACER_DEBUG`` is set, they are raised unchanged. Errors of click and
    `SystemExit` pass unchanged.
    """
    # They are None if the process was started with them closed.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal may lack characters, and names of files may have bytes that are not text.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        end_interrupted(error)
    except PlacerError as error:
        _end(str(error))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _LEFT_OUT:
            _unexpected(error)
        _end(f"this needs {_LEFT_OUT[name]}, which is not installed here: pip install {name}")
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # The reader has enough, as `head` does.
        if error.errno == errno.ENOSPC and error.filename is None:
            with contextlib.suppress(OSError, ValueError):  # Else the last flush fails, too.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _end(f"cannot write the result: {error.strerror}")
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            _end(f"cannot use {error.filename}: {error.strerror}")
        _unexpected(error)
    except Exception as error:
        if type(error).__module__.startswith("click"):
            raise
        _unexpected(error)


def _unexpected(error: Exception) -> NoReturn:
    if os.environ.get("PLACER_DEBUG"):
        raise error
    import tempfile
    import traceback

    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = "set PLACER_DEBUG=1 to see where"
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(prefix="placer-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        where = f"where is in {path}"
    _end(f"{words[:500]}; placer did not expect this: please report it, {where}")


def _end(message: str) -> NoReturn:
    from placer.report.console import print_stderr  # Loads slowly, and few commands fail.

    print_stderr(f"placer: {shortened(message)}", "red")
    sys.exit(1)
