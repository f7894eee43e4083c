"""Decide whether drives or servers have to hold what HBM and DRAM have no room for."""

from typing import TYPE_CHECKING

import numpy as np

from solvers.model.objective import Objective

if TYPE_CHECKING:
    from solvers.model.instance import Instance

_FILLED = 0.5
"""Share of HBM that is assumed to hold rows instead of buffers."""


def takes_drives(instance: "Instance") -> bool:
    """Return whether tables may exceed HBM and DRAM and drives take the rest."""
    topology = instance.problem.topology
    with_gpus = [host for host in topology.hosts if topology.gpus_of(host.id)]
    has_drives = all(host.drive is not None for host in with_gpus)
    return has_drives and _is_too_large(instance)


def takes_servers(instance: "Instance") -> bool:
    """Return whether tables may exceed the memory of hosts with GPUs and servers take the rest.

    Hosts with GPUs are then mostly full.
    """
    return instance.servers > 0 and _is_too_large(instance)


def _is_too_large(instance: "Instance") -> bool:
    tables = sum(one.table.total_bytes for one in instance.problem.profile)
    return tables > instance.all_hbm_bytes * _FILLED + float(instance.all_dram_bytes.sum())


def objective_of_servers(instance: "Instance") -> Objective:
    """Return the objective of servers: the chain that takes a server longest with all tables.

    GPUs may count another chain: see "The Lagrangian bound" in docs/bounds.md.
    """
    schedule, last = instance.objective.schedule, instance.gpus - 1
    every = [instance.model_curve(instance.whole(t), last) for t in range(instance.tables)]
    chains_s = schedule.members @ np.sum([curve.phase_s[:, 0] for curve in every], axis=0)
    return Objective(schedule, np.eye(len(chains_s))[chains_s.argmax()])
