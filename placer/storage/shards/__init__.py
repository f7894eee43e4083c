"""Tables as a plan lays them out, in files that each device loads by itself."""

from placer.storage.shards.loading import load_shards
from placer.storage.shards.resharding import Resharded, reshard
from placer.storage.shards.shard_folder import ShardFolder, open_shards
from placer.storage.shards.transfers import Schedule, Transfer, Transfers, schedule
from placer.storage.shards.writing import write_shards, write_tables

__all__ = [
    "Resharded",
    "Schedule",
    "ShardFolder",
    "Transfer",
    "Transfers",
    "load_shards",
    "open_shards",
    "reshard",
    "schedule",
    "write_shards",
    "write_tables",
]
