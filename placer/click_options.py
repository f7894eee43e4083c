"""Makes a command of a function: its parameters are options, its docstring is the help.

For `cli.py` alone, which is the only one that imports click through it.
"""

import contextlib
import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from placer.data.names import FORMATS
from placer.default_options import default_options
from placer.errors import PlacerError
from placer.files import check_place
from placer.knobs import Option, called, choices_of, members
from placer.report.failures import one_line_errors
from placer.report.plain import shortened
from placer.topology.presets import preset_help
from placer.units import parse_seconds

_SOURCES = {
    "COMMANDLINE": "given",
    "ENVIRONMENT": "of the environment",
    "DEFAULT_MAP": "of placer.toml",
    "PROMPT": "typed",
}


_EARLIER = {"--data-format": "--log-format", "--report": "--format"}
"""Options that had another name in 0.1.0."""
_LOG_FORMATS = {*FORMATS, "counts"} - {"csv"}  # `--format csv` is a result as CSV.

_STAGING = "placer.staging"


def _staging(context: click.Context | None) -> Any:
    """The command's copies of what is on stores; see `placer.data.files.staging.Staging`."""
    from placer.data.files.staging import Staging

    context = context or click.get_current_context()
    if _STAGING not in context.meta:
        context.meta[_STAGING] = Staging()
        context.call_on_close(context.meta[_STAGING].close)
    return context.meta[_STAGING]


def _check_length(kind: click.Path, value: Any) -> None:
    """Refuse a name that no file system of this machine takes."""
    try:
        os.lstat(value)
    except (OSError, ValueError, TypeError) as error:
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            kind.fail(f"{str(value)[:40]}... is too long for the name of a file")


class InputPath(click.Path):
    """A plan, a profile or a small file: of this machine, or at a URI of a store."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            return _staging(ctx).input(value)
        _check_length(self, value)
        return super().convert(value, param, ctx)


class _LocalPath(click.Path):
    """A path of this machine: a URI would become a folder that is called like its scheme."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            scheme = value.partition("://")[0]
            self.fail(f"files at {scheme}:// cannot be used here; give a path of this machine")
        _check_length(self, value)
        return super().convert(value, param, ctx)


class OutputPath(click.Path):
    """Where a result goes: what cannot be written is refused before the work, not after it.

    To a URI of a store, it is sent when the command is done.
    """

    def __init__(self, is_file: bool = False) -> None:
        super().__init__(path_type=Path)
        self._is_file = is_file

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            return _staging(ctx).output(value)
        path: Any = super().convert(value, param, ctx)
        check_place(path, self._is_file)
        return path


class WholeNumber(click.IntRange):
    """A number from some least one on; one that no count can have is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > sys.maxsize:
            self.fail(f"{value} is too large", param, ctx)
        return number


def _click_type(hint: Any, limits: Option) -> Any:
    """The click type of a type: of its members, where there may be several."""
    choices = [choice for choice in choices_of(hint) if choice is not None]
    if choices:
        return click.Choice(choices)
    kind = next(one for one in (*get_args(hint), hint) if one is not type(None))
    least = limits.above if limits.least is None else limits.least
    if kind is Path:
        return _LocalPath(path_type=Path)
    if least is None:
        return kind
    limited: Any = WholeNumber if kind is int else click.FloatRange
    return limited(least, min_open=limits.least is None)


def _parameter(name: str, hint: Any, spec: Option) -> click.Parameter:
    """What click makes of a member of a command's parameters."""
    several, required = get_origin(hint) is tuple, spec.default is ...
    # None has to be said: click takes False for the default of a flag that has a negation.
    unset = any(spec.default is value for value in (..., (), False))
    known: dict[str, Any] = {} if unset else {"default": spec.default}
    usual = Seconds() if spec.metavar == "SECONDS" else _click_type(hint, spec)
    if "--output" in spec.flags:
        usual = OutputPath()
    known["type"] = spec.kind or usual
    if spec.is_argument:
        return click.Argument([name], nargs=-1 if several else 1, required=required, **known)
    declared = spec.flags.split() or ["--" + name.replace("_", "-")]
    declared = [name, *declared] if declared[0].startswith("-") else declared
    # Not False: click then lets an option stand without its value.
    is_flag = True if hint is bool else None
    known |= {"multiple": several, "is_flag": is_flag, "metavar": spec.metavar}
    return click.Option(declared, required=required, help=spec.help, **known)


def add_command(
    group: click.Group, function: Callable[..., None], name: str | None = None
) -> Callable[..., None]:
    """Make a function a command of a group.

    Parameters
    ----------
    group : click.Group
    function : callable
        Its parameters have an `Option` as their default, see `placer.knobs`. In its docstring,
        ``{presets}`` stands for the names of machines.
    name : str, optional
        By default the function's.
    """
    made = {(of, each): _parameter(each, hint, spec) for of, each, hint, spec in members(function)}

    def call(**options: Any) -> None:
        context = click.get_current_context()
        if context.find_root().params.get("verbose"):
            _say_sources(context, options)
        with context.meta.get(_STAGING) or nullcontext():
            called(function, {at: options[str(one.name)] for at, one in made.items()})

    text = inspect.cleandoc(function.__doc__ or "").replace("{presets}", preset_help())
    named, parameters = name or function.__name__.replace("_", "-"), list(made.values())
    group.add_command(click.Command(named, callback=call, params=parameters, help=text))
    return function


def refuse_others(option: str, allowed: str) -> None:
    """Refuse what an option decides by itself, where it is given beside it.

    Parameters
    ----------
    option : str
    allowed : str
        Names of the parameters that go with it, separated by spaces.

    Raises
    ------
    click.UsageError
        Names the first option that does not.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in allowed.split():
            raise click.UsageError(f"{option} decides {parameter.opts[-1]}: leave one of them out")


def _say_sources(context: click.Context, options: dict[str, Any]) -> None:
    """Which options have other values than their defaults, and who says so."""
    from placer.report.console import print_stderr

    for name, value in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source is not ParameterSource.DEFAULT:
            print_stderr(f"{name.replace('_', '-')} = {value} ({_SOURCES[source.name]})")


class Name(click.ParamType):  # type: ignore[type-arg]  # Generic in the newest click alone.
    """A name, or several between commas, that a function has to accept."""

    def __init__(
        self,
        name: str,
        accepts: Callable[[str], bool],
        wrong: str,
        several: bool = False,
        shown: str | None = None,
    ) -> None:
        self.name, self._accepts, self._wrong = name, accepts, wrong
        self._several, self._shown = several, shown

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = ",".join(value) if isinstance(value, list) else str(value)  # Of a file.
        names = [one.strip() for one in value.split(",") if one.strip()]
        for one in names if self._several else [value]:
            if not self._accepts(one):
                self.fail(self._wrong.format(one), param, ctx)
        return names if self._several else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._shown


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
        """What begins as the text does."""
        items = [CompletionItem(name) for name in self._suggested() if name.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if self._files else [])


def _renamed(command: str | None, words: list[str]) -> Iterator[str]:
    """The words of a command line, options that had another name as they are called now."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        now = _EARLIER.get(flag, flag)
        if command == "profile" and flag == "--format" and (value or following) in _LOG_FORMATS:
            now = "--log-format"
        if now != flag:
            from placer.report.console import print_stderr

            print_stderr(f"{flag} is called {now} now")
        yield now + equals + value


@contextlib.contextmanager
def _plain_usage_errors() -> Iterator[None]:
    r"""Errors of the command line in one line, whatever characters an argument has.

    >>> with _plain_usage_errors():
    ...     raise click.UsageError("no option --a\x1b[2J")
    Traceback (most recent call last):
    click.exceptions.UsageError: no option --a\x1b[2J
    """
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(shortened(error.format_message()), error.ctx) from None


class Commands(click.Group):
    """Commands whose errors are one line, and whose options may stand in `placer.toml`."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _plain_usage_errors():
            return super().make_context(*args, **settings)

    def invoke(self, context: click.Context) -> Any:
        with one_line_errors(), _plain_usage_errors():
            context.default_map = default_options(self._options(), os.environ)
            return super().invoke(context)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, list(_renamed(name, rest))

    def _options(self) -> dict[str, dict[str, str]]:
        """The parameter of each option of each command, by the option's name without dashes."""
        return {
            name: {
                flag.removeprefix("--"): str(parameter.name)
                for parameter in command.params
                if isinstance(parameter, click.Option)
                for flag in parameter.opts
                if flag.startswith("--")
            }
            for name, command in self.commands.items()
        }
