"""From a plan back to placements of pieces: the inverse of `solvers._build.build_plan`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cost_models import Cut, Piece, pieces_of
from cost_models._base import FREE, REPLICA, Cold
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan, Shard
from placer.tables import Table
from solvers._instance import Instance, Placement
from solvers._packing import Packing

_COLDS: tuple[Cold, ...] = ("staged", "uva", "host", "cached")


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """Where a table is: its pieces with their GPUs and hot rows, and what every GPU holds.

    Attributes
    ----------
    cut : Cut
        Of a table that is all in HBM, how its cold rows would be read is a guess.
    placements : tuple of Placement
        In the order of pieces; none of a data-parallel table.
    replica : Piece or None
    """

    cut: Cut
    placements: tuple[Placement, ...]
    replica: Piece | None = None

    @property
    def replicas(self) -> tuple[Piece, ...]:
        """`replica` as `build_plan` takes it."""
        return () if self.replica is None else (self.replica,)


def placements_of(instance: Instance, plan: Plan, table: str) -> TablePlacement | None:
    """The pieces that a table's shards are; None if there is no such cut, or GPU.

    Cuts of the search space are preferred where shards can be read in several ways, but any
    cut will do.
    """
    number = instance.problem.profile.table_names.index(table)
    return read_shards(
        number,
        instance.problem.profile.tables[number].table,
        plan.shards_by_table[table],
        [gpu.id for gpu in instance.problem.topology.gpus],
        instance.cuts_of(number),
    )


def packing_of(instance: Instance, plan: Plan) -> Packing | None:
    """The packing with a plan's pieces on their GPUs, HBM filled anew; None if none fits.

    Raises
    ------
    PlanMismatchError
        If a table is not in the plan, or is placed in a way that is not searched: another
        cut, a GPU that may not serve it, or apart from tables that it belongs together with.
    """
    pairs: list[tuple[Piece, int]] = []
    replicas: list[Piece] = []
    for number, profile in enumerate(instance.problem.profile):
        if profile.name not in plan.tables_by_name:
            raise PlanMismatchError(f"the plan has no table {profile.name!r} of the problem")
        found = placements_of(instance, plan, profile.name)
        if found is None or not is_one_of(found.cut, instance.cuts_of(number)):
            raise PlanMismatchError(
                f"table {profile.name!r} is placed in a way that solvers do not search here: "
                f"{'no cut that they know' if found is None else found.cut}"
            )
        for placed in found.placements:
            if not instance.may_serve(placed.piece, placed.gpu):
                device = instance.problem.topology.gpus[placed.gpu].id
                raise PlanMismatchError(
                    f"table {profile.name!r} is on {device}, where constraints forbid it"
                )
            members = len(range(*placed.piece.rows(instance.rows(number))))
            piece = _with_share(placed, instance.cuts_of(number), members)
            pairs.append((piece, placed.gpu))
        replicas += found.replicas
    gpu_of = dict(pairs)
    for block in instance.blocks(gpu_of):
        if len({gpu_of[piece] for piece in block}) > 1:
            names = [instance.problem.profile.tables[piece.table].name for piece in block]
            raise PlanMismatchError(f"tables {', '.join(names)} have to share a GPU and do not")
    return Packing.of(instance, pairs, replicas)


def is_one_of(cut: Cut, cuts: Iterable[Cut]) -> bool:
    """Whether a cut is one of others; strips in another order are the same cut."""
    return _sorted(cut) in {_sorted(other) for other in cuts}


def _sorted(cut: Cut) -> Cut:
    """A cut whatever its strips' order and its share of rows in HBM."""
    return cut._replace(widths=tuple(sorted(cut.widths)), share=FREE)


def _with_share(placed: Placement, cuts: Iterable[Cut], rows: int) -> Piece:
    """A piece as one of a cut that fixes the share of rows in HBM, if those searched do."""
    piece = placed.piece
    share = placed.hot_rows / rows if rows else 0.0
    alike = [cut for cut in cuts if _sorted(cut) == _sorted(piece.cut)]
    nearest = min(alike, key=lambda cut: abs(cut.share - share), default=piece.cut)
    return piece._replace(cut=piece.cut._replace(share=nearest.share))


def read_shards(
    number: int, table: Table, shards: Sequence[Shard], gpus: Sequence[str], cuts: Sequence[Cut]
) -> TablePlacement | None:
    """The placement of table number `number` that `shards` are, on GPUs of these names.

    `cuts` are preferred where shards can be read in several ways.
    """
    at = {gpu: n for n, gpu in enumerate(gpus)}
    if not shards or any(device not in at for shard in shards for device in shard.devices):
        return None
    everywhere = [shard for shard in shards if len(shard.devices) > 1 and shard.row_count]
    head = _head_of(table, everywhere, at.keys())
    if head is None:
        return None
    by_gpu: dict[int, list[Shard]] = {}
    for shard in shards:
        if len(shard.devices) == 1:
            by_gpu.setdefault(at[shard.devices[0]], []).append(shard)
    if head and head == table.rows:
        by_gpu = {gpu: mine for gpu, mine in by_gpu.items() if any(s.row_count for s in mine)}
    for cut in sorted(_cuts_of(table, head, by_gpu), key=lambda cut: not is_one_of(cut, cuts)):
        placements = _matched(number, table, cut, by_gpu)
        if placements is not None:
            replica = Piece(number, cut, 0, REPLICA) if head else None
            return TablePlacement(cut, tuple(placements), replica)
    return None


def _head_of(table: Table, replicated: Sequence[Shard], gpus: Iterable[str]) -> int | None:
    """How many of the hottest rows every GPU has; None if something else is replicated."""
    if not replicated:
        return 0
    first = replicated[0]
    everywhere = len(replicated) == 1 and set(first.devices) == set(gpus)
    hottest = range(*first.rows) == range(first.row_count)
    whole_rows = first.cols == (0, table.dim) and first.lookup == "device"
    return first.row_count if everywhere and hottest and whole_rows else None


def _cuts_of(table: Table, head: int, by_gpu: dict[int, list[Shard]]) -> list[Cut]:
    """The cuts that shards may be of, by their outlines."""
    mine = [shard for part in by_gpu.values() for shard in part]
    filled = [shard for shard in mine if shard.row_count]
    lookups = {shard.lookup for shard in filled or mine} - {"device"}
    colds: tuple[Cold, ...] = {
        frozenset[str](): _COLDS,
        frozenset({"staged"}): ("staged",),
        # A cache of no rows is no cache: rows are read in place.
        frozenset({"uva"}): ("uva", "cached"),
        frozenset({"host"}): ("host",),
        frozenset({"cached"}): ("cached",),
        frozenset({"cached", "uva"}): ("cached",),
    }.get(frozenset(lookups), ())
    strips = sorted({shard.cols for shard in mine}) or [(0, table.dim)]
    if [0, *(last for _, last in strips)] != [*(first for first, _ in strips), table.dim]:
        return []
    widths = tuple(last - first for first, last in strips) if len(strips) > 1 else ()
    slices = max(1, len(by_gpu) // len(strips))
    steps = {1} if not mine else {max(shard.rows[2] for shard in mine), slices}
    shapes = [(ways, False) for ways in sorted(steps)]
    if slices > 1:
        shapes.append((slices, True))
    return [Cut(ways, widths, head, cold, blocked) for cold in colds for ways, blocked in shapes]


def _matched(
    number: int, table: Table, cut: Cut, by_gpu: dict[int, list[Shard]]
) -> list[Placement] | None:
    """Placements of the pieces of a cut, if each GPU's shards are one of them."""
    pieces = pieces_of(number, cut, table.rows)
    if len(pieces) != len(by_gpu):
        return None
    known: dict[tuple[tuple[int, int], int], Piece] = {}
    empty: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        rows, columns = range(*piece.rows(table.rows)), piece.columns(table.dim)
        if rows:
            known[columns, rows[0]] = piece
        else:
            empty.setdefault(columns, []).append(piece)
    placements = []
    for gpu, mine in sorted(by_gpu.items()):
        filled = [shard for shard in mine if shard.row_count]
        columns = (filled or mine)[0].cols
        if any(shard.cols != columns for shard in filled):
            return None
        if not filled:
            if not empty.get(columns):
                return None
            placements.append(Placement(empty[columns].pop(0), gpu, 0))
            continue
        found = known.pop((columns, min(shard.rows[0] for shard in filled)), None)
        hot = None if found is None else _hot_rows(range(*found.rows(table.rows)), filled, cut.cold)
        if found is None or hot is None:
            return None
        placements.append(Placement(found, gpu, hot))
    return sorted(placements, key=lambda placed: placed.piece)


def _hot_rows(rows: range, shards: Sequence[Shard], cold: Cold) -> int | None:
    """How many of a piece's rows its shards put in HBM (or cache); None if they are not its."""
    hot = [shard for shard in shards if shard.lookup == "device"]
    rest = [shard for shard in shards if shard.lookup != "device"]
    count = sum(shard.row_count for shard in hot)
    parts = [part for part in (rows[:count], rows[count:]) if part]
    if [range(*shard.rows) for shard in (*hot, *rest)] != parts:
        return None
    if cold != "cached":
        return count if all(shard.lookup == cold for shard in rest) else None
    if len(parts) > 1:
        return None
    cached = rest[0].cache_rows if rest else count
    # A cache of all rows is how rows in HBM are written.
    return cached if cached < len(rows) or hot else None


__all__ = ["TablePlacement", "is_one_of", "packing_of", "placements_of", "read_shards"]
