"""Turn functions into commands: parameters become options, and the docstring is the help.

Only `cli.py` uses this module, so that nothing else imports click.
"""

import contextlib
import inspect
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource

from placer.click_types import (
    Checked,
    Choice,
    LocalPath,
    Number,
    OutputPath,
    Seconds,
    WholeNumber,
)
from placer.data.layout import FORMATS
from placer.errors import PlacerError
from placer.knobs import (
    Key,
    Option,
    called,
    check_variables,
    choices_of,
    config_text,
    default_options,
    members,
    negated,
    variable_of,
)
from placer.report.failures import one_line_errors
from placer.topology.presets import preset_help
from placer.units import shortened

_SOURCES = {
    ParameterSource.COMMANDLINE: "given",
    ParameterSource.ENVIRONMENT: "of the environment",
    ParameterSource.DEFAULT_MAP: "of placer.toml",
}
_ALTERNATIVES = "profile_path", "workload"
"""Parameters of which only one may be given. On the command line, it replaces placer.toml's."""
_EARLIER = {"--data-format": "--log-format", "--report": "--format"}
"""New names of options, by their names in 0.1.0."""
_LOG_FORMATS = {*FORMATS, "counts"} - {"csv"}  # `--format csv` means results as CSV.

_PRINTS = "placer.prints"
_BY_PLACE = "_by_place"
"""Suffix for the name of an argument that may replace an option."""


def _click_type(hint: Any, limits: Option) -> Any:
    """Return the click type for a type hint; for tuples and unions, of their members."""
    choices = [choice for choice in choices_of(hint) if choice is not None]
    if choices:
        return Choice(choices)
    kind = next(one for one in (*get_args(hint), hint) if one is not type(None))
    least = limits.above if limits.least is None else limits.least
    if kind is Path:
        raise TypeError(f"a path of {limits} is read or written: its kind has to say which")
    if least is None:
        return Number() if kind is float else kind
    limited: Any = WholeNumber if kind is int else Number
    return limited(least, min_open=limits.least is None)


class _Parameter(click.Parameter):
    """A parameter that may be missing if ``--print-config`` only prints options."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter:
            if ctx.meta.get(_PRINTS):
                return None
            raise


class _Argument(_Parameter, click.Argument):
    """A parameter without a flag."""


class CommandOption(_Parameter, click.Option):
    """An option with environment variables named by its long flags, and a `heading` in help."""

    heading = "General"

    def keys(self) -> dict[str, Key]:
        """Return the key of each long flag, by the flag without dashes."""
        both = ((self.opts, False), (self.secondary_opts, True))
        return {
            flag.removeprefix("--"): Key(str(self.name), self.multiple, is_off)
            for flags, is_off in both
            for flag in flags
            if flag.startswith("--")
        }

    def variables(self, command: click.Command) -> dict[str, Key]:
        """Return the environment variables that set the option of a command."""
        words = () if isinstance(command, click.Group) else (str(command.name),)
        return {variable_of(*words, flag): key for flag, key in self.keys().items()}

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the flag for an error, and where its value comes from if not the command line."""
        hint, source = super().get_error_hint(ctx), ctx and ctx.get_parameter_source(str(self.name))
        if source in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
            hint = f"{hint} {_SOURCES[source]}"
        return hint

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the text of the option's environment variable; None if it is empty or not set."""
        found = {n: key for n, key in self.variables(ctx.command).items() if os.environ.get(n)}
        if len(found) > 1:
            raise click.UsageError(f"{' and '.join(found)} are one option: give one of them", ctx)
        for name, key in found.items():
            return negated(os.environ[name]) if key.negates else os.environ[name]
        return None

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Return the value of the variable. Several values are separated as in a shell."""
        text = self.resolve_envvar_value(ctx)
        if text is None or not self.multiple:
            return text
        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}", ctx, self) from None


def _parameter(name: str, hint: Any, spec: Option) -> click.Parameter:
    """Return the click parameter for a value of a command's parameters."""
    several, required = get_origin(hint) is tuple, spec.default is ... and not spec.positional
    # Pass None explicitly: click's default is False for a flag with a negation.
    unset = any(spec.default is value for value in (..., (), False))
    known: dict[str, Any] = {} if unset else {"default": spec.default}
    usual = Seconds() if spec.metavar == "SECONDS" else None
    kind = spec.kind or usual or _click_type(hint, spec)
    known["type"] = Checked(kind) if inspect.isfunction(kind) else kind
    if spec.is_argument:
        return _Argument([name], nargs=-1 if several else 1, required=required, **known)
    declared = spec.flags.split() or ["--" + name.replace("_", "-")]
    declared = [name, *declared] if declared[0].startswith("-") else declared
    # None instead of False: with False, click accepts an option without its value.
    is_flag = True if hint is bool else None
    known |= {"multiple": several, "is_flag": is_flag, "metavar": spec.metavar}
    option = CommandOption(declared, required=required, help=spec.help, **known)
    is_result = isinstance(option.type, OutputPath) or "--format" in option.opts
    option.heading = spec.heading or ("Results" if is_result else "Options")
    return option


def spoken() -> list[CommandOption]:
    """Return the options for how much a command prints, allowed before or after its name."""
    more = "Also print where options come from, and how long the command took."
    return [
        CommandOption(
            ["-q", "--quiet"], is_flag=True, help="Print only results and errors, no notes."
        ),
        CommandOption(["-v", "--verbose"], is_flag=True, help=more),
    ]


class _Command(click.Command):
    """A command that shows its options under headings in help."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None and isinstance(one, click.Option):
                groups.setdefault(getattr(one, "heading", "General"), []).append(record)
        groups["General"] = groups.pop("General")  # Put it last.
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def add_command(
    group: click.Group, function: Callable[..., None], name: str | None = None
) -> Callable[..., None]:
    """Add a function as a command to a group, by default with the function's name.

    The default of each parameter is an `Option`; see `placer.knobs`. In the function's docstring,
    ``{presets}`` stands for the names of machines.
    """
    made, positional = {}, {}
    for of, each, hint, spec in members(function):
        made[of, each] = one = _parameter(each, hint, spec)
        if spec.positional:
            positional[str(one.name)] = spec
    arguments = [
        _Argument([f"{at}{_BY_PLACE}"], required=False, metavar="PLAN", type=spec.kind)
        for at, spec in positional.items()
    ]
    words = "Print the values of all options as a placer.toml, and do nothing else."
    alone: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    alone["callback"] = lambda context, _, value: context.meta.update({_PRINTS: value})
    printing = CommandOption(["--print-config"], **alone, help=words)
    parameters = [*arguments, *made.values(), *spoken(), printing]

    def call(**options: Any) -> None:
        context, began_s = click.get_current_context(), time.monotonic()
        _drop_weaker(context, options)
        root = context.find_root().params
        is_quiet, is_verbose = (bool(options[n] or root.get(n)) for n in ("quiet", "verbose"))
        for at, spec in positional.items():
            options[at] = _by_place_or_flag(context, at, options.pop(f"{at}{_BY_PLACE}"), spec)
        if context.meta.get(_PRINTS):
            values = {}
            for one in parameters:
                if isinstance(one, CommandOption) and one.name in options:
                    flag = [flag for flag, key in one.keys().items() if not key.negates][-1]
                    values[flag] = options[one.name]
            return click.echo(config_text(named, values))
        _set_notes(context, is_quiet, is_verbose, began_s)
        if is_verbose:
            _say_sources(context, options)
        for one in parameters:
            if isinstance(one.type, OutputPath) and options.get(str(one.name)) is not None:
                one.type.check(options[str(one.name)])
                inputs = _inputs(parameters, options, one.type.follows)
                one.type.check_inputs(options[str(one.name)], inputs)
        called(function, {at: options[str(one.name)] for at, one in made.items()})

    text = inspect.cleandoc(function.__doc__ or "").replace("{presets}", preset_help())
    named = name or function.__name__.replace("_", "-")
    group.add_command(_Command(named, callback=call, params=parameters, help=text))
    return function


def _inputs(
    parameters: Sequence[click.Parameter], options: Mapping[str, Any], except_for: str
) -> Iterator[Path | str]:
    """Yield what a command reads: values of `LocalPath`, and texts that may be files of logs."""
    for one in parameters:
        value = None if one.name == except_for else options.get(str(one.name))
        is_read = isinstance(one.type, LocalPath) and not isinstance(one.type, OutputPath)
        if value is not None and (is_read or isinstance(value, tuple)):
            yield from value if isinstance(value, tuple) else (value,)


def _drop_weaker(context: click.Context, options: dict[str, Any]) -> None:
    """Unset those of `_ALTERNATIVES` that another one, from a stronger source, replaces."""
    given = [name for name in _ALTERNATIVES if options.get(name) is not None]
    order: dict[Any, int] = {source: place for place, source in enumerate(_SOURCES)}
    places = {name: order.get(context.get_parameter_source(name), len(order)) for name in given}
    for name in given:
        if places[name] > min(places.values()):
            options[name] = None


def _by_place_or_flag(context: click.Context, name: str, placed: Any, spec: Option) -> Any:
    """Return the value of an option that was given by its flag or as an argument."""
    flagged = context.params[name]
    is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    if placed is not None and is_given:
        raise click.UsageError(f"the plan is given twice: {placed} and {flagged}", context)
    if placed is None and flagged is None and spec.default is ... and not context.meta.get(_PRINTS):
        raise click.UsageError("Missing option '--plan', or PLAN without it.", context)
    return flagged if placed is None else placed


def _set_notes(context: click.Context, is_quiet: bool, is_verbose: bool, began_s: float) -> None:
    from placer.report.console import print_seconds, set_quiet

    set_quiet(bool(is_quiet))
    context.call_on_close(lambda: set_quiet(False))
    if is_verbose:
        context.call_on_close(lambda: print_seconds(time.monotonic() - began_s))


def refuse_others(option: str, allowed: str) -> None:
    """Refuse options on the command line that have no effect together with `option`.

    `allowed` has names of parameters, separated by blanks. Raises `click.UsageError` for the first
    other parameter that is given.
    """
    for name, flag in _given():
        if name not in allowed.split():
            raise click.UsageError(f"{flag} does not go with {option}; leave one of them out")


def refuse_without(option: str, names: str) -> None:
    """Refuse options on the command line that have no effect, as `option` is not given.

    `names` has names of parameters, separated by blanks.
    """
    for name, flag in _given():
        if name in names.split():
            words = f"{flag} has no effect without {option}; give {option}, or leave {flag} out"
            raise click.UsageError(words)


def _given() -> Iterator[tuple[str, str]]:
    """Yield names and flags of the parameters on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield name, parameter.opts[-1]


def _say_sources(context: click.Context, options: Mapping[str, Any]) -> None:
    """Print the options with other values than their defaults, and where they come from."""
    from placer.report.console import print_stderr

    for one in context.command.params:
        source = context.get_parameter_source(str(one.name))
        if source in _SOURCES and one.name in options:
            named = (one.opts[-1] if isinstance(one, click.Option) else str(one.name)).strip("-")
            print_stderr(f"{named} = {options[one.name]} ({_SOURCES[source]})")


def _renamed(command: str | None, words: list[str]) -> Iterator[str]:
    """Yield the words of a command line, with old names of options replaced by the new ones."""
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
    """Shorten usage errors to one line without control characters."""
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(shortened(error.format_message()), error.ctx) from None


class Commands(click.Group):
    """Commands with one-line errors, and with options from `placer.toml`."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with one_line_errors(), _plain_usage_errors():
            return super().make_context(*args, **settings)

    def invoke(self, context: click.Context) -> Any:
        with one_line_errors(), _plain_usage_errors():
            return super().invoke(context)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        is_help = ctx.resilient_parsing or bool({*ctx.help_option_names} & {*rest})
        try:
            self._take_defaults(ctx)
        except (PlacerError, click.UsageError):
            if not is_help:
                raise
        return name, command, list(_renamed(name, rest))

    def _take_defaults(self, context: click.Context) -> None:
        """Read defaults from `placer.toml`, and refuse environment variables without an option."""
        keys: dict[str, dict[str, Key]] = {}
        variables: list[str] = []
        for command in (self, *self.commands.values()):
            known = keys.setdefault(str(command.name), {})
            for one in command.params:
                if isinstance(one, CommandOption):
                    variables += one.variables(command)
                    known.update(one.keys())
        try:
            check_variables(os.environ, variables)
        except PlacerError as error:
            raise click.UsageError(str(error)) from None
        keys.pop(str(self.name))
        context.default_map = default_options(keys, os.environ)
