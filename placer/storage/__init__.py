"""What a run saves: checkpoints, and shards in files.

`placer.storage.checkpoint` saves whole models, `placer.storage.shards` tables as a plan lays them
out. Both write through `placer.files`.
"""
