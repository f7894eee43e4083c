"""Options that a person gives once: `placer.toml` and variables of the environment.

An option of the command line comes first, then ``PLACER_COMMAND_OPTION`` of the environment, then
the command's own table in `placer.toml`, then what stands above all tables there, then the default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placer.errors import PlacerError

FILE_NAME = "placer.toml"
FILE_VARIABLE = "PLACER_CONFIG"
"""The variable that names another file than `placer.toml` of the working folder."""


def default_options(
    commands: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """What `placer.toml` says of the options of each command, by command and parameter.

    Parameters
    ----------
    commands : mapping of str to mapping of str to str
        Of each command, the parameter of each option, by the option's name without dashes.
    environment : mapping of str to str
        Its `FILE_VARIABLE` names the file.

    Raises
    ------
    PlacerError
        If the file is named and missing, is no TOML, or has an option that no command has, or a
        command has not.

    Examples
    --------
    >>> default_options({"plan": {"topology": "topology"}}, {})
    {'plan': {}}
    """
    named = environment.get(FILE_VARIABLE)
    found: dict[str, dict[str, Any]] = {command: {} for command in commands}
    path = Path(named or FILE_NAME)
    if not named and not path.is_file():
        return found
    from placer.config_file import read_mapping  # Loads slowly, and few have such a file.

    values = read_mapping(path, "defaults", PlacerError)
    for_all = {name: value for name, value in values.items() if not isinstance(value, dict)}
    own = {name: value for name, value in values.items() if isinstance(value, dict)}
    for name, value in for_all.items():
        having = [command for command, known in commands.items() if name in known]
        if not having:
            raise PlacerError(f"{path}: no command has an option --{name}")
        for command in having:
            found[command][commands[command][name]] = value
    for command, options in own.items():
        if command not in commands:
            raise PlacerError(f"{path}: [{command}] is no command; they are {', '.join(commands)}")
        for name, value in options.items():
            if name not in commands[command]:
                raise PlacerError(f"{path}: placer {command} has no option --{name}")
            if isinstance(value, dict):
                raise PlacerError(f"{path}: --{name} of placer {command} must be one value")
            found[command][commands[command][name]] = value
    return found
