"""Turn functions into commands: parameters become options, and the docstring is the help.

Only `cli.py` uses this module, so that nothing else imports click.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource

from placer.click_types import (
    STAGING,
    Checked,
    Choice,
    LocalPath,
    Number,
    OutputPath,
    Seconds,
    WholeNumber,
)
from placer.knobs import (
    Option,
    called,
    choices_of,
    members,
)
from placer.report.failures import one_line_errors
from placer.topology.presets import preset_help
from placer.units import shortened

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


class HeadedOption(click.Option):
    """An option with a heading in help."""

    heading = "General"


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
        return click.Argument([name], nargs=-1 if several else 1, required=required, **known)
    declared = spec.flags.split() or ["--" + name.replace("_", "-")]
    declared = [name, *declared] if declared[0].startswith("-") else declared
    # None instead of False: with False, click accepts an option without its value.
    is_flag = True if hint is bool else None
    known |= {"multiple": several, "is_flag": is_flag, "metavar": spec.metavar}
    option = HeadedOption(declared, required=required, help=spec.help, **known)
    is_result = isinstance(option.type, OutputPath) or "--format" in option.opts
    option.heading = spec.heading or ("Results" if is_result else "Options")
    return option


def quiet_option() -> HeadedOption:
    """Return the option for what a command prints, allowed before or after its name."""

    def take(context: click.Context, _: click.Parameter, is_quiet: bool) -> None:
        if is_quiet:
            from placer.report.console import set_quiet

            set_quiet(True)
            context.call_on_close(lambda: set_quiet(False))

    return HeadedOption(
        ["-q", "--quiet"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=take,
        help="Print only results and errors, no notes.",
    )


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
        click.Argument([f"{at}{_BY_PLACE}"], required=False, metavar="PLAN", type=spec.kind)
        for at, spec in positional.items()
    ]
    parameters = [*arguments, *made.values(), quiet_option()]

    def call(**options: Any) -> None:
        context = click.get_current_context()
        for at, spec in positional.items():
            options[at] = _by_place_or_flag(context, at, options.pop(f"{at}{_BY_PLACE}"), spec)
        for one in parameters:
            if isinstance(one.type, OutputPath) and options.get(str(one.name)) is not None:
                one.type.check(options[str(one.name)])
                inputs = _inputs(parameters, options, one.type.follows)
                one.type.check_inputs(options[str(one.name)], inputs)
        with context.meta.get(STAGING) or nullcontext():
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


def _by_place_or_flag(context: click.Context, name: str, placed: Any, spec: Option) -> Any:
    """Return the value of an option that was given by its flag or as an argument."""
    flagged = context.params[name]
    is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    if placed is not None and is_given:
        raise click.UsageError(f"the plan is given twice: {placed} and {flagged}", context)
    if placed is None and flagged is None and spec.default is ...:
        raise click.UsageError("Missing option '--plan', or PLAN without it.", context)
    return flagged if placed is None else placed


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
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and parameter.expose_value:
            yield name, parameter.opts[-1]


@contextlib.contextmanager
def _plain_usage_errors() -> Iterator[None]:
    """Shorten usage errors to one line without control characters."""
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(shortened(error.format_message()), error.ctx) from None


class Commands(click.Group):
    """Commands with one-line errors."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with one_line_errors(), _plain_usage_errors():
            return super().make_context(*args, **settings)

    def invoke(self, context: click.Context) -> Any:
        with one_line_errors(), _plain_usage_errors():
            return super().invoke(context)
