"""Exceptions that placer raises, all derived from `PlacerError`.

Every message names the offending value, the limit that it breaks, and what to do about it.
Exceptions mean bad input, misuse or a broken backend. An infeasible problem is not an exception: it
is a *result* of a solver (`solvers.Termination`).
"""

from collections.abc import Iterable
from types import UnionType


class PlacerError(Exception):
    """Base of all exceptions that placer raises on purpose."""


class DataError(PlacerError):
    """A log cannot be read: missing column, ragged line, id out of range, empty file."""


class ProfileError(PlacerError):
    """A profile is damaged, or two profiles cannot be combined."""


class TopologyError(PlacerError):
    """A topology names unknown things, or lacks something that a plan needs."""


class ProblemError(PlacerError):
    """Tables, profile, topology, batch size or constraints do not make a valid problem."""


class PlanError(PlacerError):
    """A plan file is damaged, of a newer version, or breaks a rule of the format."""


class CapacityError(PlanError):
    """A plan puts more bytes on a device than it has."""


class PlanMismatchError(PlanError):
    """A plan does not fit the model, profile or row order that it is used with."""


class CheckpointError(PlacerError):
    """A checkpoint is incomplete, damaged or of another model."""


class BackendError(PlacerError):
    """An optional library is missing, or a library failed."""


def check_kinds(**arguments: tuple[object, type | UnionType]) -> None:
    """Raise PlacerError if an argument is not of its type, such as one of two that are swapped.

    >>> check_kinds(rows=(9, int), name=("item", str | None), steps=("many", int))
    Traceback (most recent call last):
    placer.errors.PlacerError: steps must be of type int, not str
    """
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", kind)
            raise PlacerError(f"{name} must be of type {wanted}, not {type(value).__name__}")


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return a suggestion of a similar known name, to append to a message; or ``""``.

    >>> did_you_mean("greedy-sise", ["greedy-size", "ilp"])
    '; did you mean greedy-size?'
    """
    from difflib import get_close_matches

    close = get_close_matches(wrong, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
