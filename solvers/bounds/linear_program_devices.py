"""GPUs and hosts that are alike, and what a linear relaxation asks for their time and memory.

Equal prices in a group lose nothing: equal GPUs can swap all that they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.model.instance import Instance

Float = npt.NDArray[np.float64]

_ALL_OPTIONS = 2500
"""Tables × GPUs up to which all sharding options of all tables are looked at."""

_MOST_GROUPS = 16
"""DeviceGroups of GPUs beyond which all of one kind are one."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of the relaxation's resources, in seconds of the step; none is negative.

    Attributes
    ----------
    gpu_s, hbm : float64, shape (groups of GPUs,)
        Of a second of one GPU, and of a byte of its HBM.
    dram_s, dram : float64, shape (groups of hosts,)
        Of a second of one host's memory, and of a byte of it.
    """

    gpu_s: Float
    hbm: Float
    dram_s: Float
    dram: Float


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """GPUs alike and hosts alike.

    GPUs are alike if they cost the same, have as much HBM, may serve the same tables, and are
    on hosts that are alike.

    Attributes
    ----------
    gpus, hosts : tuple of tuples of int
        Their numbers, by group.
    host_of : tuple of int
        Group of hosts that each group of GPUs is on.
    hbm_bytes, dram_bytes : float64
        Memory of each group.
    most_hbm_bytes, most_dram_bytes : float64
        Memory of the largest GPU and host of each group.
    fixed_s : float
        Seconds of any step of which GPUs' times here are without, and hosts' are not.
    uniform : bool
        Whether GPUs are alike that only cost the same: one price stands for several, which
        makes the bound weaker.
    """

    gpus: tuple[tuple[int, ...], ...]
    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]
    hbm_bytes: Float
    dram_bytes: Float
    most_hbm_bytes: Float
    most_dram_bytes: Float
    fixed_s: float
    uniform: bool

    @classmethod
    def of(cls, instance: Instance, large: bool = False) -> "DeviceGroups":
        """The groups of an instance: by kind alone if there are many groups or it is large."""
        masks: dict[bytes, npt.NDArray[np.bool_]] = {}
        for table in range(instance.tables):
            mask = instance.allowed(table)
            if mask is not None:
                masks[mask.tobytes()] = mask
        keys: list[object] = [
            (kind, float(hbm), tuple(bool(mask[gpu]) for mask in masks.values()))
            for gpu, (kind, hbm) in enumerate(
                zip(instance.kind_of_gpu, instance.hbm_bytes, strict=True)
            )
        ]
        groups = cls._by(instance, keys)
        one_kind = large and len(instance.kinds) == 1
        if len(groups.gpus) > 1 and (one_kind or len(groups.gpus) > _MOST_GROUPS):
            return cls._by(instance, list(instance.kind_of_gpu), uniform=True)
        return groups

    @classmethod
    def _by(
        cls, instance: Instance, keys: Sequence[object], *, uniform: bool = False
    ) -> "DeviceGroups":
        """GPUs of equal keys; hosts of equal GPUs and, unless uniform, equal memory."""
        on_host: list[list[str]] = [[] for _ in instance.dram_bytes]
        for gpu, host in enumerate(instance.host_of_gpu):
            on_host[host].append(repr(keys[gpu]))
        hosts = _numbers_by_key(
            [
                tuple(sorted(set(mine))) if uniform else (float(memory), tuple(sorted(mine)))
                for memory, mine in zip(instance.dram_bytes, on_host, strict=True)
            ]
        )
        group_of = {host: group for group, members in enumerate(hosts) for host in members}
        gpus = _numbers_by_key(
            [(key, group_of[instance.host_of_gpu[gpu]]) for gpu, key in enumerate(keys)]
        )
        hbm = [instance.hbm_bytes[list(members)] for members in gpus]
        dram = [instance.dram_bytes[list(members)] for members in hosts]
        return cls(
            gpus,
            hosts,
            tuple(group_of[instance.host_of_gpu[members[0]]] for members in gpus),
            np.array([mine.sum() for mine in hbm]),
            np.array([mine.sum() for mine in dram]),
            np.array([mine.max() for mine in hbm]),
            np.array([mine.max() for mine in dram]),
            instance.fixed_s,
            uniform,
        )

    @property
    def gpu_counts(self) -> Float:
        """How many GPUs each group has."""
        return np.array([float(len(members)) for members in self.gpus])

    @property
    def host_counts(self) -> Float:
        """How many hosts each group has."""
        return np.array([float(len(members)) for members in self.hosts])

    def credit_s(self, prices: Prices) -> float:
        """Seconds that all memory, and hosts' time beside that of GPUs, are worth."""
        fixed_s = self.fixed_s * float(prices.dram_s @ self.host_counts)
        return fixed_s + float(prices.hbm @ self.hbm_bytes + prices.dram @ self.dram_bytes)


def is_large(instance: Instance) -> bool:
    """Whether whole tables had better stand for all their sharding options, and can."""
    return (
        instance.tables * instance.gpus > _ALL_OPTIONS and instance.sharding_overhead_s is not None
    )


def _numbers_by_key(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Numbers of equal keys, in order of the first of each."""
    numbers: dict[object, list[int]] = {}
    for number, key in enumerate(keys):
        numbers.setdefault(key, []).append(number)
    return tuple(tuple(members) for members in numbers.values())
