"""Names of a package that are imported when they are first used (PEP 562).

`import placer` and `placer --help` take little time this way, and a trainer that consumes
a plan never imports what only a search needs.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Parameters
    ----------
    package : str
        Its `__name__`.
    modules : mapping of str to str
        Modules of the package, and the names that each exports, between spaces.

    Examples
    --------
    >>> get = lazy_exports("placer", {"placer.units": "format_bytes parse_bytes"})
    >>> get("parse_bytes")("8GiB")
    8589934592
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # The next use does not come here.
        return value

    return get
