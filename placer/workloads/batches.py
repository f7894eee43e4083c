"""Draw batches of independent samples from a profile."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from placer.data.log import Bags, Chunk
from placer.errors import ProfileError
from placer.plan.plan import Ranks
from placer.profile.cdf import Float, Int, ranks_at
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Feature

_MOST_THREADS = 8

_NEAR = 16
"""Repeated lookups of a row fall within about 1/16 of a batch."""


def drawn_batches(
    profile: Profile,
    batch_size: int,
    batches: int,
    *,
    seed: int = 0,
    orders: Mapping[str, Ranks] | None = None,
) -> Iterator[Chunk]:
    """Yield batches of independent draws from a profile. A seed always gives the same batches.

    A sample's bag is not empty with probability `coverage` of its feature, and then has
    `pooling_factor` lookups. A fractional pooling factor is rounded up or down at random, so that
    the mean is kept. Each lookup draws a row by the profile's CDF; rows of one segment are equally
    likely. `batch_size` is the batch size of all GPUs together. `orders` are the row orders of
    tables of which the profile knows no ids; by default, their rows are in the order of ids.

    If the profile has measured locality, a batch reads about as many distinct rows as measured:
    only `TableProfile.draws_of` rows are drawn, and each is read several times. If batches are a
    large part of a short log, draws are spread more evenly instead.
    """
    if batch_size < 1 or batches < 1:
        raise ProfileError(
            f"{batches} batches of {batch_size} samples: draw at least 1 batch of 1 sample"
        )
    drawers = [
        (feature, _Rows(table, batch_size, order), np.random.default_rng([seed, number, place]))
        for number, table in enumerate(profile)
        for order in [(orders or {}).get(table.table.name)]
        for place, feature in enumerate(table.table.features)
    ]
    if not drawers:
        raise ProfileError("no table of the profile has a feature whose lookups could be drawn")
    dense = np.zeros((batch_size, 0), dtype=np.float32)
    # Each feature has its own generator, so the result does not depend on threads.
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        for _ in range(batches):
            bags = threads.map(
                lambda drawer: _bags(drawer[0], drawer[1], batch_size, drawer[2]), drawers
            )
            yield Chunk(
                batch_size, {d[0].name: b for d, b in zip(drawers, bags, strict=True)}, dense
            )


class _Rows:
    def __init__(self, profile: TableProfile, batch_size: int, order: Ranks | None) -> None:
        cdf = profile.cdf
        self._shares, self._ranks = cdf.shares, cdf.ranks
        self.is_empty = not cdf.rows or cdf.shares[-1] == 0
        self._order = order if profile.counts is None else Ranks.of(profile.counts.hottest())
        lookups = batch_size * profile.table.lookups_per_sample
        self._fresh = min(1.0, profile.draws_of(lookups) / lookups) if lookups else 1.0
        self._even = 0.0
        if profile.draws_of(lookups) > lookups:
            self._even = _even_share(profile, lookups)

    def draw(self, rng: np.random.Generator, size: int) -> Int:
        """Return ids of `size` lookups."""
        if self._fresh == 1:
            return self._rows_at(self._quantiles(rng, size))
        fresh = max(min(size, 1), round(self._fresh * size))
        ids = self._rows_at(self._quantiles(rng, fresh))
        # Put repeated reads near each other: each process gets a contiguous part of a batch.
        again = ids[np.arange(size) * fresh // max(size, 1)]
        return again[np.argsort(np.arange(size) + rng.random(size) * (size / _NEAR))]

    def _quantiles(self, rng: np.random.Generator, size: int) -> Float:
        even = int(self._even * size)
        if not even:
            return rng.random(size)
        spread = (np.arange(even) + rng.random()) / even
        return rng.permutation(np.concatenate((spread, rng.random(size - even))))

    def _rows_at(self, quantiles: Float) -> Int:
        ranks = ranks_at(self._ranks, self._shares, quantiles)
        return ranks if self._order is None else self._order.ids(ranks)


def _even_share(profile: TableProfile, lookups: float) -> float:
    """Return the share of draws to spread evenly, to read the measured number of distinct rows.

    If k draws are spread evenly, they read a row of probability p with probability min(1, k p) at
    least.
    """
    p, widths = profile.cdf.row_share, profile.cdf.widths
    wanted, low, high = profile.unique(lookups), 0.0, 1.0
    for _ in range(20):
        even = (low + high) / 2
        missed = (1 - np.minimum(1, even * lookups * p)) * (1 - p) ** ((1 - even) * lookups)
        low, high = (even, high) if widths @ (1 - missed) < wanted else (low, even)
    return low


def _bags(feature: Feature, rows: _Rows, samples: int, rng: np.random.Generator) -> Bags:
    if rows.is_empty:
        return Bags(np.zeros(0, np.int64), np.zeros(samples + 1, np.int64))
    whole = int(feature.pooling_factor)
    rest = feature.pooling_factor - whole
    if feature.coverage == 1 and whole == 1 and not rest:
        return Bags(rows.draw(rng, samples))
    lengths = np.full(samples, whole, dtype=np.int64)
    if rest:
        lengths += rng.random(samples) < rest
    if feature.coverage < 1:
        lengths *= rng.random(samples) < feature.coverage
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Bags(rows.draw(rng, int(offsets[-1])), offsets)
