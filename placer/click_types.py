"""Types of options: paths that are read or written, names, durations."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from placer.errors import PlacerError, did_you_mean
from placer.files import check_place
from placer.units import parse_seconds

STAGING = "placer.staging"
"""Where a command's context has its `Staging`, if there is one."""


def _staging(context: click.Context | None) -> Any:
    """Return the command's copies of what is on stores; see `placer.data.files.staging.Staging`."""
    from placer.data.files.staging import Staging

    context = context or click.get_current_context()
    if STAGING not in context.meta:
        context.meta[STAGING] = Staging()
        context.call_on_close(context.meta[STAGING].close)
    return context.meta[STAGING]


class LocalPath(click.Path):
    """A file or folder to read on this machine."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            scheme = value.partition("://")[0]
            self.fail(f"files at {scheme}:// cannot be used here; give a path of this machine")
        if value == "":  # As of a variable of the shell that is not set. It would be this folder.
            self.fail("the path is empty", param, ctx)
        self.check_length(value)
        return super().convert(value, param, ctx)

    def check_length(self, value: Any) -> None:
        """Refuse a name that no file system of this machine takes."""
        try:
            os.lstat(value)
        except (OSError, ValueError, TypeError) as error:
            if getattr(error, "errno", None) == errno.ENAMETOOLONG:
                self.fail(f"{str(value)[:40]}... is too long for the name of a file")


class InputPath(LocalPath):
    """A plan, a profile or a small file to read: of this machine, or at a URI of a store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            return _staging(ctx).input(value)
        return super().convert(value, param, ctx)


Written = Literal["file", "folder"]


class OutputPath(LocalPath):
    """Where a result goes: `check` refuses what cannot be written, before the command's work.

    A file or a folder is written, as `what` says or tells from the command's options. The name has
    to have one of the endings. `is_local` output has to be on this machine; else, to a URI of a
    store, it is sent when the command is done. `makes_folders`: folders above it are made, too.
    """

    def __init__(
        self,
        what: Written | Callable[[Mapping[str, Any]], Written],
        endings: tuple[str, ...] = (),
        is_local: bool = False,
        makes_folders: bool = False,
    ) -> None:
        super().__init__()
        self._what, self._endings = what, endings
        self._is_local, self._makes_folders = is_local, makes_folders

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value and not self._is_local:
            return _staging(ctx).output(value)
        if self._what == "file" and str(value).endswith("/"):
            self.fail(f"{value} is a folder; name a file", param, ctx)
        return super().convert(value, param, ctx)

    def check_length(self, value: Any) -> None:
        """Leave the name to `check`."""

    def check(self, path: Path, options: Mapping[str, Any]) -> None:
        """Refuse a path that cannot be written; see `check_place`."""
        if self._endings and path.suffix.lower() not in self._endings:
            raise PlacerError(f"cannot write {path}: end its name in {' or '.join(self._endings)}")
        if not getattr(path, "uri", ""):
            what = self._what(options) if callable(self._what) else self._what
            check_place(path, what, self._makes_folders)


class Choice(click.Choice):  # type: ignore[type-arg]  # Generic in newer versions of click.
    """One of several names; the error about another one suggests a similar name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            names = ", ".join(map(str, self.choices))
            more = did_you_mean(str(value), self.choices)
            self.fail(f"{value!r} is not one of {names}{more}", param, ctx)
        return value


class WholeNumber(click.IntRange):
    """A whole number from a least one on that is small enough for a count."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > sys.maxsize:
            self.fail(f"{value} is too large", param, ctx)
        return number


class Name(click.ParamType):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """A name, or several between commas, that a function has to accept.

    Messages call it a `name`, and list the `known` ones; help shows `shown` for the value.
    """

    def __init__(
        self,
        name: str,
        accepts: Callable[[str], bool],
        known: Iterable[str],
        several: bool = False,
        shown: str | None = None,
    ) -> None:
        self.name, self._accepts, self._known = name, accepts, list(known)
        self._several, self._shown = several, shown

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = [one.strip() for one in value.split(",") if one.strip()]
        for one in names if self._several else [value]:
            if not self._accepts(one):
                more = did_you_mean(one, self._known)
                known = ", ".join(self._known)
                self.fail(f"no {self.name} is called {one!r}; there are {known}{more}", param, ctx)
        return names if self._several else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._shown or "TEXT"


class Seconds(click.ParamType):  # type: ignore[type-arg]  # As above.
    """A duration: a number of seconds, or with a unit, as in ``5min``."""

    name = "seconds"

    def __init__(self, or_none: bool = False) -> None:
        self._or_none = or_none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds = parse_seconds(str(value))
        except PlacerError as error:
            self.fail(str(error), param, ctx)
        if seconds == 0 and not self._or_none:
            self.fail(f"{value} is not more than 0 seconds", param, ctx)
        return seconds


class Suggested(click.ParamType):  # type: ignore[type-arg]  # As above.
    """A text for which a shell suggests some values, and files; others are taken too."""

    name = "text"

    def __init__(self, suggested: Callable[[], Iterable[str]], files: bool = False) -> None:
        self._suggested, self._files = suggested, files

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return what begins as the text does."""
        items = [CompletionItem(name) for name in self._suggested() if name.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if self._files else [])
