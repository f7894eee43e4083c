"""From a plan back to placements of pieces: the inverse of `solvers._build.build_plan`."""

from placer.plan.plan import Plan, Shard
from solvers._instance import Cut, Instance, Piece, Placement


def placements_of(instance: Instance, plan: Plan, table: str) -> list[Placement] | None:
    """The placements that a table's shards are; None if they are outside of the search space."""
    number = instance.problem.profile.table_names.index(table)
    spec = instance.problem.profile.tables[number].table
    gpus = {gpu.id: at for at, gpu in enumerate(instance.problem.topology.gpus)}
    shards = [s for s in plan.shards_by_table[table] if s.row_count or not spec.rows]
    if any(
        len(s.devices) != 1 or s.devices[0] not in gpus or s.lookup not in ("device", "staged")
        for s in shards
    ):
        return None
    strips = sorted({shard.cols for shard in shards})
    ways = max((shard.rows[2] for shard in shards), default=1)
    cut = Cut(ways, tuple(last - first for first, last in strips) if len(strips) > 1 else ())
    parts: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        parts.setdefault((shard.rows[0] % ways, strips.index(shard.cols)), []).append(shard)
    placements = []
    for (index, strip), members in sorted(parts.items()):
        hot = [s for s in members if s.lookup == "device"]
        cold = [s for s in members if s.lookup == "staged"]
        piece = Piece(number, cut, index, strip)
        edge = index + sum(s.row_count for s in hot) * ways
        expected = [
            range(*rows)
            for rows in ((index, min(edge, spec.rows), ways), (edge, spec.rows, ways))
            if len(range(*rows))
        ]
        same_gpu = len({shard.devices for shard in members}) == 1
        if not same_gpu or [range(*s.rows) for s in (*hot, *cold) if s.row_count] != expected:
            return None
        placements.append(
            Placement(piece, gpus[members[0].devices[0]], sum(s.row_count for s in hot))
        )
    return placements if len(placements) == cut.pieces else None
