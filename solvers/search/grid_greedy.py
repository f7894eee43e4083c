"""A greedy that assigns many variants of a problem at once, for `solvers.strategies.beam`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from solvers.model.instance import Block, Instance
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, OF_GPU, Float

Int = npt.NDArray[np.int64]


class Items:
    """What is placed as one: shards, or tables that stay together. Arrays have one row each.

    Attributes
    ----------
    cost : float64, shape (items, kinds of GPUs)
        Time plus price times HBM bytes.
    priced : float64, shape (items, kinds of GPUs, 2 + phases, prices)
        HBM bytes and GPU seconds, all and by phase.
    least_bytes, dram_bytes, columns, size_bytes : float64
        HBM of the buffers alone; DRAM of the rows that are not worth HBM; columns; bytes of all
        rows wherever they are.
    allowed : bool, shape (items, gpus)
    """

    def __init__(self, instance: Instance, price: float) -> None:
        self.instance = instance
        self.price_index = instance.price_index(price)
        self.price = price
        kinds, prices = len(instance.kinds), instance.prices.size
        self.blocks: list[Block] = []
        self.numbers: dict[Block, int] = {}
        self.cost = np.empty((0, kinds))
        self.priced = np.empty((0, kinds, instance.rows_of_costs - 3, prices))
        self.least_bytes = self.dram_bytes = self.columns = self.size_bytes = np.empty(0)
        self.allowed = np.empty((0, instance.gpus), dtype=bool)

    def of(self, blocks: Sequence[Block]) -> Int:
        """The numbers of blocks; new ones are looked at first."""
        fresh = [block for block in dict.fromkeys(blocks) if block not in self.numbers]
        if fresh:
            self.numbers |= {block: len(self.blocks) + at for at, block in enumerate(fresh)}
            self.blocks += fresh
            self._look_at(fresh)
        return np.array([self.numbers[block] for block in blocks], dtype=np.int64)

    def _look_at(self, fresh: Sequence[Block]) -> None:
        instance = self.instance
        values = np.array(
            [
                [sum(instance.priced_costs(p, gpu) for p in block) for gpu in instance.kinds]
                for block in fresh
            ]
        )
        at_price = values[..., self.price_index]
        cost = at_price[:, :, GPU_S] + self.price * at_price[:, :, BYTES]
        columns = [sum(b - a for a, b in map(instance.columns, block)) for block in fresh]
        allowed = np.array([instance.open_gpus(block) for block in fresh])
        size = values[:, 0, BYTES, -1] + values[:, 0, DRAM_BYTES, -1]
        self.cost = np.concatenate((self.cost, cost))
        self.priced = np.concatenate((self.priced, values[:, :, OF_GPU]))
        self.least_bytes = np.concatenate((self.least_bytes, values[:, 0, BYTES, 0]))
        self.dram_bytes = np.concatenate((self.dram_bytes, at_price[:, 0, DRAM_BYTES]))
        self.columns = np.concatenate((self.columns, np.array(columns, dtype=np.float64)))
        self.size_bytes = np.concatenate((self.size_bytes, size))
        self.allowed = np.concatenate((self.allowed, allowed))


def assign_many(
    instance: Instance,
    items: Items,
    orders: Sequence[Int],
    tables: Sequence[Sequence[int]],
    limits: Float,
) -> list[Int]:
    """Assign the items of several states, each under several limits of columns, all at once.

    `orders` has the items of each state in the order of assignment, `tables` the table of each
    item that has other shards, counted by itself in each state, else -1, and `limits` the columns
    that a GPU may serve. Returned are, for each state, the GPU of each item, shape (limits, items),
    -1 where no GPU has room.
    """
    states, grid, gpus = len(orders), limits.size, instance.gpus
    kinds, hosts = np.array(instance.kind_of_gpu), np.array(instance.host_of_gpu)
    longest = max(map(len, orders))
    gpu_of_item = np.full((states, grid, longest), -1)
    # Of items that a state does not have, the order and the table are -1.
    order, table = _padded(orders, longest), _padded(tables, longest)
    real = order >= 0
    # A GPU with more HBM is done sooner: what its HBM is worth counts as time it has already.
    room_s = items.price * (instance.hbm_bytes.max() - instance.hbm_bytes)
    load = np.broadcast_to(room_s, (states, grid, gpus)).copy()
    taken, columns, unworthy, bytes_ = np.zeros((4, states, grid, gpus))
    cold = np.zeros((states, grid, len(instance.dram_bytes)))
    held = np.zeros((states, grid, int(table.max()) + 1, gpus), dtype=bool)
    at_state, at_limit = np.indices((states, grid))
    for turn in range(longest):
        item, its_table = order[:, turn], table[:, turn]
        least, width = items.least_bytes[item, None, None], items.columns[item, None, None]
        # Cold rows of a GPU: those that are not worth HBM, or those for which it has none.
        unworthy_then = unworthy + items.dram_bytes[item, None, None]
        bytes_then = bytes_ + items.size_bytes[item, None, None]
        colder = np.maximum(unworthy_then, bytes_then - instance.hbm_bytes)
        colder -= np.maximum(unworthy, bytes_ - instance.hbm_bytes)
        after = load + items.cost[item][:, None, kinds]
        open_ = (taken + least <= instance.hbm_bytes) & (columns + width <= limits[:, None] + 1e-6)
        open_ &= cold[:, :, hosts] + colder <= instance.dram_bytes[hosts]
        open_ &= (items.allowed[item] & real[:, turn, None])[:, None, :]
        option = np.flatnonzero(its_table >= 0)
        open_[option] &= ~held[option, :, its_table[option]]
        after[~open_] = np.inf
        gpu = after.argmin(axis=2)
        s, m = np.nonzero(np.isfinite(after[at_state, at_limit, gpu]))
        g = gpu[s, m]
        gpu_of_item[s, m, turn] = g
        load[s, m, g] = after[s, m, g]
        taken[s, m, g] += least[s, 0, 0]
        columns[s, m, g] += width[s, 0, 0]
        cold[s, m, hosts[g]] += colder[s, m, g]
        unworthy[s, m, g] = unworthy_then[s, m, g]
        bytes_[s, m, g] = bytes_then[s, m, g]
        apart = its_table[s] >= 0
        held[s[apart], m[apart], its_table[s[apart]], g[apart]] = True
    return [gpu_of_item[state, :, : len(mine)] for state, mine in enumerate(orders)]


def _padded(rows: Sequence[Sequence[int] | Int], length: int) -> Int:
    """Rows of numbers, -1 after the end of each."""
    padded = np.full((len(rows), length), -1)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded
