"""Write and load tables as a plan divides them, in one file for each shard and device."""

from placer.storage.shards.shard_folder import ShardFolder as ShardFolder
from placer.storage.shards.shard_folder import load_shards as load_shards
from placer.storage.shards.shard_folder import open_shards as open_shards
from placer.storage.shards.table_files import write_increment as write_increment
from placer.storage.shards.table_files import write_tables as write_tables
from placer.storage.shards.writing import Resharded as Resharded
from placer.storage.shards.writing import reshard as reshard
from placer.storage.shards.writing import write_shards as write_shards
