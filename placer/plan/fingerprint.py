"""The hash by which a plan names the problem that it was made for."""

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from placer.constraints.constraints import TableRule

if TYPE_CHECKING:
    from placer.problem import Problem


def problem_sha256(problem: "Problem") -> str:
    """SHA-256 over tables, access CDFs, machine, batch size and what constraints ask.

    Names of sources and other words for people do not enter. Without constraints nothing of
    them does either; with them, two ways to ask the same of every table are the same.
    """
    digest = hashlib.sha256()
    topology = problem.topology
    facts = {
        "tables": [asdict(profile.table) for profile in problem.profile],
        "gpus": [asdict(gpu) for gpu in topology.gpus],
        "hosts": [asdict(host) for host in topology.hosts],
        "links": [asdict(link) for link in topology.links],
        "batch_size": problem.batch_size,
        **_asked(problem),
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for profile in problem.profile:
        digest.update(profile.cdf.ranks.tobytes())
        digest.update(profile.cdf.shares.tobytes())
    return digest.hexdigest()


def _asked(problem: "Problem") -> dict[str, object]:
    """What the problem's constraints ask of each table and group, if anything."""
    constraints = problem.constraints
    if not constraints:
        return {}
    rules = {
        name: {
            "devices": None if rule.devices is None else sorted(rule.devices),
            "tier": rule.tier,
            "forbid": sorted(rule.forbid),
        }
        for name, rule in ((n, constraints.rule_of(n)) for n in problem.profile.table_names)
        if rule != TableRule()
    }
    return {"constraints": {"tables": rules, "together": constraints.together}}
