"""Bytes that the arenas of a process take, by device and purpose."""

from collections import defaultdict
from collections.abc import Sequence

from placer.executor.memory.arena import Arena
from placer.executor.memory.layout import Layout
from placer.plan.plan import Plan


def memory_use(plan: Plan, layout: Layout, arenas: Sequence[Arena]) -> dict[tuple[str, str], int]:
    """Bytes by (device id, purpose); see `placer.executor.embeddings.Embeddings.memory_use`."""
    held: dict[tuple[str, str], int] = defaultdict(int)
    for arena in arenas:
        for part in arena.spec.ranges:
            size = (part.stop - part.start) * arena.home_bytes(part.dtype)
            held[part.home, part.memory] += size
        if arena.row_cache is None:
            continue
        for shard in arena.spec.cache_ranges:
            entries = shard.staging_rows + shard.cache_rows
            size = arena.row_cache.directory.nbytes * entries
            share = size // max(arena.row_cache.entries, 1)
            held[shard.device, "pool"] += entries * arena.row_bytes + share
    for name, column_slices in layout.column_slices.items():
        maps = [columns.slots for columns in column_slices if columns.slots is not None]
        if size := sum(slots.nbytes for slots in maps):
            server = plan.shards_by_table[name][0].devices[0]
            held[server, "row_maps"] += size
    return dict(held)
