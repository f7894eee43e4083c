"""Click types of options: paths to read or write, names, numbers, durations."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from placer.data.files.stores import COPY_THERE, here
from placer.errors import PlacerError, did_you_mean
from placer.files.atomic import check_place
from placer.units import parse_seconds


class InputPath(click.Path):
    """A file or folder to read on this machine."""

    is_read, fix = True, "copy it here first"
    _what: Literal["file", "folder"] = "file"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value = here(value, self.fix)
        except PlacerError as error:
            self.fail(str(error), param, ctx)
        if value == "":  # An unset shell variable. "" would be the working folder.
            self.fail("the path is empty", param, ctx)
        if value == "-":
            stream = "input: only logs are read from it" if self.is_read else "output"
            self.fail(f"- would be standard {stream}; name a {self._what}", param, ctx)
        return super().convert(value, param, ctx)


class OutputPath(InputPath):
    """A path to write a result to. Before the command's work, `check` tests if it can be written.

    `what` says whether it is a file or a folder. The name must have one of the `endings`, if any.
    `makes_folders`: missing parents are made. `follows` names the parameter of the one input that
    the result may overwrite, such as the old plan of a replan.
    """

    is_read, fix = False, COPY_THERE

    def __init__(
        self,
        what: Literal["file", "folder"],
        endings: tuple[str, ...] = (),
        makes_folders: bool = False,
        follows: str = "",
    ) -> None:
        super().__init__()
        self._what, self._endings = what, endings
        self._makes_folders, self._follows = makes_folders, follows

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._what == "file" and str(value).endswith("/"):
            self.fail(f"{value} is a folder; name a file", param, ctx)
        return super().convert(value, param, ctx)

    def check(self, path: Path, inputs: Mapping[str, Iterable[Path | str]]) -> None:
        """Raise PlacerError if the path cannot be written, or if the command reads it.

        `inputs` has what the command reads by parameter: files, folders with all files in them, and
        texts that may name logs. A log's folder may have other files, so these are not refused.
        """
        if self._endings and path.suffix.lower() not in self._endings:
            raise PlacerError(f"cannot write {path}: end its name in {' or '.join(self._endings)}")
        check_place(path, self._what, self._makes_folders)
        others = [one for at, several in inputs.items() if at != self._follows for one in several]
        for one in others if path.exists() else ():
            with contextlib.suppress(OSError, ValueError):  # A text that is no path.
                is_folder = path.is_file() and isinstance(one, Path) and one.is_dir()
                is_inside = is_folder and path.resolve().is_relative_to(Path(one).resolve())
                if is_inside or Path(one).samefile(path):
                    said = f"it is in {one}, which" if is_inside else "it"
                    said = f"{said} is what this command reads; name another {self._what}"
                    raise PlacerError(f"cannot write {path}: {said}")


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
        return number if math.isfinite(number) else self.fail(f"{value} is not finite", param, ctx)


class WholeNumber(click.IntRange):
    """A whole number within limits, at most `sys.maxsize`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if number <= sys.maxsize else self.fail(f"{value} is too large", param, ctx)


class Checked(click.ParamType):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """A text that a function checks. The function raises PlacerError for a wrong text.

    The shell completes it to one of `suggested`, and to a file if `files`.
    """

    name = "text"

    def __init__(
        self,
        check: Callable[[str], object] = str,
        suggested: Callable[[], Iterable[str]] = tuple,
        files: bool = False,
    ) -> None:
        self._check, self._suggested, self._files = check, suggested, files

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(str(value))
        except PlacerError as error:
            self.fail(str(error), param, ctx)

    def parse(self, text: str) -> Any:
        """Return the value of a text; raise PlacerError for a wrong text."""
        if not text:
            raise PlacerError("it is empty")
        self._check(text)
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return suggestions that begin with the incomplete text."""
        items = [CompletionItem(name) for name in self._suggested() if name.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if self._files else [])


class Seconds(Checked):
    """A duration: seconds, or a number with a unit such as ``5min``."""

    name = "seconds"

    def __init__(self, or_none: bool = False) -> None:
        super().__init__()
        self._or_none = or_none

    def parse(self, text: str) -> float:
        """Return the number of seconds."""
        seconds = parse_seconds(text)
        if seconds == 0 and not self._or_none:
            raise PlacerError(f"{text} is not more than 0 seconds")
        return seconds


class Name(Checked):
    """A name among `known`, or for which `accepts` returns true. Messages call it `name`.

    If `several`, names with commas between.
    """

    def __init__(
        self,
        name: str,
        known: Iterable[str],
        several: bool = False,
        accepts: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__()
        self.name, self._known, self._several = name, list(known), several
        self._accepts = accepts or self._known.__contains__

    def parse(self, text: str) -> str | list[str]:
        """Return the name, or a list of the names."""
        names = [one.strip() for one in text.split(",") if one.strip()]
        for one in names if self._several else [text]:
            if not self._accepts(one):
                known, more = ", ".join(self._known), did_you_mean(one, self._known)
                raise PlacerError(f"no {self.name} is called {one!r}; there are {known}{more}")
        if self._several and not names:
            raise PlacerError(f"name at least one {self.name}")
        return list(dict.fromkeys(names)) if self._several else text

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return "TEXT" if self._several else f"[{'|'.join(self._known)}]"
