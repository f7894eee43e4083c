"""HugeCTR's measure of a table's cost, as the formula of a step time.

Its planner rates a table by hotness × width + ρ × width, per sample, with one ρ for all tables:
what is read of memory, and what is returned over the network. A row slice takes its part of the
hotness.
"""

from collections import defaultdict

from placer.measurement import Case
from placer.plan.memory import slice_lookup_share


def hugectr_units(case: Case, rho: float) -> float:
    """Units of the GPU that has most; of a step's samples, up to a factor."""
    spent: dict[str, float] = defaultdict(float)
    seen: set[tuple[str, str, tuple[int, int]]] = set()
    profiles = {profile.name: profile for profile in case.profile}
    for shard in case.shards:
        profile = profiles[shard.table]
        hotness = profile.table.lookups_per_sample * slice_lookup_share(profile, shard.rows)
        samples = case.batch_size * case.gpus / len(shard.devices)
        for device in shard.devices:
            place = (shard.table, device, shard.cols)
            returned = 0.0 if place in seen else rho
            seen.add(place)
            spent[device] += samples * shard.width * (hotness + returned)
    return max(spent.values())
