"""What a search counts, found out by first placements: chains, hosts' memory, replicas.

One number of seconds leads a search: that of the main chain of phases at first. See "What a second
counts" in docs/solvers.md.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cost_models.base import Float
from solvers.model.instance import Instance
from solvers.search.construction import construct
from solvers.strategies._search import Search

_CHAIN_SHARES = ((0.3, 0.6, 1.2), (0.6, 0.9, np.inf), (1.0, 1.2, np.inf))
"""What a chain of phases counts beside the main one, where a first placement's takes at least, and
less than, so many times as long as the main one."""

_WEIGHED_BOUNDS = 10.0
"""Times what the first bound took that has to be left for other weights of chains."""

_NOTABLE = 0.98
"""Share of a first placement's time from which another one's is worth other weights."""

_HOST_WAITS, _HOST_SHARES = 1.1, (0.1, 0.3, 0.6)
"""Times a placement's longest chain that its hosts' memory takes for that to count, and what it
then counts beside the main chain: little, as few rows in HBM spare a host most of its reads."""


def weights_of_drives(instance: Instance) -> Float:
    """Return weights of chains where drives hold rows: only the chain with their copies counts."""
    schedule = instance.objective.schedule
    copies = {n for n, name in enumerate(schedule.phases) if name in ("copies", "link")}
    with_copies = [n for n, chain in enumerate(schedule.chains) if copies & {*chain}]
    weights: Float = np.eye(len(schedule.chains))[with_copies[-1] if with_copies else 0]
    return weights


def weighed(search: Search) -> Search:
    """Return the search with the chains weighed that a first placement waits for.

    At first the main chain alone counts. If a first placement waits for another one, such as the
    host link, mixtures of the two are tried; if it waits for a host's memory, mixtures with that.
    """
    instance, bound = search.instance, search.lagrangian
    first = search.first = construct(instance, bound, bound.step_time_s)
    many = search.clock.left_s < _WEIGHED_BOUNDS * search.bounded_in_s
    if first is not None and instance.lacks_dram:
        on_gpus = first.phase_s[: instance.gpus - instance.servers]
        chains_s = instance.objective.schedule.chain_times_s(on_gpus.T)
        if instance.objective.chain_weights.argmax() == chains_s.argmax():
            return search
    if first is None or (many and not search.clock.repeats):
        return search
    times_s = instance.objective.schedule.chain_times_s(first.phase_s.T)
    longest = int(times_s[1:].argmax()) + 1 if times_s.size > 1 else 0
    waits_for_host = first.step_time_s > _HOST_WAITS * float(times_s.max())
    if not longest and not waits_for_host:
        return search
    best, best_s, bound_s = search, first.step_time_s, search.bound_s
    tried: Sequence[float] = _HOST_SHARES
    if not waits_for_host:  # Shares near that of what the chain takes.
        ratio = float(times_s[longest] / times_s[0]) if times_s[0] else np.inf
        tried = [s for s, low, high in _CHAIN_SHARES if low <= ratio < high]
        if instance.lacks_dram and not tried:
            tried = [0.0]
    for share in tried:
        weights = np.eye(times_s.size)[0]
        if not waits_for_host:
            weights[0], weights[longest] = 1 - share, share
        host_share = share if waits_for_host else 0.0
        other = Search.start(instance.recounted(weights, host_share=host_share), search.clock)
        if waits_for_host:
            # A single shard may take its host's memory for all of its time, but not once for each
            # GPU: bounds are still those of the chains.
            other = replace(other, delayed=search)
        else:
            bound_s = max(bound_s, other.bound_s)
        found = construct(other.instance, other.lagrangian, other.lagrangian.step_time_s)
        other.first = found
        if found is not None and found.step_time_s < _NOTABLE * best_s:
            best, best_s = other, found.step_time_s
    best.prove(bound_s)
    return best


def unreplicated(search: Search) -> Search:
    """Return a search without replicas if a first placement is faster so; else the same.

    Replicas of a first table may take a step's worth of collectives, which those of others then
    share, and which neither bounds nor changes of a placement are rated by.
    """
    instance, first = search.instance, search.first
    if not instance.replicas_s or first is None or not first.replicas:
        return search
    if search.clock.left_s < search.bounded_in_s and not search.clock.repeats:
        return search
    other = weighed(Search.start(instance.recounted(with_replicas=False), search.clock))
    if other.first is None or other.first.step_time_s >= first.step_time_s:
        return search
    # A plan has replicas, and takes what all of them take once, or it has none.
    replicas_s = search.of_steps.instance.replicas_s
    return replace(other, others_s=search.weighed_bound_s + replicas_s)
