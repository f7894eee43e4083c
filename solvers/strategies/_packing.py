"""Assign shards to GPUs one by one, as the published planners in `beam` and `dp` do."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from solvers.model.instance import Block, Instance
from solvers.model.knapsack import Float


class Needs(NamedTuple):
    """What a block of shards needs on each GPU."""

    cost: Float  # Load that it adds to the GPU.
    room: Float  # Use of HBM bytes, or of several limited resources: shape (GPUs, resources).
    dram_bytes: Float  # Bytes in the memory of the GPU's host.


def pack(
    instance: Instance, blocks: Mapping[Block, Needs], load: Float, room: Float
) -> dict[Block, int]:
    """Put each block, in order, on the least loaded GPU with room; −1 if no GPU has room.

    Shards of one table go to different GPUs. `load` and `room` start as those of empty GPUs and are
    changed in place.
    """
    hosts, dram = np.array(instance.host_of_gpu), instance.dram_bytes.copy()
    holders: dict[int, list[int]] = defaultdict(list)
    gpu_of = {}
    for block, own in blocks.items():
        after = np.where(instance.open_gpus(block), load + own.cost, np.inf)
        after[(own.room > room).reshape(len(load), -1).any(axis=1)] = np.inf
        after[own.dram_bytes > dram[hosts]] = np.inf
        for shard in block:
            after[holders[shard.table]] = np.inf
        gpu = int(after.argmin())
        gpu_of[block] = gpu if np.isfinite(after[gpu]) else -1
        if gpu_of[block] == gpu:
            load[gpu] = after[gpu]
            room[gpu] -= own.room[gpu]
            dram[hosts[gpu]] -= own.dram_bytes[gpu]
            for shard in block:
                holders[shard.table].append(gpu)
    return gpu_of
