"""The file of one plan in the cache: a line with its hash, a line of JSON, and the hot ids.

One file, so that it is there whole or not at all. Nothing in it is
ever run.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from placer.errors import PlacerError, PlanError
from placer.plan.file import from_dict, to_dict
from placer.plan.plan import Plan
from placer.plan.seal import sealed
from placer.plan.verify import violations
from placer.read_files import LimitError, parse_json
from solvers.result import Limit, SolveResult, Termination

MAGIC = "placer-cached-plan-4"


@dataclass(frozen=True, slots=True)
class Entry:
    """A search and its result.

    Attributes
    ----------
    key : str
        See `solvers.cache.key.key_of`.
    time_limit_s : float
        That of the search.
    result : SolveResult
        With a plan.
    """

    key: str
    time_limit_s: float
    result: SolveResult


def encoded(entry: Entry) -> bytes:
    """The file's content.

    Raises
    ------
    PlanError
        If there is no plan.
    """
    result = entry.result
    if result.plan is None:
        raise PlanError("there is no plan to keep")
    end = result.termination
    document = {
        "key": entry.key,
        "time_limit_s": entry.time_limit_s,
        "plan": sealed(to_dict(result.plan)),
        "limit": end.limit,
        "detail": end.detail,
        "stats": result.stats,
    }
    ids = {n: np.ascontiguousarray(ids, np.int64) for n, ids in result.plan.hot_ids.items()}
    body = json.dumps(document, default=_plain).encode() + b"\n" + save(ids)
    return f"{MAGIC} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decoded(content: bytes, key: str) -> Entry:
    """The entry of a file's content.

    Raises
    ------
    PlacerError
        Says what is wrong, if it is another file, cut short or altered, was made for another key,
        or holds a plan that is not sound.
    """
    first, _, body = content.partition(b"\n")
    magic, *hashes = first.decode("ascii", "replace").split(" ")
    if magic != MAGIC:
        raise PlacerError("it is no plan of this version's cache")
    if [hashlib.sha256(body).hexdigest()] != hashes:
        raise PlacerError("it is cut short or was altered")
    line, _, ids = body.partition(b"\n")
    try:
        entry = _entry(parse_json(line), ids)
    except (LimitError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise PlacerError(f"it is damaged: {error!r}") from error
    if entry.key != key:
        raise PlacerError("it holds the plan of another problem")
    return entry


def _entry(document: dict[str, Any], ids: bytes) -> Entry:
    plan = Plan(**vars(from_dict(document["plan"], load(ids))))
    for fault in violations(plan):
        raise PlacerError(f"its plan is not sound: {fault.message}")
    if sealed(document["plan"]) != document["plan"]:
        raise PlacerError("its plan was altered")
    record = plan.solver
    end = Termination(record.status, document["limit"], document["detail"])
    if end.limit not in (None, *get_args(Limit)) or not isinstance(end.detail, str):
        raise PlacerError("it does not say how its search ended")
    result = SolveResult(plan, end, record.step_time_s, record.bound_s, dict(document["stats"]))
    return Entry(document["key"], float(document["time_limit_s"]), result)


def _plain(value: Any) -> Any:
    """What a solver counts, as JSON has it."""
    return value.item() if isinstance(value, np.generic) else str(value)
