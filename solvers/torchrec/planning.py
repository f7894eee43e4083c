"""One call of `PlacerPlanner`: from TorchRec's options to candidates, a search, and back.

Importing this needs torchrec.
"""

import copy
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.types import (
    Partitioner,
    PlannerError,
    PlannerErrorType,
)
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption
from torchrec.distributed.types import CacheParams

from cost_models.torchrec.estimates import ProfileCacheStatistics
from placer.profile.profile import Profile
from solvers.torchrec.candidates import (
    TIERS,
    Float,
    Group,
    candidates_of,
    has_free_load_factor,
    with_load_factor,
)
from solvers.torchrec.placement import Place, State, ranks_of
from solvers.torchrec.search import Effort, Found, search
from solvers.torchrec.trainable import (
    has_empty_block,
    trainable,
    with_even_blocks,
    without_companions,
)

_OWN_SHARE, _OTHERS_SHARE = 0.6, 0.85
"""Shares of the time limit by which our search, and TorchRec's proposers, have to end."""


class Planning(Partitioner):  # type: ignore[misc]
    """One call of the planner: what the proposers know of one another, and the partitioner.

    Attributes
    ----------
    found : Found or None
        Of our search.
    others_matter : bool
        Whether TorchRec's proposals are looked at even if ours is as good as proven.
    only_trainable : bool
        Whether options are left out that TorchRec trains wrong.
    space : list of ShardingOption
        What may be chosen.
    leaves_out_options : bool
        Whether options of the enumerator are not among them, or not freely.
    """

    def __init__(
        self,
        effort: Effort,
        profile: Profile | None,
        partitioner: Any,
        others_matter: bool,
        ranks: int,
        replicate: bool,
    ) -> None:
        self.effort = effort
        self.found: Found | None = None
        self.others_matter = others_matter
        self.only_trainable = True
        self.leaves_out_options = False
        self._profile = profile
        self._partitioner = partitioner
        self._ranks = ranks
        self._replicate = replicate
        self.space: list[TorchRecOption] = []
        self._tables: dict[str, list[Group]] = {}
        self._memory: Float = np.zeros((0, len(TIERS)))
        self._local_ranks = 1
        self._began = 0.0
        self._least: list[TorchRecOption] | None = None
        self._own_ms = np.inf
        self._other: tuple[float, dict[str, tuple[Any, ...]]] | None = None

    def begin(self, space: list[TorchRecOption], enumerator: Any) -> list[TorchRecOption]:
        """Take a search space; the options of each table that take the least memory.

        If there is no plan, TorchRec checks with them whether all memory together is too little.
        """
        self._estimate = enumerator.populate_estimates
        self.space, self.leaves_out_options = list(space), False
        if self.only_trainable:
            self.space = with_even_blocks(self.space, self._estimate)
            self.space = trainable(self.space, replicate=self._replicate)
            self.leaves_out_options = self.space != space or any(map(has_empty_block, space))
        self.space = [self._with_statistics(option) for option in self.space]
        self._began = time.perf_counter()
        self.found, self._own_ms, self._other = None, np.inf, None
        least: dict[str, TorchRecOption] = {}
        for option in space:
            size = option.total_storage
            other = least.get(option.fqn, option).total_storage
            if option.fqn not in least or (size.hbm, size.ddr) < (other.hbm, other.ddr):
                least[option.fqn] = option
        self._least = list(least.values())
        return self._least

    def for_proposers(self) -> list[TorchRecOption]:
        """The space for TorchRec's proposers: each cache has a load factor.

        TorchRec charges a cache of no load factor for no miss.
        """
        free = [option for option in self.space if has_free_load_factor(option)]
        usual = {id(option): with_load_factor(option, UVM_CACHING_RATIO) for option in free}
        if usual:
            self._estimate([*usual.values()])
        return [usual.get(id(option), option) for option in self.space]

    @property
    def elapsed_share(self) -> float:
        """Share of the time limit that is over."""
        return (time.perf_counter() - self._began) / self.effort.time_limit_s

    @property
    def others_are_idle(self) -> bool:
        """Whether TorchRec's proposers can gain nothing, or have no time."""
        if self.elapsed_share > _OTHERS_SHARE:
            return True
        if self.others_matter or self.found is None or self.found.state is None:
            return False
        return self.found.state.step_s <= self.found.limit_s * (1 + self.effort.gap)

    def note(self, plan: list[TorchRecOption], rating: float) -> None:
        """Remember a plan of TorchRec's, if it is the best of them."""
        if self._other is None or rating < self._other[0]:
            places = {
                option.fqn: (
                    tuple(shard.rank for shard in option.shards),
                    sum(shard.perf.total for shard in option.shards),
                    [sum(getattr(s.storage, tier) for s in option.shards) for tier in TIERS],
                )
                for option in plan
            }
            self._other = rating, places

    def partition(
        self, proposal: list[TorchRecOption], storage_constraint: Any
    ) -> list[TorchRecOption]:
        """The plan as options with ranks.

        Raises
        ------
        PlannerError
            If there is none, or none was found.
        """
        if proposal is not self._least:
            if proposal and has_ranks(proposal):
                return proposal  # Of `again`.
            placed: list[TorchRecOption] = self._partitioner.partition(
                proposal=proposal, storage_constraint=storage_constraint
            )
            return self._checked(placed)
        devices = storage_constraint.devices
        self._memory = np.array(
            [[max(0, getattr(device.storage, tier)) for tier in TIERS] for device in devices],
            dtype=np.float64,
        )
        local = getattr(storage_constraint, "intra_group_size", storage_constraint.local_world_size)
        self._local_ranks = min(int(local), len(devices))
        self._tables = candidates_of(
            self.space, self._estimate, len(devices), self._local_ranks, self._memory
        )
        self._require_candidates()
        while True:
            self.found = self._search(_OWN_SHARE)
            if self.found.state is None:
                raise PlannerError(
                    message="no placement was found in which every rank has memory for its shards",
                    error_type=PlannerErrorType.PARTITION,
                )
            plan = self._placed(self.found.state)
            if not self._without_empty_blocks(self._lone(plan)):
                break
        self._own_ms = self.found.state.step_s
        return plan

    def _lone(self, plan: list[TorchRecOption]) -> list[str]:
        """Tables with blocks of no rows that TorchRec cannot train, but could otherwise."""
        if not self.only_trainable:
            return []
        free = {option.fqn for option in self.space if not has_empty_block(option)}
        return [name for name in without_companions(plan) if name in free]

    def _without_empty_blocks(self, names: list[str]) -> bool:
        """Take away the candidates of tables that have blocks of no rows; whether there were any.

        A table that has no other candidate, for want of memory, keeps them.
        """
        any_taken = False
        for name in names:
            kept = []
            for group in self._tables[name]:
                full = np.array([not has_empty_block(option) for option, _ in group.sources])
                if full.any():
                    kept.append(group.only(full))
            if kept:
                self._tables[name] = kept
                any_taken = True
        return any_taken

    def _checked(self, plan: list[TorchRecOption]) -> list[TorchRecOption]:
        """A plan of TorchRec's, if it can train it.

        Raises
        ------
        PlannerError
        """
        lone = self._lone(plan)
        if lone:
            raise PlannerError(
                message=f"tables {', '.join(lone)} have row blocks of no rows on ranks that serve "
                "no other table with them, where TorchRec's kernels fail",
                error_type=PlannerErrorType.PARTITION,
            )
        return plan

    def again(self) -> list[TorchRecOption] | None:
        """Our search from the best plan of TorchRec's proposers, if that was better."""
        if self._other is None or not self._other[0] < self._own_ms or not self._tables:
            return None
        start = self._places_of(self._other[1])
        if start is None or not all(self._tables.values()):
            return None
        found = self._search(1.0, [start])
        if found.state is None or not found.state.step_s < self._other[0]:
            return None
        plan = self._placed(found.state)
        if self._lone(plan):
            return None
        limit_s = found.limit_s if self.found is None else self.found.limit_s
        self.found = replace(found, limit_s=limit_s)
        return plan

    def _search(self, share: float, starts: list[dict[int, Place]] | None = None) -> Found:
        left_s = (share - self.elapsed_share) * self.effort.time_limit_s
        effort = replace(self.effort, time_limit_s=max(0.2, left_s))
        if starts:
            effort = replace(effort, shares=())
        return search(
            list(self._tables.values()),
            self._bundles(),
            self._memory,
            self._local_ranks,
            effort,
            starts or (),
        )

    def _bundles(self) -> list[tuple[int, ...]]:
        """Tables that have to be together: those of a tower."""
        numbers = {name: number for number, name in enumerate(self._tables)}
        towers: dict[str, dict[int, None]] = defaultdict(dict)
        for option in self.space:
            towers[option.dependency or f"\0{option.fqn}"][numbers[option.fqn]] = None
        return [tuple(tables) for tables in towers.values()]

    def _require_candidates(self) -> None:
        """Raise if some table has no option that fits."""
        roomiest = self._memory.max(axis=0)
        lines = []
        for name in (name for name, groups in self._tables.items() if not groups):
            own = [option for option in self.space if option.fqn == name]
            least = min(max(shard.storage.hbm for shard in option.shards) for option in own)
            short = least - int(roomiest[0])
            lines.append(
                f"table {name!r} takes {least} bytes of HBM of a rank at least, of which there "
                f"are {int(roomiest[0])}: it is short of {short} bytes"
                if short > 0
                else f"table {name!r} has no option that fits the ranks; it may only be "
                + ", ".join(sorted({f"{o.sharding_type} with {o.compute_kernel}" for o in own}))
            )
        if lines:
            raise PlannerError(message="; ".join(lines), error_type=PlannerErrorType.PARTITION)

    def _places_of(self, plan: dict[str, tuple[Any, ...]]) -> dict[int, Place] | None:
        """A plan of TorchRec's as places; None if some table has no candidate as good."""
        places = {}
        for number, (name, groups) in enumerate(self._tables.items()):
            ranks, milliseconds, sizes = plan[name]
            place = next(
                (p for p in (_same_place(at, group, ranks, milliseconds, sizes)
                             for at, group in enumerate(groups)) if p), None,
            )  # fmt: skip
            if place is None:
                return None
            places[number] = place
        return places

    def _placed(self, state: State) -> list[TorchRecOption]:
        """A state as options with ranks, in the order of tables."""
        placed, changed = [], []
        for number in range(len(state.places)):
            place = state.places[number]
            group = state.space.tables[number][place.group]
            option, factor = group.sources[place.candidate]
            if factor is None:
                option = copy.deepcopy(option)
            else:
                option = with_load_factor(option, factor)
                changed.append(option)
            ranks = ranks_of(group, place.slots).ravel().tolist()
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
            placed.append(option)
        if changed:
            self._estimate(changed)
        return placed

    def _with_statistics(self, option: TorchRecOption) -> TorchRecOption:
        """A cached option with the profile's statistics, where it has none."""
        stats = option.cache_params.stats if option.cache_params is not None else None
        if (
            self._profile is None
            or stats is not None
            or option.compute_kernel != "fused_uvm_caching"
            or option.name not in self._profile.table_names
        ):
            return option
        changed = copy.deepcopy(option)
        samples = option.batch_size * self._ranks
        profile = self._profile[option.name]
        changed.cache_params = replace(
            changed.cache_params or CacheParams(), stats=ProfileCacheStatistics(profile, samples)
        )
        if not has_free_load_factor(changed):
            self._estimate([changed])
        return changed


def _same_place(
    number: int, group: Group, ranks: tuple[int, ...], milliseconds: float, sizes: list[int]
) -> Place | None:
    """The place in a group of shards on `ranks`, of the fastest candidate that is no larger."""
    if group.units * group.span != len(ranks):
        return None
    slots = [rank // group.span for rank in ranks[:: group.span]]
    if ranks_of(group, slots).ravel().tolist() != list(ranks):
        return None
    totals_s, totals = group.seconds.sum((1, 2)), group.tier_bytes.sum((1, 2))
    as_good = (totals_s <= milliseconds * (1 + 1e-9)) & (totals <= np.array(sizes) + 1).all(axis=1)
    if not as_good.any():
        return None
    at = int(np.where(as_good, totals_s, np.inf).argmin())
    return Place(number, at, tuple(slots))


def has_ranks(options: list[TorchRecOption]) -> bool:
    """Whether all shards of options have a rank."""
    return all(shard.rank is not None for option in options for shard in option.shards)


__all__ = ["Planning", "has_ranks"]
