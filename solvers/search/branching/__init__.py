"""Branch and bound over the integer program of placement.

With z[t,o] ∈ {0,1} for table t in sharding option o, x[p,k,g] ∈ {0,1} for shard p on GPU g with the
hot rows of point k of its curve, and a[e,g] ∈ {0,1} for a GPU with arena e::

    minimise T
    Σ_f of a chain T[f] + fixed ≤ T                                             for each chain
    Σ_o z[t,o] = 1                                                              for each table t
    Σ_k,g x[p,k,g] = z[t,o]                                         for each shard p of t in o
    Σ_p,k of t and e x[p,k,g] + Σ_o that replicate rows in e z[t,o] ≤ a[e,g]    for each t, e, g
    Σ_p,k bytes(p,k)·x[p,k,g] + Σ_t,o r_bytes(t,o)·z[t,o] ≤ HBM[g]              for each g
    Σ_p,k s(p,k,f)·x[p,k,g] + Σ_t,o r(t,o,f)·z[t,o] + launch[f]·Σ_e a[e,g] ≤ T[f]    for each g, f

s are seconds of a shard, r of the rows that an option replicates on every GPU; both depend on the
kind of GPU.

As it stands, it proves nothing if GPUs are alike: its linear relaxation spreads every shard over
all GPUs, and each order of the GPUs gives another equal placement. So GPUs that cost the same and
serve the same shards form a group, whose rows are the sums of its GPUs' rows (aggregation over
symmetric machines). The first relaxation has one group for each kind of GPU. A branch decides how a
table is cut and which groups serve its shards, the heaviest table first, which divides groups. When
each GPU is a group of its own, the program is the one above. Every relaxation also has the row

    s(p,k,f)·x[p,k] + Σ_t,o r(t,o,f)·z[t,o] + launch[f] ≤ T[f]      for each shard p, and f

as a phase is no shorter than its longest shard. GLOP, OR-Tools' simplex, solves the relaxations.
Many of them are rounded to a placement, which local search improves.

If DRAM has a price, one row limits the DRAM of all hosts, and columns may have rows on drives: see
`solvers.search.branching.drives`. A server is one more kind of GPU. A relaxation then puts a share
of a whole table on a server and the rest of it on GPUs, which no plan can do. So the first branches
decide which tables are on GPUs, on servers, or on both. On both, each side has a shard::

    Σ_k,g of a side x[p,k,g] summed over shards p of t in o ≥ z[t,o]            for each o

The next branches decide how these tables are cut and which servers have their shards.

The program leaves out seconds of hosts' memory, how DRAM is divided among hosts, lanes that phases
share, and pins if they are of many kinds. These only make steps longer, so bounds hold. Tables
that stay together have rows of their own: every group serves as many shards of one as of the next.
"""

from solvers.search.branching.formulation import points_of
from solvers.search.branching.tree import BranchAndBound, BranchingParams, branch_and_bound

__all__ = ["BranchAndBound", "BranchingParams", "branch_and_bound", "points_of"]
