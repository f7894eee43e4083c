"""Sum over ranks: gradients of replicated rows, and Σ g² of rows with columns on several ranks.

Each rank reads its own copy of replicated rows, and all copies get equal updates.

Gradients of replicated rows take a sparse all-reduce. For each row, all holders send their sums to
one of them, which adds them up and sends back the total. So a rank sends each row that it touched
about twice, for any number of ranks, and sends no other rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from placer.executor.distributed.channels import Channel, Unit, UnitStep, concatenated, spans
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.division import Target
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.optimizers import row_sums, runs

RowSums = tuple[Tensor, Tensor]
"""Distinct rows, int64 of shape (n,), and their vectors, float32 of shape (n, width)."""

_WORDS_OF_ID = 2
"""Words of 32 bits for an id. A message holds ids and vectors as such words."""


def all_reduce_rows(
    comm: Communicator, holders: Sequence[Sequence[int]], sums: Sequence[Sequence[RowSums]]
) -> list[list[RowSums]]:
    """Return each table's row sums added up over its holders, bit-equal on every holder.

    This takes four collectives of all ranks, for any number of groups of holders. Ranks without
    replicated rows send and get nothing. `holders` are the ordered ranks of each group that this
    rank is in, and `sums` are this rank's sums, by group and table.
    """
    dealt = [
        [_dealt(*one, len(ranks)) for one in own] for ranks, own in zip(holders, sums, strict=True)
    ]
    added = [[_added(*one) for one in own] for own in _exchanged(comm, holders, dealt)]
    to_all = [
        [[one] * len(ranks) for one in own] for ranks, own in zip(holders, added, strict=True)
    ]
    return _exchanged(comm, holders, to_all)


def _exchanged(
    comm: Communicator,
    holders: Sequence[Sequence[int]],
    parts: Sequence[Sequence[Sequence[RowSums]]],
) -> list[list[RowSums]]:
    """Exchange row sums between holders; return the received sums, joined in the holders' order.

    `parts` are by group of holders, table and receiving holder. Counts are exchanged first.
    """
    to: list[list[RowSums]] = [[] for _ in range(comm.world)]
    for ranks, tables in zip(holders, parts, strict=True):
        for place, rank in enumerate(ranks):
            to[rank] += [table[place] for table in tables]
    # Two ranks exchange the same tables in both directions.
    met = [len(theirs) for theirs in to]
    widths = [[values.shape[1] for _, values in theirs] for theirs in to]
    counts = [[rows.numel() for rows, _ in theirs] for theirs in to]
    flat = torch.tensor([count for theirs in counts for count in theirs], dtype=torch.int64)
    arrived = iter(comm.exchange("replica counts", flat, met, met).tolist())
    came = [[next(arrived) for _ in theirs] for theirs in to]
    words = [torch.empty(0, dtype=torch.int32)] if not any(met) else []
    for theirs in to:
        words += [rows.view(torch.int32) for rows, _ in theirs]
        words += [values.reshape(-1).view(torch.int32) for _, values in theirs]
    sizes = list(map(_words, came, widths))
    received = comm.exchange("replicas", torch.cat(words), list(map(_words, counts, widths)), sizes)
    from_rank = list(map(_unpacked, torch.split(received, sizes), came, widths))
    return [
        [_joined([next(from_rank[rank]) for rank in ranks]) for _ in tables]
        for ranks, tables in zip(holders, parts, strict=True)
    ]


def _words(counts: Sequence[int], widths: Sequence[int]) -> int:
    """Return the words of a message with `counts` rows of each table."""
    return sum(n * (_WORDS_OF_ID + width) for n, width in zip(counts, widths, strict=True))


def _unpacked(words: Tensor, counts: Sequence[int], widths: Sequence[int]) -> Iterator[RowSums]:
    """Yield the tables of a message: first the ids of all of them, then their vectors."""
    ids = words[: _WORDS_OF_ID * sum(counts)].clone()  # A view may not be aligned to int64.
    rows = torch.split(ids.view(torch.int64), list(counts))
    sizes = [n * width for n, width in zip(counts, widths, strict=True)]
    values = torch.split(words[ids.numel() :].view(torch.float32), sizes)
    for own, vectors, n, width in zip(rows, values, counts, widths, strict=True):
        yield own, vectors.view(n, width)


def _joined(parts: Sequence[RowSums]) -> RowSums:
    rows, values = zip(*parts, strict=True)
    return torch.cat(rows), torch.cat(values)


def _dealt(rows: Tensor, values: Tensor, holders: int) -> list[RowSums]:
    """Divide sums by the holder that adds them up: row r goes to holder r modulo `holders`."""
    owner = rows % holders
    order = torch.sort(owner, stable=True).indices
    counts = torch.bincount(owner, minlength=holders).tolist()
    return list(
        zip(torch.split(rows[order], counts), torch.split(values[order], counts), strict=True)
    )


def _added(rows: Tensor, values: Tensor) -> RowSums:
    """Return one sum per row, added in the order of the holders."""
    if not rows.numel():
        return rows, values
    order, distinct, starts = runs(rows)
    return distinct, row_sums(values, order, None, starts)


@dataclass(slots=True, eq=False)
class RowTotals:
    """Adds Σ g² up over the ranks that hold columns of a row.

    The same lookups read all column slices of a row, so all ranks have the same rows in the same
    order. They add vectors elementwise in the order of ranks, so that every rank gets equal bits.
    """

    # For each set of rows: this rank's tables with column slices of it, from left to right, and
    # all ranks that hold such slices. Groups have the same order on all ranks.
    groups: tuple[tuple[tuple[str, ...], list[int]], ...]
    dims: Mapping[str, int]  # Columns of the whole row, by table.
    comm: Communicator | None  # None if all column slices are on this rank.
    device: torch.device

    @classmethod
    def of(
        cls,
        targets: Sequence[Target],
        rank: int,
        device: torch.device,
        comm: Communicator | None = None,
    ) -> "RowTotals | None":
        """Make the totals of rows with one holder; without a communicator, of replicated rows.

        Every holder of replicated rows has all their columns, so it needs no other rank. Return
        None if no rows have several column slices.
        """
        by_peers: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            if target.peers and target.replicated == (comm is None):
                by_peers[target.peers].append(target)
        if not by_peers:
            return None
        groups = []
        dims: dict[str, int] = {}
        for members in by_peers.values():
            own = tuple(target.name for target in members if rank in target.holders)
            ranks = sorted({holder for target in members for holder in target.holders})
            if own:
                groups.append((own, [rank] if comm is None else ranks))
                dims |= dict.fromkeys(own, members[0].table.dim)
        return cls(tuple(groups), dims, comm, device)

    def total(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Σ g² over whole rows, by table. Every rank must call this at the same point."""
        # If nobody read a group's rows, some of its tables are missing, and the others are empty.
        read = [group for group in self.groups if all(name in squares for name in group[0])]
        totals = [torch.stack([squares[name] for name in names]).sum(0) for names, _ in read]
        if self.comm is not None:
            totals = self._over_ranks([ranks for _, ranks in read], totals, self.comm)
        return {
            name: total for (names, _), total in zip(read, totals, strict=True) for name in names
        }

    def _over_ranks(
        self, holders: Sequence[Sequence[int]], own: Sequence[Tensor], comm: Communicator
    ) -> list[Tensor]:
        met = [
            (other, group)
            for other in range(comm.world)
            for group, ranks in enumerate(holders)
            if other in ranks and other != comm.rank
        ]
        lengths = [own[group].numel() for _, group in met]
        sizes = [0] * comm.world
        for (other, _), length in zip(met, lengths, strict=True):
            sizes[other] += length
        sent = concatenated([own[group] for _, group in met], torch.float32, self.device)
        received = torch.split(comm.exchange("rows", sent, sizes, sizes), [*lengths, 0])
        theirs = dict(zip(met, received, strict=False))
        return [
            torch.stack([theirs.get((other, group), own[group]) for other in ranks]).sum(0)
            for group, ranks in enumerate(holders)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """A unit's targets of one width, with consecutive row numbers, so that one pass serves all."""

    width: int
    targets: tuple[int, ...]  # Their indices in the unit.
    bases: tuple[int, ...]  # First row number of each, a multiple of the holders.
    channels: tuple[int, ...]  # The unit's channels that read them, target by target.
    channel_bases: tuple[int, ...]  # First row number of each channel's target.


def _alike(unit: Unit, channels: Sequence[Channel]) -> Iterator[_Alike]:
    by_width: dict[int, list[int]] = defaultdict(list)
    for number, target in enumerate(unit.targets):
        by_width[target.width].append(number)
    holders = len(unit.holders)
    for width, members in by_width.items():
        sizes = [-(-unit.targets[number].rows // holders) * holders for number in members]
        bases = (0, *accumulate(sizes))[:-1]
        base_of = {unit.targets[n].name: base for n, base in zip(members, bases, strict=True)}
        reads = tuple(at for at, one in enumerate(channels) if one.target.name in base_of)
        own = tuple(base_of[channels[at].target.name] for at in reads)
        yield _Alike(width, tuple(members), bases, reads, own)


@dataclass(frozen=True, slots=True, eq=False)
class _Lookups:
    """Lookups of targets of one width, target by target."""

    numbers: Tensor  # Row numbers.
    sources: Tensor  # Each lookup's row in `gradients`.
    places: Tensor  # Each lookup's position among the unit's lookups.
    gradients: Tensor  # Gradients of all channels' bags, shape (bags, width).


class ReplicaUpdates:
    """Sums this rank's gradients of replicated rows, and applies the totals of all holders.

    Each holder sums the gradients of the rows that its samples read. `all_reduce_rows` adds these
    sums over ranks. Every holder applies the totals as one lookup per row, so copies stay equal to
    the bit. `position` is the unit's index on this rank.
    """

    def __init__(
        self, position: int, unit: Unit, channels: Sequence[Channel], module: PlacedEmbeddings
    ) -> None:
        self.position, self._module, self.holders = position, module.by_row(), unit.holders
        self._pooled = [channel.pooled for channel in channels]
        self._alike = tuple(_alike(unit, channels))
        self._names = [target.name for target in unit.targets]

    def sums(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> list[RowSums]:
        """Return the numbers of the rows read on this rank, and their summed gradients."""
        sums = []
        for own in self._lookups(unit_step, gradients):
            order, distinct, starts = runs(own.numbers)
            weights = unit_step.weights
            if weights is not None:
                weights = weights.detach()[own.places][order]
            added = own.gradients[:0]
            if order.numel():
                added = row_sums(own.gradients, own.sources[order], weights, starts)
            sums.append((distinct, added))
        return sums

    def apply(self, totals: Sequence[RowSums]) -> None:
        """Update the rows with all holders' gradients."""
        orders = [torch.argsort(numbers) for numbers, _ in totals]
        with torch.enable_grad():
            read = self._read([own[order] for (own, _), order in zip(totals, orders, strict=True)])
        gradients = [
            part
            for rows, (_, sums), order in zip(read, totals, orders, strict=True)
            for part in torch.split(sums[order], [len(own) for own in rows])
        ]
        torch.autograd.backward([own for rows in read for own in rows], gradients)

    def weight_gradients(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients of lookups' weights, row · gradient of the bag: shape (lookups,)."""
        lookups = list(self._lookups(unit_step, gradients))
        with torch.no_grad():
            read = self._read([own.numbers for own in lookups])
        result = torch.zeros(unit_step.bounds[-1], dtype=torch.float32, device=self._module.device)
        for own, rows in zip(lookups, read, strict=True):
            result[own.places] = (torch.cat(rows) * own.gradients[own.sources]).sum(1)
        return result

    def _lookups(self, unit_step: UnitStep, gradients: Sequence[Tensor]) -> Iterator[_Lookups]:
        batch, bounds, device = unit_step.batch, unit_step.bounds, self._module.device
        assert batch is not None, "replicas' updates read its ids"
        lengths = batch.offsets.diff().view(len(self._pooled), batch.batch_size)
        for alike in self._alike:
            starts = [bounds[place] for place in alike.channels]
            sizes = [bounds[place + 1] - bounds[place] for place in alike.channels]
            places, total = spans(starts, sizes, device), sum(sizes)
            if all(self._pooled[place] for place in alike.channels):
                of_bags = lengths[torch.tensor(alike.channels, dtype=torch.int64, device=device)]
            else:
                of_bags = torch.cat(
                    [
                        lengths[place] if self._pooled[place] else lengths.new_ones(size)
                        for place, size in zip(alike.channels, sizes, strict=True)
                    ]
                )
            of_bags = of_bags.flatten()
            bags = torch.arange(of_bags.numel(), device=device)
            bases, times = torch.tensor((alike.channel_bases, sizes), dtype=torch.int64).to(device)
            rows = batch.ids.index_select(0, places).long()
            # If no feature reads these rows, there is no channel.
            none = torch.empty(0, alike.width, dtype=torch.float32, device=device)
            yield _Lookups(
                rows + bases.repeat_interleave(times, output_size=total),
                bags.repeat_interleave(of_bags, output_size=total),
                places,
                torch.cat([none, *(gradients[place] for place in alike.channels)]),
            )

    def _read(self, numbers: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return rows by width and target; numbers of each width are target by target."""
        ids: dict[int, Tensor] = {}
        for alike, own in zip(self._alike, numbers, strict=True):
            bases = torch.tensor(alike.bases, device=own.device)
            target = torch.searchsorted(bases, own, right=True) - 1
            counts = torch.bincount(target, minlength=len(bases)).tolist()
            ids.update(zip(alike.targets, torch.split(own - bases[target], counts), strict=True))
        each = [ids[number] for number in range(len(ids))]
        bounds = (0, *accumulate(own.numel() for own in each))
        offsets = torch.tensor(bounds, dtype=torch.int64).to(self._module.device)
        read = self._module(BagBatch(torch.cat(each), offsets, 1, None, bounds))
        return [[read[self._names[number]] for number in alike.targets] for alike in self._alike]
