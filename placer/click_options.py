"""Makes a command of a function: its parameters are options, its docstring is the help.

For `cli.py` alone, which is the only one that imports click through it.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import click

from placer.knobs import Option, called, choices_of, members
from placer.report.failures import one_line_errors
from placer.topology.presets import preset_help


def _click_type(hint: Any, limits: Option) -> Any:
    """The click type of a type: of its members, where there may be several."""
    choices = [choice for choice in choices_of(hint) if choice is not None]
    if choices:
        return click.Choice(choices)
    kind = next(one for one in (*get_args(hint), hint) if one is not type(None))
    least = limits.above if limits.least is None else limits.least
    if kind is Path:
        return click.Path(path_type=Path)
    if least is None:
        return kind
    limited: Any = click.IntRange if kind is int else click.FloatRange
    return limited(least, min_open=limits.least is None)


def _parameter(name: str, hint: Any, spec: Option) -> click.Parameter:
    """What click makes of a member of a command's parameters."""
    several, required = get_origin(hint) is tuple, spec.default is ...
    unset = any(spec.default is value for value in (..., None, (), False))
    known: dict[str, Any] = {} if unset else {"default": spec.default}
    known["type"] = spec.kind or _click_type(hint, spec)
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
        called(function, {at: options[str(one.name)] for at, one in made.items()})

    text = inspect.cleandoc(function.__doc__ or "").replace("{presets}", preset_help())
    named, parameters = name or function.__name__, list(made.values())
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
        names = [one.strip() for one in value.split(",") if one.strip()]
        for one in names if self._several else [value]:
            if not self._accepts(one):
                self.fail(self._wrong.format(one), param, ctx)
        return names if self._several else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._shown


class Commands(click.Group):
    """Errors are one line, not a traceback."""

    def invoke(self, context: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(context)
