"""Import the names of a package when they are first used (PEP 562).

This keeps `import placer` and `placer --help` fast, and a trainer that uses a plan never imports
modules that only a search needs.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` for a package, given its ``__name__``.

    The package exports the names that its ``if TYPE_CHECKING:`` block imports.

    >>> import placer
    >>> get, names = lazy_exports("placer")
    >>> "Table" in names, get("Table").__module__
    (True, 'placer.tables')
    """
    spec: Any = sys.modules[package].__spec__
    source = spec.loader.get_source(package)
    blocks = (one for one in ast.parse(source).body if isinstance(one, ast.If))
    imports = (one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom))
    homes = {name.name: str(one.module) for one in imports for name in one.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # Later uses do not call `get`.
        return value

    return get, sorted(homes)
