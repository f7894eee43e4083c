"""Cases to calibrate with: one thing varied at a time, and mixtures."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from placer.measurement.cases import Case
from placer.measurement.draw import DIMS, random_cases, times_rows
from placer.plan.shard import Lookup, Shard
from placer.tables import Feature, OptimizerName, Table

SEED = 20_000
"""Of the mixtures; tests draw theirs with other seeds."""

_MIXED_WORKLOADS = 120
_REFERENCE_EVERY = 20
_OTHERS: tuple[OptimizerName, ...] = ("sgd", "adagrad", "adam")
"""Optimizers besides the usual one."""


@dataclass(frozen=True, slots=True)
class _Point:
    """One design of equal tables."""

    tables: int = 2
    rows: int = 200_000
    dim: int = 32
    pooling: float = 10.0
    exponent: float = 0.8
    lookups: float = 1e5
    optimizer: OptimizerName = "rowwise_adagrad"
    lookup: Lookup = "device"
    share: float = 0.0

    def case(self, name: str, kind: str, gpus: int, load: int) -> Case:
        """Make the case: each table whole on one GPU, in turn."""
        per_sample = self.tables * self.pooling
        samples = max(16, round(self.lookups * load / per_sample))
        rows = self.rows * times_rows(load)
        tables = tuple(
            Table(
                f"t{number}",
                rows,
                self.dim,
                optimizer=self.optimizer,
                features=(Feature(f"t{number}", self.pooling),),
            )
            for number in range(self.tables)
        )
        bare = Case(name, tables, (self.exponent,) * self.tables, samples, gpus, (), kind)
        shards: list[Shard] = []
        for number, table in enumerate(tables):
            hot = round(rows * self.share)
            cached = self.lookup == "cached"
            parts: list[tuple[Lookup, int, int]] = [(self.lookup, hot, table.rows)]
            if cached:
                parts = [("cached", 0, table.rows)]
            elif hot:
                parts.insert(0, ("device", 0, hot))
            for first, (lookup, start, stop) in enumerate(parts):
                shards.append(
                    bare.shard(
                        number,
                        lookup,
                        (start, stop, 1),
                        (0, table.dim),
                        (f"gpu:{number % gpus}",),
                        is_first=first == 0,
                        cache_rows=max(1, hot) if cached else 0,
                    )
                )
        return replace(bare, shards=tuple(shards))


def designed_cases(*, tiers: bool, gpus: int = 1, load: int = 1) -> Iterator[Case]:
    """Yield cases in an order of which any beginning is balanced.

    Parameters
    ----------
    tiers : bool
        Whether rows in DRAM are read in ways that differ.
    gpus : int
    load : int
        See `random_cases`.
    """
    rng = np.random.default_rng(SEED)
    points = list(_points(tiers))
    order = rng.permutation(len(points))
    singles = (
        points[number].case(f"designed-{number}", "designed", gpus, load)
        for number in order.tolist()
    )
    mixed = random_cases(SEED, _MIXED_WORKLOADS, gpus=gpus, load=load)
    reference = _Point().case("", "reference", gpus, load)
    number = 0
    # Two single designs for each mixture, as long as there are any.
    for mixture in mixed:
        for case in (next(singles, None), next(singles, None), mixture):
            if case is None:
                continue
            if number % _REFERENCE_EVERY == 0:
                yield replace(reference, workload=f"reference-{number}")
            number += 1
            yield replace(case, kind="designed")


def _points(tiers: bool) -> Iterator[_Point]:
    base = _Point()
    lookups: tuple[Lookup, ...] = ("device", "staged", "uva", "host", "cached")
    for lookup in lookups if tiers else lookups[:1]:
        own = replace(base, lookup=lookup, share=0.1 if lookup == "cached" else 0.0)
        yield own
        dims = DIMS if lookup == "device" else (4, 128)
        yield from (replace(own, dim=dim) for dim in dims if dim != base.dim)
        yield from (replace(own, rows=rows) for rows in (1_000, 20_000, 1_000_000))
        yield from (replace(own, rows=rows, dim=128) for rows in (5_000, 400_000))
        yield from (replace(own, exponent=exponent) for exponent in (0.0, 1.2))
        yield from (replace(own, pooling=pooling) for pooling in (1.0, 50.0))
        yield from (replace(own, pooling=pooling, dim=128) for pooling in (1.0, 50.0))
        yield from (replace(own, lookups=lookups) for lookups in (2e4, 3e5))
        yield from (replace(own, tables=tables) for tables in (1, 10))
        for optimizer in _OTHERS:
            yield replace(own, optimizer=optimizer)
            yield replace(own, optimizer=optimizer, dim=128)
        if lookup in ("staged", "uva", "host"):
            yield from (replace(own, share=share) for share in (0.02, 0.2))
        if lookup == "cached":
            yield from (replace(own, share=share) for share in (0.01, 0.5))
