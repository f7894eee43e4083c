"""Planners of others on instances of the library; nothing of theirs is part of this project."""

import argparse
import importlib
import sys

from expand import Recipe
from outcome import Outcome

from placer import Problem

PLANNERS: dict[str, str] = {}
"""The module of each, by a name; part of it may follow a colon, as in ``torchrec:dynamic``."""


def run(planner: str, recipe: Recipe, problem: Problem, options: argparse.Namespace) -> Outcome:
    """Run another's planner on an instance."""
    family, _, variant = planner.partition("-")
    if family not in PLANNERS:
        sys.exit(f"no planner is called {planner!r}")
    module = importlib.import_module(PLANNERS[family])
    outcome: Outcome = module.run(variant, recipe, problem, options)
    return outcome
