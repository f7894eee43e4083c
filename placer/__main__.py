"""The command `placer`, and `python -m placer`.

A user's repository may have its own `cli.py`, or folders called `solvers` or `cost_models`. With
`PYTHONPATH=.` Python would find these first. So the command always imports the modules beside the
package `placer`. `import placer` never imports these modules.
"""

import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from placer.interrupt import end_by_signals, end_interrupted

_BESIDE = ("cli", "cost_models", "solvers")


class _ModulesBesidePlacer:
    """Finds the modules of `_BESIDE` in the folder that has the package `placer`."""

    folder = str(Path(__file__).resolve().parent.parent)

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module of `_BESIDE`, but not submodules, which their packages find."""
        return PathFinder.find_spec(name, [cls.folder]) if name in _BESIDE else None


# Not in `main`: child processes import this module without calling `main`.
if _ModulesBesidePlacer not in sys.meta_path:
    sys.meta_path.insert(0, _ModulesBesidePlacer)


def _show_in_one_line(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning without the line of code that it comes from."""
    from placer.report.console import print_stderr

    print_stderr(f"warning: {message}", "yellow")


def main() -> None:
    """Run the command line of this installation."""
    warnings.showwarning = _show_in_one_line
    try:
        # Ranks of a launcher keep the system's way, as they wait for each other outside of Python.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            end_by_signals()
        from cli import main as command
    except KeyboardInterrupt as error:
        end_interrupted(error)
    command(prog_name="placer")


if __name__ == "__main__":
    main()
