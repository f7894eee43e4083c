"""Choose what a search minimises: which chains of phases, hosts' memory, and replicas.

A search minimises one sum of seconds, at first of the main chain of phases. A first placement shows
whether another sum leads to better plans. See "What a second counts" in docs/solvers.md.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cost_models.base import Float
from solvers.model.instance import Instance
from solvers.search.construction import construct
from solvers.strategies._search import Search

_CHAIN_SHARES = ((0.3, 0.6, 1.2), (0.6, 0.9, np.inf), (1.0, 1.2, np.inf))
"""Weights of the longest other chain: each weight is tried if that chain takes at least the second
number and less than the third times as long as the main chain. Of 59 problems, one step was 5%
longer without them, and another's bound 45% lower."""

_WEIGHED_BOUNDS = 10.0
"""Try other weights of chains only if this many times the first bound's time is left."""

_NOTABLE = 0.98
"""Take other weights if they shorten the first placement's step to less than this share of it."""

_HOST_WAITS, _HOST_SHARES = 1.1, (0.1, 0.3, 0.6)
"""Count hosts' memory if it takes this many times as long as the longest chain, with these weights.
They are small, as a few rows in HBM spare a host most of its reads. With DRAM four times as slow as
usual, steps were 0.7 and 7% longer without them."""


def weights_of_drives(instance: Instance) -> Float:
    """Return chain weights for tables on drives: only the chain that copies their rows counts."""
    schedule = instance.objective.schedule
    copies = {n for n, name in enumerate(schedule.phases) if name in ("copies", "link")}
    with_copies = [n for n, chain in enumerate(schedule.chains) if copies & {*chain}]
    weights: Float = np.eye(len(schedule.chains))[with_copies[-1] if with_copies else 0]
    return weights


def weighed(search: Search) -> Search:
    """Return a search whose weights of chains suit what a first placement waits for.

    At first only the main chain counts. If the first placement waits for another chain, such as the
    host link, try mixtures of both chains. If it waits for a host's memory, try mixtures with that.
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
    if not waits_for_host:  # Weights near the chain's share of the time.
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
            # One shard may keep its host's memory busy all the time, but not once for each GPU. So
            # this sum gives no bound, and bounds are still those of the chains.
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
    """Return a search without replicas if a first placement is faster without them.

    The first replicated table pays for collectives, which further replicated tables share. Neither
    bounds nor single changes of a placement count that fixed cost.
    """
    instance, first = search.instance, search.first
    if not instance.replicas_s or first is None or not first.replicas:
        return search
    if search.clock.left_s < search.bounded_in_s and not search.clock.repeats:
        return search
    other = weighed(Search.start(instance.recounted(with_replicas=False), search.clock))
    if other.first is None or other.first.step_time_s >= first.step_time_s:
        return search
    # Every plan has no replicas, or takes the time of their collectives once.
    replicas_s = search.of_steps.instance.replicas_s
    return replace(other, others_s=search.weighed_bound_s + replicas_s)
