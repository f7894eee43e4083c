"""Turn functions into commands: parameters become options, and the docstring is the help.

`placer.knobs` says how. Only the command line imports this, as nothing else may import click.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import click
from click.core import ParameterSource

from placer.click_types import Checked, Choice, InputPath, Number, OutputPath, WholeNumber
from placer.knobs import Option, choices_of, parameters_of
from placer.report.failures import one_line_errors
from placer.topology.presets import preset_help
from placer.units import shortened


class HeadedOption(click.Option):
    """An option with a heading in help."""

    heading = "General"


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


def _hush(context: click.Context, _: click.Parameter, is_quiet: bool) -> None:
    if is_quiet:
        from placer.report.console import set_quiet  # Loads slowly.

        set_quiet(True)
        context.call_on_close(lambda: set_quiet(False))


_WORDS = "Print only results and errors, no notes."
_HOW: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _hush}
QUIET = HeadedOption(["-q", "--quiet"], help=_WORDS, **_HOW)
"""An option of all commands, which may also be before a command's name."""


def add_command(group: click.Group, function: Callable[..., None]) -> Callable[..., None]:
    """Add a function as a command to a group. The function `diff_command` becomes ``diff``.

    An option ``--plan`` may also be given as an argument, without its flag. In the function's
    docstring, ``{presets}`` stands for the names of machines.
    """
    made = {
        at: (hint, {each: _parameter(each, *one) for each, one in options.items()})
        for at, (hint, options) in parameters_of(function).items()
    }
    params = [one for _, own in made.values() for one in own.values()]
    plan = next((str(one.name) for one in params if "--plan" in one.opts), "")
    if plan:
        how: Any = {"required": False, "metavar": "PLAN", "type": InputPath()}
        params.insert(0, click.Argument([f"{plan}_by_place"], **how))

    def call(**values: Any) -> None:
        if plan:
            values[plan] = _by_place_or_flag(values.pop(f"{plan}_by_place"), values[plan])
        _check_outputs([(one, values.get(str(one.name))) for one in params])
        arguments = {}
        for at, (hint, options) in made.items():
            own = {each: values[str(one.name)] for each, one in options.items()}
            arguments[at] = own[at] if at in own else hint(**own)
        function(**arguments)

    text = inspect.cleandoc(function.__doc__ or "").replace("{presets}", preset_help())
    name = function.__name__.removesuffix("_command").replace("_", "-")
    group.add_command(_Command(name, callback=call, params=[*params, QUIET], help=text))
    return function


def _check_outputs(given: Iterable[tuple[click.Parameter, Any]]) -> None:
    """Check that each result can be written, and is not what the command reads."""
    given = [(one, value) for one, value in given if value is not None]
    inputs: dict[str, Iterable[Path | str]] = {}
    for one, value in given:
        if isinstance(value, str):  # Such as a.yaml,b.yaml or calibrated:machine.json.
            inputs[str(one.name)] = re.split("[,:]", value)
        elif isinstance(value, tuple) or getattr(one.type, "is_read", False):
            inputs[str(one.name)] = value if isinstance(value, tuple) else (value,)
    for one, value in given:
        if isinstance(one.type, OutputPath):
            one.type.check(value, inputs)


def _parameter(name: str, hint: Any, spec: Option) -> click.Parameter:
    several = get_origin(hint) is tuple
    known: dict[str, Any] = {"type": _click_type(hint, spec), "required": spec.default is ...}
    # Pass None, too: without a default, click takes False for a flag such as --a/--no-a.
    if not any(spec.default is value for value in (..., (), False)):
        known["default"] = spec.default
    if spec.is_argument:
        return click.Argument([name], nargs=-1 if several else 1, **known)
    flags = spec.flags.split() or ["--" + name.replace("_", "-")]
    flags = [name, *flags] if flags[0].startswith("-") else flags
    # None instead of False: with False, click accepts an option without its value.
    known |= {"is_flag": True if hint is bool else None, "multiple": several}
    option = HeadedOption(flags, help=spec.help, metavar=spec.metavar, **known)
    is_result = isinstance(option.type, OutputPath) or "--format" in option.opts
    option.heading = spec.heading or ("Results" if is_result else "Options")
    return option


def _click_type(hint: Any, spec: Option) -> Any:
    """Return the click type of an option's kind, or else of a type hint or its members."""
    if spec.kind is not None:
        return Checked(spec.kind) if inspect.isfunction(spec.kind) else spec.kind
    choices = [choice for choice in choices_of(hint) if choice is not None]
    if choices:
        return Choice(choices)
    kind = next(one for one in (*get_args(hint), hint) if one is not type(None))
    if kind is Path:
        raise TypeError(f"a path of {spec} is read or written: its kind has to say which")
    least = spec.above if spec.least is None else spec.least
    if least is None:
        return Number() if kind is float else kind
    limited: Any = WholeNumber if kind is int else Number
    return limited(least, min_open=spec.least is None)


def _by_place_or_flag(placed: Any, flagged: Any) -> Any:
    """Return the plan, which is given as an argument or with its flag."""
    if placed is not None and flagged is not None:
        raise click.UsageError(f"the plan is given twice: {placed} and {flagged}")
    if placed is None and flagged is None:
        raise click.UsageError("Missing option '--plan', or PLAN without it.")
    return flagged if placed is None else placed


def refuse_others(option: str, allowed: str) -> None:
    """Raise UsageError if the command line has options without effect together with `option`.

    These are all but the `allowed` parameters, whose names are separated by blanks.
    """
    for name, flag in _given():
        if name not in allowed.split():
            raise click.UsageError(f"{flag} does not go with {option}; leave one of them out")


def refuse_without(option: str, names: str) -> None:
    """Raise UsageError if the command line has one of these parameters, which need `option`."""
    for name, flag in _given():
        if name in names.split():
            words = f"{flag} has no effect without {option}; give {option}, or leave {flag} out"
            raise click.UsageError(words)


def _given() -> Iterator[tuple[str, str]]:
    """Yield names and flags of the parameters on the command line."""
    context = click.get_current_context()
    for one in context.command.params:
        is_given = context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
        if is_given and one.expose_value:
            yield str(one.name), one.opts[-1]


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """End at any error with one line, without control characters."""
    with one_line_errors():
        try:
            yield
        except click.UsageError as error:
            raise click.UsageError(shortened(error.format_message()), error.ctx) from None


class Commands(click.Group):
    """Commands whose errors are one line each."""

    make_context = _short_errors()(click.Group.make_context)
    invoke = _short_errors()(click.Group.invoke)
