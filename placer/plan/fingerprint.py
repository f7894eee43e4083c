"""The hash by which a plan names the problem that it was made for."""

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placer.problem import Problem


def problem_sha256(problem: "Problem") -> str:
    """SHA-256 over tables, access CDFs, machine and batch size.

    Names of sources and other words for people do not enter.
    """
    digest = hashlib.sha256()
    topology = problem.topology
    facts = {
        "tables": [asdict(profile.table) for profile in problem.profile],
        "gpus": [asdict(gpu) for gpu in topology.gpus],
        "hosts": [asdict(host) for host in topology.hosts],
        "links": [asdict(link) for link in topology.links],
        "batch_size": problem.batch_size,
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for profile in problem.profile:
        digest.update(profile.cdf.ranks.tobytes())
        digest.update(profile.cdf.shares.tobytes())
    return digest.hexdigest()
