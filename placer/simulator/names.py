"""Names of options of the simulator, in a file whose import needs no numpy."""

from typing import Literal, get_args

CachePolicy = Literal["lfu", "rank", "lru", "fbgemm-lru", "fbgemm-lfu"]
"""Which rows a cache keeps: as the executor's policies do, or as other systems do."""

CACHE_POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
