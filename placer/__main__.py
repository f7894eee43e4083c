"""The command `placer`, and `python -m placer`.

People have a `cli.py`, and folders called `solvers` or `cost_models`, of their own, and with
`PYTHONPATH=.` theirs come before those that are installed. The command finds its own beside the
package `placer`, wherever the path of imports leads first. `import placer` needs none of this: it
never imports them.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_BESIDE = ("cli", "cost_models", "solvers")


class _ModulesBesidePlacer:
    """Finds modules of these names in the folder that `placer` is in, and nothing else."""

    folder = str(Path(__file__).resolve().parent.parent)

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find the modules of `_BESIDE`; leave parts of packages to the packages."""
        return PathFinder.find_spec(name, [cls.folder]) if name in _BESIDE else None


# Not in `main`: processes that the command starts import this module and do not call it.
if _ModulesBesidePlacer not in sys.meta_path:
    sys.meta_path.insert(0, _ModulesBesidePlacer)


def main() -> None:
    """Run the command line of this installation."""
    try:
        from cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("\nAborted!\n")  # As `placer.report.failures` ends what has begun.
        sys.exit(130)
    command(prog_name="placer")


if __name__ == "__main__":
    main()
