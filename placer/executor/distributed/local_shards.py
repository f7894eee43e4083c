"""What a rank holds of each table, for checkpoints that know no plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from placer.executor.distributed.placement.division import Target
from placer.executor.distributed.placement.table_routes import ids_of
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.plan.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """Some rows and columns of one tensor of a table.

    Attributes
    ----------
    table : str
    tensor : str
        ``weight``, or a name of the optimizer's state (`placer.executor.optimizers.rule.STATE`).
    cols : (start, stop), or None
        None for state that is one number a row.
    rows : int
        How many rows; `ids` says which.
    saves : bool
        Whether this rank writes it to checkpoints: of replicas, and of copies that column slices of
        a row share, one does. All of them must be read back.
    """

    table: str
    tensor: str
    cols: tuple[int, int] | None
    rows: int
    saves: bool
    _plan: Plan
    _target: Target
    _module: PlacedEmbeddings

    def ids(self, start: int, stop: int) -> Tensor:
        """Ids of the table's rows that are rows `start` to `stop` of the piece, int64."""
        return ids_of(self._plan, self._target, range(start, stop))

    @property
    def follows_ids(self) -> bool:
        """Whether row i is id i: the piece has all rows."""
        return self._target.by_id

    def read(self, rows: Tensor) -> Tensor:
        """Rows of the piece, on the host: shape (n, columns), or (n,)."""
        return read_rows(self._module, self._target.name, self.tensor, rows)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite distinct rows of the piece."""
        write_rows(self._module, self._target.name, self.tensor, rows, values)


def local_shards_of(
    plan: Plan,
    targets: Sequence[tuple[Target, PlacedEmbeddings]],
    tensors: Mapping[str, Sequence[str]],
    per_row: Mapping[str, bool],
    rank: int,
) -> Iterator[LocalShard]:
    """The pieces of all tensors of targets; `per_row` says whose state is one number a row."""
    for target, module in targets:
        name = target.table.name
        for tensor in tensors[name]:
            scalar = tensor != "weight" and per_row[name]
            saves = rank == target.holders[0] and not (scalar and target.cols[0])
            cols = None if scalar else target.cols
            yield LocalShard(name, tensor, cols, target.rows, saves, plan, target, module)


def read_rows(module: PlacedEmbeddings, table: str, tensor: str, rows: Tensor) -> Tensor:
    """Some rows of a table's weights or state, on the host."""
    return module.rows.read_rows(module.plan.tables_by_name[table], tensor, rows)


def write_rows(
    module: PlacedEmbeddings, table: str, tensor: str, rows: Tensor, values: Tensor
) -> None:
    """Overwrite distinct rows of a table's weights or state."""
    if rows.numel():
        module.rows.write_rows(module.plan.tables_by_name[table], tensor, rows, values)
