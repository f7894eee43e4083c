"""Tables as a plan lays them out, in files that each device loads by itself."""

from placer.storage.shards.increments import write_increment
from placer.storage.shards.shard_folder import ShardFolder, open_shards
from placer.storage.shards.shard_rows import load_shards
from placer.storage.shards.writing import Resharded, reshard, write_shards, write_tables

__all__ = [
    "Resharded",
    "ShardFolder",
    "load_shards",
    "open_shards",
    "reshard",
    "write_increment",
    "write_shards",
    "write_tables",
]
