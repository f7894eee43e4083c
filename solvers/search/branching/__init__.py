"""Branch and bound over the integer program of placement.

"The integer program" in docs/solvers.md has the program, with its variables z[t,o], x[p,k,g] and
a[e,g], and says how it is solved. Every relaxation also has the row

    s(p,k,f)·x[p,k] + Σ_t,o r(t,o,f)·z[t,o] + launch[f] ≤ T[f]      for each shard p, and f

as a phase is no shorter than its longest shard.

A relaxation may put a share of a whole table on a server and the rest of it on GPUs, which no plan
can do. So the first branches decide which tables are on GPUs, on servers, or on both. On both, each
side has a shard::

    Σ_k,g of a side x[p,k,g] summed over shards p of t in o ≥ z[t,o]            for each o

The program leaves out seconds of hosts' memory, how DRAM is divided among hosts, lanes that phases
share, and pins if they are of many kinds. These only make steps longer, so bounds hold.
"""

from solvers.search.branching.formulation import points_of
from solvers.search.branching.tree import BranchAndBound, branch_and_bound

__all__ = ["BranchAndBound", "branch_and_bound", "points_of"]
