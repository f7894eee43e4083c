"""Click types of options: paths to read or write, names, numbers, durations."""

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from placer.data.files.stores import COPY_THERE, here
from placer.errors import PlacerError, did_you_mean
from placer.files.atomic import check_place
from placer.units import parse_seconds


class LocalPath(click.Path):
    """A file or folder to read on this machine."""

    fix = "copy it here first"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value = here(value, self.fix)
        except PlacerError as error:
            self.fail(str(error), param, ctx)
        if value == "":  # An unset shell variable. "" would be the working folder.
            self.fail("the path is empty", param, ctx)
        if isinstance(value, str) and "\0" in value:
            self.fail(f"{value!r} has a null character, which no path has", param, ctx)
        self.check_length(value)
        return super().convert(value, param, ctx)

    def check_length(self, value: Any) -> None:
        """Refuse a name that is too long for the file system."""
        try:
            os.lstat(value)
        except (OSError, ValueError, TypeError) as error:
            if getattr(error, "errno", None) == errno.ENAMETOOLONG:
                self.fail(f"{str(value)[:40]}... is too long for the name of a file")


class OutputPath(LocalPath):
    """A path to write a result to. Before the command's work, `check` tests if it can be written.

    `what` says whether it is a file or a folder. The name must have one of the `endings`, if any.
    `makes_folders`: missing parents are made. `follows` names the parameter of the one input that
    the result may overwrite, such as the old plan of a replan.
    """

    fix = COPY_THERE

    def __init__(
        self,
        what: Literal["file", "folder"],
        endings: tuple[str, ...] = (),
        makes_folders: bool = False,
        follows: str = "",
    ) -> None:
        super().__init__()
        self.follows = follows
        self._what, self._endings = what, endings
        self._makes_folders = makes_folders

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._what == "file" and str(value).endswith("/"):
            self.fail(f"{value} is a folder; name a file", param, ctx)
        return super().convert(value, param, ctx)

    def check_length(self, value: Any) -> None:
        """Do nothing: `check` tests the name."""

    def check(self, path: Path) -> None:
        """Refuse a path that cannot be written; see `check_place`."""
        if self._endings and path.suffix.lower() not in self._endings:
            raise PlacerError(f"cannot write {path}: end its name in {' or '.join(self._endings)}")
        check_place(path, self._what, self._makes_folders)

    def check_inputs(self, path: Path, inputs: Iterable[Path | str]) -> None:
        """Raise PlacerError if the command reads this file or folder.

        It reads each of `inputs`, and all files of a folder among them. A text may name a log. A
        log's folder may have other files, so these are not refused.
        """
        if not path.exists():
            return
        for one in inputs:
            with contextlib.suppress(OSError, ValueError):  # A text that is no path.
                is_folder = path.is_file() and isinstance(one, Path) and one.is_dir()
                is_inside = is_folder and path.resolve().is_relative_to(Path(one).resolve())
                if is_inside or Path(one).samefile(path):
                    where = f"it is in {one}, which" if is_inside else "it"
                    raise PlacerError(
                        f"cannot write {path}: {where} is what this command reads; name another "
                        f"{self._what}"
                    )


class Choice(click.Choice):  # type: ignore[type-arg]  # Generic in newer versions of click.
    """One of several names. The error for another name suggests a similar one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            names = ", ".join(map(str, self.choices))
            more = did_you_mean(str(value), self.choices)
            self.fail(f"{value!r} is not one of {names}{more}", param, ctx)
        return value


class Number(click.FloatRange):
    """A finite number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite", param, ctx)
        return number


class WholeNumber(click.IntRange):
    """A whole number within limits, at most `sys.maxsize`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > sys.maxsize:
            self.fail(f"{value} is too large", param, ctx)
        return number


class Name(click.ParamType):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """A name, or several separated by commas, that `accepts` must return true for.

    Messages call it `name` and list the `known` names. Help shows `shown` for the value.
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
        if self._several and not names:
            self.fail(f"name at least one {self.name}", param, ctx)
        return list(dict.fromkeys(names)) if self._several else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._shown or "TEXT"


class Seconds(click.ParamType):  # type: ignore[type-arg]  # As above.
    """A duration: seconds, or a number with a unit such as ``5min``."""

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


class Checked(click.ParamType):  # type: ignore[type-arg]  # As above.
    """A text that a function checks. The function raises PlacerError for a wrong text."""

    name = "text"

    def __init__(self, check: Callable[[str], object]) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty", param, ctx)
        try:
            self._check(value)
        except PlacerError as error:
            self.fail(str(error), param, ctx)
        return value


class Suggested(Checked):
    """A checked text. The shell's completion suggests some values, and files if `files`."""

    def __init__(
        self,
        suggested: Callable[[], Iterable[str]],
        files: bool = False,
        check: Callable[[str], object] = str,
    ) -> None:
        super().__init__(check)
        self._suggested, self._files = suggested, files

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return suggestions that begin with the incomplete text."""
        items = [CompletionItem(name) for name in self._suggested() if name.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if self._files else [])
