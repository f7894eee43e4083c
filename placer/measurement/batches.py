"""Batches of lookups drawn as a profile says."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from placer.executor.lookups.bag_batch import BagBatch
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.tables import Feature

Int = npt.NDArray[np.int64]


def drawn_batches(plan: Plan, profile: Profile, samples: int, seed: int) -> Iterator[BagBatch]:
    """Batches without end: independent lookups, each by its table's access CDF.

    Bags of a feature are empty but for its coverage; the others hold one lookup or more, as
    many as its pooling factor on average. Ranks become ids by the plan's row order.
    """
    rng = np.random.default_rng([seed, samples])
    order = {table.name: Ranks.in_plan(plan, table.name) for table in plan.tables}
    while True:
        ids: list[Int] = []
        lengths: list[Int] = []
        for table in plan.tables:
            for feature in table.features:
                bags = _lengths(rng, feature, table.rows > 0, samples)
                ranks = _ranks(rng, profile[table.name].cdf, int(bags.sum()))
                ids.append(order[table.name].ids(ranks))
                lengths.append(bags)
        offsets = np.concatenate([[0], *lengths]).cumsum()
        joined = np.concatenate(ids) if ids else np.zeros(0, np.int64)
        yield BagBatch(torch.from_numpy(joined), torch.from_numpy(offsets), samples)


def _lengths(rng: np.random.Generator, feature: Feature, has_rows: bool, samples: int) -> Int:
    """Lookups of each sample's bag, shape (samples,); all 0 where there is no row to look up."""
    if not has_rows:
        return np.zeros(samples, np.int64)
    least = int(min(1.0, feature.pooling_factor))
    drawn = least + rng.poisson(feature.pooling_factor - least, samples)
    lengths: Int = drawn * (rng.random(samples) < feature.coverage)
    return lengths


def _ranks(rng: np.random.Generator, cdf: AccessCdf, size: int) -> Int:
    quantiles = rng.random(size) * cdf.shares[-1]
    ranks: Int = np.interp(quantiles, cdf.shares, cdf.ranks).astype(np.int64)
    last: Int = np.minimum(ranks, cdf.rows - 1)
    return last
